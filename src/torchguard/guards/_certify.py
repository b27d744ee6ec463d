"""Which dropped guards matter: apply common changes to a compiled model, and compare its results with eager mode."""

import contextlib
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchguard._pytrees import children, map_tensors
from torchguard._torch import dynamo, settings
from torchguard._torch.events import record_builds
from torchguard.exceptions import GuardError
from torchguard.guards._audit import GuardViolation, audit
from torchguard.guards._compile import compile
from torchguard.guards._explain import describe
from torchguard.guards._filters import Filter, by_function
from torchguard.guards._perturb import (
    Perturbation,
    common_perturbations,
    perturb_argument,
    perturb_closure,
    perturb_value,
)

HARMFUL, HARMLESS, NOT_EXERCISED = "harmful", "harmless", "not exercised"
CORRECT, STALE, UNGUARDED, EAGER_FAILS = "correct", "stale", "stale without a filter, too", "fails in eager mode"
# How many guarded values are changed, one at a time.
_MOST_VALUES = 48
# How many times a compiled model recompiles before it is compiled afresh: by default Dynamo's limit is eight.
_MOST_BUILDS = 4

Changes = Mapping[str, Callable[[], AbstractContextManager[Any]]]


@dataclass(frozen=True)
class LabelledGuard:
    """A dropped guard.

    Its label is "harmful" if it failed under a change with a stale result, "harmless" if it failed only under other
    changes, and "not exercised" if it never failed.
    """

    name: str
    type: str
    sources: tuple[str, ...]
    label: str


@dataclass(frozen=True)
class ChangeOutcome:
    """The result under one change, and the dropped guards, by name and type, that it violated.

    The result is "correct" if it equals eager mode's, otherwise "stale"; "stale without a filter, too" if Dynamo's full
    set of guards does not notice the change either; "fails in eager mode" if there is nothing to compare with.
    """

    change: str
    result: str
    violated: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class GuardCertificate:
    """How a filter affects results, under the changes that were tried.

    Attributes:
        filter: its `repr`.
        guards: the guards it drops, with labels.
        outcomes: of the changes.
    """

    filter: str
    guards: tuple[LabelledGuard, ...]
    outcomes: tuple[ChangeOutcome, ...]

    def labelled(self, label: str) -> list[LabelledGuard]:
        return [guard for guard in self.guards if guard.label == label]

    @property
    def is_clean(self) -> bool:
        """Whether no change led to a wrong result that unfiltered guards would have prevented."""
        return all(outcome.result != STALE for outcome in self.outcomes)

    def __str__(self) -> str:
        counts = ", ".join(f"{len(self.labelled(label))} {label}" for label in (HARMFUL, HARMLESS, NOT_EXERCISED))
        lines = [f"{self.filter} drops {len(self.guards)} guards: {counts}"]
        lines += [f"  {outcome.change}: {outcome.result}" for outcome in self.outcomes]
        lines += [f"  harmful: {guard.type} {guard.name or '(no name)'}" for guard in self.labelled(HARMFUL)]
        return "\n".join(lines)


def certify(
    model: Callable[..., Any],
    inputs: Any,
    filter: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    changes: Changes | None = None,
    backend: Any = "eager",
) -> GuardCertificate:
    """Find out which of the guards that a filter drops lead to wrong results.

    The model is compiled with the filter. Then common changes are made one at a time, the result is compared with eager
    mode's, and the change is undone: `train` and `eval`, dtype, batch size, strides, `requires_grad`, grad mode,
    autocast, hooks, and another value for each number or bool that a dropped guard checks (globals, closures,
    attributes).

    Args:
        inputs: the arguments of a call, as a tuple; or its only argument.
        changes: your own changes by name, each a function that returns a context manager. The context manager may
            return other arguments for the call, as a tuple.
    """
    given = (inputs if isinstance(inputs, tuple) else (inputs,), dict(kwargs or {}))
    filter = filter if isinstance(filter, Filter) else by_function(filter)
    trial = _FilterTrial(model, given, filter, backend)
    own = [_own_perturbation(name, apply, given) for name, apply in (changes or {}).items()]
    with settings.without_limits():
        everything = [*common_perturbations(model, *given), *trial.perturbations_of_values(), *own]
        outcomes = tuple(trial.outcome_of(change) for change in everything)
    return GuardCertificate(repr(filter), tuple(trial.labelled(outcomes)), outcomes)


def _own_perturbation(name: str, apply: Callable[[], AbstractContextManager[Any]], given: Any) -> Perturbation:
    @contextlib.contextmanager
    def with_arguments():
        with apply() as changed:
            yield (changed, given[1]) if isinstance(changed, tuple) else given

    return Perturbation(name, with_arguments)


class _Compiled:
    """A model compiled for the unchanged state, and compiled afresh after a number of recompiles.

    Entries compiled under a change stay in Dynamo's cache beside the first. With many of them, Dynamo would reach its
    recompile limit.
    """

    def __init__(self, make: Callable[[], Any], run: Callable[[Any, Any], Any], given: Any) -> None:
        self._make, self._run, self._given = make, run, given
        self._call: Any = None
        self._builds = 0

    def __call__(self) -> Any:
        """The compiled model, which was called at least once before any change."""
        if self._call is None or self._builds >= _MOST_BUILDS:
            self._call, self._builds = self._make(), 0
            result = self._run(self._call, self._given)
            if isinstance(result, Exception):
                raise GuardError(
                    f"certify: the model fails before any change: {type(result).__name__}: {result}"
                ) from result
        return self._call

    def run(self, arguments: Any) -> Any:
        with record_builds() as built:
            result = self._run(self._call, arguments)
        self._builds += len(built)
        return result


