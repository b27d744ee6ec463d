"""Element by element: arithmetic, comparisons and elementary functions.

The formulas use methods of their operands only, so that the tests can run them on symbols as well.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch

from torchguard.compiled.certify.algebra._field import UnsupportedError, reading_of
from torchguard.compiled.certify.algebra._values import Value, exact


def _add(a: Any, b: Any, *, alpha: float = 1) -> Any:
    return a + b if alpha == 1 else a + b * alpha


def _sub(a: Any, b: Any, *, alpha: float = 1) -> Any:
    return a - b if alpha == 1 else a - b * alpha


def _div(a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is not None:
        raise UnsupportedError(f"div with rounding_mode={rounding_mode!r}")
    return a / b


def power(x: Any, e: Any) -> Any:
    """`x ** e`: by roots and whole powers where e is a number, as an unknown function where it is a tensor."""
    if isinstance(e, Value):
        return _power_of_tensors(x, e)
    read = reading_of(float(e)) if math.isfinite(e) else None
    if not isinstance(x, Value):
        return x**e
    if read is None or not read.is_rational:
        raise UnsupportedError(f"pow with exponent {e}")
    q = read.rational
    if q.denominator == 1:
        return x.whole_power(int(q))
    if q.denominator == 2:
        return x.as_elements().sqrt().whole_power(q.numerator)
    whole = math.floor(q)
    return x.as_elements().whole_power(whole) * _fractional_power(x.as_elements(), q - whole)


def _fractional_power(x: Value, q: Fraction) -> Value:
    f = x.field
    y = Value(f, f.unknown_function(f"pow {q}", x.element))
    if x.tangent is None:
        return y
    slope = q * y / x.without_tangent()
    return Value(f, y.element, f.mul(x.tangent, slope.element))


def _power_of_tensors(x: Value, e: Value) -> Value:
    if not x.element.dim() and x.tangent is None:
        raise UnsupportedError("pow of a number to a tensor")
    a, b = x.as_elements(), e.as_elements()
    plain_a, plain_b = a.without_tangent(), b.without_tangent()
    y = _unknown_power(plain_a, plain_b)
    # The power of zero stays zero when the exponent moves.
    is_zero = exact(a.field, (plain_a.element == 0) & (plain_b.sizes() >= 0))
    logarithm = is_zero.where(0, is_zero.where(1, plain_a).log())
    slopes = plain_b * _unknown_power(plain_a, plain_b - 1), y * logarithm
    return with_slopes(y, (a, slopes[0]), (b, slopes[1]))


def _unknown_power(a: Value, b: Value) -> Value:
    base, exponent, size = torch.broadcast_tensors(a.element, b.element, b.sizes())
    f, is_zero = a.field, base == 0
    if bool((is_zero & (size < 0)).any()):
        f.journal.zero_divisions.add(f.journal.node)
    of_zero = (exponent == 0).to(f.dtype)
    return Value(f, torch.where(is_zero, of_zero, f.unknown_function("pow", base, exponent)))


def with_slopes(y: Value, *terms: tuple[Value, Value]) -> Value:
    """A value with the tangent that the slopes along its arguments give it."""
    tangent: Value | None = None
    for x, slope in terms:
        if x.tangent is not None:
            term = Value(y.field, x.tangent) * slope
            tangent = term if tangent is None else tangent + term
    return y if tangent is None else Value(y.field, y.element, tangent.element.expand(y.shape))


def _arctangent(a: Value, b: Value) -> Value:
    a, b = a.as_elements(), b.as_elements()
    x, y = a.without_tangent(), b.without_tangent()
    known = Value(a.field, a.field.unknown_function("atan2", *torch.broadcast_tensors(x.element, y.element)))
    square = x * x + y * y
    return with_slopes(known, (a, y / square), (b, -x / square))


def _log_add_exp(a: Value, b: Value) -> Value:
    a, b = a.as_elements(), b.as_elements()
    x, y = a.without_tangent(), b.without_tangent()
    known = Value(a.field, a.field.unknown_function("logaddexp", *torch.broadcast_tensors(x.element, y.element)))
    return with_slopes(known, (a, 1 / (1 + (y - x).exp())), (b, 1 / (1 + (x - y).exp())))


def _stepwise(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Value], Value]:
    """A function that is constant between steps: its derivative is zero."""
    return lambda x: x if x.is_exact else exact(x.field, function(x.sizes()).to(torch.int64)).as_elements()


def _logical(operation: Callable[..., torch.Tensor]) -> Callable[..., Value]:
    def rule(*operands: Value) -> Value:
        if not all(isinstance(x, Value) and x.is_exact for x in operands):
            raise UnsupportedError("logic on floats")
        return exact(operands[0].field, operation(*(x.element for x in operands)))

    return rule


def larger(a: Any, b: Any) -> Any:
    """The larger of two; where they are equal both count half, as in torch."""
    return a.eq(b).where((a + b) / 2, a.gt(b).where(a, b))


def smaller(a: Any, b: Any) -> Any:
    """The smaller of two; where they are equal both count half, as in torch."""
    return a.eq(b).where((a + b) / 2, a.gt(b).where(b, a))


def clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    """A value kept in bounds; on a bound its own derivative counts."""
    x = x if low is None else x.lt(low).where(low, x)
    return x if high is None else x.gt(high).where(high, x)


def _not_equal(a: Any, b: Any) -> Any:
    return a.eq(b).inverted()


RULES: dict[str, Callable[..., Any]] = {
    "add": _add,
    "sub": _sub,
    "rsub": lambda a, b, alpha=1: -a * alpha + b if alpha != 1 else -a + b,
    "mul": lambda a, b: a * b,
    "div": _div,
    "neg": lambda x: -x,
    "reciprocal": lambda x: 1 / x,
    "square": lambda x: x * x,
    "pow": power,
    "abs": lambda x: x * x.sgn(),
    "sgn": lambda x: x.sgn(),
    "sign": lambda x: x.sgn(),
    "exp": lambda x: x.exp(),
    "exp2": lambda x: (x * math.log(2)).exp(),
    "expm1": lambda x: x.exp() - 1,
    "log": lambda x: x.log(),
    "log1p": lambda x: (x + 1).log(),
    "log2": lambda x: x.log() / math.log(2),
    "log10": lambda x: x.log() / math.log(10),
    "sqrt": lambda x: x.sqrt(),
    "rsqrt": lambda x: 1 / x.sqrt(),
    "sin": lambda x: x.sin(),
    "cos": lambda x: x.cos(),
    "tan": lambda x: x.sin() / x.cos(),
    "asin": lambda x: x.odd("asin"),
    "acos": lambda x: x.function("acos"),
    "atan": lambda x: x.odd("atan"),
    "sinh": lambda x: (x.exp() - (-x).exp()) / 2,
    "cosh": lambda x: (x.exp() + (-x).exp()) / 2,
    "tanh": lambda x: x.tanh(),
    "asinh": lambda x: x.odd("asinh"),
    "acosh": lambda x: x.function("acosh"),
    "atanh": lambda x: x.odd("atanh"),
    "sigmoid": lambda x: x.sigmoid(),
    "erf": lambda x: x.erf(),
    "erfc": lambda x: 1 - x.erf(),
    "erfinv": lambda x: x.odd("erfinv"),
    "lgamma": lambda x: x.function("lgamma"),
    "digamma": lambda x: x.digamma(),
    "atan2": _arctangent,
    "logaddexp": _log_add_exp,
    "floor": _stepwise(torch.floor),
    "ceil": _stepwise(torch.ceil),
    "round": _stepwise(torch.round),
    "trunc": _stepwise(torch.trunc),
    "maximum": larger,
    "minimum": smaller,
    "clamp": clamp,
    "clamp_min": lambda x, low: clamp(x, low),
    "clamp_max": lambda x, high: clamp(x, None, high),
    "where": lambda condition, yes, no: condition.where(yes, no),
    "masked_fill": lambda x, mask, value: mask.where(value, x),
    "lerp": lambda a, b, weight: a + (b - a) * weight,
    "addcmul": lambda x, a, b, value=1: x + a * b * value,
    "addcdiv": lambda x, a, b, value=1: x + a / b * value,
    "gt": lambda a, b: a.gt(b),
    "lt": lambda a, b: a.lt(b),
    "ge": lambda a, b: a.ge(b),
    "le": lambda a, b: a.le(b),
    "eq": lambda a, b: a.eq(b),
    "ne": _not_equal,
    "logical_and": _logical(torch.logical_and),
    "logical_or": _logical(torch.logical_or),
    "logical_xor": _logical(torch.logical_xor),
    "logical_not": _logical(torch.logical_not),
    "bitwise_and": _logical(torch.bitwise_and),
    "bitwise_or": _logical(torch.bitwise_or),
    "bitwise_xor": _logical(torch.bitwise_xor),
    "bitwise_not": _logical(torch.bitwise_not),
}
