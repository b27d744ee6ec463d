"""Dynamo: the cache entries of a compiled function, the frame of a call, and backends.

Every function imports Dynamo itself: loading it takes seconds. What `torch.compile` returns, and the cache behind it,
are private, and the same in torch 2.11 to 2.15 but for the names that are looked up with a default: the docstring says
what is degraded without each. All others are required.
"""

import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchguard._torch.guards import Guards, guards_of
from torchguard._torch.modules import compiled_function
from torchguard._torch.support import warn_of_missing


def keep_static(tensor: Tensor) -> Tensor:
    """Have Dynamo treat the sizes of a tensor as constants: a batch size that is equal by chance is then no reason to
    make them symbols.

    `mark_static` is documented, under a private name. Degraded where it is missing: a model may recompile once.
    """
    import torch._dynamo

    mark_static = getattr(torch._dynamo, "mark_static", None)
    if mark_static is not None:
        mark_static(tensor)
    return tensor


def keep_in_place(tensor: Tensor) -> Tensor:
    """Have CUDA graphs write to the memory of a tensor that a graph changes, instead of giving up on the graph.

    `mark_static_address` is documented, under a private name. Degraded where it is missing: a graph that changes the
    tensor runs without CUDA graphs.
    """
    import torch._dynamo

    mark_static_address = getattr(torch._dynamo, "mark_static_address", None)
    if mark_static_address is not None:
        mark_static_address(tensor)
    return keep_static(tensor)


class FunctionName(NamedTuple):
    """The qualified name of a compiled function, and where it is defined."""

    function: str
    file: str
    line: int


def function_name(code: types.CodeType | None, f_locals: Any = None) -> FunctionName:
    """The name of a frame's function. That of a module's decorated `forward`, and of a module of torch, which Dynamo
    calls in a frame of its own, is made of the module's class.

    An entry that Dynamo has invalidated has no code. Degraded where Dynamo names the frame around a module otherwise:
    that frame's own name, `wrap_inline.<locals>.inner`.
    """
    if code is None:
        return FunctionName("(a function that is gone)", "", 0)
    known, first = f_locals or {}, code.co_varnames[0] if code.co_argcount else ""
    function = name = None
    if (called := known.get(shared_frame_variable(code))) is not None:
        function = type(called).forward if isinstance(called, nn.Module) else called
        name = type(called).__name__ if isinstance(called, nn.Module) else getattr(called, "__qualname__", "")
    elif "<locals>" in code.co_qualname and isinstance(module := known.get(first), nn.Module):
        function = _forward_with(module, code)
        name = f"{type(module).__name__}.forward"
    inner = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    if name and inner is not None:
        return FunctionName(name, inner.co_filename, inner.co_firstlineno)
    return FunctionName(code.co_qualname, code.co_filename, code.co_firstlineno)


def _forward_with(module: nn.Module, code: types.CodeType) -> Any:
    """The `forward` of a module, or of a base of its class, of which this is the code of a decorator."""
    for owner in (module, *type(module).__mro__):
        function = forward = vars(owner).get("forward")
        while function is not None:
            if getattr(function, "__code__", None) is code:
                return forward
            function = getattr(function, "__wrapped__", None)
    return None


ALL_REGIONS = -2  # torch counts regions from 0 on; -1 is what they share


class CacheLocation(NamedTuple):
    """Where Dynamo caches what it compiles for a call: by code object, region and backend (None: unknown).

    `limit` is the largest number of entries that it compiles there.
    """

    code: types.CodeType
    region: int
    backend: Any
    limit: int


def entries_of(cache: CacheLocation) -> list[tuple[str, Guards]]:
    """The entries there, each with its compile id: the region's own first, then those that all regions share.

    Degraded where an entry has no `backend`: the entries of all backends count.
    """
    entries = [*_in_region(cache, cache.region), *(_in_region(cache, -1) if cache.region >= 0 else ())]
    usable = [entry for entry in entries if _is_for(entry, cache.backend) and _is_valid(entry)]
    return [(str(entry.compile_id), guards_of(entry.guard_manager)) for entry in usable]


def cache_of_frame(code: types.CodeType, compiler: Any) -> CacheLocation:
    """Where Dynamo has looked up a frame that it is about to compile.

    Degraded where torch does not say in which region a frame is compiled: the entries of all regions count.
    """
    from torch._dynamo import eval_frame

    region_of_call = getattr(eval_frame, "get_eval_frame_isolate_recompiles_id", None)
    region = ALL_REGIONS if region_of_call is None else region_of_call()
    return CacheLocation(code, region, innermost_backend(compiler), 0)


