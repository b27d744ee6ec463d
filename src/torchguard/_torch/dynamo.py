"""Dynamo: the cache entries of a compiled function, and the frame of a call."""

import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchguard._torch.guards import Guards, guards_of


def keep_static(tensor: Tensor) -> Tensor:
    """Have Dynamo take the sizes of a tensor for constants. Else it may take one for that of a batch that is as large.

    `mark_static` is documented, under a private name. Where that is missing, a model may compile once more.
    """
    import torch._dynamo  # not at import: it is heavy

    mark_static = getattr(torch._dynamo, "mark_static", None)
    if mark_static is not None:
        mark_static(tensor)
    return tensor


class Kept(NamedTuple):
    """Where Dynamo keeps what it compiles for a call: by code, by region, and for a backend (None: cannot be told).

    `limit` is how much it compiles there.
    """

    code: types.CodeType
    region: int
    backend: Any
    limit: int


def entries_of(kept: Kept) -> list[tuple[str, Guards]]:
    """What is compiled there, with its compile id: the region's own first, then what all share.

    The backend of an entry has no public name. Where it cannot be told, the entries of all backends count.
    """
    entries = [*_in_region(kept, kept.region), *(_in_region(kept, -1) if kept.region != -1 else ())]
    fitting = [entry for entry in entries if _is_for(entry, kept.backend) and _is_alive(entry)]
    return [(str(entry.compile_id), guards_of(entry.guard_manager)) for entry in fitting]


def is_full(kept: Kept) -> bool:
    """Whether Dynamo compiles no more there: a region has a limit, and so have all regions and backends together."""
    import torch._dynamo.config as config
    from torch._dynamo import eval_frame

    in_all = getattr(eval_frame, "_get_total_cache_entry_count", lambda code: len(_in_region(kept, kept.region)))
    limit_of_all = getattr(config, "accumulated_recompile_limit", sys.maxsize)
    return len(_in_region(kept, kept.region)) >= kept.limit or in_all(kept.code) >= limit_of_all


def _in_region(kept: Kept, region: int) -> list[Any]:
    """Entries of a region. Before torch 2.13 there is one for all."""
    from torch._dynamo import eval_frame

    of_region = getattr(eval_frame, "_get_cache_entries_for_region", None)
    return list(
        eval_frame._debug_get_cache_entry_list(kept.code) if of_region is None else of_region(kept.code, region)
    )


def _is_for(entry: Any, backend: Any) -> bool:
    its = getattr(entry, "backend", None)
    return its is None or backend is None or its is backend or (type(its) is type(backend) and its == backend)


def stance() -> str:
    """What `torch.compiler.set_stance` was told; "default" where that cannot be read."""
    return _of_stance("stance", "default")


def _of_stance(name: str, default: Any) -> Any:
    from torch._dynamo import eval_frame

    return getattr(getattr(eval_frame, "_stance", None), name, default)


def _is_alive(entry: Any) -> bool:
    manager = entry.guard_manager  # which Dynamo takes another for when an object is gone that guards were about
    return getattr(manager, "root", None) is not None and manager.global_scope is not None


class Frame(NamedTuple):
    """The first frame of a call: where its compiled code is kept, and its locals when it starts.

    `cells` are the variables of enclosing functions, and `arguments` the names of arguments, by source.
    """

    kept: Kept
    f_locals: dict[str, Any]
    cells: dict[str, types.CellType]
    arguments: dict[str, str]


def frame_of(compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame | None:
    """The frame that Dynamo would look up for a call; None if this was not compiled."""
    found = _compiled_function(compiled)
    if found is None:
        return None
    inner, kept = found
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
    return Frame(kept, f_locals, of_source, arguments)


def kept_for(compiled: Any) -> Kept | None:
    """Where Dynamo looks up what is compiled for a call; None if this was not compiled."""
    found = _compiled_function(compiled)
    return None if found is None else found[1]


def _compiled_function(compiled: Any) -> tuple[Callable[..., Any], Kept] | None:
    call = _made_by_torch(compiled)
    if call is None:
        return None
    inner = call._torchdynamo_orig_callable
    if inspect.ismethod(call) and not inspect.ismethod(inner):  # a method of a class, decorated there
        inner = types.MethodType(inner, call.__self__)
    owner = getattr(inner, "__self__", None)
    if isinstance(owner, nn.Module) and inner.__func__ in (nn.Module.__call__, nn.Module._call_impl):
        inner = owner.forward  # the frames around it are torch's, which Dynamo skips
    code = getattr(inner, "__func__", inner).__code__
    return inner, Kept(code, getattr(call, "_isolate_recompiles_id", -1), *_backend_and_limit(call))


def _made_by_torch(compiled: Any) -> Any:
    """What `torch.compile` made, of a module that holds it, too; None if there is no such thing."""
    if not isinstance(compiled, nn.Module):
        return compiled if _is_made_by_torch(compiled) else None
    in_place = getattr(compiled, "_compiled_call_impl", None)  # what model.compile() makes
    calls = [compiled.forward] if hasattr(compiled, "_orig_mod") else [in_place, compiled.forward]
    return next((call for call in calls if _is_made_by_torch(call)), None)


def _is_made_by_torch(call: Any) -> bool:
    """`functools.wraps` copies all marks of what it wraps; so torch notes whose they are."""
    function = getattr(call, "__func__", call)
    is_marked = hasattr(function, "_torchdynamo_orig_callable")
    return is_marked and getattr(function, "_torchdynamo_wrapper_id", id(function)) == id(function)


def _backend_and_limit(call: Any) -> tuple[Any, int]:
    """What compiles for a call, and how often: from the closure of what `torch.compile` returns."""
    import torch._dynamo.config as config
    from torch._dynamo import eval_frame

    function = getattr(call, "__func__", call)
    free = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    found: Any = free["callback"].cell_contents if "callback" in free else None
    forced = _of_stance("backend", None)
    if forced is not None:
        found = eval_frame.get_compiler_fn(forced)
    limit = getattr(config, "recompile_limit", sys.maxsize)
    while hasattr(found, "_torchdynamo_orig_backend"):
        its = getattr(found, "_recompile_limit", None)
        limit, found = limit if its is None else its, found._torchdynamo_orig_backend
    return found or None, limit


def default_backend() -> object:
    """The backend of `torch.compile` where none is given, which torch 2.13 lets one set. Before, it was Inductor."""
    try:
        from torch._dynamo.backends.registry import get_default_backend  # not at import: it is heavy
    except ImportError:
        return "inductor"
    return get_default_backend()
