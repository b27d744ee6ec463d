"""Rules of pointwise operators: arithmetic, comparisons, elementary functions, activations and their derivatives.

The formulas call only methods of their operands, so that the tests can run them on symbols as well.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch

from torchguard.compiled.certify.algebra._closed_form import closed_form
from torchguard.compiled.certify.algebra._field import UnsupportedError
from torchguard.compiled.certify.algebra._values import Value, integers

_ROOT_HALF = math.sqrt(0.5)
_ROOT_2_OVER_PI = math.sqrt(2) / math.sqrt(math.pi)
_CUBIC = 0.044715


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


def _never(x: Value) -> Value:
    """All numbers of a point are finite."""
    return integers(x.field, torch.zeros(x.shape, dtype=torch.bool))


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


def stepped(x: Value, function: Callable[[torch.Tensor], torch.Tensor]) -> Value:
    """A step function of real numbers with integer values: its derivative is zero."""
    steps = function(x.real_values()).to(torch.int64)
    x.field.trace.record_step(steps)
    return integers(x.field, steps)


def _step_function(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Value], Value]:
    return lambda x: x if x.is_integer else stepped(x, function).as_elements()


def _remainder(rounding: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Value]:
    """x - y * n, where the integer n is a quotient rounded: the derivative of n is zero."""

    def rule(x: Value, y: Any) -> Value:
        x = x if isinstance(x, Value) else y._other(x)
        divisor = x._other(y)
        if x.is_integer and divisor.is_integer:
            function = torch.remainder if rounding is torch.floor else torch.fmod
            return integers(x.field, function(x.element.to(torch.int64), divisor.element.to(torch.int64)))
        x, divisor = x.as_elements(), divisor.as_elements()
        quotient = stepped(x.without_tangent() / divisor.without_tangent(), rounding)
        return x - divisor * quotient.as_elements()

    return rule


def _logical(operation: Callable[..., torch.Tensor]) -> Callable[..., Value]:
    def rule(*operands: Value) -> Value:
        if not all(isinstance(x, Value) and x.is_integer for x in operands):
            raise UnsupportedError("a logical operation on floats")
        return integers(operands[0].field, operation(*(x.element for x in operands)))

    return rule


def _maximum(a: Any, b: Any) -> Any:
    """The larger of two; where they are equal each has half the derivative, as in torch."""
    return a.eq(b).where((a + b) / 2, a.gt(b).where(a, b))


def _minimum(a: Any, b: Any) -> Any:
    """The smaller of two; where they are equal each has half the derivative, as in torch."""
    return a.eq(b).where((a + b) / 2, a.gt(b).where(b, a))


def _clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    """A value limited to bounds; on a bound it has its own derivative, as in torch."""
    x = x if low is None else x.lt(low).where(low, x)
    return x if high is None else x.gt(high).where(high, x)


def _not_equal(a: Any, b: Any) -> Any:
    return a.eq(b).inverted()


def _hardtanh(x: Any, low: float = -1, high: float = 1) -> Any:
    return x.le(low).where(low, x.ge(high).where(high, x))


def _elu(x: Any, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    return x.gt(0).where(x * scale, ((x * input_scale).exp() - 1) * alpha * scale)


def _elu_backward(g: Any, alpha: float, scale: float, input_scale: float, is_result: bool, x: Any) -> Any:
    low = (x + alpha * scale) if is_result else (x * input_scale).exp() * alpha * scale
    return x.le(0).where(g * low * input_scale, g * scale)


def _softplus(x: Any, beta: float = 1, threshold: float = 20) -> Any:
    return (x * beta).gt(threshold).where(x, (1 + (x * beta).exp()).log() / beta)


def _softplus_backward(g: Any, x: Any, beta: float, threshold: float) -> Any:
    z = (x * beta).exp()
    return (x * beta).gt(threshold).where(g, g * z / (z + 1))


def _hardsigmoid(x: Any) -> Any:
    return x.le(-3).where(0, x.ge(3).where(1, (x + 3) / 6))


def _hardsigmoid_backward(g: Any, x: Any) -> Any:
    return x.le(-3).where(0, x.ge(3).where(0, g / 6))


def _hardswish(x: Any) -> Any:
    return x.le(-3).where(0, x.ge(3).where(x, x * (x + 3) / 6))


def _hardswish_backward(g: Any, x: Any) -> Any:
    return x.le(-3).where(0, x.ge(3).where(g, g * (x / 3 + 0.5)))


def _softshrink(x: Any, bound: float = 0.5) -> Any:
    return x.gt(bound).where(x - bound, x.lt(-bound).where(x + bound, 0))


def _shrink_backward(g: Any, x: Any, bound: float) -> Any:
    return x.gt(bound).where(g, x.lt(-bound).where(g, 0))


def _gelu(x: Any, *, approximate: str = "none") -> Any:
    if approximate == "tanh":
        return 0.5 * x * (1 + _tanh_argument(x).tanh())
    return 0.5 * x * (1 + (x * _ROOT_HALF).erf())


def _gelu_backward(g: Any, x: Any, *, approximate: str = "none") -> Any:
    if approximate == "tanh":
        t = _tanh_argument(x).tanh()
        slope = _ROOT_2_OVER_PI * (1 + 3 * _CUBIC * x * x)
        return g * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope)
    density = (x * x * -0.5).exp() * (_ROOT_HALF / math.sqrt(math.pi))
    return g * (0.5 * (1 + (x * _ROOT_HALF).erf()) + x * density)


def _tanh_argument(x: Any) -> Any:
    return _ROOT_2_OVER_PI * (x + _CUBIC * x * x * x)


def _silu(x: Any) -> Any:
    return x * x.sigmoid()


def _silu_backward(g: Any, x: Any) -> Any:
    s = x.sigmoid()
    return g * s * (1 + x * (1 - s))


def _mish(x: Any) -> Any:
    return x * (1 + x.exp()).log().tanh()


def _mish_backward(g: Any, x: Any) -> Any:
    t = (1 + x.exp()).log().tanh()
    return g * (t + x * x.sigmoid() * (1 - t * t))


def _log_sigmoid(x: Any) -> tuple[Any, Any]:
    z = (-(x * x.sgn())).exp()
    return x.lt(0).where(x, 0) - (1 + z).log(), z


def _log_sigmoid_backward(g: Any, x: Any, z: Any) -> Any:
    ratio = z / (1 + z)
    return g * x.lt(0).where(1 - ratio, ratio)


def _leaky_relu_backward(g: Any, x: Any, slope: float, is_result: bool) -> Any:
    return x.gt(0).where(g, g * slope)


def _prelu(x: Any, weight: Any) -> Any:
    return x.gt(0).where(x, x * weight)


def _threshold(x: Any, bound: float, value: float) -> Any:
    return x.le(bound).where(value, x)


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
    "floor": _step_function(torch.floor),
    "ceil": _step_function(torch.ceil),
    "round": _step_function(torch.round),
    "trunc": _step_function(torch.trunc),
    **dict.fromkeys(("isnan", "isinf", "isposinf", "isneginf"), _never),
    "isfinite": lambda x: _never(x).inverted(),
    "remainder": _remainder(torch.floor),
    "fmod": _remainder(torch.trunc),
    "frac": lambda x: x - stepped(x, torch.trunc).as_elements(),
    "maximum": _maximum,
    "minimum": _minimum,
    "clamp": _clamp,
    "clamp_min": lambda x, low: _clamp(x, low),
    "clamp_max": lambda x, high: _clamp(x, None, high),
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
    "relu": lambda x: x.gt(0).where(x, 0),
    "threshold": _threshold,
    "threshold_backward": lambda g, x, bound: x.le(bound).where(0, g),
    "leaky_relu": lambda x, slope=0.01: x.gt(0).where(x, x * slope),
    "leaky_relu_backward": _leaky_relu_backward,
    "_prelu_kernel": _prelu,
    "_prelu_kernel_backward": lambda g, x, w: (x.gt(0).where(g, g * w), x.gt(0).where(0, g * x)),
    "elu": _elu,
    "elu_backward": _elu_backward,
    "celu": lambda x, alpha=1.0: _elu(x, alpha, 1, 1 / alpha),
    "silu": _silu,
    "silu_backward": _silu_backward,
    "mish": _mish,
    "mish_backward": _mish_backward,
    "softplus": _softplus,
    "softplus_backward": _softplus_backward,
    "hardtanh": _hardtanh,
    "hardtanh_backward": lambda g, x, low, high: x.le(low).where(0, x.ge(high).where(0, g)),
    "hardsigmoid": _hardsigmoid,
    "hardsigmoid_backward": _hardsigmoid_backward,
    "hardswish": _hardswish,
    "hardswish_backward": _hardswish_backward,
    "softshrink": _softshrink,
    "softshrink_backward": _shrink_backward,
    "hardshrink": lambda x, bound=0.5: x.gt(bound).where(x, x.lt(-bound).where(x, 0)),
    "hardshrink_backward": _shrink_backward,
    "gelu": _gelu,
    "gelu_backward": _gelu_backward,
    "tanh_backward": lambda g, y: g * (1 - y * y),
    "sigmoid_backward": lambda g, y: g * (1 - y) * y,
    "log_sigmoid_forward": _log_sigmoid,
    "log_sigmoid_backward": _log_sigmoid_backward,
}
