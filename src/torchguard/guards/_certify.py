"""Which dropped guards matter: change what users change, and compare with eager mode."""

import contextlib
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchguard._pytrees import mapped, parts_of
from torchguard._torch import dynamo, settings
from torchguard._torch.events import record_builds
from torchguard.exceptions import GuardError
from torchguard.guards._audit import Violation, audit
from torchguard.guards._compile import compile
from torchguard.guards._explain import describe
from torchguard.guards._filters import Filter, by_function
from torchguard.guards._perturb import Change, change_of_argument, change_of_cell, change_of_value, usual_changes

HARMFUL, HARMLESS, NOT_EXERCISED = "harmful", "harmless", "not exercised"
FINE, STALE, MISSED, NOT_POSSIBLE = "fine", "stale", "missed by Dynamo as well", "not possible in eager mode"
# So many values that guards are about are changed one by one.
_MOST_VALUES = 48
# Dynamo compiles a function eight times, by default.
_MOST_BUILDS = 4

Changes = Mapping[str, Callable[[], AbstractContextManager[Any]]]


@dataclass(frozen=True)
class LabelledGuard:
    """A dropped guard: harmful if it failed in a change with a wrong result, harmless if only in others."""

    name: str
    type: str
    sources: tuple[str, ...]
    label: str


@dataclass(frozen=True)
class Outcome:
    """What came of a change, and which dropped guards did not hold then."""

    change: str
    result: str
    violated: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Certificate:
    """What a filter costs in correctness, as far as was tried."""

    filter: str
    guards: tuple[LabelledGuard, ...]
    outcomes: tuple[Outcome, ...]

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
) -> Certificate:
    """Change the world in the ways users do, and tell which dropped guards led to wrong results.

    Each change is made after the model was compiled with the filter, the result compared with eager mode's, and the
    change undone: `train` and `eval`, dtype, batch size, strides, `requires_grad`, grad mode, autocast, hooks, and
    another value for each number or bool that a dropped guard is about (globals, closures, attributes).

    Args:
        inputs: the arguments of a call, as a tuple; or its only argument.
        changes: changes of your own by name, as functions that return a context manager. It may give other arguments,
            as a tuple.
    """
    given = (inputs if isinstance(inputs, tuple) else (inputs,), dict(kwargs or {}))
    filter = filter if isinstance(filter, Filter) else by_function(filter)
    trial = _Trial(model, given, filter, backend)
    own = [_own_change(name, made, given) for name, made in (changes or {}).items()]
    with settings.without_limits():
        everything = [*usual_changes(model, *given), *trial.changes_of_values(), *own]
        outcomes = tuple(trial.outcome_of(change) for change in everything)
    return Certificate(repr(filter), tuple(trial.labelled(outcomes)), outcomes)


def _own_change(name: str, made: Callable[[], AbstractContextManager[Any]], given: Any) -> Change:
    @contextlib.contextmanager
    def with_arguments():
        with made() as changed:
            yield (changed, given[1]) if isinstance(changed, tuple) else given

    return Change(name, with_arguments)


class _Compiled:
    """A compiled model that has seen the world as it is, and is made anew when it has seen too much else.

    What is compiled under a change stays beside the first, and guards tell them apart. With many, Dynamo gives up.
    """

    def __init__(self, make: Callable[[], Any], run: Callable[[Any, Any], Any], given: Any) -> None:
        self._make, self._run, self._given = make, run, given
        self._call: Any = None
        self._builds = 0

    def __call__(self) -> Any:
        """What to call. It was called at least once, before anything was changed."""
        if self._call is None or self._builds >= _MOST_BUILDS:
            self._call, self._builds = self._make(), 0
            result = self._run(self._call, self._given)
            if isinstance(result, Exception):
                raise GuardError(f"certify: the model fails before anything is changed: {result}") from result
        return self._call

    def run(self, arguments: Any) -> Any:
        with record_builds() as built:
            result = self._run(self._call, arguments)
        self._builds += len(built)
        return result


