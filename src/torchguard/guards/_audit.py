"""Audits: checking dropped guards from time to time while the compiled code runs.

Dynamo builds the tree of all guards, passes them to the filter, and builds a second tree of the guards that the filter
keeps. An audit stores the first tree as a *shadow* and adds a callback to the second, which Dynamo calls once all kept
guards of a call hold. In most calls the callback only counts. In every `every`-th call, and in the first call after a
change of state that is cheap to see, it checks the shadow: quickly, where nothing has changed since the last check
(`_torch.quick_check`).

Four properties of Dynamo shape the code:

- The callback can only return True, to run the compiled code, or False, to recompile. Dynamo swallows an exception
  raised in it. So the callback returns False, and the error is raised a moment later, in the same thread, where Dynamo
  begins to compile (`refuse_to_compile`).
- Dynamo then evaluates the guards once more, to explain the recompile (`is_explaining`). That is no call of the user.
- `why`, `cost` and `inspect` evaluate guard trees themselves, which calls the callback although the user called
  nothing. They do so under `audits_paused`.
- C++ owns the callback, and Python's garbage collector cannot see a cycle through it. So a shadow holds its audit
  weakly, and text in place of values.

A dropped guard that failed once and made Dynamo recompile is needed: two entries that differ only in what it checks
would each be used for both. So from then on it is kept in what is compiled, and checked in every call of what was
compiled before (`Audit.learn`). Calls that violate it are then no violations: Dynamo finds the right entry.
"""

import contextlib
import functools
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from typing import Any

from torchguard._graphs.source_lines import lines_of_stack, user_line
from torchguard._torch.dynamo import shared_frame_variable
from torchguard._torch.events import (
    THIS_COPY,
    GuardsBuiltEvent,
    is_explaining,
    recheck_before_compiling,
    refuse_to_compile,
    require_guard_events,
)
from torchguard._torch.guards import Guards, torch_function_enabled
from torchguard._torch.quick_check import QuickCheck
from torchguard._torch.tensors import any_autocast, grad_mode
from torchguard.exceptions import GuardError, StaleGuardError
from torchguard.guards._audit_report import AuditReport, GuardViolation
from torchguard.guards._filters import Filter, by_function
from torchguard.guards._guard_tree import GuardFailure, failures_of, format_value

_ROOT = "L"  # the source of guards without one, such as those on grad mode
Action = str | Callable[["list[GuardViolation]"], Any]
ACTIONS = ("record", "recompile", "raise")
OBSERVERS: list[Callable[["Audit"], None]] = []  # called with each new audit


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


class Audit:
    """A filter that checks the guards it dropped, made by `audit`. Pass it to `guards.compile(filter=...)`."""

    is_audit, package_copy = True, THIS_COPY

    def __init__(self, filter: Filter, every: int, action: Action, budget: float | None) -> None:
        self.filter, self.every, self.action, self.budget = filter, every, action, budget
        self._violations: dict[tuple[str, ...], GuardViolation] = {}
        self._learned: set[str] = set()
        self._shadows: weakref.WeakSet[_Shadow] = weakref.WeakSet()
        self._finished = [0, 0, 0]  # calls, checks and dropped guards of compiled code that is gone
        self._lock = threading.RLock()
        self._thread = threading.local()

    def __repr__(self) -> str:
        return f"audit({self.filter!r}, every={self.every}, action={self.action!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Audit":
        """The audit itself: a copy of a compiled model reports to the same audit, which is the one the user has."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process, an audit with the same settings that has found nothing yet."""
        return Audit, (self.filter, self.every, self.action, self.budget)

    def __call__(self, entries: Sequence[Any]) -> list[bool]:
        kept = [
            keep or _is_on(entry.orig_guard.name or _ROOT, self._learned)
            for keep, entry in zip(self.filter(entries), entries, strict=True)
        ]
        self._thread.dropped = [_DroppedGuard(entry) for entry, keep in zip(entries, kept, strict=True) if not keep]
        return kept

    def learn(self, sources: Set[str]) -> None:
        """Keep the guards on these sources from now on, and check them in every call of what is compiled already.

        An empty source is that of a guard on several sources at once: then all guards are kept.
        """
        with self._lock:
            self._learned |= sources
            for shadow in self._shadows:
                shadow.check_always(self._learned)

    def on_built(self, built: GuardsBuiltEvent) -> None:
        """Add a shadow: Dynamo has built the tree of the kept guards, and `built.unfiltered` is the tree of all."""
        if built.unfiltered is None or not self._thread.dropped:
            return
        shadow = _Shadow(self, built, built.unfiltered, self._thread.dropped)
        with self._lock:
            self._shadows.add(shadow)
            if not built.guards.sources() >= shadow.sources_on(self._learned):
                shadow.check_always(self._learned)
        weakref.finalize(shadow, _add, self._finished, shadow.counts)
        built.guards.add_guard(shadow.on_call if shadow.owner is None else shadow.on_call_in_shared_frame)
        if shadow.raises:
            recheck_before_compiling(shadow.entry, functools.partial(_recheck, weakref.ref(shadow)))

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
                key = (one.function, one.name, one.type)
                before = self._violations.get(key)
                self._violations[key] = replace(one, checks=before.checks + 1) if before else one
        if callable(self.action):
            return self.action(violations) is not False
        if self.action == "raise":
            raise StaleGuardError("\n".join(["Compiled code depends on what has changed:", *map(str, violations)]))
        return self.action == "record"


