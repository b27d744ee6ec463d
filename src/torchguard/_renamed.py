"""Parameters that are also accepted under a second name: that of 1.x, or of the specification's tables."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torchguard.exceptions import GivenTwiceError

F = TypeVar("F", bound=Callable[..., Any])


def renamed(**names: str) -> Callable[[F], F]:
    """Accept keywords under a second name as well: `@renamed(flags="f")` takes `flags=` for `f=`.

    A static type checker sees the first name only.
    """

    def decorate(fn: F) -> F:
        order = list(inspect.signature(fn).parameters)
        parameters = tuple((second, own, order.index(own)) for second, own in names.items())

        @functools.wraps(fn)
        def accepting(*args: Any, **kwargs: Any) -> Any:
            if not kwargs:  # the common case, kept cheap
                return fn(*args)
            for second, own, position in parameters:
                if second in kwargs:
                    if own in kwargs or position < len(args):
                        who = fn.__qualname__
                        raise GivenTwiceError(f"{who}: {own} and {second} are the same parameter. Give {own} alone.")
                    kwargs[own] = kwargs.pop(second)
            return fn(*args, **kwargs)

        return accepting  # pyright: ignore[reportReturnType]

    return decorate
