"""Lightning's `Trainer`: one bad sample costs one sample.

`RetryMixin` guards the steps of a `LightningModule` whose `training_step` returns the loss of each sample:

    class Model(RetryMixin, LightningModule):
        def training_step(self, batch, batch_idx):
            losses = F.cross_entropy(self(batch["x"]), batch["y"], reduction="none")
            self.log("train_loss", losses.mean())
            return losses

Lightning runs `training_step`, clears the gradients, and runs `backward`. `Retry` has to run both, after the gradients
were cleared, so all of it happens in `backward`: Lightning's own call of `training_step` only keeps the batch. What the
step logs is held back until it is known which of its runs counts.
"""

import contextlib
import inspect
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from torchguard import err
from torchguard._extras import require_extra
from torchguard._retry import Retry, RetryReport
from torchguard._watch.wrapper import is_watched
from torchguard.exceptions import RetryError, WatchError

require_extra("torchguard.integrations.lightning", "lightning", "lightning")
from lightning.pytorch import Callback  # noqa: E402

__all__ = ["RetryMixin", "TorchGuardCallback"]

logger = logging.getLogger("torchguard")


class RetryMixin:
    """A `LightningModule` whose steps are guarded by `Retry`: `class Model(RetryMixin, LightningModule)`.

    Its `training_step` returns the loss of each sample, `(sums, weights)`, or a dict with one of these as "loss".
    `self.guard` is the `Retry`; its reports are in `self.guard.history`. The loss that Lightning passes to
    `on_train_batch_end` is NaN: log your own.

    Attributes:
        retry_options: arguments of `Retry`, by name.
    """

    retry_options: dict[str, Any] = {}  # noqa: RUF012 (a default, replaced by a subclass)
    guard: Retry | None = None
    _held: "list[tuple[int, list[tuple[tuple[Any, ...], dict[str, Any]]]]] | None" = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "training_step" in cls.__dict__:
            cls._own_step = _with_index(cls.__dict__["training_step"])
            cls.training_step = _keep_batch

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the kept batch, and add the gradients of its good samples."""
        module: Any = self
        trainer = module.trainer
        if not module.automatic_optimization:
            raise RetryError("RetryMixin: with manual optimization, call Retry.backward in training_step yourself.")
        wrapper = trainer.strategy.model  # DDP around the module, or the module itself
        if self.guard is None:
            self.guard = Retry(wrapper, trainer.optimizers, **{"on_bad": _warn, **self.retry_options})
        batch, index = module.__dict__.pop("_kept")
        scale, own = 1.0 / trainer.accumulate_grad_batches, type(self)._own_step

        def closure(part: Any) -> Any:
            held: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
            module.__dict__["_held"] = held
            try:
                with trainer.precision_plugin.train_step_context():  # autocast, which has ended before `backward`
                    losses = _losses_of(_call(wrapper, module, own, part, index))
            finally:
                module.__dict__["_held"] = None
            runs.append((_size(losses), held))
            return _scaled(losses, scale)

        runs: list[tuple[int, list[Any]]] = []
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        with _synchronized(wrapper):
            report = self.guard.backward(closure, batch, window=False, scaler=scaler)
        if not report.skipped:
            self._log_held(runs, report)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """As that of Lightning; a `GradScaler` is not asked to step where no sample was good, and keeps its scale."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)  # pyright: ignore[reportAttributeAccessIssue]

        def closure() -> Any:
            loss = optimizer_closure()
            groups = optimizer.param_groups
            # A GradScaler refuses to step without any gradient; None has Lightning's plugin not ask it to.
            return loss if any(one.grad is not None for group in groups for one in group["params"]) else None

        given = optimizer_closure if scaler is None else closure
        super().optimizer_step(epoch, batch_idx, optimizer, given)  # pyright: ignore[reportAttributeAccessIssue]

    def log(self, *args: Any, **kwargs: Any) -> None:
        """As that of Lightning; within a step, held back until it is known which run of the step counts."""
        held = self.__dict__.get("_held")
        if held is not None:
            held.append((args, kwargs))
        else:
            super().log(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        for name, value in dictionary.items():
            self.log(name, value, *args, **kwargs)

    def _log_held(self, runs: "list[tuple[int, list[Any]]]", report: RetryReport) -> None:
        """Log what the run logged whose samples were trained: the last one of that size."""
        module: Any = self
        left = runs[0][0] - len(report.bad) - len(report.left_out)
        held = next((held for size, held in reversed(runs) if size == left), [])
        before, module._current_fx_name = module._current_fx_name, "training_step"
        try:
            for args, kwargs in held:
                super().log(*args, **{"batch_size": left, **kwargs})  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            module._current_fx_name = before


class TorchGuardCallback(Callback):
    """Logs what a watched model found, and says so.

    `bad_sample_rate` is that of a step on this rank, `bad_sample_rate_epoch` that of an epoch on all ranks.

    Args:
        guarded: what `watch` returned, the module itself or a part of it.
    """

    def __init__(self, guarded: Any) -> None:
        if not is_watched(guarded):
            raise WatchError(f"TorchGuardCallback: expected what watch returned, got {type(guarded).__name__}.")
        self.guarded, self._told = guarded, 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        f = self.guarded.flags
        if f is not None:
            bad = err.is_err(f).float()
            pl_module.log("bad_sample_rate", bad.mean(), on_step=True, on_epoch=False)
            # Ranks meet at the end only: in each step, one that does not call the model would have the others wait.
            how: Any = {"on_step": False, "on_epoch": True, "sync_dist": True, "batch_size": len(bad)}
            pl_module.log("bad_sample_rate_epoch", bad.mean(), **how)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        run = self.guarded.run_report()
        if run.total > self._told:
            logger.warning("epoch %d: %d samples bad\n%s", trainer.current_epoch, run.total - self._told, run)
            self._told = run.total


def _keep_batch(self: Any, batch: Any, batch_idx: int = 0) -> Tensor:
    """Keep the batch for `backward`. What is returned is no loss."""
    self.__dict__["_kept"] = (batch, batch_idx)
    return torch.full((), torch.nan, device=self.device, requires_grad=True)


@contextlib.contextmanager
def _synchronized(wrapper: Any) -> Iterator[None]:
    """Have DDP add up gradients in each micro-batch: Lightning puts that off until the last one of a step.

    `Retry` divides by the number of good samples of all ranks, which differs from one micro-batch to the next.
    """
    before = getattr(wrapper, "require_backward_grad_sync", None)
    if before is None:
        yield
        return
    wrapper.require_backward_grad_sync = True
    try:
        yield
    finally:
        wrapper.require_backward_grad_sync = before


def _call(wrapper: Any, module: Any, step: Any, batch: Any, index: int) -> Any:
    """Run a step of a module in the forward pass of DDP, if there is one, as Lightning itself does."""
    if wrapper is module:
        return step(module, batch, index)
    own = module.__dict__.get("forward")

    def restore() -> None:
        module.__dict__.pop("forward", None)
        if own is not None:
            module.__dict__["forward"] = own

    def forward(batch: Any, index: int) -> Any:
        restore()  # the step may call it
        return step(module, batch, index)

    module.__dict__["forward"] = forward
    try:
        return wrapper(batch, index)
    finally:
        restore()


def _with_index(step: Any) -> Any:
    """A step that takes the index of a batch. Lightning passes it to those that ask for it."""
    count = len([one for one in inspect.signature(step).parameters.values() if one.kind is not one.KEYWORD_ONLY])
    return step if count > 2 else lambda self, batch, index: step(self, batch)


def _losses_of(returned: Any) -> Any:
    """The losses of the samples: what a step returned, or its entry "loss"."""
    losses = returned["loss"] if isinstance(returned, Mapping) else returned
    each = losses[0] if isinstance(losses, tuple) else losses
    if not isinstance(each, Tensor) or each.ndim == 0:
        got = f"a tensor of {each.ndim} dims" if isinstance(each, Tensor) else type(each).__name__
        raise RetryError(
            f"RetryMixin: training_step has to return the loss of each sample (reduction='none'), got {got}. Return "
            "losses, (sums, weights), or a dict with one of these as 'loss'."
        )
    return losses


def _size(losses: Any) -> int:
    return len(losses[0] if isinstance(losses, tuple) else losses)


def _scaled(losses: Any, scale: float) -> Any:
    return (losses[0] * scale, losses[1]) if isinstance(losses, tuple) else losses * scale


def _warn(report: RetryReport) -> None:
    logger.warning("%s", report)
