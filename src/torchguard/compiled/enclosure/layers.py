"""Intervals of sums, products of matrices, convolutions, pools and softmax, and of what only moves elements."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchguard.compiled.enclosure.intervals import SLACK, Interval, UnboundedError, accumulated, rounded, unit
from torchguard.compiled.enclosure.pointwise import RULES as POINTWISE

Dims = int | Sequence[int] | None
Sizes = Sequence[int]


def _dims(x: Tensor, dim: Dims) -> list[int]:
    chosen = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
    return [d % x.dim() for d in chosen] if chosen and x.dim() else list(range(x.dim()))


def _sum(x: Interval, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype) -> Interval:
    dims = _dims(x.low, dim)
    add = (lambda t: t.sum(dims, keepdim=keepdim)) if dims else (lambda t: t)
    if not dtype.is_floating_point:
        return Interval(add(x.low), add(x.high), dtype)
    terms = math.prod(x.low.shape[d] for d in dims)
    total = rounded(add(x.low), add(x.high), dtype, 1, add(x.size) * accumulated(dtype, terms))
    is_positive = bool((x.low >= 0).all())
    return Interval(total.low.clamp(min=0), total.high, dtype) if is_positive else total


def _mean(x: Interval, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype) -> Interval:
    count = math.prod(x.low.shape[d] for d in _dims(x.low, dim))
    return POINTWISE["div"](_sum(x, dim, keepdim, dtype=dtype), count, dtype=dtype)


def _cumsum(x: Interval, dim: int, *, dtype: torch.dtype) -> Interval:
    terms = x.low.shape[dim] if x.low.dim() else 1
    slack = x.size.cumsum(dim) * accumulated(dtype, terms)
    return rounded(x.low.cumsum(dim), x.high.cumsum(dim), dtype, 1, slack)


def _extreme(reduce: Callable[..., Tensor]) -> Callable[..., Interval]:
    def rule(x: Interval, dim: Dims = (), keepdim: bool = False, *, dtype: torch.dtype) -> Interval:
        dims = _dims(x.low, dim)
        return Interval(reduce(x.low, dims, keepdim), reduce(x.high, dims, keepdim), dtype)

    return rule


def _norm(x: Interval, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype) -> Interval:
    if ord != 2:
        raise UnboundedError(f"a norm of order {ord}")
    dims = _dims(x.low, dim)
    nearest = POINTWISE["abs"](x, dtype=dtype)
    low, high = (t.square().sum(dims, keepdim=keepdim).sqrt() for t in (nearest.low, nearest.high))
    ulps = SLACK + math.prod(x.low.shape[d] for d in dims)
    return rounded(low, high, dtype, ulps)


def _bilinear(
    a: Interval, b: Interval, dtype: torch.dtype, terms: int, product: Callable[[Tensor, Tensor], Tensor]
) -> Interval:
    """A product that adds up `terms` products: midpoint and radius, and the error of adding."""
    (ma, ra), (mb, rb) = _middle(a), _middle(b)
    middle = product(ma, mb)
    radius = product(ma.abs(), rb) + product(ra, mb.abs() + rb)
    whole = product(ma.abs() + ra, mb.abs() + rb)
    if not bool(whole.isfinite().all()):
        raise UnboundedError("a product with what may be infinite")
    # Our own sums err as well: three of them, in float64.
    slack = whole * (accumulated(dtype, terms) + 4 * accumulated(torch.float64, terms))
    return rounded(middle - radius, middle + radius, dtype, 1, slack)


def _middle(x: Interval) -> tuple[Tensor, Tensor]:
    middle = x.low / 2 + x.high / 2
    radius = torch.maximum(x.high - middle, middle - x.low)
    return middle, radius * (1 + 2.0**-50)


def _matmul(a: Interval, b: Interval, *, dtype: torch.dtype) -> Interval:
    return _bilinear(a, b, dtype, a.low.shape[-1], torch.matmul)


def _addmm(c: Interval, a: Interval, b: Interval, *, beta: float = 1, alpha: float = 1, dtype: torch.dtype) -> Interval:
    if beta != 1 or alpha != 1:
        raise UnboundedError("addmm with factors")
    product = _bilinear(a, b, dtype, a.low.shape[-1] + 1, torch.matmul)
    added = POINTWISE["add"](product, c, dtype=dtype)
    # The sum may start with c: then each step rounds what holds it.
    slack = c.size.expand(added.low.shape) * accumulated(dtype, a.low.shape[-1])
    return rounded(added.low, added.high, dtype, 1, slack)


def _convolution(
    x: Interval,
    w: Interval,
    bias: Interval | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    extra: Sizes,
    groups: int,
    *,
    dtype: torch.dtype,
) -> Interval:
    def product(a: Tensor, b: Tensor) -> Tensor:
        return torch.convolution(a, b, None, stride, padding, dilation, transposed, extra, groups)

    terms = math.prod(w.low.shape[2:]) * max(w.low.shape[:2])
    y = _bilinear(x, w, dtype, terms + 1, product)
    if bias is None:
        return y
    along = bias.arranged(lambda t: t.reshape(1, -1, *[1] * (y.low.dim() - 2)))
    added = POINTWISE["add"](y, along, dtype=dtype)
    return rounded(added.low, added.high, dtype, 1, along.size * accumulated(dtype, terms))


def _softmax(x: Interval, dim: int, half_to_float: bool = False, *, dtype: torch.dtype) -> Interval:
    if bool((x.high == -torch.inf).all(dim).any()) or bool((x.high == torch.inf).any()):
        raise UnboundedError("softmax of what may be infinite")
    top = x.high.amax(dim, keepdim=True)
    low, high = (x.low - top).exp(), (x.high - top).exp()
    others_high, others_low = high.sum(dim, keepdim=True) - high, low.sum(dim, keepdim=True) - low
    others_low = others_low.clamp(min=0) * (1 - 1e-12)
    least = torch.where(low > 0, low / (low + others_high * (1 + 1e-12)), 0.0)
    most = torch.where(high > 0, high / (high + others_low), 0.0)
    # Each exponent is a difference that was rounded, and exponentials are added up.
    finite = torch.where(x.size.isfinite(), x.size, 0.0).amax(dim, keepdim=True)
    relative = 4 * unit(dtype) * finite + accumulated(dtype, x.low.shape[dim]) + SLACK * unit(dtype) * 4 + 1e-11
    if bool((relative > 0.1).any()):
        raise UnboundedError("softmax of numbers too large to tell apart")
    return rounded(least * (1 - relative), most * (1 + relative), dtype, SLACK)


def _log_of_sum(x: Interval, dim: int | Sequence[int], keepdim: bool = False, *, dtype: torch.dtype) -> Interval:
    dims = _dims(x.low, dim)
    low, high = (torch.logsumexp(t, dims, keepdim) for t in (x.low, x.high))
    return rounded(low, high, dtype, SLACK, _exponent_slack(x, dims, keepdim, dtype))


def _log_softmax(x: Interval, dim: int, half_to_float: bool = False, *, dtype: torch.dtype) -> Interval:
    """It rises in its own argument, and falls in all others."""
    low, high = x.low - _others(x.low, x.high, dim), x.high - _others(x.high, x.low, dim)
    return rounded(low, high, dtype, SLACK, _exponent_slack(x, [dim], True, dtype))


def _others(own: Tensor, others: Tensor, dim: int) -> Tensor:
    """The log of the sum of exponentials, one of them of `own` and the rest of `others`."""
    n = own.shape[dim]
    rows = others.movedim(dim, -1).unsqueeze(-2).expand(*others.movedim(dim, -1).shape[:-1], n, n)
    mixed = torch.where(torch.eye(n, dtype=torch.bool), own.movedim(dim, -1).unsqueeze(-1), rows)
    return torch.logsumexp(mixed, -1).movedim(-1, dim)


def _exponent_slack(x: Interval, dims: list[int], keepdim: bool, dtype: torch.dtype) -> Tensor:
    """What rounding the differences under exponentials and adding these up changes in the log of the sum."""
    if not bool(x.size.isfinite().all()):
        raise UnboundedError("exponentials of what may be infinite")
    terms = math.prod(x.low.shape[d] for d in dims)
    return 8 * unit(dtype) * x.size.amax(dims, keepdim) + accumulated(dtype, terms) + SLACK * unit(dtype) * 4 + 1e-12


def _moved(map_: Callable[..., Tensor]) -> Callable[..., Interval]:
    def rule(x: Interval, *args: Any, dtype: torch.dtype, **options: Any) -> Interval:
        kept = {name: value for name, value in options.items() if name not in ("memory_format", "implicit")}
        return x.arranged(lambda t: map_(t, *args, **kept))

    return rule


def _parts(map_: Callable[..., Sequence[Tensor]]) -> Callable[..., list[Interval]]:
    def rule(x: Interval, *args: Any, dtype: Any, **options: Any) -> list[Interval]:
        lows, highs = map_(x.low, *args, **options), map_(x.high, *args, **options)
        return [Interval(a, b, x.dtype) for a, b in zip(lows, highs, strict=True)]

    return rule


def _sliced(t: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    places: list[slice] = [slice(None)] * t.dim()
    places[dim] = slice(start, end, step)
    return t[tuple(places)]


def _joined(values: Sequence[Interval], dim: int = 0, *, dtype: torch.dtype) -> Interval:
    return Interval(torch.cat([v.low for v in values], dim), torch.cat([v.high for v in values], dim), dtype)


def _stacked(values: Sequence[Interval], dim: int = 0, *, dtype: torch.dtype) -> Interval:
    return Interval(torch.stack([v.low for v in values], dim), torch.stack([v.high for v in values], dim), dtype)


def _places(index: Interval) -> Tensor:
    if not index.is_known:
        raise UnboundedError("a place that is not known")
    return index.low.to(torch.int64)


def _embedding(weight: Interval, ids: Interval, *_: Any, dtype: torch.dtype) -> Interval:
    places = _places(ids)
    return weight.arranged(lambda t: t[places])


def _gather(x: Interval, dim: int, index: Interval, *, dtype: torch.dtype) -> Interval:
    places = _places(index)
    return x.arranged(lambda t: t.gather(dim, places))


def _index_select(x: Interval, dim: int, index: Interval, *, dtype: torch.dtype) -> Interval:
    places = _places(index)
    return x.arranged(lambda t: t.index_select(dim, places))


def _index(x: Interval, indices: Sequence[Interval | None], *, dtype: torch.dtype) -> Interval:
    places = tuple(slice(None) if i is None else _places(i) for i in indices)
    return x.arranged(lambda t: t[places])


def _padded(x: Interval, pad: Sizes, value: float = 0, *, dtype: torch.dtype) -> Interval:
    filling = float(torch.tensor(value, dtype=dtype))
    return x.arranged(lambda t: F.pad(t, list(pad), value=filling))


def _gated(x: Interval, dim: int = -1, *, dtype: torch.dtype) -> Interval:
    first, second = _parts(lambda t: t.chunk(2, dim))(x, dtype=dtype)
    return POINTWISE["mul"](first, POINTWISE["sigmoid"](second, dtype=dtype), dtype=dtype)


def _max_pool(x: Interval, *args: Any, dtype: torch.dtype, **options: Any) -> tuple[Interval, None]:
    return x.arranged(lambda t: F.max_pool2d(t, *args, **options)), None


def _average_pool(x: Interval, kernel: Sizes, *args: Any, dtype: torch.dtype) -> Interval:
    pool = lambda t: F.avg_pool2d(t, list(kernel), *args)  # noqa: E731
    return rounded(pool(x.low), pool(x.high), dtype, 4, pool(x.size) * accumulated(dtype, math.prod(kernel) ** 2))


RULES: dict[str, Callable[..., Any]] = {
    "sum": _sum,
    "mean": _mean,
    "cumsum": _cumsum,
    "amax": _extreme(torch.amax),
    "amin": _extreme(torch.amin),
    "linalg_vector_norm": _norm,
    **dict.fromkeys(("mm", "bmm", "mv", "dot"), _matmul),
    "addmm": _addmm,
    "baddbmm": _addmm,
    "convolution": _convolution,
    "_softmax": _softmax,
    "_log_softmax": _log_softmax,
    "logsumexp": _log_of_sum,
    "glu": _gated,
    "index": _index,
    "constant_pad_nd": _padded,
    "diag_embed": _moved(lambda t, *args: t.diag_embed(*args)),
    "max_pool2d_with_indices": _max_pool,
    "avg_pool2d": _average_pool,
    "view": _moved(lambda t, sizes: t.reshape(tuple(sizes))),
    "reshape": _moved(lambda t, sizes: t.reshape(tuple(sizes))),
    "_unsafe_view": _moved(lambda t, sizes: t.reshape(tuple(sizes))),
    "permute": _moved(lambda t, dims: t.permute(tuple(dims))),
    "transpose": _moved(lambda t, a, b: t.transpose(a, b)),
    "t": _moved(lambda t: t.t()),
    "expand": _moved(lambda t, sizes: t.expand(tuple(sizes))),
    "unsqueeze": _moved(lambda t, dim: t.unsqueeze(dim)),
    "squeeze": _moved(lambda t, *dim: t.squeeze(*(d if isinstance(d, int) else tuple(d) for d in dim))),
    "select": _moved(lambda t, dim, index: t.select(dim, index)),
    "slice": _moved(_sliced),
    "diagonal": _moved(lambda t, *args: t.diagonal(*args)),
    "flip": _moved(lambda t, dims: t.flip(dims)),
    "roll": _moved(lambda t, shifts, dims=(): t.roll(shifts, dims)),
    "repeat": _moved(lambda t, repeats: t.repeat(tuple(repeats))),
    **{name: _moved(lambda t: t) for name in ("clone", "alias", "contiguous", "detach", "lift_fresh")},
    "tril": _moved(lambda t, diagonal=0: t.tril(diagonal)),
    "triu": _moved(lambda t, diagonal=0: t.triu(diagonal)),
    "split": _parts(lambda t, size, dim=0: t.split(size, dim)),
    "unsafe_split": _parts(lambda t, size, dim=0: t.split(size, dim)),
    "split_with_sizes": _parts(lambda t, sizes, dim=0: t.split(list(sizes), dim)),
    "unbind": _parts(lambda t, dim=0: t.unbind(dim)),
    "cat": _joined,
    "stack": _stacked,
    "embedding": _embedding,
    "gather": _gather,
    "index_select": _index_select,
}
