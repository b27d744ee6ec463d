"""Guards that were built or failed, and graph breaks, as they happen.

torch has no public callback for any of this. Its structured trace log carries most of it as text, but a handler on that
log makes Dynamo write out every graph and guard in full. So four functions of torch are patched, each when the first
listener for it is added, and for the rest of the process (`patch_function`); without a listener, a patch calls the
original and nothing else:

| patched | what it reports | degraded where torch lacks it |
| --- | --- | --- |
| `CheckFunctionManager.__init__` | `GuardsBuiltEvent` | `require_guard_events` raises GuardError |
| `get_guard_fail_reason` | `GuardFailureEvent` | `require_guard_events` raises GuardError |
| `ConvertFrameAssert.__call__` | raises for `refuse_to_compile` | `require_guard_events` raises GuardError |
| `InstructionTranslatorBase.log_graph_break` | `GraphBreakEvent` | `add_listener` raises GuardError |

All of them exist in torch 2.11 to 2.15. The patches can go when torch has callbacks for compilations.
"""

import contextlib
import inspect
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from torchguard._torch import settings
from torchguard._torch.dynamo import (
    ALL_REGIONS,
    FunctionName,
    cache_of_frame,
    compiles_after_breaks,
    current_compile_id,
    entries_of,
    function_name,
    innermost_backend,
)
from torchguard._torch.guards import Guards, Stack, guards_of
from torchguard._torch.process import module_state, patch_function
from torchguard._torch.support import missing, warn_of_missing
from torchguard.exceptions import GuardError


class GuardsBuiltEvent(NamedTuple):
    """Dynamo has built the guards of a frame that it compiled.

    `unfiltered` also has the guards that an audited filter dropped, `dropped` names what any filter dropped: types and
    names. `stacks` returns where the user's code was when a guard was made, by source and guard type; it can only be
    called while the event is being reported. `f_locals` are those of the call, None where torch does not have them.
    """

    code: types.CodeType
    where: FunctionName
    compile_id: str
    guards: Guards
    unfiltered: Guards | None
    dropped: tuple[tuple[str, str], ...]
    f_locals: dict[str, Any] | None
    entries_before: int
    stacks: Callable[[], dict[tuple[str, str], Stack]]


class GuardFailureEvent(NamedTuple):
    """A cached entry whose guards a call violates, so that Dynamo recompiles under `new_compile_id`.

    `invalidation` is Dynamo's text where an object of a guard no longer exists: Dynamo has dropped all guards then.
    """

    code: types.CodeType
    compile_id: str
    new_compile_id: str
    guards: Guards
    f_locals: dict[str, Any]
    is_same_backend: bool
    invalidation: str


class GraphBreakEvent(NamedTuple):
    """A graph that ends early: Dynamo's reason, and the stack of the user's code, outermost frame first.

    `is_resumed` is whether Dynamo compiles the code after it: see `compiles_after_breaks`.
    """

    reason: str
    stack: Stack
    compile_id: str
    is_resumed: bool


Event = TypeVar("Event", GuardsBuiltEvent, GuardFailureEvent, GraphBreakEvent)
# By the name of the event's class, which a reload of this module replaces.
_listeners: dict[str, list[Callable[[Any], None]]] = module_state(globals(), "listeners", dict)
_thread = module_state(globals(), "thread", threading.local)
_NOTHING: tuple[Any, ...] = (None, None, None, None)
# Of audited entries, by the root of their guards: what to call before Dynamo compiles in their place, and the hooks of
# the call of `torch.compile` that they belong to.
_rechecks = module_state(globals(), "rechecks", weakref.WeakKeyDictionary)
_hooks = module_state(globals(), "hooks", weakref.WeakKeyDictionary)
# Identifies this copy of the package: where there are two, both patch torch, and each reports to its own audits.
THIS_COPY = module_state(globals(), "copy", object)


def missing_for_guards() -> str | None:
    """The name that torch lacks and that all of `guards` but filters needs; None if it has all of them."""
    return next((one.name for one in missing("guards") if one.is_required), None)


def require_guard_events(who: str) -> None:
    """Patch torch to report what Dynamo guards; raises GuardError where torch lacks a name that this needs."""
    warn_of_missing("guards")
    if (name := missing_for_guards()) is not None:
        raise GuardError(f"{who}: torch {torch.__version__} has no {name}, which it needs. Filters work without.")
    _patch_guards()


