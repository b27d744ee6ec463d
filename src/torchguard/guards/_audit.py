"""Dropped guards, watched: a shadow of all guards is looked at now and then."""

import contextlib
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torchguard._graphs.source_lines import own_place, places_of
from torchguard._torch.events import (
    THIS_COPY,
    GuardsBuiltEvent,
    is_explaining,
    raise_instead_of_recompiling,
    require_guard_events,
)
from torchguard._torch.guards import Guards, torch_function_enabled
from torchguard._torch.tensors import any_autocast, grad_mode
from torchguard.exceptions import GuardError, StaleGuardError
from torchguard.guards._filters import Filter, by_function
from torchguard.guards._tree import Failure, failures_of, shown

Action = str | Callable[["list[Violation]"], Any]
ACTIONS = ("record", "recompile", "raise")


class _Observing(threading.local):
    off = False  # of the class: an attribute that is missing costs each call an exception


_observing = _Observing()
_lock = threading.Lock()
_unobserved = 0  # how often it is off, in any thread: asking for the thread's own costs each call


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """While trees are called by hand, no call of the user's is under way."""
    before = _observing.off
    _observe(False, by=1)
    try:
        yield
    finally:
        _observe(not before, by=-1)


def _observe(is_on: bool, by: int) -> None:
    global _unobserved
    with _lock:
        _unobserved += by
    _observing.off = not is_on


@dataclass(frozen=True)
class Violation:
    """A dropped guard that does not hold any more: compiled code ran on an assumption that is no longer true.

    `then` is the value when it was compiled, `now` the one it was found with, and `calls` how many calls, this one
    included, may have gone wrong: those since it was last seen to hold.
    """

    name: str
    type: str
    function: str
    compile_id: str
    line: str
    then: str
    now: str
    calls: int

    def __str__(self) -> str:
        changed = f"{self.then} became {self.now}" if self.then and self.now else self.now or "no longer holds"
        where = f", from {self.line}" if self.line else ""
        return f"{self.type} {self.name} in {self.function}: {changed} ({self.calls} calls{where})"


@dataclass(frozen=True)
class AuditReport:
    """What an audit has seen."""

    violations: tuple[Violation, ...]
    calls: int
    checks: int
    dropped: int

    def __str__(self) -> str:
        head = f"{self.dropped} guards dropped, {self.checks} of {self.calls} calls checked, "
        return "\n".join([f"{head}{len(self.violations)} violations", *map(str, self.violations)])


class Audit:
    """A filter that goes on looking at what it dropped. Give it to `guards.compile(filter=...)`."""

    is_audit, package_copy = True, THIS_COPY

    def __init__(self, filter: Filter, every: int, action: Action, budget: float | None) -> None:
        self.filter, self.every, self.action, self.budget = filter, every, action, budget
        self._violations: dict[tuple[str, ...], Violation] = {}
        self._shadows: weakref.WeakSet[_Shadow] = weakref.WeakSet()
        self._gone = [0, 0, 0]  # calls, checks and dropped guards of shadows whose compiled code is gone
        self._lock = threading.RLock()
        self._decided = threading.local()

    def __repr__(self) -> str:
        return f"audit({self.filter!r}, every={self.every}, action={self.action!r})"

    def __call__(self, entries: Sequence[Any]) -> list[bool]:
        kept = self.filter(entries)
        self._decided.dropped = [_Dropped(entry) for entry, keep in zip(entries, kept, strict=True) if not keep]
        return kept

    def on_built(self, built: GuardsBuiltEvent) -> None:
        """Dynamo has built the guards that were kept; `built.unfiltered` has the others, too."""
        if built.unfiltered is None or not self._decided.dropped:
            return
        shadow = _Shadow(self, built, built.unfiltered, self._decided.dropped)
        self._shadows.add(shadow)
        weakref.finalize(shadow, _add, self._gone, shadow.counts)
        built.guards.add_guard(shadow.on_call)

    def report(self) -> AuditReport:
        with self._lock:
            total = [*self._gone]
            for shadow in self._shadows:
                _add(total, shadow.counts)
            return AuditReport(tuple(self._violations.values()), *total)

    def found(self, violations: list[Violation]) -> bool:
        """Tell of violations; whether the compiled code may run all the same. May raise."""
        with self._lock:
            for one in violations:
                self._violations.setdefault((one.compile_id, one.function, one.name, one.type, one.now), one)
        if callable(self.action):
            return self.action(violations) is not False
        if self.action == "raise":
            raise StaleGuardError("\n".join(["Compiled code rests on what is no longer true:", *map(str, violations)]))
        return self.action == "record"


class _Counts:
    """Of one shadow: which call is to be looked at, how many come before it and it, looks, and dropped guards."""

    __slots__ = ("checks", "dropped", "due", "left")

    def __init__(self, dropped: int) -> None:
        self.due, self.left, self.checks, self.dropped = 1, 1, 0, dropped

    @property
    def calls(self) -> int:
        return self.due - self.left


def _add(total: list[int], counts: _Counts) -> None:
    total[:] = total[0] + counts.calls, total[1] + counts.checks, total[2] + counts.dropped


class _Dropped:
    """What is kept of a guard that was dropped: text alone, so that nothing of the user's is kept alive."""

    def __init__(self, entry: Any) -> None:
        guard = entry.orig_guard
        self.name, self.type, self.source = entry.name, entry.guard_type, guard.name
        self.then = shown(entry.value) if entry.has_value else ""
        self.derived = entry.derived_guard_types


