"""`torch.compile` with a guard filter, without the traps of passing one in its options."""

import inspect
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import torch

from torchguard._torch import dynamo, guards, inductor
from torchguard._torch.process import process_state
from torchguard.exceptions import GuardError, GuardWarning
from torchguard.guards._explain import Entry
from torchguard.guards._filters import Filter, FilterFunction, by_function

C = TypeVar("C", bound=Callable)

# The filter each code was last compiled with, where torch cannot keep two apart.
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
    """`torch.compile(model, ...)` that keeps the guards `filter` keeps. Without a model, a decorator.

    What it compiles is its own: another filter on the same function has another cache, options may be used again,
    and a `mode` goes with a filter. Only what plain `torch.compile` made of the function before is used as long as its
    guards hold.

    Args:
        filter: a `Filter`, a function in torch's form, or an audit.
        torch_compile_kwargs: what else `torch.compile` takes.
    """
    filter, kwargs = _without_traps(filter, torch_compile_kwargs)

    def compile_one(model: Callable) -> Callable:
        if not _isolates_recompiles():
            _warn_of_shared_cache(model, filter)
        # A new dict each time: torch takes the filter out of the one it is given.
        options = {**kwargs["options"], "guard_filter_fn": filter} if filter is not None else kwargs["options"]
        return torch.compile(model, **{**kwargs, "options": options})

    return compile_one if model is None else compile_one(model)


def entries(model: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Entry]:
    """The guards of a call as a filter is shown them, for `Filter.explain`: it is compiled, and called once."""
    found: list[Entry] = []

    def keep_and_note(shown: Sequence[Entry]) -> list[bool]:
        found.extend(shown)
        return [True] * len(shown)

    compile(model, filter=keep_and_note, backend="eager")(*args, **kwargs)
    return found


def _without_traps(filter: Any, given: dict[str, Any]) -> tuple[FilterFunction | None, dict[str, Any]]:
    """The filter, and what to pass to `torch.compile` beside it."""
    kwargs = dict(given)
    options, mode = kwargs.pop("options", None), kwargs.pop("mode", None)
    if mode is not None and options is not None:
        raise GuardError(
            f"compile: torch takes a mode or options, and got mode={mode!r} and options. "
            f"Leave the mode out and write what it stands for into the options: {guards.LIST_MODE_OPTIONS}()."
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
            f"compile: mode={mode!r} and filter= go together with the backend 'inductor' only. "
            "Leave the mode out, or bind it to your backend: functools.partial(backend, mode=...)."
        )
    return inductor.mode_options(mode, dynamic)


def _isolates_recompiles() -> bool:
    """Whether this torch can keep apart what two calls of `torch.compile` make of one function: from 2.13 on."""
    return "isolate_recompiles" in inspect.signature(torch.compile).parameters


def _warn_of_shared_cache(model: object, filter: object) -> None:
    fn = type(model).forward if isinstance(model, torch.nn.Module) else model
    code = getattr(inspect.unwrap(fn) if callable(fn) else fn, "__code__", None)
    if code is None:
        return
    this = None if filter is None else weakref.ref(filter)  # it may know the model
    if code in _last_filters and _last_filters[code] is not this:
        warnings.warn(
            f"compile: {code.co_qualname} was compiled with another filter before, and torch {torch.__version__} keeps "
            "one cache for both: what is there already is used, whichever filter made it. "
            "Use torch 2.13, or compile a copy of the function.",
            GuardWarning,
            stacklevel=3,
        )
    _last_filters[code] = this