def shared_frame_variable(code: types.CodeType) -> str | None:
    """The variable with the module or function that a frame of torch's own calls; None for any other code.

    `torch.compile` puts a function of its own around each module and function of torch (`wrap_inline`). All of them
    have one code object, and before torch 2.13 one cache: the variable says whose frame it is. Degraded where torch
    names that function otherwise: frames of different modules cannot be told apart.
    """
    return "fn" if code.co_qualname == "wrap_inline.<locals>.inner" else None


def is_full(cache: CacheLocation) -> bool:
    """Whether Dynamo compiles no more there: each region has a limit, and all regions and backends together.

    Degraded before torch 2.13, which has no `_get_total_cache_entry_count`: the entries of one list count.
    """
    import torch._dynamo.config as config
    from torch._dynamo import eval_frame

    total = getattr(eval_frame, "_get_total_cache_entry_count", lambda code: len(_in_region(cache, cache.region)))
    total_limit = getattr(config, "accumulated_recompile_limit", sys.maxsize)
    return len(_in_region(cache, cache.region)) >= cache.limit or total(cache.code) >= total_limit


def _in_region(cache: CacheLocation, region: int) -> list[Any]:
    """The entries of a region. Before torch 2.13 there are no regions, and one list for all.

    Required: `_debug_get_cache_entry_list` or, since 2.13, `_get_cache_entries_for_region`.
    """
    from torch._dynamo import eval_frame

    of_region = getattr(eval_frame, "_get_cache_entries_for_region", None)
    if of_region is None or region == ALL_REGIONS:
        return list(eval_frame._debug_get_cache_entry_list(cache.code))
    return list(of_region(cache.code, region))


def _is_for(entry: Any, backend: Any) -> bool:
    its = getattr(entry, "backend", None)
    return its is None or backend is None or its is backend or (type(its) is type(backend) and its == backend)


def _is_valid(entry: Any) -> bool:
    manager = entry.guard_manager  # Dynamo replaces it when an object of a guard is deallocated
    return getattr(manager, "root", None) is not None and manager.global_scope is not None


def stance() -> str:
    """The stance that `torch.compiler.set_stance` set. Degraded where it cannot be read: "default"."""
    return _of_stance("stance", "default")


def _of_stance(name: str, default: Any) -> Any:
    from torch._dynamo import eval_frame

    return getattr(getattr(eval_frame, "_stance", None), name, default)


class CallFrame(NamedTuple):
    """The first frame of a call: where its compiled code is cached, and its locals when it starts.

    `cells` are the variables of enclosing functions, and `arguments` the names of arguments, both by source.
    """

    cache: CacheLocation
    f_locals: dict[str, Any]
    cells: dict[str, types.CellType]
    arguments: dict[str, str]


