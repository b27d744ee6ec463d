"""Which rows belong to which sample, for all tensors of a call: found once, and used in later calls of the same form.

In eager mode the first call of a form (`form_of`: shapes, dtypes, modes) is followed by an `OwnerMode`. What it finds
is an `OwnerPlan`, which later calls of that form use. Such a call has to check the same locations in the same order;
otherwise it took another way through the model, counts as mixing samples, and the next one is followed again. A model
that reads values of samples to decide what it does is followed in every call.

A batch of one sample needs no plan. Nor is there one under `torch.func` transforms and in exports, where sizes decide.
In a graph, `graph_plan.py` finds the plan while Dynamo traces.
"""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchguard._pytrees import OBJECTS, tensors_in
from torchguard._torch.tracing import is_plain
from torchguard._watch.batch import MIXED, Batch, is_size_free
from torchguard._watch.owners import OwnerMode, rows_of
from torchguard.exceptions import MixedRowsWarning

_PLAIN = torch.empty(0)
# How many plans a watched model keeps, and how many forms of other sizes have to agree before one plan serves all.
_MOST_PLANS, _ENOUGH_FORMS = 256, 3


class OwnerPlan(NamedTuple):
    """Row codes for the tensors of a call.

    Args:
        checks: for each check its location, the number of dims of the tensor, and its row code.
        neg_inf: the numbers of checks of tensors that may hold -Inf on purpose.
        outputs: the row code of each tensor that the model returns.
        problem: what mixes samples; None if the model keeps them apart.
    """

    checks: tuple[tuple[int, int, int], ...]
    neg_inf: frozenset[int]
    outputs: tuple[int, ...]
    problem: str | None

    @property
    def mixes(self) -> bool:
        return MIXED in self.outputs

    @property
    def is_size_free(self) -> bool:
        return all(map(is_size_free, (*(code for _, _, code in self.checks), *self.outputs)))


class FollowedCall:
    """A call whose owners are followed."""

    def __init__(self, mode: OwnerMode, size: int) -> None:
        self.mode, self.size = mode, size
        self._checks: list[tuple[int, int, int]] = []
        self._neg_inf: set[int] = set()

    def rows(self, z: Tensor, location: int) -> int:
        """The row code of a tensor that is checked."""
        code = self._code(z)
        self._checks.append((location, z.ndim, code))
        return code

    def may_have_neg_inf(self, z: Tensor) -> bool:
        """Whether the tensor whose rows were asked for last may hold -Inf on purpose."""
        may = self.mode.may_have_neg_inf(z)
        if may:
            self._neg_inf.add(len(self._checks))
        return may

    def set_samples(self, z: Tensor, dim: int) -> None:
        """The samples lie along that dim of a tensor, as the user said."""
        if z.shape[dim] == self.size:
            self.mode.set_samples(z, dim)

    def paused(self) -> AbstractContextManager[None]:
        return self.mode.paused()

    def running(self) -> AbstractContextManager[Any]:
        return self.mode

    def replaced(self, z: Tensor, new: Tensor) -> None:
        """A tensor was replaced by another, which belongs to the same samples."""
        if new is not z:
            self.mode.set_owners(new, self.mode.owners_of(z))

    def finish(self, output: Any) -> OwnerPlan:
        outputs = tuple([self._code(z) for _, z in tensors_in(output, objects=OBJECTS)])
        return OwnerPlan(tuple(self._checks), frozenset(self._neg_inf), outputs, self.mode.problem)

    def _code(self, z: Tensor) -> int:
        if z.layout != torch.strided or z.is_nested:
            return MIXED
        code = rows_of(self.mode.owners_of(z), self.size)
        return MIXED if code is None else code


