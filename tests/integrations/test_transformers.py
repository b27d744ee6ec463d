"""Hugging Face's `Trainer` with planted faults: training survives, equals that without the bad samples, and says so."""

import copy
import logging
import math

import pytest
import torch
import torch.distributed as dist
from tests.integrations.launch import become_rank
from tests.models import gpt2

from torchguard import watch
from torchguard.exceptions import RetryError, WatchError
from torchguard.testing import run_ranks

pytest.importorskip("accelerate")
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from torchguard.integrations.transformers import RetryMixin, TorchGuardCallback, _sample_losses

SIZE, BATCH, LENGTH = 11, 3, 5  # windows of two batches; the last one is a batch of 3 and one of 2


def tokens(bad=()):
    """Embedded tokens: labels of different lengths, and NaN in bad samples."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for i in range(SIZE):
        labels = torch.randint(50, (LENGTH,), generator=generator)
        labels[: i % 4] = -100
        embeds = torch.randn(LENGTH, 16, generator=generator, dtype=torch.float64)
        if i in bad:
            embeds[2, 3] = torch.nan
        samples.append({"inputs_embeds": embeds, "labels": labels})
    return samples


def images(bad=()):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(SIZE, 1, 8, 8, generator=generator, dtype=torch.float64)
    pixels[[*bad]] = torch.inf
    return [{"pixel_values": pixels[i], "labels": torch.tensor(i % 3)} for i in range(SIZE)]


def lm():
    torch.manual_seed(0)
    return gpt2(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0).double()


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=50, pad_token_id=0)).double()


def mixtral():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_key_value_heads": 1, "num_local_experts": 2, "output_router_logits": True}
    config = MixtralConfig(**sizes, **experts, vocab_size=50, pad_token_id=0, experts_implementation="eager")
    return MixtralForCausalLM(config).double()


def vit():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return ViTForImageClassification(
        ViTConfig(**sizes, image_size=8, patch_size=4, num_channels=1, num_labels=3)
    ).double()


class InOrder:
    """Takes the samples in their order, so that a plain loop can do the same."""

    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)


class PlainTrainer(InOrder, Trainer):
    pass


class GuardedTrainer(RetryMixin, InOrder, Trainer):
    pass


def guarded_trainer(way, model, args, samples):
    if way == "retry":
        return GuardedTrainer(model, args, train_dataset=samples)
    guarded = watch(model, quarantine=True, returns="output")
    callback = TorchGuardCallback(guarded)
    how = {"compute_loss_func": callback.loss, "callbacks": [callback]}
    return PlainTrainer(guarded, args, train_dataset=samples, **how)


def arguments(folder, **settings):
    how = {"per_device_train_batch_size": BATCH, "gradient_accumulation_steps": 2, "num_train_epochs": 2}
    how |= {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    how |= {"report_to": [], "save_strategy": "no", "logging_steps": 1, "use_cpu": True, "disable_tqdm": True}
    return TrainingArguments(folder, **(how | settings))


def trained_without(model, samples, bad, shift, smoothing=0.0, window=2 * BATCH):
    """The model after a plain loop over the good samples, window by window, and the losses of the windows."""
    model, losses = copy.deepcopy(model).train(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for start in range(0, len(samples), window):
            rows = [i for i in range(start, min(start + window, len(samples))) if i not in bad]
            if not rows:
                continue
            stacked = {name: torch.stack([samples[i][name] for i in rows]) for name in samples[0]}
            labels = stacked.pop("labels")
            sums, _ = _sample_losses(model(**stacked).logits, labels, shift=shift, smoothing=smoothing)
            optimizer.zero_grad()
            loss = sums.sum() / labels.ne(-100).sum()  # so the trainer counts for both models
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
    return model, pytest.approx(losses, rel=1e-5)


def logged_losses(trainer):
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def assert_equal_weights(got, want, atol=1e-9):
    for (name, one), (_, two) in zip(got.named_parameters(), want.named_parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


CASES = [
    pytest.param(lm, tokens, True, 0.0, id="gpt2"),
    pytest.param(vit, images, False, 0.1, id="vit, smoothed labels"),
]


@pytest.mark.parametrize(("make", "data", "shift", "smoothing"), CASES)
def test_retry_trains_as_without_the_bad_samples(make, data, shift, smoothing, tmp_path, caplog):
    model, bad = make(), [4, 10]
    want, losses = trained_without(model, data(bad), bad, shift, smoothing)
    args = arguments(tmp_path, label_smoothing_factor=smoothing)
    trainer = GuardedTrainer(model, args, train_dataset=data(bad))
    with caplog.at_level(logging.WARNING, "torchguard"):
        trainer.train()
    assert_equal_weights(model, want)
    assert logged_losses(trainer) == losses
    assert [report.bad for report in trainer.guard.history] == [[4], [4], [4], [4]]
    assert trainer.state.log_history[-2]["bad_samples"] == 4
    assert "sample 4: NaN or Inf in the input and in the loss" in caplog.text


@pytest.mark.parametrize(("make", "data", "shift", "smoothing"), CASES)
def test_a_watched_model_trains_as_without_the_bad_samples(make, data, shift, smoothing, tmp_path, caplog):
    model, bad = make(), [4, 10]
    want, losses = trained_without(model, data(bad), bad, shift, smoothing)
    trainer = guarded_trainer("watch", model, arguments(tmp_path, label_smoothing_factor=smoothing), data(bad))
    with caplog.at_level(logging.WARNING, "torchguard"):
        trainer.train()
    assert_equal_weights(model, want, atol=1e-8)
    assert logged_losses(trainer) == losses
    assert trainer.model.run_report().total == 4
    assert [log["bad_samples"] for log in trainer.state.log_history if "loss" in log] == [1, 2, 3, 4]
    assert "samples bad since the last log" in caplog.text


@pytest.mark.parametrize("way", ["retry", "watch"])
@pytest.mark.parametrize(("make", "data"), [(lm, tokens), (llama, tokens), (vit, images)])
def test_training_is_that_of_the_plain_trainer_without_the_bad_sample(make, data, way, tmp_path):
    """One step of two micro-batches, of which the second has the bad sample: its last one."""
    got, want, args = make(), make(), arguments(tmp_path, num_train_epochs=1)
    plain = PlainTrainer(want, args, train_dataset=data()[:5])
    plain.train()
    trainer = guarded_trainer(way, got, args, data(bad=[5])[:6])
    trainer.train()
    assert_equal_weights(got, want, atol=1e-8)
    assert logged_losses(trainer) == pytest.approx(logged_losses(plain), rel=1e-6)


LABELS = {
    "regression": lambda i: torch.tensor([0.1 * i, -0.2, 1.0], dtype=torch.float64),
    "multi_label_classification": lambda i: torch.tensor([0.0, i % 2, 1.0], dtype=torch.float64),
    "tokens": lambda i: torch.tensor([0, 1, -100, 2, i % 3]),
}


def bert(kind):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(**sizes, vocab_size=50, num_labels=3, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    config.problem_type = None if kind == "tokens" else kind
    return (BertForTokenClassification if kind == "tokens" else BertForSequenceClassification)(config).double()


def labelled(kind, bad=()):
    return [{**one, "labels": LABELS[kind](i)} for i, one in enumerate(tokens(bad))]


@pytest.mark.long
@pytest.mark.parametrize("way", ["retry", "watch"])
@pytest.mark.parametrize("kind", LABELS)
def test_other_losses_are_those_of_the_plain_trainer_without_the_bad_sample(kind, way, tmp_path):
    """In one micro-batch: these models ignore the number of items, and the plain trainer adds up means of several."""
    how = {"num_train_epochs": 1, "per_device_train_batch_size": 6, "gradient_accumulation_steps": 1}
    got, want, args = bert(kind), bert(kind), arguments(tmp_path, **how)
    plain = PlainTrainer(want, args, train_dataset=labelled(kind)[:5])
    plain.train()
    trainer = guarded_trainer(way, got, args, labelled(kind, bad=[5])[:6])
    trainer.train()
    assert_equal_weights(got, want)
    assert logged_losses(trainer) == pytest.approx(logged_losses(plain), rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("way", ["retry", "watch"])
def test_micro_batches_of_a_model_that_ignores_the_number_of_items_give_their_mean(way, tmp_path):
    whole, parts = bert("tokens"), bert("tokens")
    one = arguments(tmp_path, num_train_epochs=1, per_device_train_batch_size=6, gradient_accumulation_steps=1)
    guarded_trainer(way, whole, one, labelled("tokens", [4])[:6]).train()
    guarded_trainer(way, parts, arguments(tmp_path, num_train_epochs=1), labelled("tokens", [4])[:6]).train()
    assert_equal_weights(parts, whole, atol=1e-8)


def test_the_plain_trainer_logs_a_finite_loss_while_its_weights_are_ruined(tmp_path):
    """Its filter of NaN is about the log alone."""
    model = vit()
    trainer = PlainTrainer(model, arguments(tmp_path, num_train_epochs=1), train_dataset=images(bad=[4]))
    trainer.train()
    assert all(math.isfinite(loss) for loss in logged_losses(trainer))
    assert not any(one.isfinite().all() for one in model.parameters())


def test_a_step_without_a_good_sample_changes_nothing(tmp_path):
    model = vit()
    before = copy.deepcopy(model)
    trainer = GuardedTrainer(model, arguments(tmp_path, num_train_epochs=1), train_dataset=images(range(SIZE)))
    trainer.train()
    assert_equal_weights(model, before)
    assert all(report.skipped for report in trainer.guard.history)


def test_losses_that_are_not_the_trainers_are_refused(tmp_path):
    class OtherLosses(GuardedTrainer):
        @staticmethod
        def sample_losses(model, inputs):
            losses = model(pixel_values=inputs["pixel_values"]).logits.square().mean(-1)
            return losses, torch.ones_like(losses)

    with pytest.raises(RetryError, match="the trainer's own loss is"):
        OtherLosses(vit(), arguments(tmp_path), train_dataset=images()).train()


@pytest.mark.filterwarnings("ignore::torchguard.exceptions.MixedRowsWarning")
@pytest.mark.parametrize("way", ["retry", "watch"])
def test_a_loss_of_the_whole_batch_is_refused(way, tmp_path):
    """The balance of experts: small, and no sample has a share in it."""
    with pytest.raises(RetryError, match="aux_loss of the whole batch"):
        guarded_trainer(way, mixtral(), arguments(tmp_path), tokens()).train()


def test_the_callback_asks_for_a_watched_model_that_returns_its_output():
    with pytest.raises(WatchError, match='returns="output"'):
        TorchGuardCallback(watch(vit(), quarantine=True))


@pytest.mark.long
def test_training_that_is_resumed_goes_on_as_if_it_had_not_stopped(tmp_path):
    bad = [4]
    whole = lm()
    GuardedTrainer(whole, arguments(tmp_path / "a"), train_dataset=tokens(bad)).train()
    args = arguments(tmp_path / "b", save_strategy="steps", save_steps=2, max_steps=2)
    GuardedTrainer(lm(), args, train_dataset=tokens(bad)).train()
    resumed = lm()
    trainer = GuardedTrainer(resumed, arguments(tmp_path / "b"), train_dataset=tokens(bad))
    trainer.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-2"))
    assert_equal_weights(resumed, whole)


@pytest.mark.long
@pytest.mark.parametrize("way", ["retry", "watch"])
def test_bf16_training_survives(way, device, tmp_path):
    model, bad = lm().float(), [4, 10]
    data = [{**one, "inputs_embeds": one["inputs_embeds"].float()} for one in tokens(bad)]
    trainer = guarded_trainer(way, model.to(device), arguments(tmp_path, bf16=True, use_cpu=device == "cpu"), data)
    trainer.train()
    assert all(p.isfinite().all() for p in model.parameters())
    losses = logged_losses(trainer)
    assert len(losses) == 4
    assert all(0 < loss < 10 for loss in losses)


@pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides")  # DDP's, of ViT's class token
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("way", ["retry", "watch"])
@pytest.mark.parametrize(("make", "data", "shift", "smoothing"), CASES)
def test_two_ranks_train_as_one_without_the_bad_samples(make, data, shift, smoothing, way, accumulate, tmp_path):
    model, bad = make(), [2, 5]
    rows = data(bad)[:8]  # batches of two, by turns for both ranks: the bad samples are on rank 1 and on rank 0
    want, losses = trained_without(model, rows, bad, shift, smoothing, window=4 * accumulate)

    def train():
        become_rank()
        how = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulate}
        args = arguments(tmp_path / str(dist.get_rank()), label_smoothing_factor=smoothing, **how)
        trainer = guarded_trainer(way, model, args, rows)
        trainer.train()
        assert trainer.accelerator.num_processes == 2
        is_retry = way == "retry"
        found = sum(len(one.bad) for one in trainer.guard.history) if is_retry else trainer.model.run_report().total
        return [one.detach() for one in model.parameters()], found, logged_losses(trainer)

    for weights, found, logged in run_ranks(train, timeout=200):
        for one, two in zip(weights, want.parameters(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-8)
        assert logged == losses or not logged  # rank 0 logs
        assert found == 2  # one on each rank, in each of two epochs
