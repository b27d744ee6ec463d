"""`Dim`: sizes that stand in attributes of the object a method belongs to."""

import operator
from collections.abc import Callable
from typing import Any

from torchguard.exceptions import AnnotationError


class Attribute:
    """A size to be read later: an attribute, or arithmetic over attributes and whole numbers.

    Any plain name may be an attribute of the user's. So its own have names that only Python itself would use.
    """

    __slots__ = ("__is_path__", "__read__", "__text__")

    def __init__(self, text: str, read: Callable[[Any], Any], is_path: bool = True) -> None:
        self.__text__, self.__read__, self.__is_path__ = text, read, is_path

    def __getattr__(self, name: str) -> "Attribute":
        if name.startswith("__"):  # asked by Python itself, for copying and the like
            raise AttributeError(name)
        if not self.__is_path__:
            raise AnnotationError(f"{self!r} is a number: it has no {name!r}.")
        return Attribute(f"{self!r}.{name}", lambda owner: getattr(self.__read__(owner), name))

    def __getitem__(self, index: int) -> "Attribute":
        return Attribute(f"{self!r}[{index!r}]", lambda owner: self.__read__(owner)[index])

    def __truediv__(self, other: Any) -> "Attribute":
        raise AnnotationError(f"{self!r} / {other!r} may not be a whole number. Divide with //.")

    def __rtruediv__(self, other: Any) -> "Attribute":
        raise AnnotationError(f"{other!r} / {self!r} may not be a whole number. Divide with //.")

    def __neg__(self) -> "Attribute":
        raise AnnotationError(f"-{self!r} is no size.")

    def __call__(self, *args: Any, **kwargs: Any) -> "Attribute":
        raise AnnotationError(f"{self!r} cannot be called in an annotation. Give the size an attribute of its own.")

    def __repr__(self) -> str:
        return self.__text__


def _arithmetic(symbol: str, compute: Callable[[Any, Any], Any], turned: bool) -> Callable[[Any, Any], Any]:
    def combined(self: Attribute, other: Any) -> Attribute:
        if not isinstance(other, (int, Attribute)):
            raise AnnotationError(f"{self!r} and {other!r} make no whole number.")
        left, right = (other, self) if turned else (self, other)
        return Attribute(
            f"{_operand(left)} {symbol} {_operand(right)}",
            lambda owner: compute(_value(left, owner), _value(right, owner)),
            is_path=False,
        )

    return combined


def _operand(side: Any) -> str:
    return f"({side!r})" if isinstance(side, Attribute) and not side.__is_path__ else repr(side)


def _value(side: Any, owner: Any) -> Any:
    return side.__read__(owner) if isinstance(side, Attribute) else side


for _name, _symbol in {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%", "pow": "**"}.items():
    setattr(Attribute, f"__{_name}__", _arithmetic(_symbol, getattr(operator, _name), turned=False))
    setattr(Attribute, f"__r{_name}__", _arithmetic(_symbol, getattr(operator, _name), turned=True))


# Typed as Any: a static checker has nothing to say about what stands behind the dtype.
Dim: Any = Attribute("Dim", lambda owner: owner)
"""The object a method belongs to: `Dim.hidden`, `Dim.config.heads`, `Dim.sizes[0]`, `Dim.hidden * 4`."""
