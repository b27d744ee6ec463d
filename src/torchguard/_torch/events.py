"""Events of Dynamo."""

import contextlib
import inspect
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from torchguard._torch.guards import Guards, Stack, guards_of
from torchguard._torch.process import kept_through_reloads, replaced_by
from torchguard.exceptions import GuardError


class Built(NamedTuple):
    """The guards of a frame that was just compiled; `full` has those that a filter dropped, too.

    `stacks` tells where the user's code was when a guard was made, by source and type; only while this is being told.
    """

    code: types.CodeType
    compile_id: str
    guards: Guards
    full: Guards | None
    entries_before: int
    stacks: Callable[[], dict[tuple[str, str], Stack]]


class Missed(NamedTuple):
    """Something compiled before that does not fit a call, for which Dynamo compiles anew, under the id `for_id`.

    `gone` is what Dynamo says where an object is no more that a guard was about: then it has dropped all guards.
    """

    code: types.CodeType
    compile_id: str
    for_id: str
    guards: Guards
    f_locals: dict[str, Any]
    is_same_backend: bool
    gone: str


class Broken(NamedTuple):
    """A graph that ends early: Dynamo's own words, and where the user's code is, outermost first."""

    reason: str
    stack: Stack
    compile_id: str


BuiltListener = Callable[[Built], None]
RecompileListener = Callable[[Missed], None]
BreakListener = Callable[[Broken], None]
# A reload of this module leaves these as they are: torch's functions stay wrapped, and are so once.
_built: list[BuiltListener] = kept_through_reloads(globals(), "_built", list)
_recompiling: list[RecompileListener] = kept_through_reloads(globals(), "_recompiling", list)
_breaking: list[BreakListener] = kept_through_reloads(globals(), "_breaking", list)
_wrapped: set[str] = kept_through_reloads(globals(), "_wrapped", set)
_thread = kept_through_reloads(globals(), "_thread", threading.local)
# What audits to be told of have as `told_by`: where this package was imported twice, both copies wrap these functions.
HERE = kept_through_reloads(globals(), "HERE", object)


def missing() -> str | None:
    """Which private name of torch is missing that everything but filters needs, None if all are there."""
    import torch._dynamo.guards as dynamo

    manager = getattr(dynamo, "CheckFunctionManager", None)
    names = {
        "CheckFunctionManager.build_guards": getattr(manager, "build_guards", None),
        "CheckFunctionManager.compile_check_fn": getattr(manager, "compile_check_fn", None),
        "get_guard_fail_reason": getattr(dynamo, "get_guard_fail_reason", None),
        "_get_closure_vars": getattr(dynamo, "_get_closure_vars", None),
    }
    return next((name for name, found in names.items() if found is None), None)


def require(who: str) -> None:
    if (name := missing()) is not None:
        raise GuardError(f"{who}: torch {torch.__version__} has no {name}, which it needs. Filters work without.")


def compile_times() -> list[tuple[str, float, float]]:
    """The compile id, start and seconds of what was compiled last, in Dynamo's metrics: it keeps 64 of them.

    Where a metric has no such field, the time is not known.
    """
    from torch._dynamo.utils import get_compilation_metrics

    found = []
    for metrics in get_compilation_metrics():
        started, took = getattr(metrics, "start_time", None), getattr(metrics, "entire_frame_compile_time_s", None)
        if metrics.compile_id and started is not None and took is not None:
            found.append((str(metrics.compile_id), started, took))
    return found


def current_compile_id() -> str:
    from torch._guards import CompileContext

    return str(CompileContext.current_compile_id())


def on_built(listener: BuiltListener) -> None:
    """Call `listener` whenever Dynamo has built the guards of a frame."""
    _built.append(listener)
    install()


def on_recompile(listener: RecompileListener) -> None:
    """Call `listener` for each thing compiled before that does not fit, when Dynamo compiles once more."""
    _recompiling.append(listener)
    install()


