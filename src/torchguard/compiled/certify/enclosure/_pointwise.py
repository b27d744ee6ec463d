"""Intervals of pointwise operators: arithmetic, comparisons, elementary functions and activations."""

import math
import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from torchguard.compiled.certify.enclosure._intervals import (
    SLACK,
    Interval,
    Operand,
    UnboundedError,
    common_dtype,
    computed,
    converted,
    rounded,
    unit,
)

Rule = Callable[..., Any]
# Integer powers up to this exponent are multiplied out.
_MAX_INTEGER_POWER = 64
# Where gelu and silu have their minimum.
_GELU_MINIMUM, _SILU_MINIMUM = -0.7517915246935645, -1.2784645427610738
# Torch's vectorised code overflows on larger arguments, although the result would not.
_SINH_LIMITS = {torch.float32: 88.0, torch.float64: 709.0}
_ASINH_LIMITS = {torch.float32: 1e19, torch.float64: 1e154}
_LOG1P_LIMITS = {torch.float32: 9e37, torch.float64: 9e306}


def _scale(x: Operand, number: Operand, dtype: torch.dtype) -> Interval:
    return converted(x, dtype) if number == 1 else _mul(x, number, dtype)


def _add(a: Operand, b: Operand, dtype: torch.dtype, *, alpha: Operand = 1) -> Interval:
    x, y = converted(a, dtype), _scale(b, alpha, dtype)
    return computed(x.low + y.low, x.high + y.high, dtype)


def _sub(a: Operand, b: Operand, dtype: torch.dtype, *, alpha: Operand = 1) -> Interval:
    x, y = converted(a, dtype), _scale(b, alpha, dtype)
    return computed(x.low - y.high, x.high - y.low, dtype)


def _neg(x: Interval, *, dtype: torch.dtype) -> Interval:
    return _unrounded(-x.high, -x.low, dtype)


def _unrounded(low: Tensor, high: Tensor, dtype: torch.dtype) -> Interval:
    """Bounds of a result that is not rounded; integers may still overflow."""
    return Interval(low, high, dtype) if dtype.is_floating_point else computed(low, high, dtype)


def _hull(corners: list[Tensor]) -> tuple[Tensor, Tensor]:
    if any(bool(c.isnan().any()) for c in corners):
        raise UnboundedError("infinity times zero, or infinity minus infinity")
    return reduce(torch.minimum, corners), reduce(torch.maximum, corners)


def _mul(a: Operand, b: Operand, dtype: torch.dtype) -> Interval:
    if a is b and isinstance(a, Interval):
        return _pow(a, 2, dtype)
    x, y = converted(a, dtype), converted(b, dtype)
    return computed(*_hull([p * q for p in (x.low, x.high) for q in (y.low, y.high)]), dtype)


def _div(a: Operand, b: Operand, dtype: torch.dtype, *, rounding_mode: str | None = None) -> Interval:
    if rounding_mode is not None or not dtype.is_floating_point:
        raise UnboundedError("a division that rounds to integers")
    x, y = converted(a, dtype), converted(b, dtype)
    if bool(((y.low <= 0) & (y.high >= 0)).any()):
        raise UnboundedError("a division by a number that may be zero")
    return computed(*_hull([p / q for p in (x.low, x.high) for q in (y.low, y.high)]), dtype, 2)


def _abs(x: Interval, *, dtype: torch.dtype) -> Interval:
    is_across = (x.low <= 0) & (x.high >= 0)
    return _unrounded(torch.where(is_across, 0.0, torch.minimum(x.low.abs(), x.high.abs())), x.size, dtype)


def _pow(x: Operand, e: Operand, dtype: torch.dtype) -> Interval:
    if isinstance(e, Interval) or not isinstance(x, Interval):
        return _power_of_tensors(converted(x, dtype), converted(e, dtype), dtype)
    x = converted(x, dtype)
    if not dtype.is_floating_point:
        return _integer_pow(x, e, dtype)
    # Torch may use the exponent in float64, or round it to the dtype first.
    exponents = {float(e), float(converted(e, dtype).low)}
    if not all(math.isfinite(p) for p in exponents):
        raise UnboundedError(f"the exponent {e}")
    if len(exponents) == 1 and float(e).is_integer() and e >= 0:
        base = _abs(x, dtype=dtype) if int(e) % 2 == 0 else x
        return computed(base.low**e, base.high**e, dtype, SLACK)
    if len(exponents) == 1 and float(e).is_integer() and not bool(((x.low <= 0) & (x.high >= 0)).any()):
        return computed(*_hull([x.low**e, x.high**e]), dtype, SLACK)  # it has no extremum away from zero
    if bool((x.low <= 0).any()):
        raise UnboundedError(f"the exponent {e} of a number that may be zero or less")
    return computed(*_hull([end**p for end in (x.low, x.high) for p in exponents]), dtype, SLACK)


