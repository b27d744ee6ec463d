"""The value of a node in an exact evaluation: elements of a field with their tangents, or integers."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeAlias, Union

import torch
from torch import Tensor

from torchguard.compiled.certify.algebra._field import PrimeField

Operand: TypeAlias = Union["Value", int, float, Fraction]

# The derivatives of elementary functions, given argument and result. All others are composed of these functions.
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
    "erfcx": lambda x, y: 2 * x * y - 1.1283791670955126,
    "log_ndtr": lambda x, y: 0.3989422804014327 * (-(x * x / 2 + y)).exp(),
    "i0": lambda x, y: x.odd("i1"),
    "i1": lambda x, y: x.even("i0") - y / x,
}


@dataclass(frozen=True)
class Value:
    """Elements of a field with their tangents, or integers or booleans.

    Attributes:
        tangent: None where it is zero.
        is_integer: `element` is an integer or boolean tensor, not elements of the field.
        log_part: (base, factor), where the value is known to be base + log(factor).
        real: for an input of a graph, the real numbers that the elements stand for.
    """

    field: PrimeField
    element: Tensor
    tangent: Tensor | None = None
    is_integer: bool = False
    log_part: tuple[Tensor, Tensor] | None = None
    real: Tensor | None = None

    # Arithmetic

    def __add__(self, other: Operand) -> "Value":
        a, b = self._paired(other)
        if a.is_integer:
            return integers(a.field, _as_int64(a.element) + _as_int64(b.element))
        parts = None
        if a.log_part is not None or b.log_part is not None:
            (u, s), (v, t) = a._split(), b._split()
            parts = a.field.add(u, v), a.field.mul(s, t)
        element = a.field.add(a.element, b.element)
        return Value(a.field, element, _sum(a.field, a.tangent, b.tangent, element), log_part=parts)

    def __neg__(self) -> "Value":
        if self.is_integer:
            return integers(self.field, -self.element)
        parts = None
        if self.log_part is not None:
            parts = self._negative(self.log_part[0]), self.field.inverse(self.log_part[1])
        tangent = None if self.tangent is None else self._negative(self.tangent)
        return Value(self.field, self._negative(self.element), tangent, log_part=parts)

    def __sub__(self, other: Operand) -> "Value":
        return self + -self._other(other)

    def __mul__(self, other: Operand) -> "Value":
        a, b = self._paired(other)
        if a.is_integer:
            return integers(a.field, _as_int64(a.element) * _as_int64(b.element))
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

    def integer_power(self, n: int) -> "Value":
        if self.is_integer:
            return integers(self.field, _as_int64(self.element) ** n)
        x, f = self, self.field
        y = f.power(x.element, n)
        if x.tangent is None or n == 0:
            return Value(f, y)
        slope = f.mul(f.power(x.element, n - 1), f.constant(n))
        return Value(f, y, f.mul(x.tangent, slope))

    def bilinear(self, other: "Value", product: Callable[[Tensor, Tensor], Tensor]) -> "Value":
        """A bilinear function of two values, differentiated by the product rule."""
        a, b = self.as_elements(), other.as_elements()
        element = product(a.element, b.element)
        left = None if a.tangent is None else product(a.tangent, b.element)
        right = None if b.tangent is None else product(a.element, b.tangent)
        return Value(a.field, element, _sum(a.field, left, right, element))

    def matmul(self, other: "Value") -> "Value":
        return self.bilinear(other, self.field.matmul)

    def linear(self, map_: Callable[[Tensor], Tensor]) -> "Value":
        """A linear map, applied to the tangent as well."""
        return Value(
            self.field,
            map_(self.element),
            None if self.tangent is None else map_(self.tangent),
            is_integer=self.is_integer,
        )

    def rearranged(self, map_: Callable[[Tensor], Tensor]) -> "Value":
        """A map that only moves, repeats or drops elements."""
        parts = None if self.log_part is None else (map_(self.log_part[0]), map_(self.log_part[1]))
        return replace(self.linear(map_), log_part=parts)

    def total(self, dims: list[int], keepdim: bool = False) -> "Value":
        if self.is_integer:
            return integers(self.field, _as_int64(self.element).sum(dims, keepdim=keepdim) if dims else self.element)
        return self.linear(lambda t: self.field.total(t, dims, keepdim))

    # Functions

    def exp(self) -> "Value":
        """An unknown function with exp(-x) = 1 / exp(x), exp(0) = 1 and exp(u + log(s)) = s * exp(u)."""
        x, f = self.as_elements(), self.field
        base, factor = x._split() if x.log_part is not None else (x.element, None)
        smaller, is_negative = f.folded(base)
        known = f.unknown_function("exp", smaller)
        y = torch.where(is_negative, f.inverse(known), torch.where(base == 0, 1, known))
        return x._result("exp", y if factor is None else f.mul(y, factor))

    def log(self) -> "Value":
        x = self.as_elements()
        if not bool(x.element.all()):
            x.field.trace.record_zero_division()
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
        # The tangent of the half angle is an unknown odd function: so sin² + cos² = 1, sin is odd and cos even.
        smaller, is_negative = self.field.folded(self.as_elements().element)
        return torch.where(smaller == 0, 0, self.field.unknown_function("tan_half", smaller)), is_negative

    def odd(self, name: str) -> "Value":
        """An unknown function with f(-x) = -f(x), whose derivative is known."""
        smaller, is_negative = self.field.folded(self.as_elements().element)
        y = torch.where(smaller == 0, 0, self.field.unknown_function(name, smaller))
        return self._result(name, torch.where(is_negative, self._negative(y), y))

    def even(self, name: str) -> "Value":
        """An unknown function with f(-x) = f(x), whose derivative is known."""
        smaller, _ = self.field.folded(self.as_elements().element)
        return self._result(name, self.field.unknown_function(name, smaller))

    def function(self, name: str) -> "Value":
        """An unknown function whose derivative is known."""
        return self._result(name, self.field.unknown_function(name, self.as_elements().element))

    def sqrt(self) -> "Value":
        x = self.as_elements()
        return self._result("sqrt", torch.where(x.element == 0, 0, x.field.unknown_function("sqrt", x.element)))

    def erf(self) -> "Value":
        return self.odd("erf")

    def digamma(self) -> "Value":
        return self.polygamma(0)

    def polygamma(self, n: int) -> "Value":
        """An unknown function for each n, whose derivative is the one for n + 1."""
        x = self.as_elements()
        y = x.field.unknown_function(f"polygamma {n}", x.element)
        if x.tangent is None:
            return Value(x.field, y)
        slope = x.without_tangent().polygamma(n + 1)
        return Value(x.field, y, x.field.mul(x.tangent, slope.element))

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

    def real_values(self) -> Tensor:
        """The real numbers that the elements stand for, to be compared."""
        return (
            self.element.to(torch.float64)
            if self.is_integer
            else self.field.real_values(self.element).nan_to_num(0.0, math.inf, -math.inf)
        )

    def gt(self, other: Operand) -> "Value":
        a, b = self._paired(other)
        left, right = a.real_values(), b.real_values()
        # Unequal elements whose real numbers round to the same float64 are ordered by their elements, consistently.
        outcome = ((left > right) | ((left == right) & (a.element > b.element))) & (a.element != b.element)
        self.field.trace.record_comparison(outcome)
        return integers(self.field, outcome)

    def lt(self, other: Operand) -> "Value":
        return self._other(other).gt(self)

    def eq(self, other: Operand) -> "Value":
        a, b = self._paired(other)
        return integers(self.field, a.element == b.element)

    def inverted(self) -> "Value":
        return integers(self.field, ~self.element)

    def ge(self, other: Operand) -> "Value":
        return self.lt(other).inverted()

    def le(self, other: Operand) -> "Value":
        return self.gt(other).inverted()

    def where(self, yes: Operand, no: Operand) -> "Value":
        """`yes` where this is true, `no` elsewhere."""
        a, b = self._other(yes)._paired(self._other(no))
        element = torch.where(self.element, a.element, b.element)
        if a.is_integer:
            return integers(self.field, element)
        if a.tangent is None and b.tangent is None:
            return Value(self.field, element)
        zero = torch.zeros((), dtype=self.field.dtype)
        tangents = (zero if t is None else t for t in (a.tangent, b.tangent))
        return Value(self.field, element, torch.where(self.element, *tangents).expand(element.shape))

    def sgn(self) -> "Value":
        signs = self.gt(0).where(1, self.lt(0).where(-1, 0))
        return signs if self.is_integer else signs.as_elements()

    # Conversions

    def as_elements(self) -> "Value":
        return Value(self.field, self.field.tensor(self.element)) if self.is_integer else self

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
            return integers(self.field, torch.tensor(other))
        return Value(self.field, self.field.constant(other))

    def _paired(self, other: Operand) -> "tuple[Value, Value]":
        b = self._other(other)
        return (self, b) if self.is_integer and b.is_integer else (self.as_elements(), b.as_elements())


class UnknownDerivativeError(LookupError):
    """A function was differentiated that has no row in `DERIVATIVES`."""


def integers(field: PrimeField, element: Tensor) -> Value:
    """An integer or boolean tensor as a value."""
    return Value(field, element, is_integer=True)


def _as_int64(element: Tensor) -> Tensor:
    return element.to(torch.int64)


def _sum(field: PrimeField, a: Tensor | None, b: Tensor | None, like: Tensor) -> Tensor | None:
    if a is None or b is None:
        only = b if a is None else a
        return None if only is None else only.expand(like.shape)
    return field.add(a, b)
