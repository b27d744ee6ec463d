"""Declared dimensions and the sizes that they accept; `Dim`, for sizes that are attributes of `self`."""

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from torchguard.exceptions import AnnotationError

if TYPE_CHECKING:
    from torchguard.typing._scope import CheckedTensor, Scope


class Attribute:
    """A size that is read at call time: an attribute, or arithmetic over attributes and integers.

    Its own attributes have dunder names, because any plain name may be an attribute of the user's object.
    """

    __slots__ = ("__is_path__", "__read__", "__text__")

    def __init__(self, text: str, read: Callable[[Any], Any], is_path: bool = True) -> None:
        self.__text__, self.__read__, self.__is_path__ = text, read, is_path

    def __getattr__(self, name: str) -> "Attribute":
        if name.startswith("__"):  # looked up by Python itself, for example to copy
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


# Typed as Any: static checkers ignore everything after the dtype.
Dim: Any = Attribute("Dim", lambda owner: owner)
"""The object a method belongs to: `Dim.hidden`, `Dim.config.heads`, `Dim.sizes[0]`, `Dim.hidden * 4`."""


class DimSpec:
    """One declared dimension.

    Most decide at once whether they accept a size. Those that depend on other tensors are `deferred`: `accepts_finally`
    decides when all tensors of the call are known.
    """

    text: str
    deferred = False

    def accepts(self, size: int, scope: "Scope") -> bool:
        """Whether the size is accepted, as far as the tensors so far decide."""
        return True

    def accepts_finally(self, size: int, scope: "Scope", checked: "CheckedTensor", from_right: int) -> bool:
        return True

    def expected(self, scope: "Scope") -> int | None:
        """The only accepted size, if there is one and it is known."""
        return None


class Exact(DimSpec):
    def __init__(self, size: int) -> None:
        self.size, self.text = size, str(size)

    def accepts(self, size: int, scope: "Scope") -> bool:
        return size == self.size

    def expected(self, scope: "Scope") -> int | None:
        return self.size


class Named(DimSpec):
    """Any size, the same wherever the name occurs: the first tensor in argument order binds it."""

    def __init__(self, name: str) -> None:
        self.name = self.text = name

    def accepts(self, size: int, scope: "Scope") -> bool:
        return scope.sizes.setdefault(self.name, size) == size

    def expected(self, scope: "Scope") -> int | None:
        return scope.sizes.get(self.name)


class AnySize(DimSpec):
    text = "_"


class OneOr(DimSpec):
    """Size 1, or what another dimension accepts: jaxtyping's `#`."""

    def __init__(self, dim: DimSpec) -> None:
        self.dim, self.text, self.deferred = dim, f"#{dim.text}", dim.deferred

    def accepts(self, size: int, scope: "Scope") -> bool:
        return size == 1 or self.dim.accepts(size, scope)

    def accepts_finally(self, size: int, scope: "Scope", checked: "CheckedTensor", from_right: int) -> bool:
        return size == 1 or self.dim.accepts_finally(size, scope, checked, from_right)

    def expected(self, scope: "Scope") -> int | None:
        return self.dim.expected(scope)


class Broadcasting(DimSpec):
    """Any size that broadcasts against another tensor of the call, dims counted from the right."""

    text, deferred = "Broadcast", True

    def accepts_finally(self, size: int, scope: "Scope", checked: "CheckedTensor", from_right: int) -> bool:
        others = self.others(scope, checked, from_right)
        return size == 1 or not others or bool(others & {1, size})

    def others(self, scope: "Scope", checked: "CheckedTensor", from_right: int) -> set[int]:
        """The sizes of the other tensors of the call at this dimension."""
        shapes = [shape for spec, path, shape in scope.checked if path != checked[1]]
        return {shape[-from_right] for shape in shapes if len(shape) >= from_right}

    def __repr__(self) -> str:
        return self.text


class Formula(DimSpec):
    """A size computed from others: `seq - 1`, and in braces from arguments: `{self.hidden} * 4`."""

    deferred = True

    def __init__(self, text: str, names: frozenset[str], compute: Callable[["Scope"], Any]) -> None:
        self.text, self.names, self._compute = text, names, compute

    def accepts(self, size: int, scope: "Scope") -> bool:
        expected = self.expected(scope)
        return expected is None or expected == size

    def accepts_finally(self, size: int, scope: "Scope", checked: "CheckedTensor", from_right: int) -> bool:
        return self.accepts(size, scope)

    def expected(self, scope: "Scope") -> int | None:
        # A name that only an omitted argument would bind imposes nothing.
        return as_size(self.text, self._compute(scope)) if self.names <= scope.sizes.keys() else None


class OfSelf(DimSpec):
    """A size read from `self`: `Dim.hidden`."""

    def __init__(self, text: str, read: Callable[[Any], Any]) -> None:
        self.text, self._read = text, read

    def accepts(self, size: int, scope: "Scope") -> bool:
        return size == self.expected(scope)

    def expected(self, scope: "Scope") -> int:
        try:
            return as_size(self.text, self._read(scope.owner))
        except (AttributeError, LookupError, ArithmeticError, TypeError) as error:
            raise AnnotationError(f"{self.text} cannot be read off a {type(scope.owner).__name__}: {error}.") from error


def as_size(text: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise AnnotationError(f"{text} is {value!r}, a {type(value).__name__}. A size is a whole number.") from None


class RestSpec:
    """Any number of dimensions: `...`."""

    text = "..."

    def accepts(self, sizes: tuple[int, ...], scope: "Scope") -> bool:
        return True


class NamedRest(RestSpec):
    """Any number of dimensions, the same wherever the name occurs: jaxtyping's `*name`; with `#` up to broadcasting."""

    def __init__(self, name: str, broadcasts: bool) -> None:
        self.name, self.broadcasts = name, broadcasts
        self.text = f"*#{name}" if broadcasts else f"*{name}"

    def accepts(self, sizes: tuple[int, ...], scope: "Scope") -> bool:
        known, may_grow = scope.rests.setdefault(self.name, (sizes, self.broadcasts))
        if not (self.broadcasts or may_grow):
            return sizes == known
        joint = _broadcast(sizes, known)
        if joint is None or (not may_grow and joint != known) or (not self.broadcasts and joint != sizes):
            return False
        scope.rests[self.name] = joint, may_grow and self.broadcasts
        return True


def _broadcast(one: tuple[int, ...], two: tuple[int, ...]) -> tuple[int, ...] | None:
    try:
        return tuple(torch.broadcast_shapes(one, two))
    except RuntimeError:
        return None
