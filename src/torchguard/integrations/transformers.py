"""Hugging Face's `Trainer`: one bad sample costs one sample.

Two ways, as everywhere in torchguard. `RetryMixin` guards the training step by `Retry`:

    class MyTrainer(RetryMixin, Trainer): ...

`TorchGuardCallback` goes with a model that is watched in quarantine, and gives the exact loss:

    guarded = watch(model, quarantine=True, returns="output")
    callback = TorchGuardCallback(guarded)
    Trainer(guarded, args, compute_loss_func=callback.loss, callbacks=[callback], ...)

The `Trainer` divides the losses of all micro-batches of a step by `num_items_in_batch`, which counts the items of bad
samples, too. The mixin hands all micro-batches to `Retry` as one window. The callback corrects the gradients so far
whenever a micro-batch has bad samples, since it cannot know those of the next ones.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from torchguard import err
from torchguard._extras import require_extra
from torchguard._retry import Retry, RetryReport
from torchguard._retry.batch import Batch
from torchguard._torch.training import gradients_so_far, multiply_all
from torchguard._watch.wrapper import is_watched
from torchguard.exceptions import RetryError, WatchError

require_extra("torchguard.integrations.transformers", "transformers", "transformers", "accelerate")
from transformers import TrainerCallback  # noqa: E402
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

__all__ = ["RetryMixin", "TorchGuardCallback", "losses_of"]

logger = logging.getLogger("torchguard")
_IGNORED = -100  # the label of what has no loss


def losses_of(model: nn.Module, inputs: dict[str, Any], *, shift: bool, smoothing: float) -> tuple[Tensor, Tensor]:
    """The sum of the losses of each sample, and how many they are, for a model of transformers with `labels`."""
    labels = inputs["labels"]
    outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
    multi_label = _problem_type(model) == "multi_label_classification"
    return _sample_losses(_logits_of(outputs), labels, shift=shift, smoothing=smoothing, multi_label=multi_label)


def _sample_losses(
    logits: Tensor, labels: Tensor, *, shift: bool = False, smoothing: float = 0.0, multi_label: bool = False
) -> tuple[Tensor, Tensor]:
    """The sum of the losses of each sample, and how many losses that are.

    Args:
        logits: `(batch, ..., classes)`, or what a regression predicts.
        labels: `(batch, ...)` classes, of which -100 does not count; or floats, of the shape of `logits` but for
            dims of size 1.
        shift: whether each token is predicted from the ones before it.
        smoothing: of labels.
        multi_label: whether float labels are probabilities of classes.
    """
    if labels.is_floating_point():
        if labels.numel() != logits.numel():
            raise RetryError(
                f"losses of samples: labels {tuple(labels.shape)} do not have the size of logits "
                f"{tuple(logits.shape)}. Give losses of your own."
            )
        labels = labels.reshape(logits.shape).to(logits.dtype)
        fn = F.binary_cross_entropy_with_logits if multi_label else F.mse_loss
        each = fn(logits, labels, reduction="none").flatten(1)
        return each.sum(1), torch.full_like(each[:, 0], each.shape[1])
    if logits.ndim != labels.ndim + 1 or logits.shape[0] != labels.shape[0]:
        raise RetryError(
            f"losses of samples: logits {tuple(logits.shape)} do not fit labels {tuple(labels.shape)}. "
            "Give losses of your own."
        )
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    each = F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=_IGNORED, reduction="none", label_smoothing=smoothing
    )
    each = each.reshape(labels.shape[0], -1)
    return each.sum(1), labels.ne(_IGNORED).reshape(labels.shape[0], -1).sum(1).to(each.dtype)


def _logits_of(outputs: Any) -> Tensor:
    """The logits among what a model of transformers returned, if its loss follows from them alone."""
    if getattr(outputs, "aux_loss", None) is not None:
        raise RetryError(
            "losses of samples: the model adds an aux_loss of the whole batch to its loss. Give losses of "
            "your own, (sums + coefficient * outputs.aux_loss * weights, weights), or set output_router_logits=False."
        )
    if isinstance(outputs, Mapping):
        return outputs["logits"]
    return getattr(outputs, "logits", outputs[0] if isinstance(outputs, tuple) else outputs)


class RetryMixin:
    """A `Trainer` whose training step is `Retry.backward`: `class MyTrainer(RetryMixin, Trainer)`.

    Gradients are those of all micro-batches of a step without their bad samples, divided by the number of items that
    are left. `trainer.guard` is the `Retry`; its reports are in `trainer.guard.history`.

    Attributes:
        sample_losses: `(model, inputs) -> (sums, weights)`, the losses of each sample. None: those of models of
            transformers with `labels`. In the first step, their mean is compared with the trainer's own loss, as
            precisely as the model computes: to 1e-4, in float16 to 0.2 %, in bfloat16 to 1.6 %. Set it to a function
            that does not refer to the trainer.
        retry_options: arguments of `Retry`, by name.
    """

    sample_losses: Any = None
    retry_options: dict[str, Any] = {}  # noqa: RUF012 (a default, replaced by a subclass)
    guard: Retry | None = None
    _is_compared = False

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, count = super().get_batch_samples(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        self._window: list[Any] = []
        self._window_size = len(batches)
        return batches, count

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Keep a micro-batch; with the last one of a step, add the gradients of all of them."""
        trainer: Any = self
        model.train()
        if callable(getattr(trainer.optimizer, "train", None)):
            trainer.optimizer.train()
        self._window.append(trainer._prepare_inputs(inputs))
        zero = torch.zeros((), dtype=torch.float32, device=trainer.args.device)
        if len(self._window) < self._window_size:
            return zero
        if self.guard is None:
            self._closure = self._make_closure(model, as_counted=True)
            self.guard = Retry(model, trainer.optimizer, **{"on_bad": _warn, **self.retry_options})
            self._skipping = _SkippedStep()
            trainer.add_callback(self._skipping)
        if not self._is_compared:
            self._is_compared = self._compare_losses(model, self._window[0])
        scaler = trainer.accelerator.scaler
        report = self.guard.backward(self._closure, self._window, window=True, scaler=scaler)
        self._window = []
        if report.skipped and scaler is not None:
            self._skipping.prepare(model, scaler)
        return zero if report.skipped else zero + report.loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log how many samples were bad since the start, once there was one."""
        bad = sum(len(report.bad) for report in self.guard.history) if self.guard is not None else 0
        if bad:
            logs = {**logs, "bad_samples": bad}
        super().log(logs, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def _make_closure(self, model: nn.Module, as_counted: bool) -> Any:
        """The losses of samples, with the number of their items `as_counted` by the trainer, or as they are."""
        trainer: Any = self
        if trainer.accelerator.distributed_type.value in ("DEEPSPEED", "MEGATRON_LM") or trainer.args.n_gpu > 1:
            raise RetryError(
                f"RetryMixin: {trainer.accelerator.distributed_type.value} or DataParallel runs the backward pass "
                "itself. Use DDP or FSDP2, or watch(quarantine=True) with TorchGuardCallback."
            )
        own = type(self).sample_losses
        if own is not None:
            return lambda inputs: own(model, inputs)
        shift, smoothing = _shifts(model), float(trainer.args.label_smoothing_factor)

        def losses(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
            sums, weights = losses_of(model, inputs, shift=shift, smoothing=smoothing)
            return sums, _items(model, inputs["labels"], weights) if as_counted else weights

        return losses

    def _compare_losses(self, model: nn.Module, inputs: dict[str, Any]) -> bool:
        """Compare the loss over the samples that have one with the trainer's own. False if no sample has a finite one.

        Random numbers and buffers are as before. A model under autocast may round its own loss to half precision.
        """
        trainer: Any = self
        closure = self._make_closure(model, as_counted=False)
        with torch.no_grad(), _restored(model):
            good = closure(dict(inputs))[0].isfinite().nonzero().flatten().tolist()
            if not good:
                return False
            part = Batch(inputs).part(good)
            with torch.random.fork_rng():
                sums, weights = closure(dict(part))
            with torch.random.fork_rng(), trainer.compute_loss_context_manager():
                want = trainer.compute_loss(model, dict(part))
        got = (sums.sum() / weights.sum()).to(want.dtype)
        if not torch.allclose(got, want, rtol=max(1e-4, 2 * self._precision(model)), atol=1e-5):
            raise RetryError(
                f"RetryMixin: the losses of the samples amount to {got.item():.6g}, but the trainer's own loss is "
                f"{want.item():.6g}. Set sample_losses to a function (model, inputs) -> (sums, weights) of this model."
            )
        return True

    def _precision(self, model: nn.Module) -> float:
        """The largest relative rounding error of a dtype that the model computes in."""
        trainer: Any = self
        dtypes = {one.dtype for one in model.parameters() if one.is_floating_point()}
        mixed = trainer.accelerator.mixed_precision
        if mixed != "no":
            dtypes.add(torch.float16 if mixed == "fp16" else torch.bfloat16)
        return max(torch.finfo(one).eps for one in dtypes)


class TorchGuardCallback(TrainerCallback):
    """For a watched model in quarantine: the exact loss, and what happened in the logs.

    Args:
        guarded: `watch(model, quarantine=True, returns="output")`.
        losses: `(outputs, labels) -> (sums, weights)`, the losses of each sample; by default those of models of
            transformers.
    """

    def __init__(self, guarded: Any, losses: Any = None) -> None:
        if not is_watched(guarded) or guarded._watch.returns != "output":
            raise WatchError('TorchGuardCallback: give watch(model, quarantine=True, returns="output").')
        self.guarded, self._losses = guarded, losses
        self._smoothing, self._shift = 0.0, losses is None and _shifts(guarded)
        self._items = self._left = None  # of the step: what the trainer counted, and without bad samples so far
        self._sum = torch.zeros(())  # of the losses of the step so far
        self._logged = 0

    def loss(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
        """The loss over good samples: `Trainer(compute_loss_func=callback.loss)`."""
        if self._losses is not None:
            sums, weights = self._losses(outputs, labels)
        else:
            multi_label = _problem_type(self.guarded) == "multi_label_classification"
            sums, weights = _sample_losses(
                _logits_of(outputs), labels, shift=self._shift, smoothing=self._smoothing, multi_label=multi_label
            )
            weights = _items(self.guarded, labels, weights) if num_items_in_batch is not None else weights
        good = err.is_ok(self.guarded.flags).to(sums.device)
        total = torch.where(good, sums, 0).sum()
        if num_items_in_batch is None or not self.guarded.training:
            return total / torch.where(good, weights, 0).sum().clamp(min=1)
        before, left = self._left_after(num_items_in_batch, torch.where(good, 0, weights).sum())
        # The trainer logs the sum over the micro-batches: make up for what the earlier ones were divided by.
        made_up = self._sum * (1 / left - 1 / before)
        self._sum = self._sum + total.detach()
        return total / left + made_up

    def _left_after(self, items: Any, lost: Tensor) -> tuple[Tensor, Tensor]:
        """How many items of the step are left without those of bad samples: before this micro-batch, and with it.

        The gradients so far are made up for it.
        """
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(lost)
        if self._items is not items:  # a new step: the trainer counts anew
            self._items, self._left = items, torch.as_tensor(items, device=lost.device, dtype=lost.dtype)
            self._sum = torch.zeros_like(lost)
        assert self._left is not None
        before, self._left = self._left.clamp(min=1), self._left - lost
        left = self._left.clamp(min=1)
        multiply_all(gradients_so_far(self.guarded), before / left)
        return before, left

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._smoothing = float(args.label_smoothing_factor)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._items = self._left = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Say what happened since the last log: the trainer's own filter may have taken a NaN out of its loss."""
        run = self.guarded.run_report()
        if logs is not None and run.total:
            logs["bad_samples"] = run.total
            state.log_history[-1]["bad_samples"] = run.total  # it was written before the callbacks are called
        if run.total > self._logged:
            logger.warning(
                "step %d: %d samples bad since the last log\n%s", state.global_step, run.total - self._logged, run
            )
            self._logged = run.total


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Restore buffers and random numbers at the end of a block."""
    buffers = [(one, one.clone()) for one in model.buffers()]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for one, before in buffers:
            one.data.copy_(before)


def _warn(report: RetryReport) -> None:
    logger.warning("%s", report)


def _shifts(model: Any) -> bool:
    """Whether the loss of a model predicts each token from the ones before it, by the rules of the `Trainer`."""
    inner = getattr(model, "module", model)
    names = {one.__name__ for one in type(inner).__mro__}  # `fully_shard` makes a subclass
    return (
        LOSS_MAPPING.get(getattr(inner, "loss_type", None) or "") is ForCausalLMLoss
        or not names.isdisjoint(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    ) and not getattr(inner.config, "is_encoder_decoder", False)


def _items(model: Any, labels: Tensor, weights: Tensor) -> Tensor:
    """How many items of each sample the `Trainer` counts.

    For causal models without a `loss_type`, such as GPT-2, it counts the first label of a sequence, which no loss has.
    """
    inner = getattr(model, "module", model)
    is_counted = not _shifts(inner) or LOSS_MAPPING.get(getattr(inner, "loss_type", None) or "") is ForCausalLMLoss
    return weights if is_counted else labels.ne(_IGNORED).flatten(1).sum(1).to(weights.dtype)


def _problem_type(model: Any) -> str | None:
    inner = getattr(model, "module", model)
    return getattr(getattr(inner, "config", None), "problem_type", None)


class _SkippedStep(TrainerCallback):
    """Has a `GradScaler` skip a step without a good sample, and forget it.

    It steps only with gradients, and skips if one is not finite. It takes that for an overflow: scale and growth are
    set back, before anything is saved or logged.
    """

    def __init__(self) -> None:
        self._before: tuple[Any, dict[str, Any]] | None = None  # a scaler and its state

    def prepare(self, model: nn.Module, scaler: Any) -> None:
        self._before = scaler, scaler.state_dict()
        parameter = next(one for one in model.parameters() if one.requires_grad)
        parameter.grad = torch.full_like(parameter, torch.inf)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._before is not None:
            scaler, before = self._before
            scaler.load_state_dict(before)
            self._before = None
