"""float16 with a `GradScaler` in the trainers: a bad sample costs a sample and not the scale, and the reports agree."""

import contextlib
import logging
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.integrations.launch import become_rank
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from torchguard import Retry, distributed, watch
from torchguard._watch.wrapper import is_watched
from torchguard.testing import run_ranks

pytest.importorskip("accelerate")
pytest.importorskip("lightning")
from accelerate import Accelerator
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
        return distributed.mean_ok(self.net.flags, losses) if is_watched(self.net) else losses.mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class RetriedModule(lightning.RetryMixin, Module):
    def training_step(self, batch, batch_idx):
        return self.losses(batch)


def fit_lightning(way, net, device, samples, scaler, folder, ranks=1):
    module = (RetriedModule if way == "retry" else Module)(net)
    how = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    how |= {"accelerator": "gpu" if device == "cuda" else "cpu", "devices": ranks, "max_epochs": 1}
    how |= {"strategy": "ddp" if ranks > 1 else "auto", "use_distributed_sampler": False}
    # `precision="16-mixed"` makes this plugin, on a GPU only.
    plugin = MixedPrecision("16-mixed", device, scaler)
    fit = LightningTrainer(plugins=[plugin], gradient_clip_val=1.0, default_root_dir=folder, **how)
    sampler = DistributedSampler(samples, shuffle=False) if ranks > 1 else None
    fit.fit(module, DataLoader(samples, 4 // ranks, sampler=sampler))
    return getattr(module, "guard", None)


class InOrder(Trainer):
    def _get_train_sampler(self, *args, **kwargs):
        return SequentialSampler(self.train_dataset)


class RetriedTrainer(transformers.RetryMixin, InOrder):
    pass


def fit_transformers(way, net, device, samples, scaler, folder, ranks=1):
    how = {"per_device_train_batch_size": 4 // ranks, "num_train_epochs": 1, "optim": "sgd", "learning_rate": 0.1}
    how |= {"lr_scheduler_type": "constant", "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    args = TrainingArguments(str(folder), use_cpu=device == "cpu", fp16=device == "cuda", max_grad_norm=1.0, **how)
    more = {}
    if way == "watch":
        callback = transformers.TorchGuardCallback(net)
        more = {"compute_loss_func": callback.loss, "callbacks": [callback]}
    trainer = (RetriedTrainer if way == "retry" else InOrder)(net, args, train_dataset=samples, **more)
    with half_precision(trainer.accelerator, scaler, device):
        trainer.train()
    return getattr(trainer, "guard", None)


@contextlib.contextmanager
def half_precision(accelerator, scaler, device):
    """Have accelerate use float16 and this scaler."""
    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":  # accelerate asks for a GPU; apart from that, this is what it does there
            patch.setattr(accelerator, "native_amp", True)
            patch.setitem(accelerator.state.__dict__, "_mixed_precision", "fp16")
        patch.setattr(accelerator, "scaler", scaler)
        yield


def fit_accelerate(way, net, device, samples, scaler, folder, ranks=1):
    accelerator = Accelerator(cpu=device == "cpu", mixed_precision="fp16" if device == "cuda" else "no")
    with half_precision(accelerator, scaler, device):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(samples, 4 // ranks))
        guard = Retry(model, optimizer) if way == "retry" else None

        def losses(batch):
            logits = model(pixel_values=batch["pixel_values"]).logits
            return F.cross_entropy(logits.float(), batch["labels"], reduction="none")

        for batch in loader:
            if guard is not None:
                is_skipped = guard.backward(losses, batch, scaler=accelerator.scaler).skipped
            else:
                each, is_skipped = losses(batch), False
                accelerator.backward(distributed.mean_ok(net.flags, each) if way == "watch" else each.mean())
            if not is_skipped:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            optimizer.zero_grad()
    return guard


FITS = {"lightning": fit_lightning, "transformers": fit_transformers, "accelerate": fit_accelerate}


def fitted(name, way, device, samples, scale, folder, ranks=1):
    """Train in batches of four. The model, the scale at the end, and the number of bad samples in each step."""
    net, scaler, dtypes = vit().to(device), torch.amp.GradScaler(device, init_scale=scale), set()
    net.classifier.register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
    guarded = watch(net, quarantine=True, returns="output") if way == "watch" else net
    guard = FITS[name](way, guarded, device, samples, scaler, folder, ranks)
    assert dtypes == {torch.float16}
    found = [0, 0, 0]
    for step in [incident.step for incident in guarded.history] if way == "watch" else []:
        found[step] += 1
    return net, scaler.get_scale(), found if guard is None else [len(report.bad) for report in guard.history]


@pytest.fixture(params=FITS)
def fit(request, device, tmp_path):
    return lambda way, samples, scale: fitted(request.param, way, device, samples, scale, tmp_path)


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


@pytest.mark.parametrize("bad", [range(8), range(4, 12)], ids=["the first two", "the last two"])
def test_steps_without_a_good_sample_change_neither_weights_nor_scale(bad, fit, device):
    net, scale, found = fit("retry", images(bad=bad), SCALE)
    assert (scale, found) == (SCALE, [4 if start in bad else 0 for start in (0, 4, 8)])
    assert_close(net, trained_without(bad, device))


# Rows of rank 1 in the second step: ranks of Lightning take turns by row, those of accelerate by batch.
ROWS = {"lightning": [5, 7], "transformers": [6, 7], "accelerate": [6, 7]}


def trained_on_ranks(name, way, samples, scale, folder):
    def train():
        become_rank()
        net, scale_after, found = fitted(name, way, "cpu", samples, scale, folder / str(dist.get_rank()), ranks=2)
        return [one.detach() for one in net.parameters()], scale_after, found

    return run_ranks(train, timeout=200)


@pytest.mark.parametrize(("way", "count"), [("retry", 1), ("retry", 2), ("watch", 1)])
@pytest.mark.parametrize("name", FITS)
def test_bad_samples_of_one_of_two_ranks_cost_neither_the_step_nor_the_scale(name, way, count, tmp_path):
    """With two of them, that rank has no good one."""
    bad = ROWS[name][:count]
    want = trained_without(bad, "cpu")
    for rank, (weights, scale, found) in enumerate(trained_on_ranks(name, way, images(bad), SCALE, tmp_path)):
        assert (scale, found) == (SCALE, [0, rank * count, 0])
        for one, two in zip(weights, want.parameters(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", FITS)
def test_two_ranks_lower_a_scale_that_is_too_large_together(name, tmp_path):
    for weights, scale, found in trained_on_ranks(name, "retry", images(), TOO_LARGE, tmp_path):
        assert (scale, found) == (TOO_LARGE / 8, [0, 0, 0])
        assert all(torch.equal(one, two) for one, two in zip(weights, vit().parameters(), strict=True))