def frame_of(compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallFrame | None:
    """The frame that Dynamo would look up for a call; None if `compiled` is not compiled."""
    warn_of_missing("guards")
    found = _function_and_cache(compiled)
    if found is None:
        return None
    inner, cache = found
    function = getattr(inner, "__func__", inner)
    owner = (inner.__self__,) if inspect.ismethod(inner) else ()
    bound = inspect.signature(function, follow_wrapped=False).bind(*owner, *args, **kwargs)
    bound.apply_defaults()
    f_locals = dict(bound.arguments)
    cells = {
        name: cell
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        if cell != types.CellType()  # an empty one: the variable is not set yet
    }
    arguments = {f"L['{name}']": name for name in f_locals}
    f_locals |= {name: cell.cell_contents for name, cell in cells.items()}
    of_source = {f"L['{name}']": cell for name, cell in cells.items()}
    return CallFrame(cache, f_locals, of_source, arguments)


def cache_of(compiled: Any) -> CacheLocation | None:
    """Where Dynamo looks up what is compiled for a call; None if `compiled` is not compiled."""
    found = _function_and_cache(compiled)
    return None if found is None else found[1]


def _function_and_cache(compiled: Any) -> tuple[Callable[..., Any], CacheLocation] | None:
    call = compiled_function(compiled)
    if call is None:
        return None
    inner = call._torchdynamo_orig_callable
    if inspect.ismethod(call) and not inspect.ismethod(inner):  # a method that was decorated in its class
        inner = types.MethodType(inner, call.__self__)
    owner = getattr(inner, "__self__", None)
    if isinstance(owner, nn.Module) and inner.__func__ in (nn.Module.__call__, nn.Module._call_impl):
        inner = owner.forward  # the frames around it are torch's, which Dynamo skips
    code = getattr(inner, "__func__", inner).__code__
    return inner, CacheLocation(code, getattr(call, "_isolate_recompiles_id", -1), *_backend_and_limit(call))


def _backend_and_limit(call: Any) -> tuple[Any, int]:
    """The backend of a compiled function and its recompile limit, from the closure of what `torch.compile` returns.

    Degraded where the closure has no `callback`: the backend is unknown, and the entries of all backends count.
    """
    import torch._dynamo.config as config
    from torch._dynamo import eval_frame

    function = getattr(call, "__func__", call)
    free = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    backend: Any = free["callback"].cell_contents if "callback" in free else None
    forced = _of_stance("backend", None)
    if forced is not None:
        backend = eval_frame.get_compiler_fn(forced)
    limit = getattr(config, "recompile_limit", sys.maxsize)
    for layer in _layers_of(backend)[:-1]:
        its = getattr(layer, "_recompile_limit", None)
        limit = limit if its is None else its
    return innermost_backend(backend) or None, limit


def _layers_of(backend: Any) -> list[Any]:
    """A backend and those that it wraps, outermost first: `torch.compile` wraps it up to three times."""
    layers = [backend]
    while (inside := getattr(layers[-1], "_torchdynamo_orig_backend", None)) is not None:
        layers.append(inside)
    return layers


def innermost_backend(backend: Any) -> Any:
    """The backend that was passed to `torch.compile`, as cache entries store it."""
    return _layers_of(backend)[-1]


def backend_name(backend: Any) -> str:
    """The name of the backend that was passed to `torch.compile`."""
    backend = innermost_backend(backend)
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", None)
    return str(name or type(backend).__name__)


def default_backend() -> object:
    """The backend of `torch.compile` where none is given. It can be set since torch 2.13; before, it was Inductor."""
    try:
        from torch._dynamo.backends.registry import get_default_backend
    except ImportError:
        return "inductor"
    return get_default_backend()


def is_profiling() -> bool:
    """Whether a profiler runs in this process. Degraded where torch does not say: False, as if none ran."""
    import torch.autograd

    return getattr(torch.autograd, "_profiler_enabled", lambda: False)()


def current_compile_id() -> str:
    """The id of the compilation under way in this thread, such as "0/1"; "None" outside of one."""
    from torch._guards import CompileContext

    return str(CompileContext.current_compile_id())


def compile_times() -> list[tuple[str, float, float]]:
    """The compile id, start and seconds of the last 64 compilations, from Dynamo's metrics.

    Degraded where a metric lacks one of the fields: the time of that compilation is unknown.
    """
    from torch._dynamo.utils import get_compilation_metrics

    found = []
    for metrics in get_compilation_metrics():
        started, took = getattr(metrics, "start_time", None), getattr(metrics, "entire_frame_compile_time_s", None)
        if metrics.compile_id and started is not None and took is not None:
            found.append((str(metrics.compile_id), started, took))
    return found


def compiles_after_breaks() -> bool:
    """Whether Dynamo compiles the code after a graph break, as it does outside of calls with `fullgraph=True`.

    torch 2.11 has one such state for all threads. Each call of a function compiled with `fullgraph=True` sets it and
    puts back what it found, so that two calls that overlap in two threads leave it set for the rest of the process.
    It can only be read by setting it. Degraded where torch has no `set_eval_frame_override`: True, which is right
    since torch 2.12.
    """
    from torch._C._dynamo import eval_frame

    swap, states = (getattr(eval_frame, name, None) for name in ("set_eval_frame_override", "_EvalFrameOverride"))
    if swap is None or states is None:
        return True
    found = swap(states.NONE)
    swap(found)
    return found == states.NONE


def is_restart(error: BaseException) -> bool:
    """Whether an exception tells Dynamo to analyse the frame again from its start.

    Degraded where torch has no `RestartAnalysis`: False, and a restart is recorded as a failed compilation.
    """
    from torch._dynamo import exc

    return isinstance(error, getattr(exc, "RestartAnalysis", ()))
