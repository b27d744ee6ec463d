"""`@tensorcheck`: validates annotations in eager mode, and records NaN and Inf of returned tensors."""

import functools
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

from torch import nn
from torch.compiler import is_compiling

from torchguard._channel.config import get_config
from torchguard._torch.tracing import constant_in_graphs, is_jit_tracing
from torchguard.checks import location_id
from torchguard.exceptions import AnnotationError, InvalidReturnTypeError, ValidationWarning
from torchguard.locations._tracked import location_of
from torchguard.typing._contract import Contract
from torchguard.typing._detection import ReturnLayout, codes_to_detect, detect, flags_at, layout_of
from torchguard.typing._hints import names_around

F = TypeVar("F", bound=Callable[..., Any])


@overload
def tensorcheck(function: F, *, auto_detect: bool | Iterable[int] | None = True) -> F: ...
@overload
def tensorcheck(function: None = None, *, auto_detect: bool | Iterable[int] | None = True) -> Callable[[F], F]: ...
def tensorcheck(function: Any = None, *, auto_detect: bool | Iterable[int] | None = True) -> Any:
    """Validate the tensor annotations of a function, and record NaN and Inf of returned tensors in the returned flags.

    In eager mode, arguments and returned values are validated against `Tensor[...]` and jaxtyping annotations; a
    violation raises a `ValidationError`. Under `torch.compile` nothing is validated, and the graph contains no trace of
    the validation; NaN and Inf are recorded there as well.

    Args:
        auto_detect: True for NaN and Inf, False for neither, or a set: `{err.NAN}`.

    >>> from torchguard.typing import Tensor, float32_t
    >>> @tensorcheck
    ... def scale(x: Tensor[float32_t, ("batch", 4)], by: Tensor[float32_t, ("batch",)]):
    ...     return x * by[:, None]
    >>> scale(torch.ones(3, 4), torch.ones(2))
    Traceback (most recent call last):
    ...
    torchguard.exceptions.DimensionMismatchError: scale: by has the wrong shape.
    <BLANKLINE>
      by: Tensor[float32_t, ('batch',)]
        declared  (batch,)
        expected  (    3,)
        found     (    2,)
                       ^
    <BLANKLINE>
      batch = 3 (dim 0 of x)
    """
    codes = codes_to_detect(auto_detect)
    must_find = bool(codes) and auto_detect is not True
    if function is None:
        return lambda later: _checked(later, codes, must_find, sys._getframe(1))
    return _checked(function, codes, must_find, sys._getframe(1))


def _checked(function: Any, codes: frozenset[int], must_find: bool, frame: types.FrameType) -> Any:
    if isinstance(function, (classmethod, staticmethod)):
        return type(function)(_checked(function.__func__, codes, must_find, frame))
    _require_function(function)
    contract = Contract(function, names_around(inspect.unwrap(function), frame))
    terms = contract.terms
    checked = _validated(function, contract) if terms.say_something else function
    has_no_flags = not terms.unresolved and not layout_of(terms.returned).may_have_flags
    return _recording(checked, contract, codes, must_find) if codes and (must_find or not has_no_flags) else checked


def _validated(function: Callable[..., Any], contract: Contract) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or is_jit_tracing():
            return function(*args, **kwargs)
        if contract.terms.unresolved:
            contract.complete()
        scope = contract.check_arguments(args, kwargs)
        result = function(*args, **kwargs)
        contract.check_return(result, scope)
        return result

    return checked


def _recording(
    function: Callable[..., Any], contract: Contract, codes: frozenset[int], must_find: bool
) -> Callable[..., Any]:
    @constant_in_graphs
    def layout() -> ReturnLayout:
        return layout_of(contract.complete(strictly=False).returned)

    @functools.wraps(function)
    def recording(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        known = layout()
        found = flags_at(result, known)
        if found is not None:
            return detect(result, *found, known, codes, _location(args, contract.name))
        if must_find and not is_compiling():
            _miss_flags(contract.name)
        return result

    return recording


def _require_function(function: Any) -> None:
    if isinstance(function, type):
        raise AnnotationError(f"tensorcheck: {function.__name__} is a class. Decorate its methods.")
    if isinstance(function, nn.Module):
        raise AnnotationError(f"tensorcheck: a {type(function).__name__} is a module. Decorate its forward.")
    if not isinstance(function, types.FunctionType):
        raise AnnotationError(
            f"tensorcheck: a {type(function).__name__} is no function. Decorate the function itself, in its class and "
            "below decorators that make something else of it."
        )
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise AnnotationError(f"tensorcheck: {function.__qualname__} is async. Decorate the function it awaits.")


def _location(args: tuple[Any, ...], name: str) -> int:
    """The location of a method of a tracked module is that module; otherwise the name of the function."""
    owner = args[0] if args else None
    is_tracked = isinstance(owner, nn.Module) and location_of(owner) is not None
    return location_id(owner if is_tracked else name)


def _miss_flags(name: str) -> None:
    message = f"{name}: auto_detect names codes, but the returned value contains no flags. Return (..., f)."
    if get_config().strict_validation:
        raise InvalidReturnTypeError(message, name, "return")
    warnings.warn(message, ValidationWarning, stacklevel=4)