class PlannedCall:
    """A call that follows a plan."""

    def __init__(self, plan: OwnerPlan) -> None:
        self.plan, self._count, self.fits = plan, 0, True

    def rows(self, z: Tensor, location: int) -> int:
        checks, self._count = self.plan.checks, self._count + 1
        if self._count <= len(checks):
            at, ndim, code = checks[self._count - 1]
            if at == location and ndim == z.ndim:
                return code
        self.fits = False
        return MIXED

    def may_have_neg_inf(self, z: Tensor) -> bool:
        return self._count in self.plan.neg_inf

    def set_samples(self, z: Tensor, dim: int) -> None:
        return None

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()

    def running(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def replaced(self, z: Tensor, new: Tensor) -> None:
        return None

    def finish(self, output: Any) -> OwnerPlan:
        tensors = tensors_in(output, objects=OBJECTS)
        if self.fits and self._count == len(self.plan.checks) and len(tensors) == len(self.plan.outputs):
            return self.plan
        self.fits = False
        problem = "this call took another way through the model than the one that was followed"
        return self.plan._replace(outputs=tuple([MIXED] * len(tensors)), problem=problem)


Call = FollowedCall | PlannedCall


class Plans:
    """The plans of a watched model, by the form of the call."""

    def __init__(self) -> None:
        self._by_form: dict[Any, OwnerPlan] = {}
        self._by_pattern: dict[Any, list[OwnerPlan]] = {}

    def start(self, form: "Form", args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: Batch) -> "Call":
        """Start a call: with a plan, or followed."""
        plan = self._find(form)
        return follow(args, kwargs, batch) if plan is None else PlannedCall(plan)

    def finish(self, form: "Form", call: "Call", output: Any) -> OwnerPlan:
        """The plan of a call that is over. It is kept for others, unless values decide what the model does."""
        plan = call.finish(output)
        if isinstance(call, PlannedCall):
            if not call.fits:
                self._drop(form)
        elif not call.mode.reads_values:
            self._keep(form, plan)
        return plan

    def _find(self, form: "Form") -> OwnerPlan | None:
        plan = self._by_form.get(form)
        if plan is None:
            alike = self._by_pattern.get(form.pattern, [])
            if len(alike) >= _ENOUGH_FORMS and all(one == alike[0] and one.is_size_free for one in alike):
                return alike[0]
        return plan

    def _keep(self, form: "Form", plan: OwnerPlan) -> None:
        if len(self._by_form) >= _MOST_PLANS:
            self._by_form.clear()
        self._by_form[form] = plan
        alike = self._by_pattern.setdefault(form.pattern, [])
        if len(alike) < _MOST_PLANS:
            alike.append(plan)

    def _drop(self, form: "Form") -> None:
        self._by_form.pop(form, None)
        self._by_pattern.pop(form.pattern, None)


class Form(NamedTuple):
    """What a call looks like, but for values; `pattern` leaves out sizes that are not those of the batch."""

    shapes: tuple[Any, ...]
    pattern: tuple[Any, ...]


def form_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: Batch) -> Form:
    modes = tuple([module.training for module in model.modules()])
    numbers = tuple([value for value in (*args, *kwargs.items()) if _is_plain(value)])
    tensors = [(keys, z) for keys, z in tensors_in((args, kwargs))]
    shapes = tuple([(keys, z.dtype, tuple(z.shape)) for keys, z in tensors])
    pattern = tuple([(keys, z.dtype, tuple([size == batch.size for size in z.shape])) for keys, z in tensors])
    return Form((modes, numbers, shapes), (modes, numbers, pattern))


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def warn_of_mixing(model: str, problem: str | None) -> None:
    warnings.warn(
        f"watch: {model} may mix samples of a batch ({problem or 'the order of its samples is not known'}). If one "
        "goes bad, it cannot be told which others it touches: all samples of the call are flagged, and zero in the "
        "output. torchguard.Retry drops only the bad samples, on any model.",
        MixedRowsWarning,
        stacklevel=2,
    )


def can_follow() -> bool:
    """Whether operations can be followed as they run: not in a graph, a transform or another dispatch mode."""
    return not torch.compiler.is_compiling() and is_plain(_PLAIN)


def follow(args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: Batch) -> FollowedCall:
    """Start to follow a call. Its operations have to run with the mode of what is returned active."""
    mode = OwnerMode()
    set_arguments(mode, [z for _, z in tensors_in((args, kwargs))], batch.size, batch.dim)
    return FollowedCall(mode, batch.size)


def set_arguments(mode: OwnerMode, tensors: Sequence[Tensor], size: int, dim: int) -> None:
    """Set the owners of the arguments. One without the batch along its dim is for all samples, but for states of
    recurrent layers, `(layers, batch, width)`."""
    for z in tensors:
        if z.ndim > dim and z.shape[dim] == size:
            mode.set_samples(z, dim)
        elif z.ndim == 3 and z.is_floating_point() and [side == size for side in z.shape] == [False, True, False]:
            mode.set_samples(z, 1)
