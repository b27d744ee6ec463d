"""`torch.compile` with a guard filter.

Passing a filter in `torch.compile(options={"guard_filter_fn": ...})` has four pitfalls, which `compile` avoids:

- torch removes the filter from the dict it is given, so that a second use of the same options has none;
- two filters on one function share one cache: the second call uses what was compiled with the first filter;
- torch refuses a `mode` together with options;
- an exception in a filter surfaces as an internal error of Dynamo.
"""

import contextlib
import inspect
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, overload

import torch

from torchguard._torch import dynamo, guards, inductor
from torchguard._torch.process import process_state
from torchguard._torch.support import warn_of_missing
from torchguard.exceptions import GuardError, GuardWarning
from torchguard.guards._explain import FilterEntry
from torchguard.guards._filters import Filter, FilterFunction, by_function

C = TypeVar("C", bound=Callable)

# The filter that each function was last compiled with. Used before torch 2.13, which has one cache for all filters.
_last_filters: "weakref.WeakKeyDictionary[types.CodeType, weakref.ref[Any] | None]" = process_state(
    "filters", weakref.WeakKeyDictionary
)


@overload
def compile(model: C, *, filter: FilterFunction | None = None, **torch_compile_kwargs: Any) -> C: ...
@overload
def compile(
    model: None = None, *, filter: FilterFunction | None = None, **torch_compile_kwargs: Any
) -> Callable[[C], C]: ...


def compile(model: Any = None, *, filter: FilterFunction | None = None, **torch_compile_kwargs: Any) -> Any:
    """`torch.compile(model, ...)` that keeps only the guards `filter` keeps. Without a model, a decorator.

    Each filter on a function has a cache of its own, options can be used again, and a `mode` works with a filter. An
    entry that plain `torch.compile` cached for the function before is still used while its guards hold.

    Args:
        filter: a `Filter`, a function that torch takes as `guard_filter_fn`, or an `Audit`.
        torch_compile_kwargs: any other argument of `torch.compile`.
    """
    warn_of_missing("guards")
    filter, kwargs = _split_arguments(filter, torch_compile_kwargs)

    def compile_one(model: Callable) -> Callable:
        if not _isolates_recompiles():
            _warn_of_shared_cache(model, filter)
        # A new dict each time: torch removes the filter from the one it is given.
        options = {**kwargs["options"], "guard_filter_fn": filter} if filter is not None else kwargs["options"]
        return torch.compile(model, **{**kwargs, "options": options})

    return compile_one if model is None else compile_one(model)


def entries(model: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[FilterEntry]:
    """The guards of a call as Dynamo passes them to a filter, for `Filter.explain`. Compiles and calls it once."""
    found: list[FilterEntry] = []

    def record(entries: Sequence[FilterEntry]) -> list[bool]:
        found.extend(entries)
        return [True] * len(entries)

    compile(model, filter=record, backend="eager")(*args, **kwargs)
    return found


def _split_arguments(filter: Any, given: dict[str, Any]) -> tuple[FilterFunction | None, dict[str, Any]]:
    """The filter, and the other arguments of `torch.compile`."""
    kwargs = dict(given)
    options, mode = kwargs.pop("options", None), kwargs.pop("mode", None)
    if mode is not None and options is not None:
        raise GuardError(
            f"compile: torch takes either a mode or options, got mode={mode!r} and options. "
            f"Leave the mode out and copy its settings into the options: {guards.LIST_MODE_OPTIONS}()."
        )
    options = None if options is None else dict(options)
    inside = options.pop("guard_filter_fn", None) if options else None
    if inside is not None and filter is not None:
        raise GuardError("compile: got filter= and a guard_filter_fn in options. Combine them with & and pass filter=.")
    filter = _to_filter(inside if filter is None else filter)
    if filter is None:
        kwargs["mode"] = mode
    elif mode is not None:
        options = _mode_to_options(mode, kwargs.get("backend"), kwargs.get("dynamic"))
    if _isolates_recompiles():
        kwargs.setdefault("isolate_recompiles", True)
    kwargs["options"] = options if filter is None else options or {}
    return filter, kwargs


def _to_filter(filter: Any) -> FilterFunction | None:
    if filter is None or isinstance(filter, Filter) or getattr(filter, "is_audit", False):
        return filter
    return by_function(filter)


def _mode_to_options(mode: str, backend: object, dynamic: bool | None) -> dict[str, object]:
    if mode == "default":
        return {}
    if (dynamo.default_backend() if backend is None else backend) != "inductor":
        raise GuardError(
            f"compile: mode={mode!r} and filter= can be combined with the backend 'inductor' only. "
            "Leave the mode out, or bind it to your backend: functools.partial(backend, mode=...)."
        )
    return inductor.mode_options(mode, dynamic)


def _isolates_recompiles() -> bool:
    """Whether each call of `torch.compile` can have a cache of its own for one function: from torch 2.13 on."""
    return "isolate_recompiles" in inspect.signature(torch.compile).parameters


@contextlib.contextmanager
def own_cache() -> Iterator[None]:
    """A block that uses nothing that was compiled before it, and whose entries are not used after it.

    Since torch 2.13 each `compile` has a cache of its own. Before, entries of another filter would be used, so that all
    that was compiled in this process is forgotten before and after the block.
    """
    if _isolates_recompiles():
        yield
        return
    before = dict(_last_filters)
    torch.compiler.reset()
    _last_filters.clear()
    try:
        yield
    finally:
        torch.compiler.reset()
        _last_filters.clear()
        _last_filters.update(before)


def _warn_of_shared_cache(model: object, filter: object) -> None:
    """Before torch 2.13: warn where what was compiled with a filter may run for other calls."""
    if isinstance(model, torch.nn.Module) and type(model).__module__.startswith("torch."):
        if filter is not None and not getattr(filter, "is_audit", False):
            name = type(model).__name__
            warnings.warn(
                f"compile: torch {torch.__version__} has one cache for all modules of torch itself, such as this "
                f"{name}. If the filter drops the guards that tell them apart, what is compiled for this {name} may "
                "run for others. Use torch 2.13, compile a function or module of your own that calls it, or audit the "
                "filter.",
                GuardWarning,
                stacklevel=3,
            )
        return
    fn = type(model).forward if isinstance(model, torch.nn.Module) else model
    code = getattr(inspect.unwrap(fn) if callable(fn) else fn, "__code__", None)
    if code is None:
        return
    this = None if filter is None else weakref.ref(filter)  # weak: a filter may hold the model
    if code in _last_filters and _last_filters[code] is not this:
        warnings.warn(
            f"compile: {code.co_qualname} was compiled with another filter before, and torch {torch.__version__} has "
            "one cache for both: entries are used whichever filter they were compiled with. "
            "Use torch 2.13, or compile a copy of the function.",
            GuardWarning,
            stacklevel=3,
        )
    _last_filters[code] = this
