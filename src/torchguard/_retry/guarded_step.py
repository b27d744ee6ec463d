"""One guarded step: what it may change is saved, the step is run and checked, and restored if it is not finite."""

import contextlib
import functools
import itertools
import math
import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchguard._health import all_finite, local, total_norm, wide_norm
from torchguard._retry.batch import Batch
from torchguard._retry.closure import BatchedClosure, Closure
from torchguard._retry.device_step import DeviceStep, Status
from torchguard._retry.losses import Losses, RunResult
from torchguard._retry.python_state import PythonState
from torchguard._retry.sample_search import Rows
from torchguard._retry.step_scope import Scope
from torchguard._retry.tensor_state import Replaced, TensorState
from torchguard._torch.training import add_all, multiply_all, next_hook, remove_hooks
from torchguard.exceptions import RetryError

if TYPE_CHECKING:
    from torchguard._retry.retry import Retry

Gradients = dict[str, Tensor]
_NO_NORM = torch.zeros((), dtype=torch.float32, device="cpu")


class GuardedStep:
    """One guarded step, from saving what it may change to its gradients."""

    def __init__(self, retry: "Retry", scope: Scope, closure: Closure, batches: list[Batch], scaler: Any) -> None:
        self.retry, self.scope, self.parameters, self.trained = retry, scope, scope.parameters, scope.trained
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        aside = functools.partial(_aside, scope, retry.tensors)  # no method of this object, which would keep it alive
        self.closure = BatchedClosure(closure, batches, scope.ranks, scope.wrappers, aside, retry.keep_shapes)
        self.ranks = scope.ranks
        if self.ranks.size == 1 and not all(batch.size for batch in batches):
            raise RetryError(f"Retry: the batch ({type(batches[0].value).__name__}) has no samples.")
        self.number = retry.next_number()
        self.runs = 0
        self.last: tuple[Rows, int, bool] | None = None  # of the last run: samples, random stream, whether it is final
        self.results: dict[Rows, list[Losses | None]] = {}
        self.candidates: set[Rows] = set()  # parts that may turn out to be the good samples
        self.is_random = False
        self.loss = self.norm = float("nan")
        self.is_all_trained = False  # whether the optimizers train all that got a gradient in the last run
        self.device_norm: Tensor = _NO_NORM  # of the gradients of the last run, those that are scaled included

    # The step.

    def start(self, update: DeviceStep) -> None:
        """Run the step without waiting. If it is not finite, the device skips the optimizers and restores buffers."""
        self._save()
        try:
            result = self._first_run()
            if changed := self.scope.python.changed():
                raise RetryError(
                    "Retry: with wait=False a step must not change Python state, since later steps start before it can "
                    f"be restored. The closure changed {', '.join(changed[:5])}. Use wait=True."
                )
            status = self._status(self._numbers_of(result, replaced=()))
            if isinstance(status, Tensor):
                self.retry.tensors.restore_where(status[2] != 0)
            elif status[2]:
                self.retry.tensors.restore()
        except BaseException:
            self._undo()
            raise
        update.launch(status, self._norm_to_clip_by())

    def _first_run(self) -> RunResult:
        """Run the step as it was given, and refuse what must not change in it. Nothing waits for the device."""
        inputs = [batch.versions() for batch in self.closure.batches]
        self.runs += 1
        result = self.closure.first_run(self._scale)
        self._correct(result)
        self._refuse_change(self.retry.tensors.changed_trained())
        if inputs != [batch.versions() for batch in self.closure.batches]:
            raise RetryError(
                "Retry: the closure changes a tensor of the batch in place, so it cannot be run again. Change "
                "a copy: `x = x / 255` instead of `x.div_(255)`."
            )
        return result

    def _save(self) -> None:
        self.retry.tensors.save(self.scope.buffers, self.scope.others, self.trained)
        self.random = self.scope.random_state()
        self.first_hook = next_hook()
        if self.scope.wrappers.replicated:
            self._reduce_accumulated()
        self.accumulated = self.scope.wrappers.keep([*map(_gradient_of, self.scope.leaves)])
        self.inputs = [
            (one, one.grad)
            for batch in self.closure.batches
            for one in batch.tensors
            if one.requires_grad and one.is_leaf
        ]
        self.has_accumulated = any(map(_is_not, self.accumulated, itertools.repeat(None)))
        if self.has_accumulated:
            self._clear()

    def _reduce_accumulated(self) -> None:
        """The mean over the ranks of gradients that were accumulated in `no_sync()`, as DDP takes it in this step."""
        parameters = self.scope.wrappers.unreduced()
        if not parameters:
            return
        present = self.ranks.gather([one.grad is not None for one in parameters])
        for parameter, *of_ranks in zip(parameters, *present, strict=True):
            if any(of_ranks):
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
                parameter.grad = self.ranks.total(own) / self.ranks.size

    def _clear(self) -> None:
        for parameter in self.scope.leaves:
            parameter.grad = None

    def _restore(self, stream: int = 0) -> None:
        """Everything as before the step, but the gradients that were accumulated before are still set aside."""
        self.scope.wrappers.reset()
        self.retry.tensors.restore()
        self.scope.python.restore()
        self.scope.freeze_as_before()
        _remove_new_hooks(self.scope.reached.modules, self.first_hook, self.scope.wrappers.own_hooks)
        self.random.restore(stream)
        self._clear()
        for tensor, grad in self.inputs:
            tensor.grad = grad

    def _undo(self) -> None:
        self._restore()
        for parameter, before in zip(self.scope.leaves, self.accumulated, strict=True):
            parameter.grad = before

    def _accumulate(self) -> None:
        """Add the gradients of this step to those of before."""
        if not self.has_accumulated:
            return
        both = [
            (parameter, before)
            for parameter, before in zip(self.scope.leaves, self.accumulated, strict=True)
            if before is not None
        ]
        with torch.no_grad():
            dense = [(before, one.grad) for one, before in both if one.grad is not None and not before.is_sparse]
            dense = [(before, grad) for before, grad in dense if not grad.is_sparse]
            add_all([before for before, _ in dense], [grad for _, grad in dense])
            added = {id(before) for before, _ in dense}
            for parameter, before in both:
                if id(before) not in added and parameter.grad is not None:
                    before = before + parameter.grad
                parameter.grad = before

    def accumulated_gradients(self) -> dict[int, Tensor]:
        """The gradients of before the step that trained parameters have, by the parameter's id.

        Empty with a `GradScaler`, which has to see that scaled gradients overflow.
        """
        if not self.has_accumulated or self.scaler is not None:
            return {}
        return {
            id(one): local(grad)
            for one, grad in zip(self.scope.leaves, self.accumulated, strict=True)
            if grad is not None and id(one) in self.trained
        }

    def _gradients(self) -> list[Tensor]:
        return [one for one in [*map(_gradient_of, self.scope.leaves)] if one is not None]

    def _correct(self, result: RunResult) -> None:
        if result.correction is not None:
            multiply_all(self._gradients(), result.correction)

    def _scale(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _read(self, result: RunResult, is_scaled: bool) -> tuple[float, float, bool]:
        """The loss, the norm of the gradients, and whether all of the run is finite. The one wait for the device.

        A finite norm proves that every gradient is finite. An infinite one may be an overflow: then each gradient is
        checked, and likewise each loss and each buffer that the run changed.
        """
        status = self._status(self._numbers_of(result, is_scaled))
        loss, norm, flag = status.tolist() if isinstance(status, Tensor) else status
        return self._exactly(result, loss, norm) if flag else (loss, norm, True)

    def _exactly(self, result: RunResult, loss: float, norm: float) -> tuple[float, float, bool]:
        """Check every loss, gradient and buffer of a run by itself."""
        is_finite = (
            not math.isnan(loss)  # an infinite one may be an overflow of a sum
            and result.is_finite()
            and all_finite(self._gradients())
            and (self.runs > 1 or all_finite([*self.accumulated_gradients().values()]))
            and not self.retry.tensors.newly_non_finite()
            and not any(bool(one.has_fault()) for one in self.scope.python.replaced())
        )
        if is_finite and norm == float("inf"):
            norm = wide_norm(self._gradients())
        return loss, norm, not self.ranks.any(not is_finite)

    def _numbers_of(
        self, result: RunResult, is_scaled: bool = False, replaced: Sequence[Replaced] | None = None
    ) -> list[Tensor]:
        """On the devices: the loss, the norm of the gradients, and numbers for other tensors that the run changed.

        All are finite only if the run is.

        Args:
            result: of the run.
            is_scaled: whether its gradients are scaled.
            replaced: the tensors that were put in the place of others, if these are known.
        """
        loss = result.loss
        gradients = self._gradients()
        is_same = self.scope.has_same_leaves()
        self.is_all_trained = is_same and self.scope.is_all_trained
        is_plain = is_same and self.scope.has_plain_gradients
        norm = total_norm(gradients, is_plain) if gradients else torch.zeros_like(loss)
        self.device_norm = norm
        if self.scaler is not None and is_scaled:
            norm = norm / self._scale(torch.ones((), dtype=norm.dtype, device=norm.device))
        weight = () if result.weight is None else (result.weight,)
        replaced = self.scope.python.replaced() if replaced is None else replaced
        faults = [torch.where(one.has_fault(), torch.inf, 0.0) for one in replaced]
        before = [*self.accumulated_gradients().values()] if self.runs == 1 else []
        norms = [total_norm(before)] if before else []
        return [loss, norm, *weight, *norms, *self.retry.tensors.finiteness(), *faults]

    def _status(self, values: Sequence[Tensor]) -> Status:
        """The loss, the norm of the gradients, and whether anything may be non-finite on any rank."""
        is_on_host = decides_on_host(values[0])
        if self.ranks.size == 1 and is_on_host:
            loss, norm, *others = [one.item() for one in values]
            return [loss, norm, not all(map(math.isfinite, (loss, norm, *others)))]
        found = _stacked(values)
        flag = (~found.isfinite()).any().to(found.dtype)
        if self.ranks.size == 1:
            return torch.cat([found[:2], flag.view(1)])
        loss, flags = self.ranks.total(torch.stack([found[0], flag]))
        status = torch.stack([loss, found[1], (flags > 0).to(found.dtype)])  # optimizers skip where this is 1, not 2
        return status.tolist() if is_on_host else status

    def _norm_to_clip_by(self) -> Tensor:
        """The norm of the gradients of the last run that the optimizers see."""
        if self.is_all_trained:
            return self.device_norm
        gradients = [
            grad
            for one, grad in zip(self.scope.leaves, map(_gradient_of, self.scope.leaves), strict=True)
            if grad is not None and id(one) in self.scope.stepped
        ]
        return total_norm(gradients) if gradients else torch.zeros_like(self.device_norm)

    def _refuse_change(self, names: list[str]) -> None:
        if names:
            raise RetryError(
                f"Retry: the closure or a hook changed {', '.join(names)}, which an optimizer trains. That cannot be "
                "undone. Change trained parameters outside of the closure; a teacher must not require gradients."
            )


_gradient_of, _is_not = operator.attrgetter("grad"), operator.is_not


def decides_on_host(loss: Tensor) -> bool:
    """Whether the host has the outcome of a run without waiting for a device."""
    return loss.device.type == "cpu"


def _stacked(values: Sequence[Tensor]) -> Tensor:
    """Numbers in one tensor on the device of the first."""
    device = values[0].device
    if any(one.dtype is not torch.float32 or one.device != device for one in values):
        dtype = torch.float64 if any(one.dtype is torch.float64 for one in values) else torch.float32
        values = [one.to(device, dtype) for one in values]
    return torch.stack([*values])


@contextlib.contextmanager
def _aside(scope: Scope, tensors: TensorState) -> Iterator[None]:
    """Put back all that is changed in this context, but gradients."""
    python, random, first_hook = PythonState(scope.reached), scope.random_state(), next_hook()
    with tensors.aside():
        yield
    python.restore()
    _remove_new_hooks(scope.reached.modules, first_hook, scope.wrappers.own_hooks)
    random.restore()


def _remove_new_hooks(modules: Iterable[tuple[str, nn.Module]], first: int, but: Collection[int]) -> None:
    """Remove hooks that were registered in a run. Some models do so in their first call, and note it as an attribute.

    Restoring that attribute alone would have them register the hooks once more.
    """
    if next_hook() != first:
        for _, module in modules:
            remove_hooks(module, first, but=but)
