"""Which rows belong to which sample, for all tensors of a call: found once, and used in later calls of the same form.

In eager mode the first call of a form (`arguments.form_of`) is followed by an `OwnerMode`. What it finds
is an `OwnerPlan`, which later calls of that form use. A plan holds only for the way that the followed call took through
the model: an attribute, a random number or a value may lead to another. So each call that uses a plan runs under a
`PathMode`, and every check compares the operations so far with those of the plan. Where they differ, the call counts as
mixing samples from there on, and the next one is followed again; after two such calls of a form, all are followed.
Parts of a model that are compiled on their own would not run compiled under any dispatch mode. A model that has some
goes without this comparison.

Without quarantine, a batch of one sample needs no plan, and under `torch.func` transforms sizes decide. With it, and
for an export, `export.py` finds a plan before. In a graph, `graph_plan.py` finds the plan while Dynamo traces.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchguard._pytrees import OBJECTS, tensors_in
from torchguard._torch.host_data import listening
from torchguard._torch.tensors import flatten, is_distributed
from torchguard._torch.tracing import (
    is_in_backward,
    is_in_checkpoint,
    is_in_reentrant_checkpoint,
    is_plain,
    is_wrapped,
)
from torchguard._torch.uncompiled import without_compiled_code
from torchguard._watch.arguments import set_arguments, tensors_by_sample
from torchguard._watch.batch import MIXED, Batch
from torchguard._watch.call_path import PathMode
from torchguard._watch.owner_storages import created_since, is_new, rows_of
from torchguard._watch.owners import OwnerMode
from torchguard._watch.parameter_uses import RECURRENT, Argument, ParameterUse

_PLAIN = torch.empty(0)
# How many plans a watched model keeps.
_MOST_PLANS = 256
# After how many calls that take another way than their plan all calls of that form are followed.
_MOST_MISFITS = 2


class OwnerPlan(NamedTuple):
    """Row codes for the tensors of a call.

    Args:
        checks: for each check its location, the path of operations up to it, and the row code of the tensor.
        neg_inf: the numbers of checks of tensors that may hold -Inf on purpose.
        outputs: the row code of each tensor that the model returns.
        path: that of all operations of the call.
        problem: what mixes samples; None if the model keeps them apart.
        uses: of parameters, by the path of operations before and the name of the function.
        paths: those before any function of torch that the model called.
        needs_hooks: whether gradients of parameters need hooks: see `finite_gradients.py`.
    """

    checks: tuple[tuple[int, int, int], ...]
    neg_inf: frozenset[int]
    outputs: tuple[int, ...]
    path: int
    problem: str | None
    uses: Mapping[tuple[int, str], ParameterUse] = {}
    paths: frozenset[int] = frozenset()
    needs_hooks: bool = False

    @property
    def mixes(self) -> bool:
        return MIXED in self.outputs


# The plan of a call of which nothing is known.
NOTHING_KNOWN = OwnerPlan((), frozenset(), (), 0, "its operations cannot be followed under this transform")


class FollowedCall:
    """A call whose owners are followed."""

    def __init__(self, mode: OwnerMode, size: int, known: Iterable[Tensor]) -> None:
        self.mode, self.size, self._known = mode, size, known
        self._checks: list[tuple[int, int, int]] = []
        self._neg_inf: set[int] = set()
        self._uses: dict[tuple[int, str], ParameterUse] = {}
        self._paths: set[int] = set()
        self._key = (0, "")  # of the last use
        self._is_unprotected = False  # whether a reentrant checkpoint has uses of parameters

    def rows(self, z: Tensor, location: int) -> int:
        """The row code of a tensor that is checked."""
        code = self._code(z)
        self._checks.append((location, self.mode.path, code))
        return code

    def may_have_neg_inf(self, z: Tensor) -> bool:
        """Whether the tensor whose rows were asked for last may hold -Inf on purpose."""
        may = self.mode.may_have_neg_inf(z)
        if may:
            self._neg_inf.add(len(self._checks))
        return may

    def lose(self, problem: str) -> None:
        """From here on, it is not known which rows belong to which sample."""
        self.mode.lose(problem)

    def set_samples(self, z: Tensor, dim: int) -> None:
        """The samples lie along that dim of a tensor, as the user said."""
        if z.shape[dim] == self.size:
            with self.mode.paused():
                self.mode.set_samples(z, dim)

    @property
    def is_paused(self) -> bool:
        return self.mode.is_paused

    def paused(self) -> AbstractContextManager[None]:
        return self.mode.paused()

    @contextmanager
    def running(self) -> Iterator[None]:
        with without_compiled_code(), created_since(), listening(self.mode):
            self.mode.know(self._known)
            with self.mode:
                yield

    def replaced(self, z: Tensor, new: Tensor) -> None:
        """A tensor was replaced by another, which belongs to the same samples."""
        if new is not z:
            with self.mode.paused():
                self.mode.set_owners(new, self.mode.owners_of(z))

    def checked(self, z: Tensor, new: Tensor) -> None:
        """A check replaced a tensor by another, which is finite."""
        self.replaced(z, new)
        if new.layout == torch.strided and not new.is_nested:
            self.mode.used.note_clean(new)

    def use_of(self, name: str, leaves: Sequence[Any]) -> ParameterUse | None:
        """The use that a call of a function with these arguments is, if it is one."""
        self._paths.add(self.mode.path)
        floats = [(i, z) for i, z in enumerate(leaves) if _is_float(z)]
        if any(is_wrapped(z) or z.layout != torch.strided or z.is_nested for _, z in floats):
            return None
        weights = [i for i, z in floats if z.requires_grad and not self._has_owner(z)]
        samples = [(i, z, self._code(z)) for i, z in floats if self._has_owner(z)] if weights else []
        if not samples:
            return None
        unknown = [
            Argument(i, code, self.mode.may_have_neg_inf(z)) for i, z, code in samples if not self.mode.used.is_clean(z)
        ]
        self._key = (self.mode.path, name)
        return ParameterUse(tuple(unknown), tuple(weights), name in RECURRENT or is_in_checkpoint())

    def without_gradients(self, arguments: Any) -> None:
        """A function is called without gradients. A reentrant checkpoint will call it again, outside of the call."""
        if self._is_unprotected:
            return
        floats = [z for z in flatten(arguments)[0] if _is_float(z) and z.layout == torch.strided and not z.is_nested]
        owners = [self.mode.owners_of(z) is not None for z in floats]
        is_use = any(owners) and any(
            z.requires_grad for z, is_owned in zip(floats, owners, strict=True) if not is_owned
        )
        self._is_unprotected = is_use and is_in_reentrant_checkpoint()

    def enters(self, use: ParameterUse) -> None:
        """The last use is a function whose steps are followed one by one."""
        self._uses[self._key] = use
        self.mode.used.met.add(self._key)

    def codes_of_use(self, result: Any, use: ParameterUse) -> tuple[int | None, ...]:
        """The row code of each leaf of a result; None if it is no tensor of floating-point numbers."""
        return tuple([self._code(one) if _is_float(one) else None for one in flatten(result)[0]])

    def used(self, result: Any, use: ParameterUse) -> Any:
        """Note the result of a use."""
        found = [one for one in flatten(result)[0] if _is_float(one)]
        self._uses[self._key] = use._replace(outputs=self.codes_of_use(result, use))
        is_mixed = use.is_opaque and self._key[1] not in RECURRENT
        self.mode.used.note_use(self._key, found, is_mixed)
        if use.arguments or self._key[1] in RECURRENT:
            self.mode.used.met.add(self._key)
            for z in found if is_mixed else ():
                with self.mode.paused():
                    self.mode.mix_used(z)
        return result

    def finish(self, output: Any) -> OwnerPlan:
        outputs = tuple([self._code(z) for _, z in tensors_in(output, objects=OBJECTS)])
        if self._is_unprotected:
            outputs = tuple([MIXED] * len(outputs))
            self.mode.problem = self.mode.problem or "a parameter is used in a checkpoint with use_reentrant=True"
        uses = {key: use for key, use in self._uses.items() if key in self.mode.used.met}
        known = (self.mode.path, self.mode.problem, uses, frozenset(self._paths), self._is_unprotected)
        return OwnerPlan(tuple(self._checks), frozenset(self._neg_inf), outputs, *known)

    def _has_owner(self, z: Tensor) -> bool:
        with self.mode.paused():
            return self.mode.owners_of(z) is not None

    def _code(self, z: Tensor) -> int:
        if is_distributed(z):
            self.mode.problem = self.mode.problem or "samples are not followed through DTensors"
            return MIXED
        if self.mode.is_lost or z.layout != torch.strided or z.is_nested:
            return MIXED
        with self.mode.paused():
            code = rows_of(self.mode.owners_of(z), self.size)
        return MIXED if code is None else code


class PlannedCall:
    """A call that uses a plan.

    Args:
        compares: whether to compare the operations with those of the plan.
        protects_all: whether all operations that may be uses of parameters count as such, and as mixing samples: under
            a transform it is not known which are.
    """

    def __init__(self, plan: OwnerPlan, compares: bool, protects_all: bool = False) -> None:
        self.plan, self._count, self.fits, self._protects_all = plan, 0, True, protects_all
        self._is_paused = False
        self._mode = PathMode() if compares else None

    def rows(self, z: Tensor, location: int) -> int:
        checks, self._count = self.plan.checks, self._count + 1
        if self._count > len(checks):
            self.fits = False
            return MIXED
        at, path, code = checks[self._count - 1]
        self.fits = self.fits and at == location and (self._mode is None or self._mode.path == path)
        return code if self.fits else MIXED

    def may_have_neg_inf(self, z: Tensor) -> bool:
        return self._count in self.plan.neg_inf

    def lose(self, problem: str) -> None:
        self.fits = False

    def set_samples(self, z: Tensor, dim: int) -> None:
        return None

    @property
    def is_paused(self) -> bool:
        if self._mode is None:
            return self._is_paused or not self._protects_all
        return self._mode.is_paused

    def paused(self) -> AbstractContextManager[Any]:
        return self._pause() if self._mode is None else self._mode.paused()

    @contextmanager
    def _pause(self) -> Iterator[None]:
        self._is_paused, before = True, self._is_paused
        try:
            yield
        finally:
            self._is_paused = before

    def running(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._mode is None else self._mode

    def replaced(self, z: Tensor, new: Tensor) -> None:
        return None

    def checked(self, z: Tensor, new: Tensor) -> None:
        return None

    def use_of(self, name: str, leaves: Sequence[Any]) -> ParameterUse | None:
        path = None if self._mode is None else self._mode.path
        use = None if path is None else self.plan.uses.get((path, name))
        if use is not None or path in self.plan.paths:
            return use
        # Another way than the one that was followed: all samples count as mixed, and whatever may be a use as one.
        floats = [i for i, one in enumerate(leaves) if _is_float(one) and (self._protects_all or not is_wrapped(one))]
        given = [i for i in floats if leaves[i].requires_grad]
        arguments = tuple([Argument(i, MIXED, False) for i in floats])
        return ParameterUse(arguments, tuple(given), name in RECURRENT or is_in_checkpoint()) if given else None

    def without_gradients(self, arguments: Any) -> None:
        return None

    def enters(self, use: ParameterUse) -> None:
        return None

    def codes_of_use(self, result: Any, use: ParameterUse) -> tuple[int | None, ...]:
        if use.outputs:
            return use.outputs
        return tuple([MIXED if _is_float(one) else None for one in flatten(result)[0]])

    def used(self, result: Any, use: ParameterUse) -> Any:
        return result

    def finish(self, output: Any) -> OwnerPlan:
        tensors = tensors_in(output, objects=OBJECTS)
        is_same = self._mode is None or self._mode.path == self.plan.path
        if self.fits and is_same and self._count == len(self.plan.checks) and len(tensors) == len(self.plan.outputs):
            return self.plan
        self.fits = False
        problem = "this call took another way through the model than the one that was followed"
        return self.plan._replace(outputs=tuple([MIXED] * len(tensors)), problem=problem)


Call = FollowedCall | PlannedCall


class Plans:
    """The plans of a watched model, by the form of the call."""

    def __init__(self) -> None:
        self._by_form: dict[Any, OwnerPlan] = {}
        self._misfits: dict[Any, int] = {}  # how many calls of a form took another way than its plan
        self.of_transforms: dict[Any, OwnerPlan | None] = {}  # of calls under `torch.func`: see `export.py`

    def start(
        self,
        form: Any,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        batch: Batch,
        shows_all: bool,
    ) -> Call:
        """Start a call: with a plan, or followed.

        Args:
            shows_all: whether all operations can be compared, since no part of the model is compiled.
        """
        plan = self._by_form.get(form)
        if plan is None or self._misfits.get(form, 0) >= _MOST_MISFITS:
            return follow(model, args, kwargs, batch)
        # In backward, a checkpoint repeats a call with other tensors, and may leave it early.
        return PlannedCall(plan, shows_all and not is_in_backward())

    def known(self, form: Any) -> OwnerPlan | None:
        return self._by_form.get(form)

    def finish(self, form: Any, call: Call, output: Any) -> OwnerPlan:
        """The plan of a call that is over. It is kept for others, unless owners were lost."""
        plan = call.finish(output)
        if isinstance(call, PlannedCall):
            if not call.fits:
                self._by_form.pop(form, None)
                self._misfits[form] = self._misfits.get(form, 0) + 1
        elif not call.mode.is_lost:
            if len(self._by_form) >= _MOST_PLANS:
                self._by_form.clear()
                self._misfits.clear()
            self._by_form[form] = plan
        return plan


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def can_follow() -> bool:
    """Whether operations can be followed as they run: not in a graph, a transform or another dispatch mode."""
    return not torch.compiler.is_compiling() and is_plain(_PLAIN)


def follow(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: Batch) -> FollowedCall:
    """Start to follow a call. Its operations have to run with the mode of what is returned active."""
    mode = OwnerMode(is_new)
    given = [z for _, z in tensors_in((args, kwargs), objects=OBJECTS)]
    set_arguments(mode, given, batch.size, batch.dim)
    for number, tensors in enumerate(tensors_by_sample(args, kwargs, batch)):
        for z in tensors:
            mode.set_sample(z, number)
    return FollowedCall(mode, batch.size, (*given, *model.parameters(), *model.buffers()))
