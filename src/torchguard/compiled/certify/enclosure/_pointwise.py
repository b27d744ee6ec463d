"""Intervals of arithmetic, comparisons and choices, element by element."""

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
    converted,
    settled,
)

Rule = Callable[..., Any]
# Powers of integers are multiplied out.
_LARGEST_POWER = 64


def _scaled(x: Operand, number: Operand, dtype: torch.dtype) -> Interval:
    return converted(x, dtype) if number == 1 else _times(x, number, dtype)


def _plus(a: Operand, b: Operand, dtype: torch.dtype, *, alpha: Operand = 1) -> Interval:
    x, y = converted(a, dtype), _scaled(b, alpha, dtype)
    return settled(x.low + y.low, x.high + y.high, dtype)


def _minus(a: Operand, b: Operand, dtype: torch.dtype, *, alpha: Operand = 1) -> Interval:
    x, y = converted(a, dtype), _scaled(b, alpha, dtype)
    return settled(x.low - y.high, x.high - y.low, dtype)


def _negative(x: Interval, *, dtype: torch.dtype) -> Interval:
    return _kept(-x.high, -x.low, dtype)


def _kept(low: Tensor, high: Tensor, dtype: torch.dtype) -> Interval:
    """Bounds of what is computed without rounding, though integers may wrap around."""
    return Interval(low, high, dtype) if dtype.is_floating_point else settled(low, high, dtype)


def _hull(corners: list[Tensor]) -> tuple[Tensor, Tensor]:
    if any(bool(c.isnan().any()) for c in corners):
        raise UnboundedError("infinity times zero, or less infinity")
    return reduce(torch.minimum, corners), reduce(torch.maximum, corners)


def _times(a: Operand, b: Operand, dtype: torch.dtype) -> Interval:
    if a is b and isinstance(a, Interval):
        return _power(a, 2, dtype)
    x, y = converted(a, dtype), converted(b, dtype)
    return settled(*_hull([p * q for p in (x.low, x.high) for q in (y.low, y.high)]), dtype)


def _over(a: Operand, b: Operand, dtype: torch.dtype, *, rounding_mode: str | None = None) -> Interval:
    if rounding_mode is not None or not dtype.is_floating_point:
        raise UnboundedError("a division that rounds")
    x, y = converted(a, dtype), converted(b, dtype)
    if bool(((y.low <= 0) & (y.high >= 0)).any()):
        raise UnboundedError("a division by what may be zero")
    return settled(*_hull([p / q for p in (x.low, x.high) for q in (y.low, y.high)]), dtype, 2)


def _absolute(x: Interval, *, dtype: torch.dtype) -> Interval:
    is_across = (x.low <= 0) & (x.high >= 0)
    return _kept(torch.where(is_across, 0.0, torch.minimum(x.low.abs(), x.high.abs())), x.size, dtype)


def _power(x: Operand, e: Operand, dtype: torch.dtype) -> Interval:
    if isinstance(e, Interval) or not isinstance(x, Interval):
        raise UnboundedError("a power that is a tensor")
    x = converted(x, dtype)
    if not dtype.is_floating_point:
        return _integer_power(x, e, dtype)
    # Torch may keep the exponent as it is, or round it first.
    exponents = {float(e), float(converted(e, dtype).low)}
    if not all(math.isfinite(p) for p in exponents):
        raise UnboundedError(f"the power {e}")
    if len(exponents) == 1 and float(e).is_integer() and e >= 0:
        base = _absolute(x, dtype=dtype) if int(e) % 2 == 0 else x
        return settled(base.low**e, base.high**e, dtype, SLACK)
    if bool((x.low <= 0).any()):
        raise UnboundedError(f"the power {e} of what may be zero or less")
    return settled(*_hull([end**p for end in (x.low, x.high) for p in exponents]), dtype, SLACK)


def _integer_power(x: Interval, e: float, dtype: torch.dtype) -> Interval:
    if not isinstance(e, int) or not 0 <= e <= _LARGEST_POWER:
        raise UnboundedError(f"the power {e} of integers")
    base = _absolute(x, dtype=dtype) if e % 2 == 0 else x
    low, high = (reduce(operator.mul, [end] * e, torch.ones_like(end)) for end in (base.low, base.high))
    return settled(low, high, dtype)


def _clamped(x: Operand, low: Operand | None = None, high: Operand | None = None, *, dtype: torch.dtype) -> Interval:
    above = converted(x, dtype) if low is None else _larger(x, low, dtype)
    return above if high is None else _smaller(above, high, dtype)


