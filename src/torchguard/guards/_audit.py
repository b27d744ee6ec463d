"""Audits: checking dropped guards from time to time while the compiled code runs.

Dynamo builds the tree of all guards, passes them to the filter, and builds a second tree of the guards that the filter
keeps. An audit stores the first tree as a *shadow* and adds a callback to the second, which Dynamo calls once all kept
guards of a call hold. In most calls the callback only counts. In every `every`-th call, and in the first call after a
change of state that is cheap to see, it checks the shadow.

Three properties of Dynamo shape the code:

- The callback can only return True, to run the compiled code, or False, to recompile. Dynamo swallows an exception
  raised in it. So an error is stored, the callback returns False, and the error is raised a moment later, when Dynamo
  evaluates the guards once more to explain the recompile (`is_explaining`, `raise_instead`).
- `why`, `cost` and `inspect` evaluate guard trees themselves, which calls the callback although the user called
  nothing. They do so under `audits_paused`.
- C++ owns the callback, and Python's garbage collector cannot see a cycle through it. So a shadow holds its audit
  weakly, and text in place of values.
"""

import contextlib
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torchguard._graphs.source_lines import lines_of_stack, user_line
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
from torchguard.guards._tree import GuardFailure, failures_of, format_value

Action = str | Callable[["list[GuardViolation]"], Any]
ACTIONS = ("record", "recompile", "raise")


class _ThreadState(threading.local):
    is_paused = False  # a class attribute: a missing attribute would cost each call an exception


_thread = _ThreadState()
_lock = threading.Lock()
_paused_threads = 0  # read first in each call: it is cheaper than the state of the thread


@contextlib.contextmanager
def audits_paused() -> Iterator[None]:
    """Evaluate guard trees in this thread without audits taking it for calls of the user."""
    global _paused_threads
    before = _thread.is_paused
    with _lock:
        _paused_threads += 1
    _thread.is_paused = True
    try:
        yield
    finally:
        with _lock:
            _paused_threads -= 1
        _thread.is_paused = before