def _power_of_tensors(x: Interval, e: Interval, dtype: torch.dtype) -> Interval:
    """A power of a positive number is monotonic in both arguments, so its bounds are at corners."""
    if not dtype.is_floating_point or bool((x.low <= 0).any()):
        raise UnboundedError("a power of tensors whose base may be zero or less")
    corners = [a**b for a in (x.low, x.high) for b in (e.low, e.high)]
    return computed(*_hull(corners), dtype, SLACK)


def _integer_pow(x: Interval, e: float, dtype: torch.dtype) -> Interval:
    if not isinstance(e, int) or not 0 <= e <= _MAX_INTEGER_POWER:
        raise UnboundedError(f"the exponent {e} of integers")
    base = _abs(x, dtype=dtype) if e % 2 == 0 else x
    low, high = (reduce(operator.mul, [end] * e, torch.ones_like(end)) for end in (base.low, base.high))
    return computed(low, high, dtype)


def _clamp(x: Operand, low: Operand | None = None, high: Operand | None = None, *, dtype: torch.dtype) -> Interval:
    above = converted(x, dtype) if low is None else _maximum(x, low, dtype)
    return above if high is None else _minimum(above, high, dtype)


def _maximum(a: Operand, b: Operand, dtype: torch.dtype) -> Interval:
    x, y = converted(a, dtype), converted(b, dtype)
    return Interval(torch.maximum(x.low, y.low), torch.maximum(x.high, y.high), dtype)


def _minimum(a: Operand, b: Operand, dtype: torch.dtype) -> Interval:
    x, y = converted(a, dtype), converted(b, dtype)
    return Interval(torch.minimum(x.low, y.low), torch.minimum(x.high, y.high), dtype)


def _where(condition: Interval, yes: Operand, no: Operand, dtype: torch.dtype) -> Interval:
    a, b, holds = converted(yes, dtype), converted(no, dtype), converted(condition, torch.bool)
    may, must = holds.high > 0, holds.low > 0
    low = torch.where(must, a.low, torch.where(may, torch.minimum(a.low, b.low), b.low))
    high = torch.where(must, a.high, torch.where(may, torch.maximum(a.high, b.high), b.high))
    return Interval(low, high, dtype)


def _comparison(is_surely: Callable[..., Tensor], is_maybe: Callable[..., Tensor]) -> Rule:
    def rule(a: Operand, b: Operand, *, dtype: torch.dtype) -> Interval:
        common = common_dtype(a, b)
        x, y = converted(a, common), converted(b, common)
        both = [is_(x, y).to(torch.float64) for is_ in (is_surely, is_maybe)]
        return Interval(both[0], both[1], torch.bool)

    return rule


_LE = _comparison(lambda x, y: x.high <= y.low, lambda x, y: x.low <= y.high)


def _logical(function: Callable[..., Tensor]) -> Rule:
    def rule(*operands: Interval, dtype: torch.dtype) -> Interval:
        if dtype != torch.bool or any(x.dtype != torch.bool for x in operands):
            raise UnboundedError("a logical operation on numbers")
        low, high = (function(*(getattr(x, end) > 0 for x in operands)) for end in ("low", "high"))
        return Interval(low.to(torch.float64), high.to(torch.float64), torch.bool)

    return rule


def _logical_not(x: Interval, *, dtype: torch.dtype) -> Interval:
    if x.dtype != torch.bool:
        raise UnboundedError("a logical operation on numbers")
    return Interval(1 - x.high, 1 - x.low, torch.bool)


_EQ = _comparison(
    lambda x, y: (x.low == x.high) & (y.low == y.high) & (x.low == y.low),
    lambda x, y: (x.low <= y.high) & (y.low <= x.high),
)


def _not_equal(a: Operand, b: Operand, *, dtype: torch.dtype) -> Interval:
    return _logical_not(_EQ(a, b, dtype=torch.bool), dtype=torch.bool)


def _never(x: Interval, *, dtype: torch.dtype) -> Interval:
    """What has bounds is no NaN, and finite if they are."""
    is_infinite = bool(x.low.isinf().any() | x.high.isinf().any())
    if is_infinite:
        raise UnboundedError("a test of a number that may be infinite")
    return Interval(torch.zeros_like(x.low), torch.zeros_like(x.low), torch.bool)


