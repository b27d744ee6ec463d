"""Intervals of elementary functions and activations."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchguard.compiled.certify.enclosure._intervals import SLACK, Interval, UnboundedError, converted, rounded, unit

_GELU_LOWEST, _SILU_LOWEST = -0.7517915246935645, -1.2784645427610738
# Vectorized code gives these up before their results overflow: up to where they can be relied on.
_SINH_ENDS = {torch.float32: 88.0, torch.float64: 709.0}
_ASINH_ENDS = {torch.float32: 1e19, torch.float64: 1e154}
_LOG1P_ENDS = {torch.float32: 9e37, torch.float64: 9e306}
Rule = Callable[..., Any]


def rising(
    function: Callable[[Tensor], Tensor],
    *,
    above: float = -math.inf,
    at_least: float = -math.inf,
    ends: dict[torch.dtype, float] | None = None,
    absolute: float = 0,
    between: tuple[float, float] = (-math.inf, math.inf),
) -> Rule:
    """A function that never falls, of arguments in a range, with an absolute error beside the relative one."""

    def rule(x: Interval, *, dtype: torch.dtype) -> Interval:
        x = converted(x, dtype)
        slack = absolute * SLACK * unit(dtype)
        if bool(((x.low <= above) | (x.low < at_least)).any()):
            raise UnboundedError(f"an argument that may be {max(above, at_least):g} or less")
        if ends is not None and bool((x.size > ends[dtype]).any()):
            raise UnboundedError(f"an argument that may be past {ends[dtype]:g}")
        made = rounded(function(x.low), function(x.high), dtype, SLACK, slack)
        return Interval(made.low.clamp(*between), made.high.clamp(*between), dtype)

    return rule


def falling(function: Callable[[Tensor], Tensor], *, above: float) -> Rule:
    """A function that never rises, of arguments above some number."""

    def rule(x: Interval, *, dtype: torch.dtype) -> Interval:
        x = converted(x, dtype)
        if bool((x.low <= above).any()):
            raise UnboundedError(f"an argument that may be {above:g} or less")
        return rounded(function(x.high), function(x.low), dtype, SLACK)

    return rule


def _valley(function: Callable[[Tensor], Tensor], lowest: float) -> Rule:
    """A function that falls up to one point and rises from there; small differences of large numbers make it up."""

    def rule(x: Interval, *, dtype: torch.dtype, approximate: str = "none") -> Interval:
        if approximate != "none":
            raise UnboundedError(f"gelu with approximate={approximate!r}")
        x = converted(x, dtype)
        bottom = function(torch.minimum(torch.maximum(torch.tensor(lowest, dtype=torch.float64), x.low), x.high))
        top = torch.maximum(function(x.low), function(x.high))
        # The lowest point is known to ten digits: what lies under it by that is far less.
        # Twice x is computed on the way.
        return rounded(bottom, top, dtype, SLACK, SLACK * unit(dtype) * x.size + 1e-15, through=4 * x.size)

    return rule


def _wave(shift: float) -> Rule:
    """The sine, shifted: one where x + shift is a multiple of the full turn and a quarter."""

    def rule(x: Interval, *, dtype: torch.dtype) -> Interval:
        x = converted(x, dtype)
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


def _leaky(x: Interval, slope: float = 0.01, *, dtype: torch.dtype) -> Interval:
    x, factor = converted(x, dtype), converted(slope, dtype).low
    if bool(factor < 0):
        raise UnboundedError("leaky_relu that falls")
    low, high = (torch.where(t > 0, t, t * factor) for t in (x.low, x.high))
    return rounded(low, high, dtype)


def _softplus(x: Interval, beta: float = 1, threshold: float = 20, *, dtype: torch.dtype) -> Interval:
    if beta != 1 or threshold != 20:
        raise UnboundedError("softplus with other settings than its own")
    x = converted(x, dtype)
    # Past the threshold torch returns x, which differs from softplus by less than exp(-20).
    low, high = (torch.nn.functional.softplus(t, 1, 100) for t in (x.low, x.high))
    return rounded(low, high, dtype, SLACK, 3e-9)


def _relu(x: Interval, *, dtype: torch.dtype) -> Interval:
    return x.arranged(torch.relu)


def _elu(x: Interval, alpha: float = 1, scale: float = 1, input_scale: float = 1, *, dtype: torch.dtype) -> Interval:
    if (alpha, scale, input_scale) != (1, 1, 1):
        raise UnboundedError("elu with other settings than its own")
    return rising(torch.nn.functional.elu, absolute=1)(x, dtype=dtype)


RULES: dict[str, Rule] = {
    "exp": rising(torch.exp),
    "expm1": rising(torch.expm1),
    "tanh": rising(torch.tanh, between=(-1, 1)),
    "sigmoid": rising(torch.sigmoid, between=(0, 1)),
    "erf": rising(torch.erf, absolute=1),
    "atan": rising(torch.atan),
    "asinh": rising(torch.asinh, absolute=1, ends=_ASINH_ENDS),
    "sinh": rising(torch.sinh, ends=_SINH_ENDS),
    "log": rising(torch.log, above=0, absolute=1),
    "log2": rising(torch.log2, above=0, absolute=1),
    "log10": rising(torch.log10, above=0, absolute=1),
    "log1p": rising(torch.log1p, above=-1, absolute=1, ends=_LOG1P_ENDS),
    "sqrt": rising(torch.sqrt, at_least=0),
    "rsqrt": falling(torch.rsqrt, above=0),
    "softplus": _softplus,
    "relu": _relu,
    "elu": _elu,
    "gelu": _valley(torch.nn.functional.gelu, _GELU_LOWEST),
    "silu": _valley(torch.nn.functional.silu, _SILU_LOWEST),
    "sin": _wave(0.0),
    "cos": _wave(math.pi / 2),
    "leaky_relu": _leaky,
}