def add_listener(event: type[Event], listener: Callable[[Event], None]) -> None:
    """Call `listener` with each event of a class, in the thread in which Dynamo compiles.

    GuardsBuiltEvent comes for each compiled frame; GuardFailureEvent for each cached entry that a call violates, before
    Dynamo recompiles; GraphBreakEvent for each graph break.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    if event is GraphBreakEvent and not hasattr(InstructionTranslatorBase, "log_graph_break"):
        name = "InstructionTranslatorBase.log_graph_break"
        raise GuardError(f"inspect: torch {torch.__version__} has no {name}, which it needs to report graph breaks.")
    _listeners.setdefault(event.__name__, []).append(listener)
    _patch_guards()


def remove_listener(listener: Callable[[Any], None]) -> None:
    for listeners in _listeners.values():
        if listener in listeners:
            listeners.remove(listener)


@contextlib.contextmanager
def record_builds() -> Iterator[list[GuardsBuiltEvent]]:
    """A list that receives an event for each frame compiled in the block."""
    found: list[GuardsBuiltEvent] = []
    listener = found.append
    add_listener(GuardsBuiltEvent, listener)
    try:
        yield found
    finally:
        remove_listener(listener)


def _listeners_of(event: type) -> tuple[Callable[[Any], None], ...]:
    return tuple(_listeners.get(event.__name__, ()))


def _patch_guards() -> None:
    import torch._dynamo.guards as dynamo
    from torch._dynamo.convert_frame import ConvertFrameAssert
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    patch_function(ConvertFrameAssert, "__call__", globals(), "_convert")
    patch_function(dynamo.CheckFunctionManager, "__init__", globals(), "_build")
    patch_function(dynamo, "get_guard_fail_reason", globals(), "_explain")
    patch_function(InstructionTranslatorBase, "log_graph_break", globals(), "_break")


def _build(
    original: Callable[..., None], self: Any, f_code: types.CodeType, output_graph: Any, *args: Any, **kwargs: Any
) -> None:
    """Replaces `CheckFunctionManager.__init__`."""
    call = inspect.signature(original).bind(self, f_code, output_graph, *args, **kwargs)
    given, unfiltered, noted = call.arguments, None, None
    if given.get("guard_filter_fn") is not None:
        noted = given["guard_filter_fn"] = _NotedFilter(given["guard_filter_fn"])
        unfiltered = _unfiltered_guards(self) if noted.package_copy is THIS_COPY else None
    original(*call.args, **call.kwargs)
    event = GuardsBuiltEvent(
        f_code,
        function_name(f_code, locals_of(output_graph)),
        current_compile_id(),
        guards_of(self.guard_manager),
        unfiltered() if unfiltered is not None else None,
        tuple(noted.dropped) if noted is not None else (),
        locals_of(output_graph),
        _entries_before(f_code, given),
        lambda: _stacks(output_graph),
    )
    if noted is not None and unfiltered is not None:
        if (hooks := getattr(_thread, "hooks", None)) is not None:
            _hooks[event.guards.root] = weakref.ref(hooks)
        noted.filter.on_built(event)
    for listener in _listeners_of(GuardsBuiltEvent):
        listener(event)


class _NotedFilter:
    """A guard filter that notes what it drops. Another copy of the package still sees whether it is an audit of its."""

    def __init__(self, filter: Any) -> None:
        self.filter, self.dropped = filter, []
        self.package_copy = getattr(filter, "package_copy", None)
        self.on_built = getattr(filter, "on_built", None)

    def __call__(self, entries: Sequence[Any]) -> Sequence[bool]:
        kept = self.filter(entries)
        dropped = (entry for entry, keep in zip(entries, kept, strict=False) if not keep)
        self.dropped = [(entry.guard_type, entry.orig_guard.name or entry.name) for entry in dropped]
        return kept


def locals_of(output_graph: Any) -> Any:
    """The locals of the frame that a graph was made of. Degraded where torch does not have them: None."""
    return getattr(output_graph, "local_scope", None)


def _entries_before(code: types.CodeType, given: dict[str, Any]) -> int:
    """How many entries a frame had before. torch 2.11 passes another kind of chain, and has no regions."""
    from torch._dynamo import eval_frame

    if "cache_entry" in given:
        return len(eval_frame._debug_get_cache_entry_list(code))
    return len(given.get("cache_entries") or ())


def _stacks(output_graph: Any) -> dict[tuple[str, str], Stack]:
    """Where guards come from. Degraded where torch keeps no `user_stack`: only the line in a guard's text is known."""
    found: dict[tuple[str, str], Stack] = {}
    for guard in getattr(output_graph, "guards", ()):
        if stack := getattr(guard, "user_stack", None):
            found[guard.name, guard.create_fn_name()] = stack
            found.setdefault((guard.name, ""), stack)
    return found


