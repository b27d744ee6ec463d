"""Operators defined by others that have rules. One entry covers an operator in every layer that can use it.

A definition states what an operator computes in real numbers; torch's derivatives are no part of it. So do those of the
operators that torch's derivative formulas use, such as `logit_backward`. Some have more assumptions, stated with them:
a sequence that is searched is sorted; a matrix has full rank.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchguard.compiled._decompositions import logcumsumexp, sinc


class UndefinedCallError(Exception):
    """A definition does not cover a call. It never reaches a user: the operator is named as one without a rule."""


@dataclass(frozen=True)
class Definition:
    """What an operator computes.

    Attributes:
        keeps_rounding: torch computes the operator by these operators, up to the order of sums. Bounds of the
            definition are then bounds of the operator.
        reads_layout: it holds only for operands that start where their storage does.
    """

    function: Callable[..., Any]
    keeps_rounding: bool = False
    reads_layout: bool = False


def _require(condition: bool) -> None:
    if not condition:
        raise UndefinedCallError


# Moving elements


def _pixel_shuffle(x: Tensor, factor: int) -> Tensor:
    *batch, channels, height, width = x.shape
    split = x.reshape(*batch, channels // factor**2, factor, factor, height, width)
    n = len(batch)
    moved = split.permute(*range(n), n, n + 3, n + 1, n + 4, n + 2)
    return moved.reshape(*batch, channels // factor**2, height * factor, width * factor)


def _pixel_unshuffle(x: Tensor, factor: int) -> Tensor:
    *batch, channels, height, width = x.shape
    split = x.reshape(*batch, channels, height // factor, factor, width // factor, factor)
    n = len(batch)
    moved = split.permute(*range(n), n, n + 2, n + 4, n + 1, n + 3)
    return moved.reshape(*batch, channels * factor**2, height // factor, width // factor)


def _channel_shuffle(x: Tensor, groups: int) -> Tensor:
    return x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)


def _rot90(x: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    a, b = dims
    turns = {0: lambda t: t.clone(), 1: lambda t: t.flip(b).transpose(a, b), 2: lambda t: t.flip((a, b))}
    return {**turns, 3: lambda t: t.flip(a).transpose(a, b)}[k % 4](x)


def _block_diag(blocks: Sequence[Tensor]) -> Tensor:
    blocks = [block.reshape(1, -1) if block.dim() < 2 else block for block in blocks]
    width, start, rows = sum(block.shape[1] for block in blocks), 0, []
    for block in blocks:
        end = start + block.shape[1]
        left, right = block.new_zeros(block.shape[0], start), block.new_zeros(block.shape[0], width - end)
        rows.append(torch.cat([left, block, right], 1))
        start = end
    return torch.cat(rows, 0)


def _positions_in_padding(n: int, before: int, after: int, is_reflection: bool) -> Tensor:
    at = torch.arange(-before, n + after)
    if is_reflection:
        return (n - 1) - ((n - 1) - at.abs()).abs()
    return at.clamp(0, n - 1)


def _padding(is_reflection: bool) -> Callable[[Tensor, Sequence[int]], Tensor]:
    def pad(x: Tensor, padding: Sequence[int]) -> Tensor:
        for i in range(len(padding) // 2):
            dim = x.dim() - 1 - i
            before, after = padding[2 * i : 2 * i + 2]
            x = x.index_select(dim, _positions_in_padding(x.shape[dim], before, after, is_reflection))
        return x

    return pad


def _padding_backward(is_reflection: bool) -> Callable[[Tensor, Tensor, Sequence[int]], Tensor]:
    def unpad(g: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
        for i in range(len(padding) // 2):
            dim = x.dim() - 1 - i
            before, after = padding[2 * i : 2 * i + 2]
            positions = _positions_in_padding(x.shape[dim], before, after, is_reflection)
            shape = [*g.shape[:dim], x.shape[dim], *g.shape[dim + 1 :]]
            g = g.new_zeros(shape).index_add(dim, positions, g)
        return g

    return unpad


def _strided_positions(x: Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int | None) -> Tensor:
    _require(x.is_contiguous() and len(sizes) > 0)
    last = (offset or 0) + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
    _require(0 <= (offset or 0) <= last < x.numel() and all(size > 0 for size in sizes))
    positions = torch.full((), offset or 0)
    for size, step in zip(sizes, strides, strict=True):
        positions = positions.unsqueeze(-1) + torch.arange(size) * step
    return positions.reshape(-1)


def _as_strided(x: Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int | None = None) -> Tensor:
    return x.reshape(-1).index_select(0, _strided_positions(x, sizes, strides, offset)).reshape(tuple(sizes))


def _as_strided_scatter(
    x: Tensor, source: Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int | None = None
) -> Tensor:
    positions = _strided_positions(x, sizes, strides, offset)
    return x.reshape(-1).index_put((positions,), source.reshape(-1)).reshape(x.shape)


def _index_fill(x: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    shape = [-1 if d == dim % x.dim() else 1 for d in range(x.dim())]
    is_chosen = (torch.arange(x.shape[dim]).unsqueeze(1) == index.reshape(1, -1)).any(1)
    return torch.where(is_chosen.reshape(shape), value, x)


def _masked_positions(mask: Tensor) -> Tensor:
    """The number of true elements before each one."""
    flat = mask.reshape(-1).to(torch.int64)
    return flat.cumsum(0) - flat


def _masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    x, mask = x.expand(shape), mask.expand(shape)
    _require(source.numel() >= x.numel() > 0)
    return torch.where(mask, source.reshape(-1).index_select(0, _masked_positions(mask)).reshape(shape), x)


def _masked_scatter_backward(g: Tensor, mask: Tensor, sizes: Sequence[int]) -> Tensor:
    _require(math.prod(sizes) >= g.numel() > 0)
    mask = mask.expand(g.shape)
    kept = torch.where(mask, g, 0.0).reshape(-1)
    return g.new_zeros(math.prod(sizes)).index_add(0, _masked_positions(mask), kept).reshape(tuple(sizes))


# Arithmetic and functions


def _addr(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = a.unsqueeze(1) * b
    return (c if beta == 1 else c * beta) + (product if alpha == 1 else product * alpha)


def _cross(a: Tensor, b: Tensor, *, dim: int = -1) -> Tensor:
    return a.roll(-1, dim) * b.roll(1, dim) - a.roll(1, dim) * b.roll(-1, dim)


def _xlogy(x: Any, y: Any) -> Tensor:
    """The product x log(y); 0 where x is 0 and the logarithm is not finite."""
    if not isinstance(x, Tensor):
        return y.new_zeros(y.shape) if x == 0 else x * y.log()
    if not isinstance(y, Tensor):
        _require(y > 0)
        return x * math.log(y)
    return torch.where((x == 0) & (y <= 0), 0.0, x * y.log())


def _logit(x: Tensor, eps: float | None = None) -> Tensor:
    x = x if eps is None else x.clamp(eps, 1 - eps)
    return (x / (1 - x)).log()


def _logit_backward(g: Tensor, x: Tensor, eps: float | None = None) -> Tensor:
    slope = g / (x * (1 - x))
    return slope if eps is None else torch.where((x < eps) | (x > 1 - eps), 0.0, slope)


def _nan_to_num(
    x: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    limits = torch.finfo(x.dtype)
    y = torch.where(x.isnan(), nan or 0.0, x)
    y = torch.where(x == math.inf, limits.max if posinf is None else posinf, y)
    return torch.where(x == -math.inf, limits.min if neginf is None else neginf, y)


# Norms and distances


def _norm(x: Tensor, p: float | None = 2, dim: Any = None, keepdim: bool = False, **_: Any) -> Tensor:
    return torch.linalg.vector_norm(x, 2 if p is None else p, dim, keepdim)


def _cdist(x: Tensor, y: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Tensor:
    return torch.linalg.vector_norm(x.unsqueeze(-2) - y.unsqueeze(-3), p, dim=-1)


def _cdist_backward(g: Tensor, x: Tensor, y: Tensor, p: float, distances: Tensor) -> Tensor:
    """The gradient by x. At distance 0 it is 0."""
    _require(p in (1, 2))
    difference = x.unsqueeze(-2) - y.unsqueeze(-3)
    if p == 1:
        return (g.unsqueeze(-1) * difference.sgn()).sum(-2)
    is_zero = distances == 0
    scale = torch.where(is_zero, 0.0, g / torch.where(is_zero, 1.0, distances))
    return (scale.unsqueeze(-1) * difference).sum(-2)


def _pdist_pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    n = x.shape[0]
    numbers = torch.arange(n * (n - 1) // 2)
    starts = torch.cat([torch.full((n - 1 - i,), i) for i in range(n - 1)])
    offsets = torch.cat([torch.full((n - 1 - i,), i * n - i * (i + 1) // 2 - i - 1) for i in range(n - 1)])
    return starts, numbers - offsets


def _pdist(x: Tensor, p: float = 2) -> Tensor:
    _require(x.shape[0] > 1)
    first, second = _pdist_pairs(x)
    return torch.linalg.vector_norm(x[first] - x[second], p, dim=-1)


def _trilinear(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    of_a: Sequence[int],
    of_b: Sequence[int],
    of_c: Sequence[int],
    summed: Sequence[int],
    unroll_dim: int = 1,
) -> Tensor:
    """The product of three tensors, each with further dims of size 1, summed over some dims."""
    factors = []
    for factor, dims in ((a, of_a), (b, of_b), (c, of_c)):
        for dim in sorted(dims):
            factor = factor.unsqueeze(dim)
        factors.append(factor)
    return math.prod(factors[1:], start=factors[0]).sum(tuple(summed))


# Reductions by index, and searches


def _scatter_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    _require(x.dim() > 0 and reduce in ("sum", "mean", "amax", "amin"))
    dim = dim % x.dim()
    same = [size for d, size in enumerate(index.shape) if d != dim]
    _require(same == [size for d, size in enumerate(x.shape) if d != dim])
    source = source[tuple(slice(size) for size in index.shape)]
    if reduce in ("amax", "amin"):
        return _scatter_extremum(x, dim, index, source, reduce, include_self)
    ones = torch.ones_like(source)
    counts = torch.zeros_like(x).scatter_add(dim, index, ones)
    kept = x if include_self else torch.where(counts == 0, x, 0.0)
    total = kept.scatter_add(dim, index, source)
    if reduce == "sum":
        return total
    counts = counts + 1 if include_self else counts.clamp(min=1)
    return total / counts


def _scatter_extremum(x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, include_self: bool) -> Tensor:
    """Of each position and all that is written there, the largest or smallest."""
    _require(include_self and source.shape[dim] > 0)
    far = -math.inf if reduce == "amax" else math.inf
    last = lambda t: t.movedim(dim, -1)  # noqa: E731
    own, written, to = last(x).unsqueeze(-1), last(source).unsqueeze(-2), last(index).unsqueeze(-2)
    is_here = to == torch.arange(x.shape[dim]).unsqueeze(-1)
    candidates = torch.cat([own, torch.where(is_here, written, far)], -1)
    return getattr(candidates, reduce)(-1).movedim(-1, dim)


def _searchsorted(
    sequence: Tensor,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Tensor:
    """How many elements of a sorted sequence are smaller, or at most as large."""
    _require(sorter is None and isinstance(x, Tensor))
    is_right = right or side == "right"
    row = sequence.unsqueeze(-2) if sequence.dim() > 1 else sequence
    is_before = row <= x.unsqueeze(-1) if is_right else row < x.unsqueeze(-1)
    return is_before.sum(-1).to(torch.int32 if out_int32 else torch.int64)


def _bucketize(x: Any, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    return _searchsorted(boundaries, x, out_int32=out_int32, right=right)


def _pinv(a: Tensor, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Tensor:
    """The inverse from the side on which a matrix of full rank has one."""
    _require(not hermitian and a.shape[-1] > 0 and a.shape[-2] > 0)
    if a.shape[-2] >= a.shape[-1]:
        return torch.linalg.inv(a.mT @ a) @ a.mT
    return a.mT @ torch.linalg.inv(a @ a.mT)


def _moves(function: Callable[..., Any]) -> Definition:
    return Definition(function, keeps_rounding=True)


DEFINITIONS: dict[str, Definition] = {
    "pixel_shuffle": _moves(_pixel_shuffle),
    "pixel_unshuffle": _moves(_pixel_unshuffle),
    "channel_shuffle": _moves(_channel_shuffle),
    "native_channel_shuffle": _moves(_channel_shuffle),
    "rot90": _moves(_rot90),
    "block_diag": _moves(_block_diag),
    **{f"reflection_pad{rank}d": _moves(_padding(True)) for rank in (1, 2, 3)},
    **{f"replication_pad{rank}d": _moves(_padding(False)) for rank in (1, 2, 3)},
    **{f"reflection_pad{rank}d_backward": Definition(_padding_backward(True)) for rank in (1, 2, 3)},
    **{f"replication_pad{rank}d_backward": Definition(_padding_backward(False)) for rank in (1, 2, 3)},
    "as_strided": Definition(_as_strided, keeps_rounding=True, reads_layout=True),
    "as_strided_scatter": Definition(_as_strided_scatter, keeps_rounding=True, reads_layout=True),
    "index_fill": _moves(_index_fill),
    "masked_scatter": _moves(_masked_scatter),
    "masked_scatter_backward": Definition(_masked_scatter_backward),
    "_neg_view": _moves(torch.neg),
    "zero": _moves(torch.zeros_like),
    "trace": _moves(lambda x: x.diagonal().sum()),
    "addr": Definition(_addr),
    "linalg_cross": _moves(_cross),
    "hypot": Definition(lambda a, b: (a * a + b * b).sqrt()),
    "xlogy": Definition(_xlogy),
    "special_xlog1py": Definition(lambda x, y: _xlogy(x, y + 1)),
    "special_entr": Definition(lambda x: -_xlogy(x, x)),
    "logit": Definition(_logit),
    "logit_backward": Definition(_logit_backward),
    "sinc": Definition(sinc),
    "ldexp": _moves(lambda x, e: x * 2.0**e),
    "nan_to_num": Definition(_nan_to_num),
    "nansum": Definition(lambda x, dim=None, keepdim=False, **_: torch.where(x.isnan(), 0.0, x).sum(dim, keepdim)),
    "fmax": _moves(lambda a, b: torch.where((a >= b) | b.isnan(), a, b)),
    "fmin": _moves(lambda a, b: torch.where((a <= b) | b.isnan(), a, b)),
    "heaviside": _moves(lambda x, at_zero: torch.where(x == 0, at_zero, (x > 0).to(x.dtype))),
    "copysign": Definition(lambda a, b: a.abs() * torch.where(b < 0, -1.0, 1.0)),
    "signbit": Definition(lambda x: x < 0),
    "count_nonzero": _moves(lambda x, dim=None: (x != 0).sum(dim)),
    "norm": Definition(_norm),
    "std_mean": _moves(
        lambda x, dim=None, **options: (x.std(dim, **options), x.mean(dim, options.get("keepdim", False)))
    ),
    "_cdist_forward": Definition(_cdist),
    "_euclidean_dist": Definition(_cdist),
    "_cdist_backward": Definition(_cdist_backward),
    "_pdist_forward": Definition(_pdist),
    "_trilinear": Definition(_trilinear),
    "scatter_reduce": Definition(_scatter_reduce),
    "logcumsumexp": Definition(logcumsumexp),
    "searchsorted": Definition(_searchsorted),
    "bucketize": Definition(_bucketize),
    "linalg_pinv": Definition(_pinv),
}
