"""Intervals of reductions, matrix products, convolutions and pools."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchguard.compiled.certify.enclosure._elementary import RULES as ELEMENTARY
from torchguard.compiled.certify.enclosure._intervals import (
    MAX_INTEGER,
    Interval,
    UnboundedError,
    accumulated,
    converted,
    integers,
    rounded,
)
from torchguard.compiled.certify.enclosure._pointwise import RULES as POINTWISE
from torchguard.compiled.certify.enclosure._shapes import known_index, splitting

Dims = int | Sequence[int] | None
Sizes = Sequence[int]


def dims_of(x: Tensor, dim: Dims) -> list[int]:
    """The dims that a reduction is over: all if none is given."""
    chosen = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
    return [d % x.dim() for d in chosen] if chosen and x.dim() else list(range(x.dim()))


def _summed(x: Interval, add: Callable[[Tensor], Tensor], terms: int, dtype: torch.dtype) -> Interval:
    """A sum of some number of terms, in any order: no partial sum exceeds the sum of all absolute values."""
    total = add(x.size)
    if not dtype.is_floating_point:
        if bool((total >= MAX_INTEGER // 2).any()):
            raise UnboundedError("a sum of integers that may reach 2**52")
        return integers(add(x.low), add(x.high), dtype)
    error = accumulated(dtype, terms)
    made = rounded(add(x.low), add(x.high), dtype, 1, total * error, through=total * (1 + error))
    is_positive = bool((x.low >= 0).all())
    return Interval(made.low.clamp(min=0), made.high, dtype) if is_positive else made


def _sum(x: Interval, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype) -> Interval:
    dims = dims_of(x.low, dim)
    add = (lambda t: t.sum(dims, keepdim=keepdim)) if dims else (lambda t: t)
    return _summed(converted(x, dtype), add, math.prod(x.low.shape[d] for d in dims), dtype)


def mean(x: Interval, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype) -> Interval:
    """The rule of `mean`."""
    count = math.prod(x.low.shape[d] for d in dims_of(x.low, dim))
    return POINTWISE["div"](_sum(x, dim, keepdim, dtype=dtype), count, dtype=dtype)


def _cumsum(x: Interval, dim: int, *, dtype: torch.dtype) -> Interval:
    terms = x.low.shape[dim] if x.low.dim() else 1
    return _summed(converted(x, dtype), lambda t: t.cumsum(dim), terms, dtype)


def _product(x: Interval, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype) -> Interval:
    """A product in any order: the relative errors of its roundings add up."""
    x = converted(x, dtype)
    flat = x.rearranged(lambda t: t.reshape(-1)) if dim is None else x
    low, high = _running_product(flat, dim or 0)
    last = lambda t: t.narrow(dim or 0, -1, 1) if t.shape[dim or 0] else t.sum(dim or 0, keepdim=True) + 1  # noqa: E731
    drop = (lambda t: t) if keepdim and dim is not None else (lambda t: t.squeeze(dim or 0))
    return _rounded_product(drop(last(low)), drop(last(high)), flat, dim or 0, dtype)


def _cumprod(x: Interval, dim: int, *, dtype: torch.dtype) -> Interval:
    x = converted(x, dtype)
    return _rounded_product(*_running_product(x, dim), x, dim, dtype) if x.low.dim() else x


def _running_product(x: Interval, dim: int) -> tuple[Tensor, Tensor]:
    lows, highs = [], []
    for low, high in zip(x.low.unbind(dim), x.high.unbind(dim), strict=True):
        if lows:
            corners = torch.stack([a * b for a in (lows[-1], highs[-1]) for b in (low, high)])
            low, high = corners.amin(0), corners.amax(0)
        lows.append(low)
        highs.append(high)
    return torch.stack(lows, dim), torch.stack(highs, dim)


def _rounded_product(low: Tensor, high: Tensor, x: Interval, dim: int, dtype: torch.dtype) -> Interval:
    largest = x.size.clamp(min=1).prod(dim).max() if x.low.numel() else torch.tensor(1.0, dtype=x.low.dtype)
    return rounded(low, high, dtype, 2 * x.low.shape[dim] + 2, torch.finfo(dtype).tiny * largest, through=largest)


def _sorted(x: Interval, dim: int, descending: bool) -> Interval:
    """Sorted bounds: the k-th smallest number increases with each of them."""
    return x.rearranged(lambda t: t.sort(dim=dim, descending=descending).values if t.dim() else t)


def _sort(x: Interval, *args: Any, dtype: torch.dtype, **options: Any) -> tuple[Interval, None]:
    given = {"dim": -1, "descending": False, **options}
    for argument in args:
        given["descending" if isinstance(argument, bool) else "dim"] = argument
    return _sorted(x, given["dim"], given["descending"]), None


def _topk(
    x: Interval, k: int, dim: int = -1, largest: bool = True, is_sorted: bool = True, *, dtype: torch.dtype
) -> tuple[Interval, None]:
    if not is_sorted:
        raise UnboundedError("topk without an order")
    return _sorted(x, dim, largest).rearranged(lambda t: t.narrow(dim, 0, k) if t.dim() else t), None


def _kthvalue(x: Interval, k: int, dim: int = -1, keepdim: bool = False, *, dtype: torch.dtype) -> Any:
    pick = lambda t: t.narrow(dim, k - 1, 1) if keepdim else t.select(dim, k - 1)  # noqa: E731
    return _sorted(x, dim, False).rearranged(lambda t: pick(t) if t.dim() else t), None


def _median(x: Interval, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype) -> Any:
    if dim is None:
        return x.rearranged(lambda t: t.median())
    return _kthvalue(x, (x.low.shape[dim] - 1) // 2 + 1, dim, keepdim, dtype=dtype)


def _running_extreme(run: Callable[..., Any]) -> Callable[..., tuple[Interval, None]]:
    return lambda x, dim, *, dtype: (x.rearranged(lambda t: run(t, dim).values), None)


def _extreme_and_index(reduce: Callable[..., Tensor]) -> Callable[..., Any]:
    def rule(x: Interval, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype) -> Any:
        made = _extreme(reduce)(x, dim, keepdim, dtype=dtype)
        return made if dim is None else (made, None)

    return rule


def _index_add(
    x: Interval, dim: int, index: Interval, source: Interval, *, alpha: float = 1, dtype: torch.dtype
) -> Interval:
    positions = known_index(index)
    x, scaled = converted(x, dtype), converted(source, dtype)
    scaled = scaled if alpha == 1 else POINTWISE["mul"](scaled, alpha, dtype=dtype)
    joined = Interval(torch.cat([x.low, scaled.low], dim), torch.cat([x.high, scaled.high], dim), dtype)
    size = x.low.shape[dim]
    add = lambda t: t.narrow(dim, 0, size).index_add(dim, positions, t.narrow(dim, size, t.shape[dim] - size))  # noqa: E731
    return _summed(joined, add, positions.numel() + 1, dtype)


def _extreme(reduce: Callable[..., Tensor]) -> Callable[..., Interval]:
    def rule(x: Interval, dim: Dims = (), keepdim: bool = False, *, dtype: torch.dtype) -> Interval:
        dims = dims_of(x.low, dim)
        return Interval(reduce(x.low, dims, keepdim), reduce(x.high, dims, keepdim), dtype)

    return rule


def bilinear(
    a: Interval,
    b: Interval,
    dtype: torch.dtype,
    terms: int,
    product: Callable[[Tensor, Tensor], Tensor],
    start: Interval | None = None,
) -> Interval:
    """A sum of `terms` products, added to `start`, by midpoint and radius, with the rounding error of the sum."""
    mkldnn: Any = torch.backends.mkldnn
    if dtype == torch.float32 and {mkldnn.matmul.fp32_precision, mkldnn.conv.fp32_precision} - {"none", "ieee"}:
        raise UnboundedError("a product in a precision below float32, which torch.backends allows")
    (ma, ra), (mb, rb) = _midpoint(converted(a, dtype)), _midpoint(converted(b, dtype))
    middle = product(ma, mb)
    radius = product(ma.abs(), rb) + product(ra, mb.abs() + rb)
    total = product(ma.abs() + ra, mb.abs() + rb)
    low, high = middle - radius, middle + radius
    if start is not None:
        low, high, total, terms = low + start.low, high + start.high, total + start.size, terms + 1
    error = accumulated(dtype, terms)
    # Each product may also underflow.
    slack = 2 * total * error + 4 * (terms + 1) * torch.finfo(dtype).tiny
    return rounded(low, high, dtype, 1, slack, through=total + slack)


def _midpoint(x: Interval) -> tuple[Tensor, Tensor]:
    middle = x.low / 2 + x.high / 2
    radius = torch.maximum(x.high - middle, middle - x.low)
    return middle, radius * (1 + 2.0**-50)


def _matmul(a: Interval, b: Interval, *, dtype: torch.dtype) -> Interval:
    return bilinear(a, b, dtype, a.low.shape[-1], torch.matmul)


def _addmm(c: Interval, a: Interval, b: Interval, *, beta: float = 1, alpha: float = 1, dtype: torch.dtype) -> Interval:
    if beta != 1 or alpha != 1:
        raise UnboundedError("addmm with beta or alpha")
    return bilinear(a, b, dtype, a.low.shape[-1], torch.matmul, converted(c, dtype))


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
    if torch.backends.nnpack.is_available() and not torch.backends.mkldnn.enabled:
        raise UnboundedError("a convolution by NNPACK, which sums other products")

    def product(a: Tensor, b: Tensor) -> Tensor:
        return torch.convolution(a, b, None, stride, padding, dilation, transposed, extra, groups)

    terms = math.prod(w.low.shape[2:]) * max(w.low.shape[:2])
    channels = None if bias is None else bias.rearranged(lambda t: t.reshape(-1, *[1] * (w.low.dim() - 2)))
    return bilinear(x, w, dtype, terms, product, channels)


def _glu(x: Interval, dim: int = -1, *, dtype: torch.dtype) -> Interval:
    first, second = splitting(lambda t: t.chunk(2, dim))(x, dtype=dtype)
    return POINTWISE["mul"](first, ELEMENTARY["sigmoid"](second, dtype=dtype), dtype=dtype)


def _max_pool(x: Interval, *args: Any, dtype: torch.dtype, **options: Any) -> tuple[Interval, None]:
    return x.rearranged(lambda t: F.max_pool2d(t, *args, **options)), None


def _average_pool(x: Interval, kernel: Sizes, *args: Any, dtype: torch.dtype) -> Interval:
    if len(args) > 4 and args[4] is not None:
        raise UnboundedError("avg_pool2d with divisor_override")
    pool = lambda t: F.avg_pool2d(t, list(kernel), *args[:4])  # noqa: E731
    # A single size stands for both dimensions of the kernel.
    terms = math.prod(kernel) ** (2 if len(kernel) == 1 else 1)
    error, mean = accumulated(dtype, terms), pool(x.size)
    return rounded(pool(x.low), pool(x.high), dtype, 4, mean * error, through=mean * terms * (1 + error))


RULES: dict[str, Callable[..., Any]] = {
    "sum": _sum,
    "mean": mean,
    "cumsum": _cumsum,
    "amax": _extreme(torch.amax),
    "amin": _extreme(torch.amin),
    "max": _extreme_and_index(torch.amax),
    "min": _extreme_and_index(torch.amin),
    "prod": _product,
    "cumprod": _cumprod,
    "sort": _sort,
    "topk": _topk,
    "kthvalue": _kthvalue,
    "median": _median,
    "cummax": _running_extreme(torch.cummax),
    "cummin": _running_extreme(torch.cummin),
    "index_add": _index_add,
    **dict.fromkeys(("mm", "bmm", "mv", "dot"), _matmul),
    "addmm": _addmm,
    "baddbmm": _addmm,
    "convolution": _convolution,
    "glu": _glu,
    "max_pool2d_with_indices": _max_pool,
    "avg_pool2d": _average_pool,
}