def _sign(x: Interval, *, dtype: torch.dtype) -> Interval:
    return Interval(x.low.sign(), x.high.sign(), dtype)


def _hypot(a: Interval, b: Interval, *, dtype: torch.dtype) -> Interval:
    x, y = (_abs(converted(v, dtype), dtype=dtype) for v in (a, b))
    return rounded(torch.hypot(x.low, y.low), torch.hypot(x.high, y.high), dtype, SLACK)


def _xlogy(x: Operand, y: Operand, *, dtype: torch.dtype) -> Interval:
    """Where x is zero the result is zero, as the product is."""
    return _mul(x, RULES["log"](converted(y, dtype), dtype=dtype), dtype)


def _remainder(x: Operand, y: Operand, *, dtype: torch.dtype) -> Interval:
    dividend, divisor = converted(x, dtype), converted(y, dtype)
    if not dtype.is_floating_point and dividend.is_known and divisor.is_known and not bool((divisor.low == 0).any()):
        found = torch.remainder(dividend.low, divisor.low)
        return Interval(found, found, dtype)
    if bool((divisor.low <= 0).any()) or not dtype.is_floating_point:
        raise UnboundedError("a remainder by a number that may be zero or less")
    shape = torch.broadcast_shapes(*(v.low.shape for v in (x, y) if isinstance(v, Interval)))
    return Interval(torch.zeros(shape, dtype=torch.float64), divisor.high.expand(shape), dtype)


def _fmod(x: Operand, y: Operand, *, dtype: torch.dtype) -> Interval:
    """The sign is that of x, and the size at most that of both."""
    a, size = converted(x, dtype), converted(y, dtype).size
    if not dtype.is_floating_point or bool(((converted(y, dtype).low <= 0) & (converted(y, dtype).high >= 0)).any()):
        raise UnboundedError("a remainder by a number that may be zero")
    low, high = torch.maximum(a.low.clamp(max=0), -size), torch.minimum(a.high.clamp(min=0), size)
    return Interval(low, high, dtype)


def _logit(x: Interval, eps: float | None = None, *, dtype: torch.dtype) -> Interval:
    x = converted(x, dtype)
    if eps is not None or bool(((x.low <= 0) | (x.high >= 1)).any()):
        raise UnboundedError("logit of a number that may not lie between 0 and 1")
    # The quotient x / (1 - x) has a relative error of a few units, which is an absolute error of its logarithm.
    return rounded(torch.logit(x.low), torch.logit(x.high), dtype, SLACK, SLACK * unit(dtype))


def _huber(
    x: Interval, y: Interval, reduction: int = 1, delta: float = 1.0, *, dtype: torch.dtype, is_smooth_l1: bool = False
) -> Interval:
    if reduction != 0 or delta <= 0:
        raise UnboundedError("a loss that is reduced")
    z, scale = _abs(_sub(x, y, dtype), dtype=dtype), delta if is_smooth_l1 else 1.0
    near, far = (lambda t: t * t / 2), (lambda t: delta * (t - delta / 2))
    low, high = (torch.where(t < delta, near(t), far(t)) / scale for t in (z.low, z.high))
    slack = SLACK * unit(dtype) * delta * delta / scale
    return rounded(low, high, dtype, SLACK, slack, through=z.high.square())


def _one_minus_square(y: Interval, dtype: torch.dtype) -> Interval:
    return _sub(1.0, _pow(y, 2, dtype), dtype)


def _increasing(
    function: Callable[[Tensor], Tensor],
    *,
    above: float = -math.inf,
    at_least: float = -math.inf,
    limits: dict[torch.dtype, float] | None = None,
    absolute: float = 0,
    between: tuple[float, float] = (-math.inf, math.inf),
) -> Rule:
    """The rule of an increasing function.

    Args:
        above: every argument must exceed this number.
        at_least: no argument may be less than this number.
        limits: the largest absolute value of an argument, by dtype.
        absolute: an absolute error beside the relative one, in the same units.
        between: the range of the function.
    """

    def rule(x: Interval, *, dtype: torch.dtype) -> Interval:
        x = converted(x, dtype)
        slack = absolute * SLACK * unit(dtype)
        if bool(((x.low <= above) | (x.low < at_least)).any()):
            raise UnboundedError(f"an argument that may be {max(above, at_least):g} or less")
        if limits is not None and bool((x.size > limits[dtype]).any()):
            raise UnboundedError(f"an argument that may exceed {limits[dtype]:g}")
        made = rounded(function(x.low), function(x.high), dtype, SLACK, slack)
        return Interval(made.low.clamp(*between), made.high.clamp(*between), dtype)

    return rule


