"""What a node of a graph has for a value when it is evaluated exactly: elements of a field, with a tangent."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeAlias, Union

import torch
from torch import Tensor

from torchguard.compiled.certify.algebra._field import Field

Operand: TypeAlias = Union["Value", int, float, Fraction]

# The functions of which we know the derivative, given argument and result. Everything else is made of these.
DERIVATIVES: dict[str, Callable[..., Operand]] = {
    "exp": lambda x, y: y,
    "log": lambda x, y: 1 / x,
    "sqrt": lambda x, y: 1 / (2 * y),
    "sin": lambda x, y: x.cos(),
    "cos": lambda x, y: -x.sin(),
    "erf": lambda x, y: 1.1283791670955126 * (-x * x).exp(),
    "asin": lambda x, y: 1 / (1 - x * x).sqrt(),
    "acos": lambda x, y: -1 / (1 - x * x).sqrt(),
    "atan": lambda x, y: 1 / (1 + x * x),
    "asinh": lambda x, y: 1 / (x * x + 1).sqrt(),
    "acosh": lambda x, y: 1 / (x * x - 1).sqrt(),
    "atanh": lambda x, y: 1 / (1 - x * x),
    "lgamma": lambda x, y: x.digamma(),
    "erfinv": lambda x, y: 0.8862269254527579 * (y * y).exp(),
}


@dataclass(frozen=True)
class Value:
    """Elements of a field with their tangents, or integers or booleans as they are.

    Attributes:
        tangent: None where it is zero.
        is_exact: an integer or boolean tensor, not elements of the field.
        log_part: (base, factor), where the value is known to be base + log(factor).
        real: for what a graph takes, the real numbers that the elements stand for.
    """

    field: Field
    element: Tensor
    tangent: Tensor | None = None
    is_exact: bool = False
    log_part: tuple[Tensor, Tensor] | None = None
    real: Tensor | None = None

    # Arithmetic

    def __add__(self, other: Operand) -> "Value":
        a, b = self._paired(other)
        if a.is_exact:
            return exact(a.field, _integers(a.element) + _integers(b.element))
        parts = None
        if a.log_part is not None or b.log_part is not None:
            (u, s), (v, t) = a._split(), b._split()
            parts = a.field.add(u, v), a.field.mul(s, t)
        element = a.field.add(a.element, b.element)
        return Value(a.field, element, _sum(a.field, a.tangent, b.tangent, element), log_part=parts)

    def __neg__(self) -> "Value":
        if self.is_exact:
            return exact(self.field, -self.element)
        parts = None
        if self.log_part is not None:
            parts = self._negative(self.log_part[0]), self.field.inverse(self.log_part[1])
        tangent = None if self.tangent is None else self._negative(self.tangent)
        return Value(self.field, self._negative(self.element), tangent, log_part=parts)

    def __sub__(self, other: Operand) -> "Value":
        return self + -self._other(other)

    def __mul__(self, other: Operand) -> "Value":
        a, b = self._paired(other)
        if a.is_exact:
            return exact(a.field, _integers(a.element) * _integers(b.element))
        return a.bilinear(b, a.field.mul)

    def __truediv__(self, other: Operand) -> "Value":
        return self.as_elements() * self._other(other).as_elements().reciprocal()

    def __radd__(self, other: Operand) -> "Value":
        return self + other

    def __rmul__(self, other: Operand) -> "Value":
        return self * other

    def __rsub__(self, other: Operand) -> "Value":
        return -self + other

    def __rtruediv__(self, other: Operand) -> "Value":
        return self.reciprocal() * other

    def reciprocal(self) -> "Value":
        x = self.as_elements()
        inverse = x.field.inverse(x.element)
        tangent = None if x.tangent is None else x._negative(x.field.mul(x.tangent, x.field.mul(inverse, inverse)))
        return Value(x.field, inverse, tangent)

    def square(self) -> "Value":
        return self * self

    def whole_power(self, n: int) -> "Value":
        if self.is_exact:
            return exact(self.field, _integers(self.element) ** n)
        x, f = self, self.field
        y = f.power(x.element, n)
        if x.tangent is None or n == 0:
            return Value(f, y)
        slope = f.mul(f.power(x.element, n - 1), f.constant(n))
        return Value(f, y, f.mul(x.tangent, slope))

    def bilinear(self, other: "Value", product: Callable[[Tensor, Tensor], Tensor]) -> "Value":
        """A product of any kind, by the product rule."""
        a, b = self.as_elements(), other.as_elements()
        element = product(a.element, b.element)
        left = None if a.tangent is None else product(a.tangent, b.element)
        right = None if b.tangent is None else product(a.element, b.tangent)
        return Value(a.field, element, _sum(a.field, left, right, element))

    def matmul(self, other: "Value") -> "Value":
        return self.bilinear(other, self.field.matmul)

    def linear(self, map_: Callable[[Tensor], Tensor]) -> "Value":
        """A linear map, the tangent's as well."""
        return Value(
            self.field,
            map_(self.element),
            None if self.tangent is None else map_(self.tangent),
            is_exact=self.is_exact,
        )

    def arranged(self, map_: Callable[[Tensor], Tensor]) -> "Value":
        """A map that only moves, repeats or drops elements."""
        parts = None if self.log_part is None else (map_(self.log_part[0]), map_(self.log_part[1]))
        return replace(self.linear(map_), log_part=parts)

    def total(self, dims: list[int], keepdim: bool = False) -> "Value":
        if self.is_exact:
            return exact(self.field, _integers(self.element).sum(dims, keepdim=keepdim) if dims else self.element)
        return self.linear(lambda t: self.field.total(t, dims, keepdim))

    # Functions

    def exp(self) -> "Value":
        """exp(-x) = 1 / exp(x), exp(0) = 1 and exp(u + log(s)) = s * exp(u) hold; nothing else does."""
        x, f = self.as_elements(), self.field
        base, factor = x._split() if x.log_part is not None else (x.element, None)
        smaller, is_negative = f.folded(base)
        known = f.unknown_function("exp", smaller)
        y = torch.where(is_negative, f.inverse(known), torch.where(base == 0, 1, known))
        return x._result("exp", y if factor is None else f.mul(y, factor))

    def log(self) -> "Value":
        x = self.as_elements()
        if not bool(x.element.all()):
            x.field.journal.zero_divisions.add(x.field.journal.node)
        y = torch.where(x.element == 1, 0, x.field.unknown_function("log", x.element))
        return replace(x._result("log", y), log_part=(torch.zeros_like(y), x.element))

    def sin(self) -> "Value":
        t, is_negative = self._half_angle()
        f = self.field
        y = f.mul(f.add(t, t), f.inverse(f.reduced(f.mul(t, t) + 1)))
        return self._result("sin", f.reduced(torch.where(is_negative, -y, y)))

    def cos(self) -> "Value":
        t, _ = self._half_angle()
        f = self.field
        tt = f.mul(t, t)
        return self._result("cos", f.mul(f.reduced(1 - tt), f.inverse(f.reduced(tt + 1))))

    def _half_angle(self) -> tuple[Tensor, Tensor]:
        # sin and cos of an unknown half-angle tangent: sin² + cos² = 1, sin is odd and cos even.
        smaller, is_negative = self.field.folded(self.as_elements().element)
        return torch.where(smaller == 0, 0, self.field.unknown_function("tan_half", smaller)), is_negative

    def odd(self, name: str) -> "Value":
        """A function with f(-x) = -f(x), whose derivative is known."""
        smaller, is_negative = self.field.folded(self.as_elements().element)
        y = torch.where(smaller == 0, 0, self.field.unknown_function(name, smaller))
        return self._result(name, torch.where(is_negative, self._negative(y), y))

    def function(self, name: str) -> "Value":
        """A function of which nothing but the derivative is known."""
        return self._result(name, self.field.unknown_function(name, self.as_elements().element))

    def sqrt(self) -> "Value":
        x = self.as_elements()
        return self._result("sqrt", torch.where(x.element == 0, 0, x.field.unknown_function("sqrt", x.element)))

    def erf(self) -> "Value":
        return self.odd("erf")

    def digamma(self) -> "Value":
        return self.function("digamma")

    def sigmoid(self) -> "Value":
        return 1 / (1 + (-self).exp())

    def tanh(self) -> "Value":
        return 1 - 2 / (1 + (2 * self).exp())

    def _result(self, name: str, y: Tensor) -> "Value":
        if self.tangent is None:
            return Value(self.field, y)
        if name not in DERIVATIVES:
            raise UnknownDerivativeError(name)
        plain = Value(self.field, self.as_elements().element)
        slope = plain._other(DERIVATIVES[name](plain, Value(self.field, y)))
        return Value(self.field, y, self.field.mul(self.tangent, slope.element))

    # Order

    def sizes(self) -> Tensor:
        """The real numbers these are, for comparing."""
        return (
            self.element.to(torch.float64)
            if self.is_exact
            else self.field.sizes(self.element).nan_to_num(0.0, math.inf, -math.inf)
        )

    def gt(self, other: Operand) -> "Value":
        a, b = self._paired(other)
        left, right = a.sizes(), b.sizes()
        # Of numbers that differ by less than rounding shows, one is the larger all the same, and the same one always.
        outcome = ((left > right) | ((left == right) & (a.element > b.element))) & (a.element != b.element)
        self.field.journal.compared(outcome)
        return exact(self.field, outcome)

    def lt(self, other: Operand) -> "Value":
        return self._other(other).gt(self)

    def eq(self, other: Operand) -> "Value":
        a, b = self._paired(other)
        return exact(self.field, a.element == b.element)

    def inverted(self) -> "Value":
        return exact(self.field, ~self.element)

    def ge(self, other: Operand) -> "Value":
        return self.lt(other).inverted()

    def le(self, other: Operand) -> "Value":
        return self.gt(other).inverted()

    def where(self, yes: Operand, no: Operand) -> "Value":
        """The one where this is true, the other elsewhere."""
        a, b = self._other(yes)._paired(self._other(no))
        element = torch.where(self.element, a.element, b.element)
        if a.is_exact:
            return exact(self.field, element)
        if a.tangent is None and b.tangent is None:
            return Value(self.field, element)
        zero = torch.zeros((), dtype=self.field.dtype)
        tangents = (zero if t is None else t for t in (a.tangent, b.tangent))
        return Value(self.field, element, torch.where(self.element, *tangents).expand(element.shape))

    def sgn(self) -> "Value":
        signs = self.gt(0).where(1, self.lt(0).where(-1, 0))
        return signs if self.is_exact else signs.as_elements()

    # Kinds

    def as_elements(self) -> "Value":
        return Value(self.field, self.field.tensor(self.element)) if self.is_exact else self

    def without_tangent(self) -> "Value":
        return replace(self, tangent=None)

    @property
    def shape(self) -> torch.Size:
        return self.element.shape

    def _split(self) -> tuple[Tensor, Tensor]:
        return self.log_part if self.log_part is not None else (self.element, torch.ones_like(self.element))

    def _negative(self, element: Tensor) -> Tensor:
        return self.field.reduced(-element)

    def _other(self, other: Operand) -> "Value":
        if isinstance(other, Value):
            return other
        if isinstance(other, bool | int):
            return exact(self.field, torch.tensor(other))
        return Value(self.field, self.field.constant(other))

    def _paired(self, other: Operand) -> "tuple[Value, Value]":
        b = self._other(other)
        return (self, b) if self.is_exact and b.is_exact else (self.as_elements(), b.as_elements())


class UnknownDerivativeError(LookupError):
    """A function was differentiated whose derivative is in no table."""


def exact(field: Field, element: Tensor) -> Value:
    """An integer or boolean tensor as it is."""
    return Value(field, element, is_exact=True)


def _integers(element: Tensor) -> Tensor:
    return element.to(torch.int64)


def _sum(field: Field, a: Tensor | None, b: Tensor | None, like: Tensor) -> Tensor | None:
    if a is None or b is None:
        only = b if a is None else a
        return None if only is None else only.expand(like.shape)
    return field.add(a, b)
