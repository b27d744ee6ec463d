"""float16 with a `GradScaler` in the trainers: a bad sample costs a sample and not the scale, and the reports agree."""

import logging
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler

from torchguard import err, watch
from torchguard._watch.wrapper import is_watched

pytest.importorskip("accelerate")
pytest.importorskip("lightning")
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lightning.pytorch import LightningModule
    from lightning.pytorch import Trainer as LightningTrainer
    from lightning.pytorch.plugins import MixedPrecision

from torchguard.integrations import lightning, transformers

pytestmark = pytest.mark.long
SCALE, TOO_LARGE = 2.0**10, 2.0**120


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's, about numbers of workers and missing loggers
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        yield


def images(bad=()):
    """Twelve samples, in batches of four."""
    pixels = torch.randn(12, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    pixels[[*bad]] = torch.nan
    return [{"pixel_values": pixels[i], "labels": torch.tensor(i % 3)} for i in range(12)]


def vit():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, num_channels=1, num_labels=3))


def trained_without(bad, device):
    """The model after a plain loop over the good samples of each batch."""
    net, samples = vit().to(device), images()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for start in (0, 4, 8):
        rows = [samples[i] for i in range(start, start + 4) if i not in bad]
        if not rows:
            continue
        x, y = (torch.stack([row[name] for row in rows]).to(device) for name in ("pixel_values", "labels"))
        with torch.autocast(device, torch.float16):
            logits = net(x).logits
        optimizer.zero_grad()
        (F.cross_entropy(logits.float(), y) * SCALE).backward()
        for one in net.parameters():
            one.grad /= SCALE
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    return net


class Module(LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def losses(self, batch):
        logits = self.net(batch["pixel_values"]).logits
        return F.cross_entropy(logits.float(), batch["labels"], reduction="none")

    def training_step(self, batch, batch_idx):
        losses = self.losses(batch)
        return err.mean_ok(self.net.flags, losses) if is_watched(self.net) else losses.mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class RetriedModule(lightning.RetryMixin, Module):
    def training_step(self, batch, batch_idx):
        return self.losses(batch)


def fit_lightning(way, net, device, samples, scaler, folder):
    module = (RetriedModule if way == "retry" else Module)(net)
    how = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    how |= {"accelerator": "gpu" if device == "cuda" else "cpu", "devices": 1, "max_epochs": 1}
    # `precision="16-mixed"` makes this plugin, on a GPU only.
    plugin = MixedPrecision("16-mixed", device, scaler)
    fit = LightningTrainer(plugins=[plugin], gradient_clip_val=1.0, default_root_dir=folder, **how)
    fit.fit(module, DataLoader(samples, 4))
    return getattr(module, "guard", None)


class InOrder(Trainer):
    def _get_train_sampler(self, *args, **kwargs):
        return SequentialSampler(self.train_dataset)


class RetriedTrainer(transformers.RetryMixin, InOrder):
    pass


def fit_transformers(way, net, device, samples, scaler, folder):
    how = {"per_device_train_batch_size": 4, "num_train_epochs": 1, "optim": "sgd", "learning_rate": 0.1}
    how |= {"lr_scheduler_type": "constant", "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    args = TrainingArguments(str(folder), use_cpu=device == "cpu", fp16=device == "cuda", max_grad_norm=1.0, **how)
    more = {}
    if way == "watch":
        callback = transformers.TorchGuardCallback(net)
        more = {"compute_loss_func": callback.loss, "callbacks": [callback]}
    trainer = (RetriedTrainer if way == "retry" else InOrder)(net, args, train_dataset=samples, **more)
    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":  # accelerate asks for a GPU; apart from that, this is what it does there
            patch.setattr(trainer.accelerator, "native_amp", True)
            patch.setitem(trainer.accelerator.state.__dict__, "_mixed_precision", "fp16")
        patch.setattr(trainer.accelerator, "scaler", scaler)
        trainer.train()
    return getattr(trainer, "guard", None)


@pytest.fixture(params=[fit_lightning, fit_transformers], ids=["lightning", "transformers"])
def fit(request, device, tmp_path):
    """Train in batches of four. The model, the scale at the end, and the number of bad samples in each step."""

    def run(way, samples, scale):
        net, scaler, dtypes = vit().to(device), torch.amp.GradScaler(device, init_scale=scale), set()
        net.classifier.register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
        guarded = watch(net, quarantine=True, returns="output") if way == "watch" else net
        guard = request.param(way, guarded, device, samples, scaler, tmp_path)
        assert dtypes == {torch.float16}
        found = [0, 0, 0]
        for step in [incident.step for incident in guarded.history] if way == "watch" else []:
            found[step] += 1
        return net, scaler.get_scale(), found if guard is None else [len(report.bad) for report in guard.history]

    return run


def assert_close(got, want):
    for (name, one), two in zip(got.named_parameters(), want.parameters(), strict=True):
        # Lightning moves its module to the CPU in the end.
        torch.testing.assert_close(
            one.cpu(), two.cpu(), rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("way", ["retry", "watch"])
def test_a_bad_sample_costs_neither_the_step_nor_the_scale(way, fit, device):
    net, scale, found = fit(way, images(bad=[5]), SCALE)
    assert (scale, found) == (SCALE, [0, 1, 0])
    assert_close(net, trained_without([5], device))


def test_without_torchguard_it_costs_both(fit):
    assert fit("plain", images(bad=[5]), SCALE)[1] == SCALE / 2


@pytest.mark.parametrize("way", ["retry", "watch"])
def test_a_scale_that_is_too_large_accuses_no_sample(way, fit):
    net, scale, found = fit(way, images(), TOO_LARGE)
    assert (scale, found) == (TOO_LARGE / 8, [0, 0, 0])
    assert all(torch.equal(one.cpu(), two) for one, two in zip(net.parameters(), vit().parameters(), strict=True))


def test_steps_without_a_good_sample_change_neither_weights_nor_scale(fit, device):
    net, scale, found = fit("retry", images(bad=range(8)), SCALE)
    assert (scale, found) == (SCALE, [4, 4, 0])
    assert_close(net, trained_without(range(8), device))
