"""One guarded step: save what it may change, run it, and run it again without its bad samples if it is not finite."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchguard._health import all_finite, total_norm, wide_norm
from torchguard._retry.batch import Batch, tensors_of
from torchguard._retry.plan import Plan
from torchguard._retry.python_state import PythonState
from torchguard._retry.run import Closure, Losses, Result, Step
from torchguard._retry.search import Rows
from torchguard._torch.tensors import Versions, is_unchanged
from torchguard._torch.training import add_all, multiply_all
from torchguard.exceptions import RetryError

if TYPE_CHECKING:
    from torchguard._retry.retry import Retry

Gradients = dict[str, Tensor]


class Attempt:
    """One guarded step, from saving what it may change to its gradients."""

    def __init__(self, guard: "Retry", plan: Plan, closure: Closure, batches: list[Batch], scaler: Any) -> None:
        self.guard, self.plan, self.parameters, self.trained = guard, plan, plan.parameters, plan.trained
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.run = Step(closure, batches, plan.ranks, plan.wrappers, self._aside, guard.keep_shapes)
        self.number = guard.next_number()
        self.runs = 0
        self.last: tuple[Rows, int, bool] | None = None  # of the last run: samples, random stream, whether it is final
        self.results: dict[Rows, list[Losses | None]] = {}
        self.candidates: set[Rows] = set()  # parts that may turn out to be the good samples
        self.is_random = False
        self.loss = self.norm = float("nan")

    # The step.

    def start(self) -> Tensor:
        """Run the step without waiting, and put its buffers back on the device if it is not finite.

        Returns:
            On the device: loss, norm of the gradients, and whether anything is not finite.
        """
        self._save()
        try:
            self.runs += 1
            result = self.run.first_run(self._scale)
            self._correct(result)
            if changed := self.plan.python.changed():
                raise RetryError(
                    "Retry: with wait=False a step must not change Python state, since later steps start before it can "
                    f"be restored. The closure changed {', '.join(changed[:5])}. Use wait=True."
                )
            status = self._status(result)
            self.guard.tensors.restore_where(status[2] != 0)
        except BaseException:
            self._undo()
            raise
        return status

    def _save(self) -> None:
        self.guard.tensors.save(self.plan.buffers, self.plan.others, self.trained)
        self.random = self.plan.random_state()
        self._reduce_accumulated()
        self.accumulated = [self.plan.wrappers.keep(parameter.grad) for parameter in self.parameters.values()]
        self.inputs = [
            (one, one.grad)
            for batch in self.run.batches
            for one in tensors_of(batch.value)
            if one.is_leaf and one.requires_grad
        ]
        self._clear()

    def _reduce_accumulated(self) -> None:
        """The mean over the ranks of gradients that were accumulated in `no_sync()`, as DDP takes it in this step."""
        parameters = self.plan.wrappers.unreduced()
        if not parameters:
            return
        present = self.run.ranks.gather([one.grad is not None for one in parameters])
        for parameter, *of_ranks in zip(parameters, *present, strict=True):
            if any(of_ranks):
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
                parameter.grad = self.run.ranks.total(own) / self.run.ranks.size

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Put back all that is changed in this context, but gradients."""
        python, random = PythonState(self.plan.reached), self.plan.random_state()
        with self.guard.tensors.aside():
            yield
        python.restore()
        random.restore()

    def _clear(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def _restore(self, stream: int = 0) -> None:
        """Everything as before the step, but the gradients that were accumulated before are still set aside."""
        self.plan.wrappers.reset()
        self.guard.tensors.restore()
        self.plan.python.restore()
        self.random.restore(stream)
        self._clear()
        for tensor, grad in self.inputs:
            tensor.grad = grad

    def _undo(self) -> None:
        self._restore()
        for parameter, before in zip(self.parameters.values(), self.accumulated, strict=True):
            parameter.grad = before

    def _accumulate(self) -> None:
        """Add the gradients of this step to those of before."""
        both = [
            (parameter, before)
            for parameter, before in zip(self.parameters.values(), self.accumulated, strict=True)
            if before is not None
        ]
        if not both:
            return
        with torch.no_grad():
            dense = [(before, one.grad) for one, before in both if one.grad is not None and not before.is_sparse]
            dense = [(before, grad) for before, grad in dense if not grad.is_sparse]
            add_all([before for before, _ in dense], [grad for _, grad in dense])
            added = {id(before) for before, _ in dense}
            for parameter, before in both:
                if id(before) not in added and parameter.grad is not None:
                    before = before + parameter.grad
                parameter.grad = before

    def _gradients(self) -> list[Tensor]:
        return [one.grad for one in self.parameters.values() if one.grad is not None]

    def _correct(self, result: Result) -> None:
        if result.correction is not None:
            multiply_all(self._gradients(), result.correction)

    def _scale(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _read(self, result: Result, is_scaled: bool) -> tuple[float, float, bool]:
        """The loss, the norm of the gradients, and whether all of the run is finite. The one wait for the device.

        A finite norm proves that every gradient is finite. An infinite one may be an overflow: then each gradient is
        checked, and likewise each loss and each buffer that the run changed.
        """
        status = self._status(result, is_scaled)
        loss, norm, flag = status.tolist()
        if not flag:
            return loss, norm, True
        is_finite = (
            all(bool(one.sums.isfinite().all()) for one in result.losses if one is not None)
            and all_finite(self._gradients())
            and not self.guard.tensors.newly_non_finite()
            and not any(bool(one.has_fault()) for one in self.plan.python.replaced())
        )
        if is_finite and norm == float("inf"):
            norm = wide_norm(self._gradients())
        return loss, norm, not self.run.ranks.any(not is_finite)

    def _status(self, result: Result, is_scaled: bool = False) -> Tensor:
        """On the device: the loss, the norm of the gradients, and whether anything may be non-finite on any rank."""
        gradients = self._gradients()
        norm = total_norm(gradients) if gradients else torch.zeros((), dtype=torch.float32)
        if self.scaler is not None and is_scaled:
            norm = norm / self._scale(torch.ones((), dtype=norm.dtype, device=norm.device))
        buffers = self.guard.tensors.largest()
        values = [result.loss, norm] if buffers is None else [result.loss, norm, buffers]
        values += [torch.where(one.has_fault(), torch.inf, 0.0) for one in self.plan.python.replaced()]
        dtype = torch.float64 if any(one.dtype is torch.float64 for one in values) else torch.float32
        found = torch.stack([one.detach().to(result.loss.device, dtype) for one in values])
        flag = (~found.isfinite()).any().to(dtype)
        if self.run.ranks.size == 1:
            return torch.stack([found[0], found[1], flag])
        loss, flags = self.run.ranks.total(torch.stack([found[0], flag]))
        return torch.stack([loss, found[1], (flags > 0).to(dtype)])  # optimizers skip a step where this is 1, not 2

    def _refuse_change(self, names: list[str]) -> None:
        if names:
            raise RetryError(
                f"Retry: the closure or a hook changed {', '.join(names)}, which an optimizer trains. That cannot be "
                "undone. Change trained parameters outside of the closure; a teacher must not require gradients."
            )

    def _is_changed(self, parameter: Tensor, versions: Versions) -> bool:
        return any(one is parameter and not is_unchanged([(one, before)]) for one, before in versions)