class _Trial:
    """A model compiled with a filter, and without one, and run under changes."""

    def __init__(self, model: Callable[..., Any], given: Any, filter: Filter, backend: Any) -> None:
        self.model, self.given, self.filter = model, given, filter
        self.entries: list[Any] = []
        self.violations: list[Violation] = []
        watch = audit(by_function(self._spied, repr(filter)), every=1, action=self.violations.extend)
        self.filtered = _Compiled(lambda: compile(model, filter=watch, backend=backend), self._run, given)
        self.plain = _Compiled(lambda: compile(model, backend=backend), self._run, given)

    def _spied(self, entries: Sequence[Any]) -> list[bool]:
        kept = self.filter(entries)
        self.entries += [entry for entry, keep in zip(entries, kept, strict=True) if not keep]
        return kept

    def changes_of_values(self) -> list[Change]:
        """Another value for each number that a dropped guard is about; one for all layers of a list."""
        frame = dynamo.frame_of(self.filtered(), *self.given)
        if frame is None:
            return []
        compiled = dynamo.entries_of(frame.cache)
        found: dict[str, Change] = {}
        for entry in self.entries if compiled else ():
            source = entry.orig_guard.name
            alike = re.sub(r"\d+", "*", source)
            if alike in found or not entry.has_value or len(found) >= _MOST_VALUES:
                continue
            cell = frame.cells.get(source)
            if cell is not None:
                change = change_of_cell(source, cell, self.given)
            elif source in frame.arguments:
                change = change_of_argument(self.model, frame.arguments[source], entry.value, self.given)
            else:
                evaluate = functools.partial(compiled[0][1].value, f_locals=frame.f_locals)
                change = change_of_value(source, entry.value, evaluate, self.given)
            if change is not None:
                found[alike] = change
        return list(found.values())

    def outcome_of(self, change: Change) -> Outcome:
        self.filtered()
        self.violations.clear()
        is_missed = False
        with change.made() as arguments:
            want = self._run(self.model, arguments)
            if isinstance(want, Exception):
                return Outcome(change.name, NOT_POSSIBLE, ())
            is_stale = not _equal(self.filtered.run(arguments), want)
        violated = tuple({(one.name, one.type): None for one in self.violations})
        if is_stale:
            self.plain()
            with change.made() as arguments:
                is_missed = not _equal(self.plain.run(arguments), self._run(self.model, arguments))
        return Outcome(change.name, (MISSED if is_missed else STALE) if is_stale else FINE, violated)

    def _run(self, call: Callable[..., Any], arguments: Any) -> Any:
        """The result, or the exception; what a run leaves in arguments, parameters and buffers is undone."""
        kept = _tensors_of(self.model)
        args, kwargs = mapped(arguments, lambda z: z.detach().clone().requires_grad_(z.requires_grad))
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return call(*args, **kwargs)
        except Exception as error:  # a result like any other, to be compared
            return error
        finally:
            with torch.no_grad():
                for tensor, value in kept:
                    if not torch.equal(tensor, value):
                        tensor.copy_(value)

    def labelled(self, outcomes: Sequence[Outcome]) -> list[LabelledGuard]:
        harmful = {key for outcome in outcomes if outcome.result == STALE for key in outcome.violated}
        exercised = {key for outcome in outcomes for key in outcome.violated}
        found = {}
        for entry in self.entries:
            # One of a number comes down to another of the same number: both failed.
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
    left, right = parts_of(one), parts_of(two)
    if left or right:
        same = len(left) == len(right) and type(one) is type(two)
        return same and all(a == b and _equal(x, y) for (a, x), (b, y) in zip(left, right, strict=True))
    if hasattr(one, "__array__") and hasattr(two, "__array__"):
        return _equal(torch.as_tensor(one), torch.as_tensor(two))
    # What cannot be compared counts as equal if it is of one kind.
    is_comparable = type(one).__eq__ is not object.__eq__
    return bool(one == two) if is_comparable else type(one) is type(two)


def _equal_tensors(one: Tensor, two: Tensor) -> bool:
    alike = one.dtype == two.dtype and one.shape == two.shape and one.requires_grad == two.requires_grad
    return alike and torch.allclose(one.detach(), two.detach(), rtol=1e-4, atol=1e-5, equal_nan=True)
