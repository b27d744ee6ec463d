"""Intervals of what is computed element by element."""

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from torchguard.compiled.enclosure.intervals import SLACK, Interval, UnboundedError, rounded, unit

_GELU_LOWEST, _SILU_LOWEST = -0.7517915246935645, -1.2784645427610738
Operand = Interval | bool | int | float
Rule = Callable[..., Any]


def as_interval(x: Operand, dtype: torch.dtype) -> Interval:
    """An operand as an interval; a number is taken as it is."""
    if isinstance(x, Interval):
        return x
    value = torch.tensor(float(x), dtype=torch.float64)
    return Interval(value, value, dtype)


def _exactly(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point


def _finished(low: Tensor, high: Tensor, dtype: torch.dtype, ulps: float = 1, slack: Tensor | float = 0.0) -> Interval:
    if not _exactly(dtype):
        return rounded(low, high, dtype, ulps, slack)
    if not bool(((low.abs() <= 2.0**53) & (high.abs() <= 2.0**53)).all()):
        raise UnboundedError("integers past 2**53")
    return Interval(low, high, dtype)


def _scaled(x: Interval, number: Operand) -> Interval:
    return x if number == 1 else _times(x, as_interval(number, x.dtype), x.dtype)


def _plus(a: Operand, b: Operand, dtype: torch.dtype, *, alpha: Operand = 1) -> Interval:
    x, y = as_interval(a, dtype), _scaled(as_interval(b, dtype), alpha)
    return _finished(x.low + y.low, x.high + y.high, dtype)


def _negative(x: Interval) -> Interval:
    return Interval(-x.high, -x.low, x.dtype)


def _minus(a: Operand, b: Operand, dtype: torch.dtype, *, alpha: Operand = 1) -> Interval:
    return _plus(a, _negative(_scaled(as_interval(b, dtype), alpha)), dtype)


def _hull(corners: list[Tensor]) -> tuple[Tensor, Tensor]:
    if any(bool(c.isnan().any()) for c in corners):
        raise UnboundedError("infinity times zero, or less infinity")
    return reduce(torch.minimum, corners), reduce(torch.maximum, corners)


def _times(a: Operand, b: Operand, dtype: torch.dtype) -> Interval:
    if a is b and isinstance(a, Interval):
        return _power(a, 2, dtype)
    x, y = as_interval(a, dtype), as_interval(b, dtype)
    return _finished(*_hull([p * q for p in (x.low, x.high) for q in (y.low, y.high)]), dtype)


def _over(a: Operand, b: Operand, dtype: torch.dtype, *, rounding_mode: str | None = None) -> Interval:
    x, y = as_interval(a, dtype), as_interval(b, dtype)
    if rounding_mode is not None:
        raise UnboundedError("a division that rounds")
    if bool(((y.low <= 0) & (y.high >= 0)).any()):
        raise UnboundedError("a division by what may be zero")
    return _finished(*_hull([p / q for p in (x.low, x.high) for q in (y.low, y.high)]), dtype, 2)


def rising(
    function: Callable[[Tensor], Tensor],
    *,
    above: float = -math.inf,
    at_least: float = -math.inf,
    absolute: float = 0,
    between: tuple[float, float] = (-math.inf, math.inf),
) -> Rule:
    """A function that never falls, of arguments in a range, with an absolute error beside the relative one."""

    def rule(x: Interval, *, dtype: torch.dtype) -> Interval:
        if bool(((x.low <= above) | (x.low < at_least)).any()):
            raise UnboundedError(f"an argument that may be {max(above, at_least):g} or less")
        made = rounded(function(x.low), function(x.high), dtype, SLACK, absolute * SLACK * unit(dtype))
        return Interval(made.low.clamp(*between), made.high.clamp(*between), dtype)

    return rule


def falling(function: Callable[[Tensor], Tensor], *, above: float) -> Rule:
    """A function that never rises, of arguments above some number."""

    def rule(x: Interval, *, dtype: torch.dtype) -> Interval:
        if bool((x.low <= above).any()):
            raise UnboundedError(f"an argument that may be {above:g} or less")
        return rounded(function(x.high), function(x.low), dtype, SLACK)

    return rule


def _valley(function: Callable[[Tensor], Tensor], lowest: float) -> Rule:
    """A function that falls up to one point and rises from there; small differences of large numbers make it up."""

    def rule(x: Interval, *, dtype: torch.dtype, approximate: str = "none") -> Interval:
        if approximate != "none":
            raise UnboundedError(f"gelu with approximate={approximate!r}")
        bottom = function(torch.minimum(torch.maximum(torch.tensor(lowest, dtype=torch.float64), x.low), x.high))
        top = torch.maximum(function(x.low), function(x.high))
        # The lowest point is known to ten digits: what lies under it by that is far less.
        return rounded(bottom, top, dtype, SLACK, SLACK * unit(dtype) * x.size + 1e-15)

    return rule


def _wave(shift: float) -> Rule:
    """The sine, shifted: one where x + shift is a multiple of the full turn and a quarter."""

    def rule(x: Interval, *, dtype: torch.dtype) -> Interval:
        if bool((x.size > 1e6).any()):
            raise UnboundedError("an angle past a million")
        low, high = x.low + shift, x.high + shift
        ends = torch.sin(low), torch.sin(high)
        top, bottom = torch.maximum(*ends), torch.minimum(*ends)
        # A peak is inside, or so near that rounding cannot tell.
        turn, near = 2 * math.pi, 1e-9
        has_peak = torch.floor((high + near - math.pi / 2) / turn) >= torch.ceil((low - near - math.pi / 2) / turn)
        has_dip = torch.floor((high + near + math.pi / 2) / turn) >= torch.ceil((low - near + math.pi / 2) / turn)
        slack = SLACK * unit(dtype) + 1e-9
        return rounded(torch.where(has_dip, -1.0, bottom), torch.where(has_peak, 1.0, top), dtype, SLACK, slack)

    return rule


def _absolute(x: Interval, *, dtype: torch.dtype) -> Interval:
    is_across = (x.low <= 0) & (x.high >= 0)
    return Interval(torch.where(is_across, 0.0, torch.minimum(x.low.abs(), x.high.abs())), x.size, dtype)


def _power(x: Operand, e: Operand, dtype: torch.dtype) -> Interval:
    if isinstance(e, Interval) or not isinstance(x, Interval):
        raise UnboundedError("a power that is a tensor")
    if float(e).is_integer() and e >= 0:
        base = _absolute(x, dtype=dtype) if int(e) % 2 == 0 else x
        return _finished(base.low**e, base.high**e, dtype, SLACK)
    if bool((x.low <= 0).any()):
        raise UnboundedError(f"the power {e} of what may be zero or less")
    ends = x.low**e, x.high**e
    return _finished(torch.minimum(*ends), torch.maximum(*ends), dtype, SLACK)


def _clamped(x: Interval, low: Operand | None = None, high: Operand | None = None, *, dtype: torch.dtype) -> Interval:
    if low is not None:
        x = _larger(x, low, dtype)
    return x if high is None else _smaller(x, high, dtype)


def _larger(a: Operand, b: Operand, dtype: torch.dtype) -> Interval:
    x, y = as_interval(a, dtype), _as_stored(b, dtype)
    return Interval(torch.maximum(x.low, y.low), torch.maximum(x.high, y.high), dtype)


def _smaller(a: Operand, b: Operand, dtype: torch.dtype) -> Interval:
    x, y = as_interval(a, dtype), _as_stored(b, dtype)
    return Interval(torch.minimum(x.low, y.low), torch.minimum(x.high, y.high), dtype)


def _as_stored(x: Operand, dtype: torch.dtype) -> Interval:
    """A number as it comes out of the dtype: 0.1 is not 0.1 in float32."""
    if isinstance(x, Interval) or _exactly(dtype):
        return as_interval(x, dtype)
    stored = torch.tensor(float(x), dtype=dtype).to(torch.float64)
    return Interval(stored, stored, dtype)


def _chosen(condition: Interval, yes: Operand, no: Operand, dtype: torch.dtype) -> Interval:
    a, b = _as_stored(yes, dtype), _as_stored(no, dtype)
    may, must = condition.high > 0, condition.low > 0
    low = torch.where(must, a.low, torch.where(may, torch.minimum(a.low, b.low), b.low))
    high = torch.where(must, a.high, torch.where(may, torch.maximum(a.high, b.high), b.high))
    return Interval(low, high, dtype)


def _compared(is_surely: Callable[..., Tensor], is_maybe: Callable[..., Tensor]) -> Rule:
    def rule(a: Operand, b: Operand, *, dtype: torch.dtype) -> Interval:
        x = as_interval(a, torch.float64)
        own = x.dtype if isinstance(a, Interval) else torch.float64
        y = _as_stored(b, own) if own.is_floating_point else as_interval(b, own)
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


def _leaky(x: Interval, slope: float = 0.01, *, dtype: torch.dtype) -> Interval:
    if slope < 0:
        raise UnboundedError("leaky_relu that falls")
    low, high = (torch.where(t > 0, t, t * slope) for t in (x.low, x.high))
    return rounded(low, high, dtype)


def _converted(x: Interval, *_: Any, dtype: torch.dtype, **__: Any) -> Interval:
    if dtype.is_floating_point:
        return rounded(x.low, x.high, dtype) if dtype != x.dtype else x
    if x.dtype.is_floating_point:
        raise UnboundedError(f"a conversion from {x.dtype} to {dtype}")
    return Interval(x.low, x.high, dtype)


def _softplus(x: Interval, beta: float = 1, threshold: float = 20, *, dtype: torch.dtype) -> Interval:
    if beta != 1 or threshold != 20:
        raise UnboundedError("softplus with other settings than its own")
    # Past the threshold torch returns x, which differs from softplus by less than exp(-20).
    low, high = (torch.nn.functional.softplus(t, 1, 100) for t in (x.low, x.high))
    return rounded(low, high, dtype, SLACK, 3e-9)


def _relu(x: Interval, *, dtype: torch.dtype) -> Interval:
    return x.arranged(torch.relu)


def _elu(x: Interval, alpha: float = 1, scale: float = 1, input_scale: float = 1, *, dtype: torch.dtype) -> Interval:
    if (alpha, scale, input_scale) != (1, 1, 1):
        raise UnboundedError("elu with other settings than its own")
    return rising(torch.nn.functional.elu, absolute=1)(x, dtype=dtype)


def _less_square(y: Interval, dtype: torch.dtype) -> Interval:
    return _minus(1.0, _power(y, 2, dtype), dtype)


RULES: dict[str, Rule] = {
    "exp": rising(torch.exp),
    "expm1": rising(torch.expm1),
    "tanh": rising(torch.tanh, between=(-1, 1)),
    "sigmoid": rising(torch.sigmoid, between=(0, 1)),
    "erf": rising(torch.erf, absolute=1),
    "atan": rising(torch.atan),
    "asinh": rising(torch.asinh, absolute=1),
    "sinh": rising(torch.sinh),
    "log": rising(torch.log, above=0, absolute=1),
    "log2": rising(torch.log2, above=0, absolute=1),
    "log10": rising(torch.log10, above=0, absolute=1),
    "log1p": rising(torch.log1p, above=-1, absolute=1),
    "sqrt": rising(torch.sqrt, at_least=0),
    "softplus": _softplus,
    "relu": _relu,
    "elu": _elu,
    "tanh_backward": lambda g, y, *, dtype: _times(g, _less_square(y, dtype), dtype),
    "sigmoid_backward": lambda g, y, *, dtype: _times(_times(g, _minus(1.0, y, dtype), dtype), y, dtype),
    "threshold_backward": lambda g, x, bound, *, dtype: _chosen(_AT_MOST(x, bound, dtype=dtype), 0.0, g, dtype),
    "add": _plus,
    "sub": _minus,
    "rsub": lambda a, b, alpha=1, *, dtype: _minus(b, a, dtype, alpha=alpha),
    "mul": _times,
    "div": _over,
    "neg": lambda x, *, dtype: _negative(x),
    "abs": _absolute,
    "square": lambda x, *, dtype: _power(x, 2, dtype),
    "pow": _power,
    "reciprocal": lambda x, *, dtype: _over(1.0, x, dtype),
    "rsqrt": falling(torch.rsqrt, above=0),
    "gelu": _valley(torch.nn.functional.gelu, _GELU_LOWEST),
    "silu": _valley(torch.nn.functional.silu, _SILU_LOWEST),
    "sin": _wave(0.0),
    "cos": _wave(math.pi / 2),
    "leaky_relu": _leaky,
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
    "_to_copy": _converted,
}