@dataclass(frozen=True)
class GuardViolation:
    """A dropped guard that no longer holds: compiled code ran although an assumption of it had become false.

    Attributes:
        name: what the guard is about, such as `self.training`.
        type: of the guard, such as `EQUALS_MATCH`.
        function: the compiled function.
        compile_id: Dynamo's id of the compilation.
        line: your source line that led to the guard.
        then: the value when the function was compiled.
        now: the value when the audit checked it.
        calls: how many calls, this one included, may have returned stale results: those since the last clean check.
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
        return f"{self.type} {self.name} in {self.function}: {changed} (calls affected: at most {self.calls}{where})"


@dataclass(frozen=True)
class AuditReport:
    """What an audit found.

    Attributes:
        violations: each once for each value it was found with.
        calls: of all functions compiled with the audit.
        checks: how many of these calls were checked.
        dropped: how many guards the filter dropped.
    """

    violations: tuple[GuardViolation, ...]
    calls: int
    checks: int
    dropped: int

    def __str__(self) -> str:
        head = f"{self.dropped} guards dropped, {self.checks} of {self.calls} calls checked, "
        return "\n".join([f"{head}{len(self.violations)} violations", *map(str, self.violations)])


class Audit:
    """A filter that checks the guards it dropped, made by `audit`. Pass it to `guards.compile(filter=...)`."""

    is_audit, package_copy = True, THIS_COPY

    def __init__(self, filter: Filter, every: int, action: Action, budget: float | None) -> None:
        self.filter, self.every, self.action, self.budget = filter, every, action, budget
        self._violations: dict[tuple[str, ...], GuardViolation] = {}
        self._shadows: weakref.WeakSet[_Shadow] = weakref.WeakSet()
        self._finished = [0, 0, 0]  # calls, checks and dropped guards of compiled code that is gone
        self._lock = threading.RLock()
        self._thread = threading.local()

    def __repr__(self) -> str:
        return f"audit({self.filter!r}, every={self.every}, action={self.action!r})"

    def __call__(self, entries: Sequence[Any]) -> list[bool]:
        kept = self.filter(entries)
        self._thread.dropped = [_DroppedGuard(entry) for entry, keep in zip(entries, kept, strict=True) if not keep]
        return kept

    def on_built(self, built: GuardsBuiltEvent) -> None:
        """Add a shadow: Dynamo has built the tree of the kept guards, and `built.unfiltered` is the tree of all."""
        if built.unfiltered is None or not self._thread.dropped:
            return
        shadow = _Shadow(self, built, built.unfiltered, self._thread.dropped)
        self._shadows.add(shadow)
        weakref.finalize(shadow, _add, self._finished, shadow.counts)
        built.guards.add_guard(shadow.on_call)

    def report(self) -> AuditReport:
        """What was found so far."""
        with self._lock:
            total = [*self._finished]
            for shadow in self._shadows:
                _add(total, shadow.counts)
            return AuditReport(tuple(self._violations.values()), *total)

    def on_violations(self, violations: list[GuardViolation]) -> bool:
        """Record violations and take the action. Returns whether the compiled code may run; may raise."""
        with self._lock:
            for one in violations:
                self._violations.setdefault((one.compile_id, one.function, one.name, one.type, one.now), one)
        if callable(self.action):
            return self.action(violations) is not False
        if self.action == "raise":
            raise StaleGuardError("\n".join(["Compiled code depends on what has changed:", *map(str, violations)]))
        return self.action == "record"


class _Counts:
    """Of one shadow: the number of the next call to check, the calls until then, checks made, guards dropped."""

    __slots__ = ("checks", "dropped", "next_check", "remaining")

    def __init__(self, dropped: int) -> None:
        self.next_check, self.remaining, self.checks, self.dropped = 1, 1, 0, dropped

    @property
    def calls(self) -> int:
        return self.next_check - self.remaining


def _add(total: list[int], counts: _Counts) -> None:
    total[:] = total[0] + counts.calls, total[1] + counts.checks, total[2] + counts.dropped


class _DroppedGuard:
    """A guard that was dropped, as text alone: nothing of the user's is kept alive."""

    def __init__(self, entry: Any) -> None:
        guard = entry.orig_guard
        self.name, self.type, self.source = entry.name, entry.guard_type, guard.name
        self.then = format_value(entry.value) if entry.has_value else ""
        self.derived = entry.derived_guard_types


