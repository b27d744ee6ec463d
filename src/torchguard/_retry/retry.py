"""`Retry`: a training step that is run again without its bad samples, if it is not finite."""

import collections
import inspect
import operator
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchguard._retry.batch import Batch, Select, keys_of, micro_batches
from torchguard._retry.closure import Closure
from torchguard._retry.device_step import DeviceStep, clear_gradients, has_state, update, why_not
from torchguard._retry.packages import Followed
from torchguard._retry.recoverable_step import RecoverableStep
from torchguard._retry.report import OBSERVERS, PendingReport, RetryReport, retry_section
from torchguard._retry.step_scope import Scope
from torchguard._retry.tensor_state import TensorState
from torchguard._torch.support import warn_of_missing
from torchguard.exceptions import RetryError, RetryWarning
from torchguard.report import Section, Shown

_NO_CLOSURE = inspect.Parameter("closure", inspect.Parameter.KEYWORD_ONLY, default=None)

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


class Retry(Shown, Followed):
    """Guards training steps: one bad sample costs one sample, whatever the model does with its rows.

    A step whose losses and gradients are finite costs one check of what it computed anyway. A step that is not is
    undone, its bad samples are found, and it is run again without them.

    Args:
        model: the model, or several. Everything else that a closure uses is found from the closure.
        optimizer: one or several, for `step`.
        shared: keys, names or positions in the batch of what belongs to no sample.
        select: `select(batch, rows)` for batches that are no pytree of tensors with samples along dim 0.
        size: `size(batch)` counts the samples, where `select` is given and the batch does not tell.
        ids: where the batch has the ids of its samples: a key, or a function of the batch.
        min_batch: the smallest part of a batch to run.
        max_bad: the most bad samples to do without: an int, or a float for a share of the batch.
        max_runs: the most runs of one step.
        wait: whether to wait for the outcome before the optimizer steps. See `docs/retry.md` for False.
        retries: how the closure is called again: "eager", or "compiled", apart from what is compiled already.
        keep_shapes: replace bad samples by copies of good ones whose losses do not count. Not exact.
        process_group: the ranks that have different samples; found for DDP and FSDP2.
        on_bad: called with the report of each step that was not finite as it was given.
        history: how many reports to keep.

    >>> from torchguard._retry import Retry
    >>> model = torch.nn.Linear(2, 1)
    >>> guard = Retry(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> x = torch.tensor([[1.0, 2.0], [float("nan"), 1.0], [0.5, 0.5]])
    >>> guard.step(lambda x: model(x).square().squeeze(1), x).bad
    [1]
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizers = None,
        *,
        shared: Collection[Any] = (),
        select: Select | None = None,
        size: Callable[[Any], int] | None = None,
        ids: str | Callable[[Any], Any] | None = None,
        min_batch: int = 1,
        max_bad: float | None = None,
        max_runs: int = 200,
        wait: bool = True,
        retries: str = "eager",
        keep_shapes: bool = False,
        process_group: dist.ProcessGroup | None = None,
        on_bad: Callable[[RetryReport], object] | None = None,
        history: int = 1000,
    ) -> None:
        warn_of_missing("Retry")
        self.models: list[nn.Module] = _all_given(model, lambda one: isinstance(one, nn.Module), "an nn.Module")
        self.optimizers: list[torch.optim.Optimizer] = (
            [] if optimizer is None else _all_given(optimizer, lambda one: hasattr(one, "param_groups"), "an optimizer")
        )
        for one in self.optimizers:
            if inspect.signature(one.step).parameters.get("closure", _NO_CLOSURE).default is inspect.Parameter.empty:
                raise RetryError(
                    f"Retry: {type(one).__name__} runs a closure itself. Call Retry's `backward` inside the closure "
                    "that you pass to its `step`."
                )
        if retries not in ("eager", "compiled"):
            raise RetryError(f"Retry: retries is {retries!r}. Give 'eager' or 'compiled'.")
        numbers = {"min_batch": (min_batch, 1), "max_runs": (max_runs, 1), "max_bad": (max_bad, 0)}
        for name, (value, least) in {**numbers, "history": (history, 0)}.items():
            if value is not None and value < least:
                raise RetryError(f"Retry: {name} is {value!r}. Give {least} or more.")
        self.shared = (shared,) if isinstance(shared, (str, int)) else tuple(shared)
        self.select, self.size, self.ids = select, size, ids
        self.min_batch, self.max_bad, self.max_runs = min_batch, max_bad, max_runs
        self.wait, self.retries, self.keep_shapes = wait, retries, keep_shapes
        self.process_group, self.on_bad = process_group, on_bad
        self.history: collections.deque[RetryReport] = collections.deque(maxlen=history)
        self.tensors = TensorState()
        # Whether faults stay when they are run again: None until one was, False once one was not reproduced.
        self.is_steady: bool | None = None
        self._steps = 0  # begun
        self._ended = self._bad_steps = self._bad_samples = self._skipped = 0  # whose outcome is known
        self._pending: Pending | None = None
        self._scope: Scope | None = None

    def backward(self, closure: Closure, batch: Any, *, window: bool | None = None, scaler: Any = None) -> RetryReport:
        """Add the gradients of the batch without its bad samples to those that the parameters have.

        Args:
            closure: takes a batch and returns the loss of each sample; or `(sums, weights)` of each sample, whose loss
                is the sum of all sums divided by the sum of all weights; or one loss.
            batch: a batch, or a list of micro-batches that are accumulated into one step, a window.
            window: whether the batch is a list of micro-batches, where that is not clear.
            scaler: a `GradScaler`: the gradients are scaled, and an overflow that the scale causes is left to it.
        """
        report = self._run(self._guarded(closure, batch, window, scaler))
        self._conclude(report)
        return report

    def step(
        self,
        closure: Closure,
        batch: Any,
        *,
        clip: float | None = None,
        scaler: Any = None,
        window: bool | None = None,
    ) -> RetryReport:
        """One step of the optimizers with the gradients of the batch without its bad samples.

        Clears the gradients before. If all samples are bad, or the bad ones cannot be found, nothing is changed.

        Args:
            closure: as for `backward`.
            batch: as for `backward`.
            scaler: as for `backward`; it steps the optimizers and is updated.
            window: as for `backward`.
            clip: the largest norm of all gradients together.
        """
        if not self.optimizers:
            raise RetryError("Retry: step needs an optimizer. Give Retry(model, optimizer), or use backward.")
        if not self.wait and self._can_be_deferred(scaler):
            return self._step_without_waiting(closure, batch, clip, window)
        self.finish()
        return self._step(closure, batch, clip, scaler, window)

    def _step(
        self,
        closure: Closure,
        batch: Any,
        clip: float | None,
        scaler: Any,
        window: bool | None,
        late: int | None = None,
    ) -> RetryReport:
        clear_gradients(self.optimizers)
        step = self._guarded(closure, batch, window, scaler)
        report = self._run(step, late, lambda: self._step_ahead(step, clip))
        if not report.skipped and not step.is_updated():
            self._update(step, clip, scaler)
        self._conclude(report, is_late=late is not None)
        return report

    def _step_ahead(self, step: RecoverableStep, clip: float | None) -> DeviceStep | None:
        """The step of the optimizers, if it can be launched before the outcome of the first run is known."""
        scope = step.scope
        is_possible = (
            step.scaler is None
            and runs_ahead(scope.devices)
            and not scope.wrappers.is_sharded
            and all(has_state(optimizer) and not why_not(optimizer) for optimizer in self.optimizers)
        )
        return DeviceStep(self.optimizers, clip) if is_possible else None

    def _update(self, step: RecoverableStep, clip: float | None, scaler: Any) -> None:
        if scaler is None:
            is_known = step.is_all_trained and not step.scope.wrappers.is_sharded
            update(self.optimizers, clip, step.device_norm if is_known else None)
            return
        for optimizer in self.optimizers:
            scaler.unscale_(optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_(self._trained(), clip)
        for optimizer in self.optimizers:
            scaler.step(optimizer)
        scaler.update()

    def __repr__(self) -> str:
        """What it guards and what it has found so far. Waits for nothing."""
        guarded = ", ".join(type(one).__name__ for one in (*self.models, *self.optimizers))
        if not self._ended:
            return f"Retry({guarded}): no steps yet"
        found = "all finite"
        if self._bad_steps:
            found = f"{self._bad_steps:,} not finite ({_counted(self._bad_samples, 'bad sample')}"
            found += f", {_counted(self._skipped, 'step')} skipped)" if self._skipped else ")"
        pending = "" if self._pending is None else "; one more is not read yet"
        return f"Retry({guarded}): {_counted(self._ended, 'step')}, {found}{pending}"

    def section(self) -> Section:
        """The steps in `history` as a section of a report. Waits for the last one."""
        self.finish()
        return retry_section([*self.history])

    # wait=False: the optimizer skips a bad step by itself, and its samples are trained one step later.

    def finish(self) -> None:
        """With `wait=False`: read the outcome of the last step, and train its good samples if it was bad."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.resolve()

    def _can_be_deferred(self, scaler: Any) -> bool:
        if scaler is not None and scaler.is_enabled():
            raise RetryError("Retry: with a GradScaler the host waits for each step anyway. Use wait=True.")
        for optimizer in self.optimizers:
            if reason := why_not(optimizer):
                raise RetryError(
                    f"Retry: wait=False needs optimizers that skip a step on the device. {type(optimizer).__name__} "
                    f"{reason}, or use wait=True."
                )
        # An optimizer makes its state in its first step, from the gradients of that step if these are skipped, too.
        return all(map(has_state, self.optimizers)) and self.tensors.has_learned

    def _step_without_waiting(
        self, closure: Closure, batch: Any, clip: float | None, window: bool | None
    ) -> RetryReport:
        clear_gradients(self.optimizers)
        step = self._guarded(closure, batch, window, None)
        update = DeviceStep(self.optimizers, clip)
        step.start(update)
        previous, self._pending = self._pending, Pending(self, step, update, (closure, batch, clip, None, window))
        self.history.append(self._pending.report)
        newest = self._pending.report
        if previous is not None:
            previous.resolve()
        return newest

    def _trained(self) -> list[torch.Tensor]:
        return [one for optimizer in self.optimizers for group in optimizer.param_groups for one in group["params"]]

    def _conclude(self, report: RetryReport, is_late: bool = False) -> None:
        if not is_late:  # a late one is in the history since its step
            self.history.append(report)
        self._ended += 1
        self._bad_steps += not report.ok
        self._bad_samples += len(report.bad)
        self._skipped += report.skipped
        for observe in OBSERVERS:
            observe(report)
        if self.on_bad is not None and not report.ok:
            self.on_bad(report)

    def _run(
        self, step: RecoverableStep, late: int | None = None, ahead: Callable[[], DeviceStep | None] = lambda: None
    ) -> RetryReport:
        """Run a step. `late` is the number of one that was run before without waiting for its outcome."""
        if late is None:
            try:
                return step.run_recovered(ahead)
            except Exception as exception:
                if (count := len(step.closure.batches)) > 1:
                    exception.add_note(
                        f"Retry called the closure with each of {count} micro-batches, the items of the given list. "
                        "Give window=False if the list is one batch."
                    )
                raise
        self._steps, step.number = self._steps - 1, late
        report = step.run_recovered()
        report.runs += 1
        return report

    def _guarded(self, closure: Closure, batch: Any, window: bool | None, scaler: Any) -> RecoverableStep:
        if not callable(closure):
            raise RetryError(
                f"Retry: expected a closure that takes a batch and returns its losses, got {type(closure).__name__}."
            )
        parts = micro_batches(batch, window)
        batches = [Batch(one, self.shared, self.select, self._size_of(one)) for one in parts]
        if self._steps == 0 and (unknown := {*self.shared}.difference(*map(keys_of, parts))):
            warnings.warn(
                f"Retry: shared= names {', '.join(sorted(map(repr, unknown)))}, which the batch does not have.",
                RetryWarning,
                stacklevel=5,
            )
        if self._scope is None or not self._scope.update(closure):
            self._scope = Scope(self.models, self.optimizers, self.process_group, closure)
        return RecoverableStep(self, self._scope, closure, batches, scaler)

    def _size_of(self, batch: Any) -> int | None:
        if self.size is None:
            return None
        size = self.size(batch)
        if not hasattr(size, "__index__"):
            raise RetryError(f"Retry: size= has to return the number of samples, got {type(size).__name__}.")
        return operator.index(size)

    def next_number(self) -> int:
        self._steps += 1
        return self._steps - 1