def _is_on(source: str, failed: Set[str]) -> bool:
    """Whether a guard on this source is to be kept since guards on others failed.

    These are guards on the same source, on those that lead to it and on those reached from it: an attribute that is
    absent in one entry, as `forward` is until it is patched, is guarded on the object or its `__dict__` there, and on
    itself in another entry. Where a failed guard is on several sources at once, its source is empty and all are kept.
    """
    for one in failed:
        owner = one.removesuffix(".__dict__")
        if (
            not one
            or source == one
            or (_ROOT not in (one, source) and (owner.startswith(source) or source.startswith(owner)))
        ):
            return True
    return False


def _matches(shadow: "weakref.ref[_Shadow]", f_locals: dict[str, Any]) -> bool:
    """Whether Dynamo would run the compiled code for a call with these locals, but for the dropped guards."""
    one = shadow()
    return one is not None and one.is_own(f_locals) and one.kept.check(f_locals)


def _recheck(shadow: "weakref.ref[_Shadow]", f_locals: dict[str, Any]) -> None:
    """Check the shadow for a call that Dynamo is about to compile for, if its kept guards hold."""
    one = shadow()
    if one is not None and not _thread.is_paused and _matches(shadow, f_locals):
        one._on_due_call(f_locals)


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
        self.full, self.compile_id, self.code, self.entry = full, built.compile_id, built.code, built.guards.key()
        self.quick = QuickCheck(full)
        self.kept = built.guards.copy()  # before the callback is added: with it, the tree would hold itself
        # Where the guard on grad mode and autocast is kept, Dynamo itself tells such calls apart.
        self.is_state_guarded = built.guards.has_at_root("GLOBAL_STATE")
        self.function = built.where.function
        # Of a method this is the module, whatever it calls `self`.
        self.first_argument = built.code.co_varnames[0] if built.code.co_argcount else ""
        # Of a module of torch, whose frame all of them share, this is the module, too.
        self.owner: weakref.ref[Any] | None = None
        shared = shared_frame_variable(built.code)
        if shared is not None and built.f_locals is not None:
            self.first_argument = shared
            with contextlib.suppress(KeyError, TypeError):  # a callable that cannot be referred to weakly
                self.owner = weakref.ref(built.f_locals[shared])
        self.dropped = {}
        for one in dropped:
            self.dropped.setdefault(one.source, []).append(one)
        self.stacks = built.stacks()
        self.counts = _Counts(len(dropped))
        self.last_clean_call = 0
        self.always: Guards | None = None
        # The threads in which its last check refused the call. Dynamo explains a recompile in the thread of the call,
        # while other threads check the same shadow.
        self.refused: set[int] = set()
        self.raises = audit.action == "raise"
        self.state: tuple[bool, bool] | None = None
        self.training: Any = None
        self.started = time.perf_counter()

    def is_own(self, f_locals: dict[str, Any]) -> bool:
        """Whether a call is one of the module that the code was compiled for, where modules share a frame of torch's.

        Before torch 2.13 they also share a cache. A call of another module violates nothing: it has another entry.
        """
        return self.owner is None or f_locals.get(self.first_argument) is self.owner()

    def on_call_in_shared_frame(self, f_locals: dict[str, Any]) -> bool:
        return self.is_own(f_locals) and self.on_call(f_locals)

    def on_call(self, f_locals: dict[str, Any]) -> bool:
        # Every call runs this. It checks only what users change often and what is cheap to read.
        counts = self.counts
        if (
            counts.remaining > 1
            and getattr(f_locals.get(self.first_argument), "training", None) is self.training
            and (self.is_state_guarded or (grad_mode(), any_autocast()) == self.state)
            and not (_paused_threads and _thread.is_paused)
            and (self.always is None or self._holds_always(f_locals))
        ):
            counts.remaining -= 1
            return True
        return self._on_due_call(f_locals)

    def sources_on(self, failed: Set[str]) -> set[str]:
        return {source for source in self.full.sources() if _is_on(source, failed)}

    def check_always(self, failed: Set[str]) -> None:
        """Check the guards on these sources in every call."""
        self.always = self.full.part_on(self.sources_on(failed))

    def _holds_always(self, f_locals: dict[str, Any]) -> bool:
        if self.always is None:
            return True
        with torch_function_enabled():
            return self.always.check(f_locals)

    def _on_due_call(self, f_locals: dict[str, Any]) -> bool:
        if _thread.is_paused:
            return True
        if is_explaining():
            return threading.get_ident() not in self.refused
        if not self.raises and not self._holds_always(f_locals):
            self.refused.add(threading.get_ident())
            return False
        start, audit = time.perf_counter(), self.audit()
        if audit is None:  # nobody can read its report
            return True
        self.training = getattr(f_locals.get(self.first_argument), "training", None)
        self.state = (grad_mode(), any_autocast())
        self.counts.remaining -= 1
        with torch_function_enabled():
            is_clean, allowed = self._check(f_locals, self.counts.calls, audit)
        self._schedule(self._interval(audit, start) if is_clean or audit.action == "record" else 1)
        return allowed

    def _check(self, f_locals: dict[str, Any], call: int, audit: Audit) -> tuple[bool, bool]:
        """Whether all guards hold, and whether the compiled code may run."""
        self.counts.checks += 1
        if self.quick.check(f_locals):
            self.last_clean_call = call
            self.refused.discard(threading.get_ident())
            return True, True
        failures = failures_of(self.full, f_locals)
        allowed = False
        try:
            allowed = audit.on_violations([self._violation(failure, call) for failure in failures])
        except Exception as error:  # Dynamo would swallow it here
            if error.__traceback__ is not None:  # without this frame, which holds the arguments of the call
                error.__traceback__ = error.__traceback__.tb_next
            refuse_to_compile(self.code, self.entry, error, functools.partial(_matches, weakref.ref(self)))
        if allowed:
            self.refused.discard(threading.get_ident())
        else:
            self.refused.add(threading.get_ident())
            self._learn({failure.guard.source for failure in failures}, f_locals, audit)
        return False, allowed

    def _learn(self, sources: set[str], f_locals: dict[str, Any], audit: Audit) -> None:
        if self.full.part_on(self.sources_on(sources)).check(f_locals):
            sources.add("")  # what failed is not among them: check everything
        if self.raises:  # kept in what is compiled next, they would lead to a recompile in place of the error
            self.check_always(sources)
        else:
            audit.learn(sources)

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
    made = Audit(filter if isinstance(filter, Filter) else by_function(filter), every, action, budget)
    for observe in OBSERVERS:
        observe(made)
    return made