def on_break(listener: BreakListener) -> None:
    """Call `listener` for each graph break.

    There is no public way to hear of them. The structured trace log has them as text, but a handler on it makes Dynamo
    write out every graph and guard, too. Where the method is missing, this refuses.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    if not hasattr(InstructionTranslatorBase, "log_graph_break"):
        name = "InstructionTranslatorBase.log_graph_break"
        raise GuardError(f"inspect: torch {torch.__version__} has no {name}, which it needs to hear of graph breaks.")
    _breaking.append(listener)
    install()


def forget(listener: Any) -> None:
    """Take a listener off."""
    for listeners in (_built, _recompiling, _breaking):
        if listener in listeners:
            listeners.remove(listener)


@contextlib.contextmanager
def counting_builds() -> Iterator[list[Built]]:
    """What Dynamo builds in a block."""
    found: list[Built] = []
    listener = found.append
    on_built(listener)
    try:
        yield found
    finally:
        forget(listener)


def install() -> None:
    """Have audits and listeners told of what Dynamo builds. Costs nothing where there are none."""
    import torch._dynamo.guards as dynamo
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    for owner, name, ours in (
        (dynamo.CheckFunctionManager, "__init__", "_build"),
        (dynamo, "get_guard_fail_reason", "_explain"),
        (InstructionTranslatorBase, "log_graph_break", "_break"),
    ):
        if hasattr(owner, name) and name not in _wrapped:
            _wrapped.add(name)
            setattr(owner, name, replaced_by(globals(), ours, getattr(owner, name)))


def _build(
    original: Callable[..., None], self: Any, f_code: types.CodeType, output_graph: Any, *args: Any, **kwargs: Any
) -> None:
    """In the place of `CheckFunctionManager.__init__`."""
    given = inspect.signature(original).bind(self, f_code, output_graph, *args, **kwargs).arguments
    full = None
    if getattr(given.get("guard_filter_fn"), "told_by", None) is HERE:
        full = _first_built(self)
    original(self, f_code, output_graph, *args, **kwargs)
    built = Built(
        f_code,
        current_compile_id(),
        guards_of(self.guard_manager),
        full() if full is not None else None,
        _entries_before(f_code, given),
        lambda: _stacks(output_graph),
    )
    if full is not None:
        given["guard_filter_fn"].on_built(built)
    for listener in tuple(_built):
        listener(built)


def _entries_before(code: types.CodeType, given: dict[str, Any]) -> int:
    """How much was compiled for a frame before. Torch 2.11 passes a chain of another kind, and has no regions."""
    from torch._dynamo import eval_frame

    if "cache_entry" in given:
        return len(eval_frame._debug_get_cache_entry_list(code))
    return len(given.get("cache_entries") or ())


def _stacks(output_graph: Any) -> dict[tuple[str, str], Stack]:
    """Where guards come from. Where torch does not keep it, the line in their text is all there is."""
    found: dict[tuple[str, str], Stack] = {}
    for guard in getattr(output_graph, "guards", ()):
        if stack := getattr(guard, "user_stack", None):
            found[guard.name, guard.create_fn_name()] = stack
            found.setdefault((guard.name, ""), stack)
    return found


def _first_built(manager: Any) -> Callable[[], Guards | None]:
    """Keep the tree of all guards, which torch builds to show it to a filter and drops: it costs no second build."""
    found: list[Any] = []

    def build_guards(guards: Any, *args: Any, **kwargs: Any) -> Any:
        built = type(manager).build_guards(manager, guards, *args, **kwargs)
        if not found:
            found.extend([guards, *built])
        elif len(found) == 3:
            # What is left to do to it: guards about several sources at once, and the scope to evaluate sources in.
            guards, builder, wrapper = found
            manager.guard_manager = wrapper
            manager.compile_check_fn(builder, guards, None)
            del manager.guard_manager
            found[:] = [wrapper]
        return built

    manager.build_guards = build_guards

    def full() -> Guards | None:
        del manager.build_guards
        return guards_of(found[0]) if len(found) == 1 else None

    return full


def _explain(
    original: Callable[..., str], wrapper: Any, code: types.CodeType, f_locals: Any, *args: Any, **kwargs: Any
) -> str:
    """In the place of `get_guard_fail_reason`."""
    if _recompiling and getattr(wrapper, "root", None) is not None:
        given = inspect.signature(original).bind(wrapper, code, f_locals, *args, **kwargs).arguments
        backend = _innermost(given.get("backend"))
        is_same = getattr(wrapper.cache_entry, "backend", backend) == backend
        gone = getattr(wrapper, "invalidation_reason", "")
        ids = (str(given["compile_id"]), current_compile_id())
        missed = Missed(code, *ids, guards_of(wrapper), f_locals, is_same, gone)
        for listener in tuple(_recompiling):
            listener(missed)
    _thread.is_explaining, _thread.error = True, None
    try:
        reason = original(wrapper, code, f_locals, *args, **kwargs)
    finally:
        _thread.is_explaining = False
    if _thread.error is not None:
        raise _thread.error
    return reason


def _innermost(backend: Any) -> Any:
    """The backend itself, as it is kept with what it compiled: torch 2.11 hands on one that is wrapped."""
    while (inside := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inside
    return backend


def _break(original: Callable[..., None], self: Any, code_options: Any, reason: str, exc: Any) -> None:
    """In the place of `InstructionTranslatorBase.log_graph_break`."""
    from torch._guards import TracingContext

    if _breaking and not exc.logged:  # it comes by here once for each frame that it goes up through
        stack = getattr(exc, "real_stack", None) or TracingContext.extract_stack()
        first = (code_options["co_filename"], code_options["co_firstlineno"], code_options["co_name"])
        broken = Broken(reason, stack or [traceback.FrameSummary(*first)], current_compile_id())
        for listener in tuple(_breaking):
            listener(broken)
    original(self, code_options, reason, exc)


def is_explaining() -> bool:
    """Whether Dynamo checks guards a second time, to tell why they failed."""
    return getattr(_thread, "is_explaining", False)


def raise_instead(error: Exception) -> None:
    """Raise an error in the place of compiling again, while `is_explaining`."""
    _thread.error = error