def _decreasing(function: Callable[[Tensor], Tensor], *, above: float) -> Rule:
    """The rule of a decreasing function, whose arguments must exceed a number."""

    def rule(x: Interval, *, dtype: torch.dtype) -> Interval:
        x = converted(x, dtype)
        if bool((x.low <= above).any()):
            raise UnboundedError(f"an argument that may be {above:g} or less")
        return rounded(function(x.high), function(x.low), dtype, SLACK)

    return rule


def _falling_then_rising(function: Callable[[Tensor], Tensor], minimum: float) -> Rule:
    """The rule of a function that decreases up to its minimum and increases from there, such as gelu."""

    def rule(x: Interval, *, dtype: torch.dtype, approximate: str = "none") -> Interval:
        if approximate != "none":
            raise UnboundedError(f"gelu with approximate={approximate!r}")
        x = converted(x, dtype)
        bottom = function(torch.minimum(torch.maximum(torch.tensor(minimum, dtype=torch.float64), x.low), x.high))
        top = torch.maximum(function(x.low), function(x.high))
        # The position of the minimum is known to ten digits: the error this makes in its value is far below 1e-15.
        # On the way torch computes 2x, and differences of numbers of that size.
        return rounded(bottom, top, dtype, SLACK, SLACK * unit(dtype) * x.size + 1e-15, through=4 * x.size)

    return rule


def _sine(shift: float) -> Rule:
    """The rule of sin(x + shift)."""

    def rule(x: Interval, *, dtype: torch.dtype) -> Interval:
        x = converted(x, dtype)
        if bool((x.size > 1e6).any()):
            raise UnboundedError("an angle that may exceed a million")
        low, high = x.low + shift, x.high + shift
        ends = torch.sin(low), torch.sin(high)
        top, bottom = torch.maximum(*ends), torch.minimum(*ends)
        # Whether a maximum or a minimum of the sine lies inside, or too near an end to exclude it.
        turn, near = 2 * math.pi, 1e-9
        has_maximum = torch.floor((high + near - math.pi / 2) / turn) >= torch.ceil((low - near - math.pi / 2) / turn)
        has_minimum = torch.floor((high + near + math.pi / 2) / turn) >= torch.ceil((low - near + math.pi / 2) / turn)
        slack = SLACK * unit(dtype) + 1e-9
        return rounded(torch.where(has_minimum, -1.0, bottom), torch.where(has_maximum, 1.0, top), dtype, SLACK, slack)

    return rule


def _leaky_relu(x: Interval, slope: float = 0.01, *, dtype: torch.dtype) -> Interval:
    x, factor = converted(x, dtype), converted(slope, dtype).low
    if bool(factor < 0):
        raise UnboundedError("leaky_relu with a negative slope")
    low, high = (torch.where(t > 0, t, t * factor) for t in (x.low, x.high))
    return rounded(low, high, dtype)


def _softplus(x: Interval, beta: float = 1, threshold: float = 20, *, dtype: torch.dtype) -> Interval:
    if beta != 1 or threshold != 20:
        raise UnboundedError("softplus with other than its default arguments")
    x = converted(x, dtype)
    # Above the threshold torch returns x, which differs from softplus by less than exp(-20) < 3e-9.
    low, high = (torch.nn.functional.softplus(t, 1, 100) for t in (x.low, x.high))
    return rounded(low, high, dtype, SLACK, 3e-9)


def _relu(x: Interval, *, dtype: torch.dtype) -> Interval:
    return x.rearranged(torch.relu)


def _elu(x: Interval, alpha: float = 1, scale: float = 1, input_scale: float = 1, *, dtype: torch.dtype) -> Interval:
    if min(alpha, scale, input_scale) <= 0:
        raise UnboundedError("elu with an argument that is not positive")
    function = lambda t: scale * torch.where(t > 0, t, alpha * torch.expm1(t * input_scale))  # noqa: E731
    return _increasing(function, absolute=1 + alpha * scale)(x, dtype=dtype)