class Pending:
    """A step whose outcome is on its way to the host."""

    def __init__(self, retry: Retry, step: RecoverableStep, update: DeviceStep, arguments: tuple[Any, ...]) -> None:
        self.retry, self.step, self.update, self.arguments = retry, step, update, arguments
        self.report = PendingReport(self._resolved)
        self._found: RetryReport | None = None

    def resolve(self) -> RetryReport:
        """Wait for the outcome of this step, not of later ones; train its good samples if it was bad."""
        if self._found is None:
            loss, norm, is_skipped = self.update.outcome()
            number = self.step.number
            if not is_skipped:
                self._found = RetryReport(number, 1, loss, norm)
                self.retry._ended += 1
            else:
                self._found = self.retry._step(*self.arguments, late=number)
            del self.step, self.update, self.arguments
        return self._found

    def _resolved(self) -> RetryReport:
        if self._found is None and self.step.closure.ranks.size > 1:
            raise RetryError(
                "Retry: the outcome of this step is not known yet. Call guard.finish() on every rank first."
            )
        if self.retry._pending is self:
            self.retry._pending = None
        return self.resolve()


def _all_given(given: Any, is_one: Callable[[Any], bool], what: str) -> list[Any]:
    """One object or several as a list.

    Raises:
        RetryError: one is something else.
    """
    found = [*given] if not is_one(given) and isinstance(given, Iterable) else [given]
    for one in found:
        if not is_one(one):
            raise RetryError(f"Retry: expected {what} or several, got {type(one).__name__}.")
    return found


def runs_ahead(devices: Collection[torch.device]) -> bool:
    """Whether the host gives work to the device before it is needed: then the optimizers are launched ahead."""
    return len(devices) == 1 and all(device.type == "cuda" for device in devices)


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
