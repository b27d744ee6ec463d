"""Intervals of pointwise operators: arithmetic, powers, comparisons, choices and logic."""

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
)

Rule = Callable[..., Any]
# Integer powers up to this exponent are multiplied out.
_MAX_INTEGER_POWER = 64


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
    "le": _comparison(lambda x, y: x.high <= y.low, lambda x, y: x.low <= y.high),
    "eq": _EQ,
    "ne": _not_equal,
    "isnan": _never,
    "isinf": _never,
    "sign": _sign,
    "sgn": _sign,
    "fill": lambda x, value, *, dtype: converted(value, dtype).rearranged(lambda t: t.expand(x.low.shape)),
    "remainder": _remainder,
    "fmod": _fmod,
    "logical_and": _logical(torch.logical_and),
    "logical_or": _logical(torch.logical_or),
    "bitwise_and": _logical(torch.logical_and),
    "bitwise_or": _logical(torch.logical_or),
    "logical_not": _logical_not,
    "bitwise_not": _logical_not,
    "_to_copy": lambda x, *_, dtype, **__: converted(x, dtype),
}
