"""Intervals of elementary functions, and of activations and losses made of them."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from torchguard.compiled.certify.enclosure._intervals import (
    SLACK,
    Interval,
    Operand,
    UnboundedError,
    converted,
    rounded,
    unit,
)
from torchguard.compiled.certify.enclosure._pointwise import RULES as POINTWISE
from torchguard.compiled.certify.enclosure._pointwise import Rule

_abs, _gt, _le, _mul = (POINTWISE[name] for name in ("abs", "gt", "le", "mul"))
_neg, _pow, _sub, _where = (POINTWISE[name] for name in ("neg", "pow", "sub", "where"))
# Where gelu and silu have their minimum.
_GELU_MINIMUM, _TANH_GELU_MINIMUM, _SILU_MINIMUM = -0.7517915246935645, -0.7524614220710163, -1.2784645427610738
_MAX_CUBED = 1e12


# Torch's vectorised code overflows on larger arguments, although the result would not.
_SINH_LIMITS = {torch.float32: 88.0, torch.float64: 709.0}


_ASINH_LIMITS = {torch.float32: 1e19, torch.float64: 1e154}


_LOG1P_LIMITS = {torch.float32: 9e37, torch.float64: 9e306}


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

    def rule(x: Interval, *, dtype: torch.dtype) -> Interval:
        x = converted(x, dtype)
        bottom = function(torch.minimum(torch.maximum(torch.tensor(minimum, dtype=torch.float64), x.low), x.high))
        top = torch.maximum(function(x.low), function(x.high))
        # The position of the minimum is known to ten digits: the error this makes in its value is far below 1e-15.
        # On the way torch computes 2x, and differences of numbers of that size.
        return rounded(bottom, top, dtype, SLACK, SLACK * unit(dtype) * x.size + 1e-15, through=4 * x.size)

    return rule


def _gelu(x: Interval, *, dtype: torch.dtype, approximate: str = "none") -> Interval:
    if approximate == "none":
        return _falling_then_rising(F.gelu, _GELU_MINIMUM)(x, dtype=dtype)
    if bool((x.size > _MAX_CUBED).any()):
        raise UnboundedError("gelu with approximate='tanh' of a number whose cube may not be finite")
    return _falling_then_rising(lambda t: F.gelu(t, approximate="tanh"), _TANH_GELU_MINIMUM)(x, dtype=dtype)


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


def _logit(x: Interval, eps: float | None = None, *, dtype: torch.dtype) -> Interval:
    x = converted(x, dtype)
    if eps is not None or bool(((x.low <= 0) | (x.high >= 1)).any()):
        raise UnboundedError("logit of a number that may not lie between 0 and 1")
    # The quotient x / (1 - x) has a relative error of a few units, which is an absolute error of its logarithm.
    return rounded(torch.logit(x.low), torch.logit(x.high), dtype, SLACK, SLACK * unit(dtype))


def _xlogy(x: Operand, y: Operand, *, dtype: torch.dtype) -> Interval:
    """Where x is zero the result is zero, as the product is."""
    return _mul(x, RULES["log"](converted(y, dtype), dtype=dtype), dtype)


def _hypot(a: Interval, b: Interval, *, dtype: torch.dtype) -> Interval:
    x, y = (_abs(converted(v, dtype), dtype=dtype) for v in (a, b))
    return rounded(torch.hypot(x.low, y.low), torch.hypot(x.high, y.high), dtype, SLACK)


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
    low, high = (F.softplus(t, 1, 100) for t in (x.low, x.high))
    return rounded(low, high, dtype, SLACK, 3e-9)


def _relu(x: Interval, *, dtype: torch.dtype) -> Interval:
    return x.rearranged(torch.relu)


def _elu(x: Interval, alpha: float = 1, scale: float = 1, input_scale: float = 1, *, dtype: torch.dtype) -> Interval:
    if min(alpha, scale, input_scale) <= 0:
        raise UnboundedError("elu with an argument that is not positive")
    function = lambda t: scale * torch.where(t > 0, t, alpha * torch.expm1(t * input_scale))  # noqa: E731
    return _increasing(function, absolute=1 + alpha * scale)(x, dtype=dtype)


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


RULES: dict[str, Rule] = {
    "hypot": _hypot,
    "xlogy": _xlogy,
    "special_entr": lambda x, *, dtype: _neg(_xlogy(x, x, dtype=dtype), dtype=dtype),
    "logit": _logit,
    "huber_loss": _huber,
    "smooth_l1_loss": lambda x, y, reduction=1, beta=1.0, *, dtype: _huber(
        x, y, reduction, beta, dtype=dtype, is_smooth_l1=True
    ),
    "celu": lambda x, alpha=1.0, *, dtype: _elu(x, alpha, 1, 1 / alpha, dtype=dtype),
    "_prelu_kernel": lambda x, w, *, dtype: _where(_gt(x, 0.0, dtype=dtype), x, _mul(x, w, dtype), dtype),
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
    "gelu": _gelu,
    "silu": _falling_then_rising(F.silu, _SILU_MINIMUM),
    "sin": _sine(0.0),
    "cos": _sine(math.pi / 2),
    "leaky_relu": _leaky_relu,
    "tanh_backward": lambda g, y, *, dtype: _mul(g, _one_minus_square(y, dtype), dtype),
    "sigmoid_backward": lambda g, y, *, dtype: _mul(_mul(g, _sub(1.0, y, dtype), dtype), y, dtype),
    "threshold_backward": lambda g, x, bound, *, dtype: _where(_le(x, bound, dtype=dtype), 0.0, g, dtype),
}
