"""Intervals of softmax, of the logarithm of a sum of exponentials, and of fused attention."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchguard.compiled.certify.enclosure._intervals import (
    SLACK,
    Interval,
    UnboundedError,
    accumulated,
    converted,
    rounded,
    unit,
)
from torchguard.compiled.certify.enclosure._layers import bilinear, dims_of
from torchguard.compiled.certify.enclosure._pointwise import RULES as POINTWISE

# The exponential of a number below the negative of this underflows in the dtype.
_UNDERFLOW_EXPONENT = {torch.float32: 110.0, torch.float64: 760.0}
# Fused attention takes the keys in blocks, none of them smaller than this, and scales what it has by each.
_BLOCK = 16


def _softmax(x: Interval, dim: int, half_to_float: bool = False, *, dtype: torch.dtype) -> Interval:
    if half_to_float or bool((x.low == -torch.inf).all(dim).any()) or bool((x.high == torch.inf).any()):
        raise UnboundedError("softmax of numbers that may be infinite")
    low_top, high_top = x.low.amax(dim, keepdim=True), x.high.amax(dim, keepdim=True)
    # An element has its largest share when it is largest and all others are smallest. Both are shifted by one number.
    least = _log_share(x.low - high_top, x.high - high_top, dim).exp()
    most = _log_share(x.high - low_top, x.low - low_top, dim).exp()
    # The errors: each exponent is a rounded difference, and the exponentials are summed.
    terms, reach = x.low.shape[dim], _UNDERFLOW_EXPONENT[dtype]
    spread = (high_top - x.low.amin(dim, keepdim=True)).clamp(max=reach)
    error = 2 * spread * unit(dtype) + accumulated(dtype, terms) + 8 * SLACK * unit(dtype)
    width = (x.high - torch.where(x.low.isinf(), low_top, x.low)).clamp(min=0)
    own = (terms + 8) * 2.0**-50 * (801 + width)
    if bool((error + own > 0.1).any()):
        raise UnboundedError("softmax of numbers that may be too far apart")
    return rounded(least * (1 - error - own), most / (1 - error - own), dtype, SLACK)


def _log_share(own: Tensor, others: Tensor, dim: int) -> Tensor:
    """The logarithm of the share of exp(own) in the sum of itself and of exp(others) at all other indices."""
    return own - torch.logaddexp(own, _logsumexp_of_others(others, dim))


def _logsumexp_of_others(x: Tensor, dim: int) -> Tensor:
    """For each index the logarithm of the sum of exponentials at all other indices.

    It is computed from both sides instead of by subtraction, so that nothing cancels.
    """
    edge, count = torch.full_like(x.narrow(dim, 0, 1), -torch.inf), x.shape[dim] - 1
    before, after = (torch.cat([edge, t.logcumsumexp(dim).narrow(dim, 0, count)], dim) for t in (x, x.flip(dim)))
    return torch.logaddexp(before, after.flip(dim))


def _logsumexp(x: Interval, dim: int | Sequence[int], keepdim: bool = False, *, dtype: torch.dtype) -> Interval:
    x, dims = converted(x, dtype), dims_of(x.low, dim)
    low, high = (torch.logsumexp(t, dims, keepdim) for t in (x.low, x.high))
    return rounded(low, high, dtype, SLACK, _exponent_slack(x, dims, keepdim, dtype))


def _log_softmax(x: Interval, dim: int, half_to_float: bool = False, *, dtype: torch.dtype) -> Interval:
    """An element increases with its own argument, and decreases with all others."""
    if half_to_float:
        raise UnboundedError("log_softmax with half_to_float")
    low, high = _log_share(x.low, x.high, dim), _log_share(x.high, x.low, dim)
    return rounded(low, high, dtype, SLACK, _exponent_slack(x, [dim], True, dtype))


def _exponent_slack(x: Interval, dims: list[int], keepdim: bool, dtype: torch.dtype) -> Tensor:
    """The error in the logarithm of a sum of exponentials, by rounding their exponents and by the sum."""
    if not bool(x.size.isfinite().all()):
        raise UnboundedError("exponentials of numbers that may be infinite")
    terms, size = math.prod(x.low.shape[d] for d in dims), x.size.amax(dims, keepdim)
    own = (terms + 8) * 2.0**-50 * (1 + size)
    return 8 * unit(dtype) * size + accumulated(dtype, terms) + SLACK * unit(dtype) * 4 + own


def _logcumsumexp(x: Interval, dim: int, *, dtype: torch.dtype) -> Interval:
    """Each result increases with all arguments. Torch adds one after the other, and rounds each time."""
    x = converted(x, dtype)
    if not x.low.dim():
        return x
    low, high = (t.logcumsumexp(dim) for t in (x.low, x.high))
    terms, size = x.low.shape[dim], x.size.amax(dim, keepdim=True) if x.low.numel() else x.size
    return rounded(low, high, dtype, SLACK, terms * SLACK * unit(dtype) * (1 + size + math.log(terms + 1)))


def _attention(
    q: Interval,
    k: Interval,
    v: Interval,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Interval | None = None,
    scale: float | None = None,
    dtype: torch.dtype,
) -> tuple[Interval, Interval | None]:
    """A mean of values, weighted by a softmax: it lies between the smallest and the largest of them."""
    if dropout:
        raise UnboundedError("attention with dropout")
    repeats = q.low.shape[-3] // k.low.shape[-3]
    k, v = (t if repeats == 1 else t.rearranged(lambda s: s.repeat_interleave(repeats, -3)) for t in (k, v))
    scores = bilinear(q, k.rearranged(lambda t: t.mT), dtype, q.low.shape[-1], torch.matmul)
    # The factor may be multiplied before or after the sum.
    factor = 1 / math.sqrt(q.low.shape[-1]) if scale is None else scale
    scores = POINTWISE["mul"](scores, factor, dtype=dtype)
    scores = rounded(scores.low, scores.high, dtype, SLACK, SLACK * unit(dtype) * scores.size)
    if attn_mask is not None:
        scores = _masked(scores, attn_mask, dtype)
    if is_causal:
        is_kept = torch.ones(scores.low.shape[-2:], dtype=torch.bool).tril()
        scores = scores.rearranged(lambda t: torch.where(is_kept, t, -math.inf))
    weights = _softmax(scores, -1, dtype=dtype)
    seen = Interval(torch.where(scores.low.isinf(), math.inf, scores.low), scores.high, dtype)
    reach = _UNDERFLOW_EXPONENT[dtype]
    spread = (seen.high.amax(-1, keepdim=True) - seen.low.amin(-1, keepdim=True)).clamp(max=reach)
    blocks = 1 + k.low.shape[-2] // _BLOCK
    error = blocks * unit(dtype) * (2 * spread + 8 * SLACK)
    if bool((error > 0.1).any()):
        raise UnboundedError("attention to too many keys")
    weights = rounded(weights.low * (1 - error), weights.high * (1 + 2 * error), dtype)
    result = bilinear(weights, v, dtype, k.low.shape[-2], torch.matmul)
    allowed = (accumulated(dtype, k.low.shape[-2]) + 2 * error.amax()) * v.size.amax(-2, keepdim=True)
    allowed = allowed + 4 * (k.low.shape[-2] + 1) * torch.finfo(dtype).tiny  # each product may underflow
    low, high = v.low.amin(-2, keepdim=True) - allowed, v.high.amax(-2, keepdim=True) + allowed
    result = Interval(torch.maximum(result.low, low), torch.minimum(result.high, high), dtype)
    return result, _logsumexp(scores, -1, dtype=dtype) if bool(scores.low.isfinite().all()) else None


def _masked(scores: Interval, mask: Interval, dtype: torch.dtype) -> Interval:
    """Scores with a mask: a boolean one that keeps some, or numbers that are added, minus infinity among them."""
    if mask.dtype == torch.bool:
        if not mask.is_known:
            raise UnboundedError("attention with a mask that is not known")
        return scores.rearranged(lambda t: torch.where(mask.low > 0, t, -math.inf))
    mask = converted(mask, dtype)
    is_hidden = mask.high == -math.inf
    added = POINTWISE["add"](scores, mask.rearranged(lambda t: torch.where(is_hidden, 0.0, t)), dtype=dtype)
    return added.rearranged(lambda t: torch.where(is_hidden, -math.inf, t))


RULES: dict[str, Callable[..., Any]] = {
    "_softmax": _softmax,
    "_safe_softmax": _softmax,
    "_log_softmax": _log_softmax,
    "logsumexp": _logsumexp,
    "logcumsumexp": _logcumsumexp,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
}
