"""Intervals of variances and vector norms, and of layer, group and batch norm."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchguard.compiled.certify.enclosure._elementary import RULES as ELEMENTARY
from torchguard.compiled.certify.enclosure._intervals import (
    SLACK,
    Interval,
    UnboundedError,
    accumulated,
    converted,
    rounded,
    unit,
)
from torchguard.compiled.certify.enclosure._layers import Dims, dims_of, mean
from torchguard.compiled.certify.enclosure._pointwise import RULES as POINTWISE


def _variance(x: Interval, dim: Dims, correction: float | None, keepdim: bool, dtype: torch.dtype) -> Interval:
    """The mean square of deviations from a mean that lies between those of both bounds."""
    x, dims = converted(x, dtype), dims_of(x.low, dim)
    count = math.prod(x.low.shape[d] for d in dims)
    divisor = count - (1 if correction is None else correction)
    if divisor <= 0 or not dims:
        raise UnboundedError("a variance of too few numbers")
    low, high = (t.mean(dims, keepdim=True) for t in (x.low, x.high))
    least, most = x.low - high, x.high - low
    is_across = (least <= 0) & (most >= 0)
    near = torch.where(is_across, 0.0, torch.minimum(least.abs(), most.abs())).square()
    far = torch.maximum(least.abs(), most.abs()).square()
    # Torch updates a running mean and sum of squares: each step rounds numbers of the size of the squares.
    squares = x.size.square().sum(dims, keepdim=keepdim)
    slack = accumulated(dtype, 8 * count + 8) * squares / divisor
    bounds = [t.sum(dims, keepdim=keepdim) / divisor for t in (near, far)]
    made = rounded(bounds[0], bounds[1], dtype, SLACK, slack, through=4 * squares)
    return Interval(made.low.clamp(min=0), made.high, dtype)


def _var(
    x: Interval, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False, dtype: torch.dtype
) -> Interval:
    return _variance(x, dim, correction, keepdim, dtype)


def _var_mean(x: Interval, dim: Dims = None, *, dtype: torch.dtype, **options: Any) -> tuple[Interval, Interval]:
    return _var(x, dim, dtype=dtype, **options), mean(x, dim, options.get("keepdim", False), dtype=dtype)


def _std(x: Interval, dim: Dims = None, *, dtype: torch.dtype, **options: Any) -> Interval:
    return ELEMENTARY["sqrt"](_var(x, dim, dtype=dtype, **options), dtype=dtype)


def _norm(x: Interval, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype) -> Interval:
    if ord != 2:
        raise UnboundedError(f"a norm of order {ord}")
    dims = dims_of(x.low, dim)
    terms = math.prod(x.low.shape[d] for d in dims) + 1
    near = POINTWISE["abs"](converted(x, dtype), dtype=dtype)
    least, most = (t.square().sum(dims, keepdim=keepdim) if dims else t.square() for t in (near.low, near.high))
    # Each square is rounded, underflows where it is small, and may overflow although its root does not.
    error, lost = accumulated(dtype, terms), terms * torch.finfo(dtype).tiny
    least, most = (least * (1 - error) - lost).clamp(min=0), most * (1 + error) + lost
    return rounded(least.sqrt(), most.sqrt(), dtype, SLACK, through=most)


def _normalised(
    x: Interval, dims: list[int], weight: Interval | None, bias: Interval | None, eps: float, dtype: torch.dtype
) -> tuple[Interval, Interval, Interval]:
    """(x - mean) / √(variance + eps) * weight + bias, the mean, and the reciprocal root, which keep their dims.

    Torch multiplies this out in several ways. Each rounds numbers of the size of x and of the mean, times the factors.
    """
    if eps <= 0:
        raise UnboundedError("a norm with an eps that is not positive")
    x = converted(x, dtype)
    center = mean(x, dims, True, dtype=dtype)
    variance = _variance(x, dims, 0, True, dtype)
    scale = ELEMENTARY["rsqrt"](POINTWISE["add"](variance, eps, dtype=dtype), dtype=dtype)
    result = POINTWISE["mul"](POINTWISE["sub"](x, center, dtype=dtype), scale, dtype=dtype)
    factor = scale.size
    if weight is not None:
        result, factor = POINTWISE["mul"](result, weight, dtype=dtype), factor * weight.size
    if bias is not None:
        result = POINTWISE["add"](result, bias, dtype=dtype)
    through = (x.size + center.size) * factor + (0.0 if bias is None else bias.size)
    slack = SLACK * unit(dtype) * through
    return rounded(result.low, result.high, dtype, SLACK, slack, through=through), center, scale


def _layer_norm(
    x: Interval, shape: Sequence[int], weight: Interval | None, bias: Interval | None, eps: float, *, dtype: torch.dtype
) -> tuple[Interval, Interval, Interval]:
    rank = x.low.dim()
    return _normalised(x, list(range(rank - len(shape), rank)), weight, bias, eps, dtype)


def _group_norm(
    x: Interval,
    weight: Interval | None,
    bias: Interval | None,
    n: int,
    channels: int,
    inner: int,
    groups: int,
    eps: float,
    *,
    dtype: torch.dtype,
) -> tuple[Interval, Interval, Interval]:
    split = (n, groups, channels // groups, inner)
    w, b = (None if v is None else v.rearranged(lambda t: t.reshape(1, *split[1:3], 1)) for v in (weight, bias))
    y, center, scale = _normalised(x.rearranged(lambda t: t.reshape(split)), [2, 3], w, b, eps, dtype)
    center, scale = (v.rearranged(lambda t: t.reshape(n, groups)) for v in (center, scale))
    return y.rearranged(lambda t: t.reshape(x.low.shape)), center, scale


def _batch_norm(
    x: Interval, weight: Interval | None, bias: Interval | None, *statistics: Any, dtype: torch.dtype
) -> tuple[Interval, Interval, Interval]:
    """Batch norm by the statistics of the batch. That by given ones is traced as arithmetic."""
    *_, training, _, eps = statistics
    if not training:
        raise UnboundedError("batch norm by given statistics")
    rank = x.low.dim()
    w, b = (None if v is None else v.rearranged(lambda t: t.reshape(-1, *[1] * (rank - 2))) for v in (weight, bias))
    y, center, scale = _normalised(x, [d for d in range(rank) if d != 1], w, b, eps, dtype)
    flat = lambda t: t.reshape(-1)  # noqa: E731
    return y, center.rearranged(flat), scale.rearranged(flat)


RULES: dict[str, Callable[..., Any]] = {
    "var": _var,
    "var_mean": _var_mean,
    "std": _std,
    "linalg_vector_norm": _norm,
    "native_layer_norm": _layer_norm,
    "native_group_norm": _group_norm,
    "native_batch_norm": _batch_norm,
    "_native_batch_norm_legit": _batch_norm,
}