def _larger(a: Operand, b: Operand, dtype: torch.dtype) -> Interval:
    x, y = converted(a, dtype), converted(b, dtype)
    return Interval(torch.maximum(x.low, y.low), torch.maximum(x.high, y.high), dtype)


def _smaller(a: Operand, b: Operand, dtype: torch.dtype) -> Interval:
    x, y = converted(a, dtype), converted(b, dtype)
    return Interval(torch.minimum(x.low, y.low), torch.minimum(x.high, y.high), dtype)


def _chosen(condition: Interval, yes: Operand, no: Operand, dtype: torch.dtype) -> Interval:
    a, b, holds = converted(yes, dtype), converted(no, dtype), converted(condition, torch.bool)
    may, must = holds.high > 0, holds.low > 0
    low = torch.where(must, a.low, torch.where(may, torch.minimum(a.low, b.low), b.low))
    high = torch.where(must, a.high, torch.where(may, torch.maximum(a.high, b.high), b.high))
    return Interval(low, high, dtype)


def _compared(is_surely: Callable[..., Tensor], is_maybe: Callable[..., Tensor]) -> Rule:
    def rule(a: Operand, b: Operand, *, dtype: torch.dtype) -> Interval:
        common = common_dtype(a, b)
        x, y = converted(a, common), converted(b, common)
        both = [is_(x, y).to(torch.float64) for is_ in (is_surely, is_maybe)]
        return Interval(both[0], both[1], torch.bool)

    return rule


_AT_MOST = _compared(lambda x, y: x.high <= y.low, lambda x, y: x.low <= y.high)


def _logic(function: Callable[..., Tensor]) -> Rule:
    def rule(*operands: Interval, dtype: torch.dtype) -> Interval:
        if dtype != torch.bool or any(x.dtype != torch.bool for x in operands):
            raise UnboundedError("logic on numbers")
        low, high = (function(*(getattr(x, end) > 0 for x in operands)) for end in ("low", "high"))
        return Interval(low.to(torch.float64), high.to(torch.float64), torch.bool)

    return rule


def _not(x: Interval, *, dtype: torch.dtype) -> Interval:
    if x.dtype != torch.bool:
        raise UnboundedError("logic on numbers")
    return Interval(1 - x.high, 1 - x.low, torch.bool)


def _less_square(y: Interval, dtype: torch.dtype) -> Interval:
    return _minus(1.0, _power(y, 2, dtype), dtype)


RULES: dict[str, Rule] = {
    "tanh_backward": lambda g, y, *, dtype: _times(g, _less_square(y, dtype), dtype),
    "sigmoid_backward": lambda g, y, *, dtype: _times(_times(g, _minus(1.0, y, dtype), dtype), y, dtype),
    "threshold_backward": lambda g, x, bound, *, dtype: _chosen(_AT_MOST(x, bound, dtype=dtype), 0.0, g, dtype),
    "add": _plus,
    "sub": _minus,
    "rsub": lambda a, b, alpha=1, *, dtype: _minus(b, a, dtype, alpha=alpha),
    "mul": _times,
    "div": _over,
    "neg": _negative,
    "abs": _absolute,
    "square": lambda x, *, dtype: _power(x, 2, dtype),
    "pow": _power,
    "reciprocal": lambda x, *, dtype: _over(1.0, x, dtype),
    "hardtanh": lambda x, low=-1, high=1, *, dtype: _clamped(x, low, high, dtype=dtype),
    "clamp": _clamped,
    "clamp_min": lambda x, low, *, dtype: _clamped(x, low, dtype=dtype),
    "clamp_max": lambda x, high, *, dtype: _clamped(x, None, high, dtype=dtype),
    "maximum": _larger,
    "minimum": _smaller,
    "where": _chosen,
    "masked_fill": lambda x, mask, value, *, dtype: _chosen(mask, value, x, dtype),
    "gt": _compared(lambda x, y: x.low > y.high, lambda x, y: x.high > y.low),
    "lt": _compared(lambda x, y: x.high < y.low, lambda x, y: x.low < y.high),
    "ge": _compared(lambda x, y: x.low >= y.high, lambda x, y: x.high >= y.low),
    "le": _AT_MOST,
    "logical_and": _logic(torch.logical_and),
    "logical_or": _logic(torch.logical_or),
    "bitwise_and": _logic(torch.logical_and),
    "bitwise_or": _logic(torch.logical_or),
    "logical_not": _not,
    "bitwise_not": _not,
    "_to_copy": lambda x, *_, dtype, **__: converted(x, dtype),
}