class _Shadow:
    """All guards of one compiled frame, of which some were dropped."""

    def __init__(self, audit: Audit, built: GuardsBuiltEvent, full: Guards, dropped: list[_Dropped]) -> None:
        # Held by Dynamo's guards, where the garbage collector sees no cycle: the audit may know the model.
        self.audit = weakref.ref(audit)
        self.full, self.compile_id = full, built.compile_id
        # Where it is still a guard, no call with another grad mode or autocast comes by.
        self.is_state_kept = built.guards.has_at_root("GLOBAL_STATE")
        self.function = getattr(built.code, "co_qualname", built.code.co_name)
        self.owner = built.code.co_varnames[0] if built.code.co_argcount else ""  # a module, if this is a method of one
        self.dropped = {}
        for one in dropped:
            self.dropped.setdefault(one.source, []).append(one)
        self.stacks = built.stacks()  # text alone, too
        self.counts = _Counts(len(dropped))
        self.last_held = 0  # the number of the last call for which all held
        self.allowed = True
        self.error: Exception | None = None
        self.state: tuple[bool, bool] | None = None
        self.training: Any = None
        self.started = time.perf_counter()

    def on_call(self, f_locals: dict[str, Any]) -> bool:
        # Every call comes by here: what users change between calls, and can be seen at once, and hardly more.
        counts = self.counts
        if (
            counts.left > 1
            and getattr(f_locals.get(self.owner), "training", None) is self.training
            and (self.is_state_kept or (grad_mode(), any_autocast()) == self.state)
            and not (_unobserved and _observing.off)
        ):
            counts.left -= 1
            return True
        return self._on_noted_call(f_locals)

    def _on_noted_call(self, f_locals: dict[str, Any]) -> bool:
        if _observing.off:
            return True
        if is_explaining():
            if self.error is not None:
                raise_instead_of_recompiling(self.error)
            return self.allowed
        start, audit = time.perf_counter(), self.audit()
        if audit is None:  # nobody is left to be told
            return True
        self.training = getattr(f_locals.get(self.owner), "training", None)
        self.state = (grad_mode(), any_autocast())
        self.counts.left -= 1
        with torch_function_enabled():
            held = self._look(f_locals, self.counts.calls, audit)
        self._wait(self._pause(audit, start) if held or audit.action == "record" else 1)
        return self.allowed

    def _look(self, f_locals: dict[str, Any], call: int, audit: Audit) -> bool:
        """Whether all guards hold."""
        self.counts.checks += 1
        self.allowed, self.error = True, None
        if self.full.check(f_locals):
            self.last_held = call
            return True
        violations = [self._violation(failure, call) for failure in failures_of(self.full, f_locals)]
        try:
            self.allowed = audit.found(violations)
        except Exception as error:  # Dynamo would swallow it here, and does not where it recompiles
            self.allowed, self.error = False, error
        return False

    def _wait(self, calls: int) -> None:
        self.counts.due, self.counts.left = self.counts.calls + calls, calls

    def _pause(self, audit: Audit, start: float) -> int:
        """After how many calls to look again: as told, or so that looking takes a share of the time."""
        if audit.budget is None:
            return audit.every
        now = time.perf_counter()
        a_call = (now - self.started) / max(self.counts.calls - 1, 1)
        return max(1, math.ceil((now - start) / (audit.budget * a_call)))

    def _violation(self, failure: Failure, call: int) -> Violation:
        guard = failure.guard
        about = self.dropped.get(guard.source, [])
        same_type = [one for one in about if guard.type == one.type or guard.type in one.derived]
        about_value = [one for one in about if one.type != "TYPE_MATCH"]
        one = next(iter(same_type or about_value or about), None)
        stack = self.stacks.get((guard.source, one.type if one else "")) or self.stacks.get((guard.source, ""))
        return Violation(
            name=one.name if one else guard.source,
            type=one.type if one else guard.type,
            function=self.function,
            compile_id=self.compile_id,
            line=str(own_place(places_of(stack))) if stack else guard.line,
            then=one.then if one else "",
            now=failure.now or failure.why or guard.code,
            calls=call - self.last_held,
        )


def audit(filter: Any, every: int = 100, action: Action = "record", budget: float | None = None) -> Audit:
    """A filter that tells when a guard it dropped would have failed.

    Args:
        filter: what to keep: a filter of ours, or any function torch takes as `guard_filter_fn`.
        every: look at all guards in each so-manieth call, in the first one, and after `train`, `eval`, a change of grad
            mode or autocast.
        action: "record" for the report alone; "recompile", which heals; "raise" a StaleGuardError instead of running
            stale code; or a function of the violations, which has Dynamo recompile by returning False.
        budget: the share of the time that looking may take, such as 0.02: sets `every` by itself. What is between two
            calls counts as time; seeing whether to look, half a microsecond a call, does not.
    """
    if not callable(action) and action not in ACTIONS:
        raise GuardError(f"audit: action is {action!r}. Give one of {', '.join(ACTIONS)}, or a function.")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise GuardError(f"audit: every is {every!r}. Give a number of calls, 1 or more.")
    if budget is not None and not 0 < budget < 1:
        raise GuardError(f"audit: budget is {budget!r}. Give a share of the time, such as 0.02.")
    require_guard_events("audit")
    return Audit(filter if isinstance(filter, Filter) else by_function(filter), every, action, budget)
