"""Intervals of sums, products of matrices, convolutions, pools and softmax."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchguard.compiled.certify.enclosure._functions import RULES as FUNCTIONS
from torchguard.compiled.certify.enclosure._intervals import (
    INTEGERS_END,
    SLACK,
    Interval,
    UnboundedError,
    accumulated,
    converted,
    rounded,
    unit,
    whole,
)
from torchguard.compiled.certify.enclosure._moving import parts
from torchguard.compiled.certify.enclosure._pointwise import RULES as POINTWISE

Dims = int | Sequence[int] | None
Sizes = Sequence[int]
# An exponential of less than minus this is no normal number of the dtype any more.
_EXPONENTS_END = {torch.float32: 110.0, torch.float64: 760.0}


def _dims(x: Tensor, dim: Dims) -> list[int]:
    chosen = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
    return [d % x.dim() for d in chosen] if chosen and x.dim() else list(range(x.dim()))


def _added(x: Interval, add: Callable[[Tensor], Tensor], terms: int, dtype: torch.dtype) -> Interval:
    """A sum of that many terms, in any order: no part of it is larger than the sum of all absolute values."""
    total = add(x.size)
    if not dtype.is_floating_point:
        if bool((total >= INTEGERS_END // 2).any()):
            raise UnboundedError("a sum of integers that may reach 2**52")
        return whole(add(x.low), add(x.high), dtype)
    error = accumulated(dtype, terms)
    made = rounded(add(x.low), add(x.high), dtype, 1, total * error, through=total * (1 + error))
    is_positive = bool((x.low >= 0).all())
    return Interval(made.low.clamp(min=0), made.high, dtype) if is_positive else made


def _sum(x: Interval, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype) -> Interval:
    dims = _dims(x.low, dim)
    add = (lambda t: t.sum(dims, keepdim=keepdim)) if dims else (lambda t: t)
    return _added(converted(x, dtype), add, math.prod(x.low.shape[d] for d in dims), dtype)


def _mean(x: Interval, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype) -> Interval:
    count = math.prod(x.low.shape[d] for d in _dims(x.low, dim))
    return POINTWISE["div"](_sum(x, dim, keepdim, dtype=dtype), count, dtype=dtype)


def _cumsum(x: Interval, dim: int, *, dtype: torch.dtype) -> Interval:
    terms = x.low.shape[dim] if x.low.dim() else 1
    return _added(converted(x, dtype), lambda t: t.cumsum(dim), terms, dtype)


def _extreme(reduce: Callable[..., Tensor]) -> Callable[..., Interval]:
    def rule(x: Interval, dim: Dims = (), keepdim: bool = False, *, dtype: torch.dtype) -> Interval:
        dims = _dims(x.low, dim)
        return Interval(reduce(x.low, dims, keepdim), reduce(x.high, dims, keepdim), dtype)

    return rule


def _norm(x: Interval, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype) -> Interval:
    if ord != 2:
        raise UnboundedError(f"a norm of order {ord}")
    dims = _dims(x.low, dim)
    terms = math.prod(x.low.shape[d] for d in dims) + 1
    near = POINTWISE["abs"](converted(x, dtype), dtype=dtype)
    least, most = (t.square().sum(dims, keepdim=keepdim) if dims else t.square() for t in (near.low, near.high))
    # Each square is rounded, to zero where it is small, and may overflow where its root does not.
    error, lost = accumulated(dtype, terms), terms * torch.finfo(dtype).tiny
    least, most = (least * (1 - error) - lost).clamp(min=0), most * (1 + error) + lost
    return rounded(least.sqrt(), most.sqrt(), dtype, SLACK, through=most)


def _bilinear(
    a: Interval,
    b: Interval,
    dtype: torch.dtype,
    terms: int,
    product: Callable[[Tensor, Tensor], Tensor],
    start: Interval | None = None,
) -> Interval:
    """A product that adds up `terms` products to what it starts with: midpoint and radius, and the error of adding."""
    mkldnn: Any = torch.backends.mkldnn
    if dtype == torch.float32 and {mkldnn.matmul.fp32_precision, mkldnn.conv.fp32_precision} - {"none", "ieee"}:
        raise UnboundedError("a product in a lower precision than float32, as torch.backends allows it")
    (ma, ra), (mb, rb) = _middle(converted(a, dtype)), _middle(converted(b, dtype))
    middle = product(ma, mb)
    radius = product(ma.abs(), rb) + product(ra, mb.abs() + rb)
    total = product(ma.abs() + ra, mb.abs() + rb)
    low, high = middle - radius, middle + radius
    if start is not None:
        low, high, total, terms = low + start.low, high + start.high, total + start.size, terms + 1
    error = accumulated(dtype, terms)
    # A product may also be too small for the dtype, and then it is lost.
    slack = 2 * total * error + 4 * (terms + 1) * torch.finfo(dtype).tiny
    return rounded(low, high, dtype, 1, slack, through=total + slack)


def _middle(x: Interval) -> tuple[Tensor, Tensor]:
    middle = x.low / 2 + x.high / 2
    radius = torch.maximum(x.high - middle, middle - x.low)
    return middle, radius * (1 + 2.0**-50)


def _matmul(a: Interval, b: Interval, *, dtype: torch.dtype) -> Interval:
    return _bilinear(a, b, dtype, a.low.shape[-1], torch.matmul)


def _addmm(c: Interval, a: Interval, b: Interval, *, beta: float = 1, alpha: float = 1, dtype: torch.dtype) -> Interval:
    if beta != 1 or alpha != 1:
        raise UnboundedError("addmm with factors")
    return _bilinear(a, b, dtype, a.low.shape[-1], torch.matmul, converted(c, dtype))


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
        raise UnboundedError("a convolution by NNPACK, which adds up other products")

    def product(a: Tensor, b: Tensor) -> Tensor:
        return torch.convolution(a, b, None, stride, padding, dilation, transposed, extra, groups)

    terms = math.prod(w.low.shape[2:]) * max(w.low.shape[:2])
    channels = None if bias is None else bias.arranged(lambda t: t.reshape(-1, *[1] * (w.low.dim() - 2)))
    return _bilinear(x, w, dtype, terms, product, channels)


def _softmax(x: Interval, dim: int, half_to_float: bool = False, *, dtype: torch.dtype) -> Interval:
    if half_to_float or bool((x.low == -torch.inf).all(dim).any()) or bool((x.high == torch.inf).any()):
        raise UnboundedError("softmax of what may be infinite")
    low_top, high_top = x.low.amax(dim, keepdim=True), x.high.amax(dim, keepdim=True)
    # The largest share of an element is next to the least of all others, and both are measured from the same number.
    least = _log_share(x.low - high_top, x.high - high_top, dim).exp()
    most = _log_share(x.high - low_top, x.low - low_top, dim).exp()
    # Each exponent is a difference that was rounded, and exponentials are added up.
    terms, reach = x.low.shape[dim], _EXPONENTS_END[dtype]
    spread = (high_top - x.low.amin(dim, keepdim=True)).clamp(max=reach)
    error = 2 * spread * unit(dtype) + accumulated(dtype, terms) + 8 * SLACK * unit(dtype)
    width = (x.high - torch.where(x.low.isinf(), low_top, x.low)).clamp(min=0)
    own = (terms + 8) * 2.0**-50 * (801 + width)
    if bool((error + own > 0.1).any()):
        raise UnboundedError("softmax of numbers that may be too far apart")
    return rounded(least * (1 - error - own), most / (1 - error - own), dtype, SLACK)


def _log_share(own: Tensor, others: Tensor, dim: int) -> Tensor:
    """The log of the share of exp(own) in the sum of it and of all exp(others) at other places."""
    return own - torch.logaddexp(own, _without_own(others, dim))


def _without_own(x: Tensor, dim: int) -> Tensor:
    """For each place the log of the sum of the exponentials at all other places, from both sides: nothing cancels."""
    edge, count = torch.full_like(x.narrow(dim, 0, 1), -torch.inf), x.shape[dim] - 1
    before, after = (torch.cat([edge, t.logcumsumexp(dim).narrow(dim, 0, count)], dim) for t in (x, x.flip(dim)))
    return torch.logaddexp(before, after.flip(dim))


def _log_of_sum(x: Interval, dim: int | Sequence[int], keepdim: bool = False, *, dtype: torch.dtype) -> Interval:
    x, dims = converted(x, dtype), _dims(x.low, dim)
    low, high = (torch.logsumexp(t, dims, keepdim) for t in (x.low, x.high))
    return rounded(low, high, dtype, SLACK, _exponent_slack(x, dims, keepdim, dtype))


def _log_softmax(x: Interval, dim: int, half_to_float: bool = False, *, dtype: torch.dtype) -> Interval:
    """It rises in its own argument, and falls in all others."""
    if half_to_float:
        raise UnboundedError("log_softmax of another dtype")
    low, high = _log_share(x.low, x.high, dim), _log_share(x.high, x.low, dim)
    return rounded(low, high, dtype, SLACK, _exponent_slack(x, [dim], True, dtype))


def _exponent_slack(x: Interval, dims: list[int], keepdim: bool, dtype: torch.dtype) -> Tensor:
    """What rounding the differences under exponentials and adding these up changes in the log of the sum."""
    if not bool(x.size.isfinite().all()):
        raise UnboundedError("exponentials of what may be infinite")
    terms, size = math.prod(x.low.shape[d] for d in dims), x.size.amax(dims, keepdim)
    own = (terms + 8) * 2.0**-50 * (1 + size)
    return 8 * unit(dtype) * size + accumulated(dtype, terms) + SLACK * unit(dtype) * 4 + own


def _gated(x: Interval, dim: int = -1, *, dtype: torch.dtype) -> Interval:
    first, second = parts(lambda t: t.chunk(2, dim))(x, dtype=dtype)
    return POINTWISE["mul"](first, FUNCTIONS["sigmoid"](second, dtype=dtype), dtype=dtype)


def _max_pool(x: Interval, *args: Any, dtype: torch.dtype, **options: Any) -> tuple[Interval, None]:
    return x.arranged(lambda t: F.max_pool2d(t, *args, **options)), None


def _average_pool(x: Interval, kernel: Sizes, *args: Any, dtype: torch.dtype) -> Interval:
    if len(args) > 4 and args[4] is not None:
        raise UnboundedError("avg_pool2d with a divisor")
    pool = lambda t: F.avg_pool2d(t, list(kernel), *args[:4])  # noqa: E731
    # One size of a kernel stands for both.
    terms = math.prod(kernel) ** (2 if len(kernel) == 1 else 1)
    error, mean = accumulated(dtype, terms), pool(x.size)
    return rounded(pool(x.low), pool(x.high), dtype, 4, mean * error, through=mean * terms * (1 + error))


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
    "max_pool2d_with_indices": _max_pool,
    "avg_pool2d": _average_pool,
}