def _unfiltered_guards(manager: Any) -> Callable[[], Guards | None]:
    """Save the tree of all guards, which torch builds to show it to a filter and then drops: no second build."""
    found: list[Any] = []

    def build_guards(guards: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if found else settings.all_tensor_guards():
            built = type(manager).build_guards(manager, guards, *args, **kwargs)
        if not found:
            found.extend([guards, *built])
        elif len(found) == 3:
            # torch has not added these to the tree yet: guards about several sources, and the scope of sources.
            guards, builder, wrapper = found
            manager.guard_manager = wrapper
            manager.compile_check_fn(builder, guards, None)
            del manager.guard_manager
            found[:] = [wrapper]
        return built

    manager.build_guards = build_guards

    def unfiltered() -> Guards | None:
        del manager.build_guards
        return guards_of(found[0]) if len(found) == 1 else None

    return unfiltered


def _explain(
    original: Callable[..., str], wrapper: Any, code: types.CodeType, f_locals: Any, *args: Any, **kwargs: Any
) -> str:
    """Replaces `get_guard_fail_reason`."""
    listeners = _listeners_of(GuardFailureEvent)
    if listeners and getattr(wrapper, "root", None) is not None:
        given = inspect.signature(original).bind(wrapper, code, f_locals, *args, **kwargs).arguments
        backend = innermost_backend(given.get("backend"))  # torch 2.11 passes a wrapped one
        is_same = getattr(wrapper.cache_entry, "backend", backend) == backend
        invalidation = getattr(wrapper, "invalidation_reason", "")
        ids = (str(given["compile_id"]), current_compile_id())
        event = GuardFailureEvent(code, *ids, guards_of(wrapper), f_locals, is_same, invalidation)
        for listener in listeners:
            listener(event)
    _thread.is_explaining = True
    try:
        return original(wrapper, code, f_locals, *args, **kwargs)
    finally:
        _thread.is_explaining = False


def is_explaining() -> bool:
    """Whether Dynamo is checking guards a second time, to find out why they failed."""
    return getattr(_thread, "is_explaining", False)


def refuse_to_compile(
    code: types.CodeType, entry: "weakref.ref[Any]", error: Exception, applies: Callable[[dict[str, Any]], bool]
) -> None:
    """Have Dynamo raise an error where it would compile this code in this thread, for a call to which it applies.

    `entry` is the `Guards.key` of the entry that the call would have used.
    """
    _thread.refused = (code, entry, error, applies)


def recheck_before_compiling(entry: "weakref.ref[Any]", recheck: Callable[[dict[str, Any]], None]) -> None:
    """Have Dynamo call this with the locals before it compiles for a call that could have used this audited entry.

    With several threads, Dynamo now and then misses a cached entry although all its guards hold, without calling the
    callback of an audit (once in some thousand calls, torch 2.13): the region in which it looks is state of the
    process, and another thread may have changed it. `recheck` can refuse the call in its place.

    One code object can have entries of several modules: all of a class, or all that are torch's own. So an entry is
    rechecked only for calls of what the same call of `torch.compile` returned.
    """
    tree = entry()
    if tree is not None:
        _rechecks[tree] = recheck


def _convert(original: Callable[..., Any], self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `ConvertFrameAssert.__call__`, with which Dynamo compiles a frame that no cached entry matches.

    Each call of `torch.compile` passes hooks of its own. Degraded where there are none: the compiler stands for them.
    """
    hooks = inspect.signature(original).bind(self, frame, *args, **kwargs).arguments.get("hooks", self)
    before = getattr(_thread, "hooks", None)
    if len(_rechecks) > 0 or getattr(_thread, "refused", _NOTHING)[0] is frame.f_code:
        _refuse_stale_call(self, frame, hooks)
    _thread.hooks = hooks
    try:
        return original(self, frame, *args, **kwargs)
    finally:
        _thread.hooks = before


def _refuse_stale_call(compiler: Any, frame: Any, hooks: Any) -> None:
    """Raise the error of an entry that the call would have used, if there is one."""
    cache = cache_of_frame(frame.f_code, compiler)
    # Of all regions: another thread may have changed the region. An entry that a reset has dropped is not among them,
    # though its guards may still be alive.
    cached = [guards.root for _, guards in entries_of(cache._replace(region=ALL_REGIONS))]
    own = [tree for tree in cached if tree in _hooks and _hooks[tree]() is hooks]
    if getattr(_thread, "refused", _NOTHING)[0] is not frame.f_code:
        for recheck in [_rechecks[tree] for tree in own if tree in _rechecks]:
            recheck(frame.f_locals)
    code, entry, error, applies = getattr(_thread, "refused", _NOTHING)
    if code is not frame.f_code:
        return
    _thread.refused = _NOTHING
    tree = entry()
    is_usable = tree in own or tree in [guards.root for _, guards in entries_of(cache)]
    if is_usable and applies(frame.f_locals):
        raise error


def _break(original: Callable[..., None], self: Any, code_options: Any, reason: str, exc: Any) -> None:
    """Replaces `InstructionTranslatorBase.log_graph_break`."""
    from torch._guards import TracingContext

    listeners = _listeners_of(GraphBreakEvent)
    if listeners and not exc.logged:  # Dynamo calls this once for each frame that the exception passes
        stack = getattr(exc, "real_stack", None) or TracingContext.extract_stack()
        first = (code_options["co_filename"], code_options["co_firstlineno"], code_options["co_name"])
        stack = stack or [traceback.FrameSummary(*first)]
        event = GraphBreakEvent(reason, stack, current_compile_id(), compiles_after_breaks())
        for listener in listeners:
            listener(event)
    original(self, code_options, reason, exc)
