"""Parameters with a second name: the one they have in 1.x, or in the tables of the specification."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torchguard.exceptions import TorchGuardError

F = TypeVar("F", bound=Callable[..., Any])


class GivenTwiceError(TorchGuardError, TypeError):
    """An argument was given under both of its names."""


def renamed(**names: str) -> Callable[[F], F]:
    """Accept keywords under a second name as well: `@renamed(flags="f")` takes `flags=` for `f=`.

    A static type checker sees the function as it is written, with the own names alone.
    """

    def decorate(fn: F) -> F:
        order = list(inspect.signature(fn).parameters)
        parameters = tuple((second, own, order.index(own)) for second, own in names.items())

        @functools.wraps(fn)
        def accepting(*args: Any, **kwargs: Any) -> Any:
            if not kwargs:  # as in most calls, which should cost next to nothing here
                return fn(*args)
            for second, own, place in parameters:
                if second in kwargs:
                    if own in kwargs or place < len(args):
                        who = fn.__qualname__
                        raise GivenTwiceError(f"{who}: {own} and {second} are the same parameter. Give {own} alone.")
                    kwargs[own] = kwargs.pop(second)
            return fn(*args, **kwargs)

        return accepting  # pyright: ignore[reportReturnType]

    return decorate
