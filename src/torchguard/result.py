"""A value or an error, returned instead of raised."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

from torchguard.exceptions import UnwrapError

__all__ = ["Err", "Ok", "Result", "UnwrapError", "as_exception", "as_result", "unwrap"]

T = TypeVar("T")
U = TypeVar("U")
E = TypeVar("E")
P = ParamSpec("P")


@dataclass(frozen=True)
class Ok(Generic[T]):
    """The value of a call that succeeded.

    >>> Ok(20).map(lambda x: x + 1)
    Ok(21)
    """

    value: T

    def is_ok(self) -> bool:
        return True

    def is_err(self) -> bool:
        return False

    def unwrap(self) -> T:
        """The value."""
        return self.value

    def unwrap_err(self) -> Any:
        """Raises: there is no error."""
        raise UnwrapError(f"unwrap_err on {self!r}: it holds a value. Ask is_err() first.")

    @property
    def ok_value(self) -> T:
        """The value."""
        return self.value

    @property
    def err_value(self) -> None:
        """None: there is no error."""
        return None

    def unwrap_or(self, default: object) -> T:
        """The value; the default is for `Err`."""
        return self.value

    def map(self, fn: Callable[[T], U]) -> "Ok[U]":
        """`Ok(fn(value))`."""
        return Ok(fn(self.value))

    def map_err(self, fn: Callable[[Any], Any]) -> "Ok[T]":
        """Itself."""
        return self

    def and_then(self, fn: Callable[[T], "Result[U, E]"]) -> "Result[U, E]":
        """`fn(value)`, itself a `Result`."""
        return fn(self.value)

    def __repr__(self) -> str:
        return f"Ok({self.value!r})"


@dataclass(frozen=True)
class Err(Generic[E]):
    """The error of a call that failed.

    >>> Err("no such row").unwrap_or(0)
    0
    """

    error: E

    def is_ok(self) -> bool:
        return False

    def is_err(self) -> bool:
        return True

    def unwrap(self) -> Any:
        """Raises the error, or an `UnwrapError` that holds it if it is no exception."""
        if isinstance(self.error, BaseException):
            raise self.error
        raise UnwrapError(f"unwrap on {self!r}: it holds an error. Ask is_ok() first, or use unwrap_or(default).")

    def unwrap_err(self) -> E:
        """The error."""
        return self.error

    @property
    def ok_value(self) -> None:
        """None: there is no value."""
        return None

    @property
    def err_value(self) -> E:
        """The error."""
        return self.error

    def unwrap_or(self, default: U) -> U:
        """The default."""
        return default

    def map(self, fn: Callable[[Any], Any]) -> "Err[E]":
        """Itself."""
        return self

    def map_err(self, fn: Callable[[E], U]) -> "Err[U]":
        """`Err(fn(error))`."""
        return Err(fn(self.error))

    def and_then(self, fn: Callable[[Any], Any]) -> "Err[E]":
        """Itself."""
        return self

    def __repr__(self) -> str:
        return f"Err({self.error!r})"


Result = Ok[T] | Err[E]


def as_result(fn: Callable[P, T]) -> Callable[P, "Result[T, Exception]"]:
    """Return `Ok(value)`, or `Err(exception)` instead of raising.

    >>> as_result(int)("12"), as_result(int)("x").is_err()
    (Ok(12), True)
    """

    @functools.wraps(fn)
    def returning(*args: P.args, **kwargs: P.kwargs) -> "Result[T, Exception]":
        try:
            return Ok(fn(*args, **kwargs))
        except Exception as error:
            return Err(error)

    return returning


def as_exception(fn: Callable[P, "Result[T, Any]"]) -> Callable[P, T]:
    """Return the value of the `Result`, or raise its error."""

    @functools.wraps(fn)
    def raising(*args: P.args, **kwargs: P.kwargs) -> T:
        return fn(*args, **kwargs).unwrap()

    return raising


def unwrap(target: Any) -> Any:
    """`as_exception` under another name; given a `Result`, its value."""
    return target.unwrap() if isinstance(target, (Ok, Err)) else as_exception(target)