RULES: dict[str, Rule] = {
    "add": _add,
    "sub": _sub,
    "rsub": lambda a, b, alpha=1, *, dtype: _sub(b, a, dtype, alpha=alpha),
    "mul": _mul,
    "div": _div,
    "neg": _neg,
    "abs": _abs,
    "square": lambda x, *, dtype: _pow(x, 2, dtype),
    "pow": _pow,
    "reciprocal": lambda x, *, dtype: _div(1.0, x, dtype),
    "hardtanh": lambda x, low=-1, high=1, *, dtype: _clamp(x, low, high, dtype=dtype),
    "clamp": _clamp,
    "clamp_min": lambda x, low, *, dtype: _clamp(x, low, dtype=dtype),
    "clamp_max": lambda x, high, *, dtype: _clamp(x, None, high, dtype=dtype),
    "maximum": _maximum,
    "minimum": _minimum,
    "where": _where,
    "masked_fill": lambda x, mask, value, *, dtype: _where(mask, value, x, dtype),
    "gt": _comparison(lambda x, y: x.low > y.high, lambda x, y: x.high > y.low),
    "lt": _comparison(lambda x, y: x.high < y.low, lambda x, y: x.low < y.high),
    "ge": _comparison(lambda x, y: x.low >= y.high, lambda x, y: x.high >= y.low),
    "le": _LE,
    "eq": _EQ,
    "ne": _not_equal,
    "isnan": _never,
    "isinf": _never,
    "sign": _sign,
    "sgn": _sign,
    "hypot": _hypot,
    "xlogy": _xlogy,
    "special_entr": lambda x, *, dtype: _neg(_xlogy(x, x, dtype=dtype), dtype=dtype),
    "fill": lambda x, value, *, dtype: converted(value, dtype).rearranged(lambda t: t.expand(x.low.shape)),
    "remainder": _remainder,
    "fmod": _fmod,
    "logit": _logit,
    "huber_loss": _huber,
    "smooth_l1_loss": lambda x, y, reduction=1, beta=1.0, *, dtype: _huber(
        x, y, reduction, beta, dtype=dtype, is_smooth_l1=True
    ),
    "celu": lambda x, alpha=1.0, *, dtype: _elu(x, alpha, 1, 1 / alpha, dtype=dtype),
    "_prelu_kernel": lambda x, w, *, dtype: _where(
        _comparison(lambda a, b: a.low > b.high, lambda a, b: a.high > b.low)(x, 0.0, dtype=dtype),
        x,
        _mul(x, w, dtype),
        dtype,
    ),
    "logical_and": _logical(torch.logical_and),
    "logical_or": _logical(torch.logical_or),
    "bitwise_and": _logical(torch.logical_and),
    "bitwise_or": _logical(torch.logical_or),
    "logical_not": _logical_not,
    "bitwise_not": _logical_not,
    "_to_copy": lambda x, *_, dtype, **__: converted(x, dtype),
    "exp": _increasing(torch.exp),
    "expm1": _increasing(torch.expm1),
    "tanh": _increasing(torch.tanh, between=(-1, 1)),
    "sigmoid": _increasing(torch.sigmoid, between=(0, 1)),
    "erf": _increasing(torch.erf, absolute=1),
    "atan": _increasing(torch.atan),
    "asinh": _increasing(torch.asinh, absolute=1, limits=_ASINH_LIMITS),
    "sinh": _increasing(torch.sinh, limits=_SINH_LIMITS),
    "log": _increasing(torch.log, above=0, absolute=1),
    "log2": _increasing(torch.log2, above=0, absolute=1),
    "log10": _increasing(torch.log10, above=0, absolute=1),
    "log1p": _increasing(torch.log1p, above=-1, absolute=1, limits=_LOG1P_LIMITS),
    "sqrt": _increasing(torch.sqrt, at_least=0),
    "rsqrt": _decreasing(torch.rsqrt, above=0),
    "softplus": _softplus,
    "relu": _relu,
    "elu": _elu,
    "gelu": _falling_then_rising(torch.nn.functional.gelu, _GELU_MINIMUM),
    "silu": _falling_then_rising(torch.nn.functional.silu, _SILU_MINIMUM),
    "sin": _sine(0.0),
    "cos": _sine(math.pi / 2),
    "leaky_relu": _leaky_relu,
    "tanh_backward": lambda g, y, *, dtype: _mul(g, _one_minus_square(y, dtype), dtype),
    "sigmoid_backward": lambda g, y, *, dtype: _mul(_mul(g, _sub(1.0, y, dtype), dtype), y, dtype),
    "threshold_backward": lambda g, x, bound, *, dtype: _where(_LE(x, bound, dtype=dtype), 0.0, g, dtype),
}