class _FilterTrial:
    """A model that is compiled with a filter and without one, and run under changes."""

    def __init__(self, model: Callable[..., Any], given: Any, filter: Filter, backend: Any) -> None:
        self.model, self.given, self.filter = model, given, filter
        self.entries: list[Any] = []
        self.violations: list[GuardViolation] = []
        audited = audit(by_function(self._keep, repr(filter)), every=1, action=self.violations.extend)
        self.filtered = _Compiled(lambda: compile(model, filter=audited, backend=backend), self._run, given)
        self.plain = _Compiled(lambda: compile(model, backend=backend), self._run, given)

    def _keep(self, entries: Sequence[Any]) -> list[bool]:
        """Decide as the filter does, and record what it drops."""
        kept = self.filter(entries)
        self.entries += [entry for entry, keep in zip(entries, kept, strict=True) if not keep]
        return kept

    def perturbations_of_values(self) -> list[Perturbation]:
        """Another value for each number or bool that a dropped guard checks; only once for the layers of a list."""
        frame = dynamo.frame_of(self.filtered(), *self.given)
        if frame is None:
            return []
        compiled = dynamo.entries_of(frame.cache)
        found: dict[str, Perturbation] = {}
        for entry in self.entries if compiled else ():
            source = entry.orig_guard.name
            pattern = re.sub(r"\d+", "*", source)
            if pattern in found or not entry.has_value or len(found) >= _MOST_VALUES:
                continue
            cell = frame.cells.get(source)
            if cell is not None:
                change = perturb_closure(source, cell, self.given)
            elif source in frame.arguments:
                change = perturb_argument(self.model, frame.arguments[source], entry.value, self.given)
            else:
                evaluate = functools.partial(compiled[0][1].value, f_locals=frame.f_locals)
                change = perturb_value(source, entry.value, evaluate, self.given)
            if change is not None:
                found[pattern] = change
        return list(found.values())

    def outcome_of(self, change: Perturbation) -> ChangeOutcome:
        self.filtered()
        self.violations.clear()
        with change.apply() as arguments:
            want = self._run(self.model, arguments)
            if isinstance(want, Exception):
                return ChangeOutcome(change.name, EAGER_FAILS, ())
            is_stale = not _equal(self.filtered.run(arguments), want)
        violated = tuple({(one.name, one.type): None for one in self.violations})
        if not is_stale:
            return ChangeOutcome(change.name, CORRECT, violated)
        self.plain()
        with change.apply() as arguments:
            is_guarded = _equal(self.plain.run(arguments), self._run(self.model, arguments))
        return ChangeOutcome(change.name, STALE if is_guarded else UNGUARDED, violated)

    def _run(self, call: Callable[..., Any], arguments: Any) -> Any:
        """The result, or the exception. Changes that a run makes to arguments, parameters and buffers are undone."""
        before = _tensors_of(self.model)
        args, kwargs = map_tensors(arguments, lambda z: z.detach().clone().requires_grad_(z.requires_grad))
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return call(*args, **kwargs)
        except Exception as error:  # a result to compare, like any other
            return error
        finally:
            with torch.no_grad():
                for tensor, value in before:
                    if not torch.equal(tensor, value):
                        tensor.copy_(value)

    def labelled(self, outcomes: Sequence[ChangeOutcome]) -> list[LabelledGuard]:
        harmful = {key for outcome in outcomes if outcome.result == STALE for key in outcome.violated}
        exercised = {key for outcome in outcomes for key in outcome.violated}
        found = {}
        for entry in self.entries:
            # A guard may consist of guards of other types on the same value: if one of them failed, so did it.
            keys = {(entry.name, type) for type in (entry.guard_type, *entry.derived_guard_types)}
            label = HARMFUL if keys & harmful else HARMLESS if keys & exercised else NOT_EXERCISED
            found[entry.name, entry.guard_type] = LabelledGuard(
                entry.name, entry.guard_type, describe(entry).sources, label
            )
        return list(found.values())


def _tensors_of(model: Any) -> list[tuple[Tensor, Tensor]]:
    tensors = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    return [(tensor, tensor.detach().clone()) for tensor in tensors]


def _equal(one: Any, two: Any) -> bool:
    """Whether two results are equal, part by part."""
    if isinstance(one, Exception) or isinstance(two, Exception):
        return False
    if isinstance(one, Tensor) or isinstance(two, Tensor):
        return isinstance(one, Tensor) and isinstance(two, Tensor) and _equal_tensors(one, two)
    left, right = children(one), children(two)
    if left or right:
        same = len(left) == len(right) and type(one) is type(two)
        return same and all(a == b and _equal(x, y) for (a, x), (b, y) in zip(left, right, strict=True))
    if hasattr(one, "__array__") and hasattr(two, "__array__"):
        return _equal(torch.as_tensor(one), torch.as_tensor(two))
    # Objects without `__eq__` count as equal if they have the same type.
    is_comparable = type(one).__eq__ is not object.__eq__
    return bool(one == two) if is_comparable else type(one) is type(two)


def _equal_tensors(one: Tensor, two: Tensor) -> bool:
    same = one.dtype == two.dtype and one.shape == two.shape and one.requires_grad == two.requires_grad
    return same and torch.allclose(one.detach(), two.detach(), rtol=1e-4, atol=1e-5, equal_nan=True)
