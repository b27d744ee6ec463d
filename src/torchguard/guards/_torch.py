"""The seam to Dynamo's guard trees, all of which is private torch: they are walked, and their leaves called.

Where a name is missing, `events.missing()` says which, and what needs it refuses in words; filters need none of them.
"""

import contextlib
import inspect
import sys
import traceback
import types
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import nn

# What advice names.
MARK_DYNAMIC, LIST_MODE_OPTIONS = "torch._dynamo.mark_dynamic", "torch._inductor.list_mode_options"
# The text by which a check of ours in Dynamo's trees is known.
OURS = "torchguard: the guards that were dropped"


Stack = Sequence[traceback.FrameSummary]


class Guards:
    """A tree of guards, and what is needed to call it."""

    def __init__(self, root: Any, scope: dict[str, Any]) -> None:
        self.root, self._scope = root, scope

    def has_at_root(self, type: str) -> bool:
        """Whether one of the guards on no source in particular is of that type."""
        return any(leaf.type == type for leaf in leaves_of(self.root))

    def check(self, f_locals: dict[str, Any]) -> bool:
        return self.root.check(f_locals)

    def first_failing(self, f_locals: dict[str, Any]) -> str:
        """What Dynamo itself would say: the text of the first guard that fails."""
        return "; ".join(self.root.check_verbose(f_locals).verbose_code_parts)

    def part(self, sources: Set[str]) -> "Guards":
        """The guards on these sources alone, which have to have the ways to them among them."""
        return Guards(self.root.clone_manager(lambda manager: manager.get_source() in sources), self._scope)

    def value(self, source: str, f_locals: dict[str, Any]) -> Any:
        """What a source such as `L['self'].k` stands for, in a call with these locals. May raise anything."""
        from torch._dynamo.guards import _get_closure_vars

        if source == "L":
            return f_locals
        if source == "G":
            return self._scope["G"]
        return eval(source, {**_get_closure_vars(), **self._scope}, {"L": f_locals})

    def listen(self, hook: Callable[[dict[str, Any]], bool]) -> None:
        """Have `hook` called with the locals of a call when all guards hold. Where it says False, they do not."""
        self.root.add_epilogue_lambda_guard(hook, [OURS], None)


def guards_of(wrapper: Any) -> Guards:
    """The tree that Dynamo keeps in a wrapper; one without guards, if what they are about is gone."""
    scope = wrapper.global_scope or {"G": {}}
    return Guards(wrapper.root, {**(wrapper.closure_vars or {}), "G": scope["G"]})


grad_mode = torch.is_grad_enabled
# Whether autocast is on for any device: the public way is asked device by device, in every call.
any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", torch.is_autocast_enabled)


def as_in_a_call() -> contextlib.AbstractContextManager[Any]:
    """Undo what Dynamo does while it checks guards, switching `__torch_function__` off, which is a guard itself."""
    return torch._C._EnableTorchFunction()  # pyright: ignore[reportAttributeAccessIssue]


class Leaf(NamedTuple):
    """One check in a tree. `holds` calls it with a value; None if it can only be checked together with others."""

    source: str
    type: str
    code: tuple[str, ...]
    holds: Callable[[Any], bool] | None


def children_of(manager: Any) -> list[Any]:
    from torch._C._dynamo.guards import DictGuardManager

    pairs = manager.get_key_value_managers().values() if isinstance(manager, DictGuardManager) else ()
    return [*(child for pair in pairs for child in pair if child), *manager.get_child_managers()]


def leaves_of(manager: Any) -> list[Leaf]:
    """The checks at one node of a tree; at the root, also those that run last. Ours is none of them."""
    from torch._C._dynamo.guards import RelationalGuard, RootGuardManager

    last = manager.get_epilogue_lambda_guards() if isinstance(manager, RootGuardManager) else []
    found = []
    for guard in [*manager.get_leaf_guards(), *last]:
        code = tuple(guard.verbose_code_parts())
        holds: Any = guard if callable(guard) and not isinstance(guard, RelationalGuard) else None
        if OURS not in code:
            found.append(Leaf(manager.get_source(), type(guard).__name__, code, holds))
    return found


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


def without_limits() -> contextlib.AbstractContextManager[Any]:
    """Compile as often as it takes: a trial should not use up what Dynamo grants a function in all."""
    import torch._dynamo.config as config

    named = ("accumulated_recompile_limit", "recompile_limit")
    return config.patch({name: 2**20 for name in named if hasattr(config, name)})  # pyright: ignore[reportAttributeAccessIssue]


# What filters need: where it is missing, they do without.


def guard_types() -> frozenset[str]:
    """The names of all guard types: the methods in capitals of Dynamo's builder of guards, listed nowhere else.

    Where the builder is missing there are none, and names of types are not checked.
    """
    try:
        from torch._dynamo.guards import GuardBuilder  # not at import: it is heavy
    except ImportError:
        return frozenset()
    return frozenset(name for name in vars(GuardBuilder) if name.isupper())


def unserializable_guard_types() -> frozenset[str]:
    """The guard types that cannot be saved, which ahead-of-time compilation drops. Missing, there are none."""
    try:
        from torch._dynamo.guards import CheckFunctionManager  # not at import: it is heavy
    except ImportError:
        return frozenset()
    return frozenset(getattr(CheckFunctionManager, "UNSUPPORTED_SERIALIZATION_GUARD_TYPES", ()))


def guard_sources(guard: Any) -> tuple[str, ...]:
    """What a guard of Dynamo's is reached from: of "global", "local", "module", "closure" and "state", one or two.

    A guard has a source with a chain of bases; neither is public. What cannot be told is "state".
    """
    chain = [getattr(guard, "originating_source", None)]
    while (base := getattr(chain[-1], "base", None)) is not None:
        chain.append(base)
    root, where, name = chain[-1], getattr(getattr(guard, "source", None), "name", ""), getattr(guard, "name", "")
    is_free = getattr(root, "is_derefed_cell_contents", False) and not getattr(root, "is_input", False)
    told = {
        "global": type(root).__name__ == "GlobalSource",
        "local": "LOCAL" in where and not is_free,
        "closure": is_free or ".__closure__" in name,
        "module": "MODULE" in where,
    }
    return tuple(kind for kind, is_it in told.items() if is_it and name) or ("state",)


def mode_options(mode: str, dynamic: bool | None) -> dict[str, object]:
    """The options of Inductor that a mode of `torch.compile` stands for.

    Torch refuses a mode beside options, and a filter travels in the options. Its docs name this function; where it
    is missing, a mode cannot be combined with a filter, and the ImportError says so.
    """
    from torch._inductor import list_mode_options  # not at import: it is heavy

    return dict(list_mode_options(mode, dynamic))


def default_backend() -> object:
    """The backend of `torch.compile` where none is given, which torch 2.13 lets one set. Before, it was Inductor."""
    try:
        from torch._dynamo.backends.registry import get_default_backend  # not at import: it is heavy
    except ImportError:
        return "inductor"
    return get_default_backend()