class _Shadow:
    """The tree of all guards of one compiled frame, of which the filter dropped some."""

    def __init__(self, audit: Audit, built: GuardsBuiltEvent, full: Guards, dropped: list[_DroppedGuard]) -> None:
        self.audit = weakref.ref(audit)
        self.full, self.compile_id = full, built.compile_id
        # Where the guard on grad mode and autocast is kept, Dynamo itself tells such calls apart.
        self.is_state_guarded = built.guards.has_at_root("GLOBAL_STATE")
        self.function = getattr(built.code, "co_qualname", built.code.co_name)
        # Of a method this is the module, whatever it calls `self`.
        self.first_argument = built.code.co_varnames[0] if built.code.co_argcount else ""
        self.dropped = {}
        for one in dropped:
            self.dropped.setdefault(one.source, []).append(one)
        self.stacks = built.stacks()
        self.counts = _Counts(len(dropped))
        self.last_clean_call = 0
        self.allowed = True
        self.error: Exception | None = None
        self.state: tuple[bool, bool] | None = None
        self.training: Any = None
        self.started = time.perf_counter()

    def on_call(self, f_locals: dict[str, Any]) -> bool:
        # Every call runs this. It checks only what users change often and what is cheap to read.
        counts = self.counts
        if (
            counts.remaining > 1
            and getattr(f_locals.get(self.first_argument), "training", None) is self.training
            and (self.is_state_guarded or (grad_mode(), any_autocast()) == self.state)
            and not (_paused_threads and _thread.is_paused)
        ):
            counts.remaining -= 1
            return True
        return self._on_due_call(f_locals)

    def _on_due_call(self, f_locals: dict[str, Any]) -> bool:
        if _thread.is_paused:
            return True
        if is_explaining():
            if self.error is not None:
                raise_instead_of_recompiling(self.error)
            return self.allowed
        start, audit = time.perf_counter(), self.audit()
        if audit is None:  # nobody can read its report
            return True
        self.training = getattr(f_locals.get(self.first_argument), "training", None)
        self.state = (grad_mode(), any_autocast())
        self.counts.remaining -= 1
        with torch_function_enabled():
            is_clean = self._check(f_locals, self.counts.calls, audit)
        self._schedule(self._interval(audit, start) if is_clean or audit.action == "record" else 1)
        return self.allowed

    def _check(self, f_locals: dict[str, Any], call: int, audit: Audit) -> bool:
        """Whether all guards hold."""
        self.counts.checks += 1
        self.allowed, self.error = True, None
        if self.full.check(f_locals):
            self.last_clean_call = call
            return True
        violations = [self._violation(failure, call) for failure in failures_of(self.full, f_locals)]
        try:
            self.allowed = audit.on_violations(violations)
        except Exception as error:  # Dynamo would swallow it here; it is raised while Dynamo explains the recompile
            self.allowed, self.error = False, error
        return False

    def _schedule(self, calls: int) -> None:
        self.counts.next_check, self.counts.remaining = self.counts.calls + calls, calls

    def _interval(self, audit: Audit, start: float) -> int:
        """Calls until the next check: `every`, or as many as keep checks within the budget."""
        if audit.budget is None:
            return audit.every
        now = time.perf_counter()
        seconds_per_call = (now - self.started) / max(self.counts.calls - 1, 1)
        return max(1, math.ceil((now - start) / (audit.budget * seconds_per_call)))

    def _violation(self, failure: GuardFailure, call: int) -> GuardViolation:
        guard = failure.guard
        candidates = self.dropped.get(guard.source, [])
        same_type = [one for one in candidates if guard.type == one.type or guard.type in one.derived]
        on_value = [one for one in candidates if one.type != "TYPE_MATCH"]
        one = next(iter(same_type or on_value or candidates), None)
        stack = self.stacks.get((guard.source, one.type if one else "")) or self.stacks.get((guard.source, ""))
        return GuardViolation(
            name=one.name if one else guard.source,
            type=one.type if one else guard.type,
            function=self.function,
            compile_id=self.compile_id,
            line=str(user_line(lines_of_stack(stack))) if stack else guard.line,
            then=one.then if one else "",
            now=failure.now or failure.why or guard.code,
            calls=call - self.last_clean_call,
        )


def audit(filter: Any, every: int = 100, action: Action = "record", budget: float | None = None) -> Audit:
    """A filter that reports when a guard it dropped would have failed.

    Args:
        filter: which guards to keep: a `Filter`, or any function torch takes as `guard_filter_fn`.
        every: check all guards on every `every`-th call, on the first one, and after `train`, `eval` or a change of
            grad mode or autocast.
        action: what happens when a dropped guard fails. "record" adds it to the report; "recompile" has Dynamo compile
            for the new value; "raise" raises a `StaleGuardError` before the stale code runs. A function is called with
            the violations, and has Dynamo recompile by returning False.
        budget: the share of the running time that checks may take, such as 0.02; it replaces `every`. The running time
            includes what happens between calls. Deciding whether to check takes half a microsecond per call, which is
            not counted.
    """
    if not callable(action) and action not in ACTIONS:
        raise GuardError(f"audit: action is {action!r}. Give one of {', '.join(ACTIONS)}, or a function.")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise GuardError(f"audit: every is {every!r}. Give a number of calls, 1 or more.")
    if budget is not None and not 0 < budget < 1:
        raise GuardError(f"audit: budget is {budget!r}. Give a share of the time, such as 0.02.")
    require_guard_events("audit")
    return Audit(filter if isinstance(filter, Filter) else by_function(filter), every, action, budget)
