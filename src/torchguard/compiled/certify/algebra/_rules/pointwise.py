"""Rules of pointwise operators: arithmetic and elementary functions.

The formulas call only methods of their operands, so that the tests can run them on symbols as well.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch

from torchguard.compiled.certify.algebra._closed_form import closed_form
from torchguard.compiled.certify.algebra._field import UnsupportedError
from torchguard.compiled.certify.algebra._rules.choices import stepped
from torchguard.compiled.certify.algebra._values import Value, integers


def _add(a: Any, b: Any, *, alpha: float = 1) -> Any:
    return a + b if alpha == 1 else a + b * alpha


def _sub(a: Any, b: Any, *, alpha: float = 1) -> Any:
    return a - b if alpha == 1 else a - b * alpha


def _div(a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return a / b
    quotient = stepped(a.without_tangent() / b, torch.floor if rounding_mode == "floor" else torch.trunc)
    return quotient if a.is_integer and getattr(b, "is_integer", isinstance(b, int)) else quotient.as_elements()


def power(x: Any, e: Any) -> Any:
    """`x ** e`: by roots and integer powers if e is a number, as an unknown function if it is a tensor."""
    if isinstance(e, Value):
        return _power_of_tensors(x, e)
    form = closed_form(float(e)) if math.isfinite(e) else None
    if not isinstance(x, Value):
        return x**e
    if form is None or not form.is_rational:
        raise UnsupportedError(f"pow with exponent {e}")
    q = form.rational
    if q.denominator == 1:
        return x.integer_power(int(q))
    if q.denominator == 2:
        return x.as_elements().sqrt().integer_power(q.numerator)
    floor = math.floor(q)
    return x.as_elements().integer_power(floor) * _fractional_power(x.as_elements(), q - floor)


def _fractional_power(x: Value, q: Fraction) -> Value:
    f = x.field
    y = Value(f, f.root(x.element, q))
    if x.tangent is None:
        return y
    slope = q * y / x.without_tangent()
    return Value(f, y.element, f.mul(x.tangent, slope.element))


def _power_of_tensors(x: Value, e: Value) -> Value:
    a, b = x.as_elements(), e.as_elements()
    plain_a, plain_b = a.without_tangent(), b.without_tangent()
    y = _unknown_power(plain_a, plain_b)
    # A power of zero is zero for every exponent, so its derivative by the exponent is zero.
    is_zero = integers(a.field, (plain_a.element == 0) & (plain_b.real_values() >= 0))
    logarithm = is_zero.where(0, is_zero.where(1, plain_a).log())
    slopes = plain_b * _unknown_power(plain_a, plain_b - 1), y * logarithm
    return _with_slopes(y, (a, slopes[0]), (b, slopes[1]))


def power_of_number(base: float, e: Value) -> Value:
    """`base ** e` of a positive number, whose logarithm is one as well; of integers as torch computes it."""
    if isinstance(base, int) and e.is_integer:
        return integers(e.field, torch.pow(int(base), e.element.to(torch.int64)))
    if not 0 < base < math.inf:
        raise UnsupportedError(f"pow of {base} to a tensor")
    b = e.as_elements()
    constant = Value(b.field, b.field.constant(float(base)))
    y = _unknown_power(constant, b.without_tangent())
    return _with_slopes(y, (b, y * math.log(base)))


def _unknown_power(a: Value, b: Value) -> Value:
    base, exponent, real_exponent = torch.broadcast_tensors(a.element, b.element, b.real_values())
    f, is_zero = a.field, base == 0
    if bool((is_zero & (real_exponent < 0)).any()):
        f.trace.record_zero_division()
    of_zero = (exponent == 0).to(f.dtype)
    return Value(f, torch.where(is_zero, of_zero, f.unknown_function("pow", base, exponent)))


def _with_slopes(y: Value, *terms: tuple[Value, Value]) -> Value:
    """A value with the tangent that follows from its slopes along its arguments."""
    tangent: Value | None = None
    for x, slope in terms:
        if x.tangent is not None:
            term = Value(y.field, x.tangent) * slope
            tangent = term if tangent is None else tangent + term
    return y if tangent is None else Value(y.field, y.element, tangent.element.expand(y.shape))


def _atan2(a: Value, b: Value) -> Value:
    a, b = a.as_elements(), b.as_elements()
    x, y = a.without_tangent(), b.without_tangent()
    known = Value(a.field, a.field.unknown_function("atan2", *torch.broadcast_tensors(x.element, y.element)))
    square = x * x + y * y
    return _with_slopes(known, (a, y / square), (b, -x / square))


def _logaddexp(a: Value, b: Value) -> Value:
    a, b = a.as_elements(), b.as_elements()
    x, y = a.without_tangent(), b.without_tangent()
    known = Value(a.field, a.field.unknown_function("logaddexp", *torch.broadcast_tensors(x.element, y.element)))
    return _with_slopes(known, (a, 1 / (1 + (y - x).exp())), (b, 1 / (1 + (x - y).exp())))


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
    "polygamma": lambda n, x: x.polygamma(int(n.element) if isinstance(n, Value) else n),
    "special_erfcx": lambda x: x.function("erfcx"),
    "special_log_ndtr": lambda x: x.function("log_ndtr"),
    "i0": lambda x: x.even("i0"),
    "special_i0e": lambda x: x.even("i0") * (-(x * x.sgn())).exp(),
    "special_i1": lambda x: x.odd("i1"),
    "special_i1e": lambda x: x.odd("i1") * (-(x * x.sgn())).exp(),
    "atan2": _atan2,
    "logaddexp": _logaddexp,
    "lerp": lambda a, b, weight: a + (b - a) * weight,
    "addcmul": lambda x, a, b, value=1: x + a * b * value,
    "addcdiv": lambda x, a, b, value=1: x + a / b * value,
}
