"""Rules of fused layers, as the formulas they stand for: normalisation, gated units, attention and losses."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchguard.compiled.certify.algebra._field import UnsupportedError
from torchguard.compiled.certify.algebra._rules.reductions import (
    count_of,
    logsumexp,
    mean,
    safe_softmax,
    without_masked_rows,
)
from torchguard.compiled.certify.algebra._rules.shapes import concatenated
from torchguard.compiled.certify.algebra._values import Value, integers

# The reductions of a loss, as torch numbers them.
_NONE, _MEAN, _SUM = 0, 1, 2


def _statistics(x: Value, dims: list[int], eps: float) -> tuple[Value, Value]:
    average = mean(x, dims, True)
    return average, 1 / (mean((x - average).square(), dims, True) + eps).sqrt()


def _normalise_backward(g: Value, x: Value, average: Value, scale: Value, dims: list[int]) -> Value:
    """The gradient of (x - average) * scale by x, for its cotangent g."""
    hat, count = (x - average) * scale, count_of(x, dims)
    return (g - g.total(dims, True) / count - hat * (g * hat).total(dims, True) / count) * scale


def _layer_norm(x: Value, shape: Sequence[int], weight: Value | None, bias: Value | None, eps: float) -> Any:
    rank = x.element.dim()
    average, scale = _statistics(x, list(range(rank - len(shape), rank)), eps)
    y = (x - average) * scale
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias), average, scale


def _layer_norm_backward(
    g: Value, x: Value, shape: Sequence[int], average: Value, scale: Value, weight: Value | None, *_: Any
) -> tuple[Value, Value, Value]:
    rank = x.element.dim()
    outer = list(range(rank - len(shape)))
    hat = (x - average) * scale
    inner = g if weight is None else g * weight
    dx = _normalise_backward(inner, x, average, scale, list(range(rank - len(shape), rank)))
    return dx, (g * hat).total(outer), g.total(outer)


def _along_channels(v: Value, rank: int) -> Value:
    return v.rearranged(lambda t: t.reshape(1, -1, *[1] * (rank - 2)))


def _group_norm(
    x: Value, weight: Value | None, bias: Value | None, n: int, c: int, hw: int, groups: int, eps: float
) -> Any:
    grouped = x.rearranged(lambda t: t.reshape(n, groups, -1))
    average, scale = _statistics(grouped, [2], eps)
    y = ((grouped - average) * scale).rearranged(lambda t: t.reshape(x.shape))
    rank = x.element.dim()
    y = y if weight is None else y * _along_channels(weight, rank)
    y = y if bias is None else y + _along_channels(bias, rank)
    return y, average.rearranged(lambda t: t.squeeze(2)), scale.rearranged(lambda t: t.squeeze(2))


def _group_norm_backward(
    g: Value,
    x: Value,
    average: Value,
    scale: Value,
    weight: Value | None,
    n: int,
    c: int,
    hw: int,
    groups: int,
    mask: Any,
) -> tuple[Value, Value, Value]:
    average, scale = (v.rearranged(lambda t: t.unsqueeze(2)) for v in (average, scale))
    as_groups = lambda v: v.rearranged(lambda t: t.reshape(n, groups, -1))  # noqa: E731
    as_channels = lambda v: v.rearranged(lambda t: t.reshape(n, c, -1))  # noqa: E731
    grouped = as_groups(x)
    inner = as_groups(g if weight is None else g * _along_channels(weight, x.element.dim()))
    dx = _normalise_backward(inner, grouped, average, scale, [2]).rearranged(lambda t: t.reshape(x.shape))
    hat = as_channels((grouped - average) * scale)
    return dx, (as_channels(g) * hat).total([0, 2]), as_channels(g).total([0, 2])


def _batch_norm(
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value, Value, Value]:
    rank = x.element.dim()
    if training:
        if running_mean is not None:
            raise UnsupportedError("batch_norm that updates running statistics")
        average, scale = _statistics(x, [d for d in range(rank) if d != 1], eps)
        saved = average.rearranged(lambda t: t.reshape(-1)), scale.rearranged(lambda t: t.reshape(-1))
    else:
        if running_mean is None or running_var is None:
            raise UnsupportedError("batch_norm in eval mode without statistics")
        average, scale = (_along_channels(v, rank) for v in (running_mean, 1 / (running_var + eps).sqrt()))
        empty = integers(x.field, torch.zeros(0, dtype=torch.int64)).as_elements()
        saved = empty, empty
    y = (x - average) * scale
    y = y if weight is None else y * _along_channels(weight, rank)
    return (y if bias is None else y + _along_channels(bias, rank)), *saved


def _batch_norm_backward(
    g: Value,
    x: Value,
    weight: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    saved_mean: Value | None,
    saved_scale: Value | None,
    training: bool,
    eps: float,
    mask: Any,
) -> tuple[Value, Value, Value]:
    rank = x.element.dim()
    dims = [d for d in range(rank) if d != 1]
    inner = g if weight is None else g * _along_channels(weight, rank)
    if training:
        if saved_mean is None or saved_scale is None:
            raise UnsupportedError("batch_norm backward without its saved statistics")
        average, scale = _along_channels(saved_mean, rank), _along_channels(saved_scale, rank)
        dx = _normalise_backward(inner, x, average, scale, dims)
    else:
        if running_mean is None or running_var is None:
            raise UnsupportedError("batch_norm backward in eval mode without statistics")
        average = _along_channels(running_mean, rank)
        scale = _along_channels(1 / (running_var + eps).sqrt(), rank)
        dx = inner * scale
    return dx, (g * (x - average) * scale).total(dims), g.total(dims)


def _halves(x: Value, dim: int) -> tuple[Value, Value]:
    size = x.shape[dim] // 2
    return x.rearranged(lambda t: t.narrow(dim, 0, size)), x.rearranged(lambda t: t.narrow(dim, size, size))


def _glu(x: Value, dim: int = -1) -> Value:
    a, b = _halves(x, dim)
    return a * b.sigmoid()


def _glu_backward(g: Value, x: Value, dim: int) -> Value:
    a, b = _halves(x, dim)
    s = b.sigmoid()
    return concatenated([g * s, g * a * s * (1 - s)], dim)


def _glu_jvp(y: Value, x: Value, dx: Value, dim: int) -> Value:
    _, b = _halves(x, dim)
    da, db = _halves(dx, dim)
    s = b.sigmoid()
    return da * s + db * (y - s * y)


def _scores(q: Value, k: Value, is_causal: bool, mask: Value | None, factor: float) -> Value:
    scores = q.matmul(_transposed(k)) * factor
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores + integers(q.field, allowed).where(0, -math.inf)
    return scores if mask is None else scores + mask


def _transposed(x: Value) -> Value:
    return x.rearranged(lambda t: t.transpose(-2, -1))


def _shared(x: Value, heads: int) -> Value:
    """Keys or values with each head repeated for the heads of the queries that share it."""
    count = heads // x.shape[1]
    return x if count == 1 else x.rearranged(lambda t: t.repeat_interleave(count, 1))


def _shared_backward(g: Value, heads: int) -> Value:
    count = g.shape[1] // heads
    return g if count == 1 else g.rearranged(lambda t: t.unflatten(1, (heads, count))).total([2])


def _attention(
    q: Value,
    k: Value,
    v: Value,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Value | None = None,
    scale: float | None = None,
) -> tuple[Value, Value]:
    if dropout:
        raise UnsupportedError("attention with dropout")
    k, v = (_shared(x, q.shape[1]) for x in (k, v))
    scores = _scores(q, k, is_causal, attn_mask, 1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    return safe_softmax(scores, -1).matmul(v), logsumexp(scores, -1)


def _attention_backward(
    g: Value,
    q: Value,
    k: Value,
    v: Value,
    y: Value,
    log_sums: Value,
    dropout: float,
    is_causal: bool,
    *,
    attn_mask: Value | None = None,
    scale: float | None = None,
) -> tuple[Value, Value, Value]:
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    heads = k.shape[1]
    k, v = (_shared(x, q.shape[1]) for x in (k, v))
    scores = _scores(q, k, is_causal, attn_mask, factor)
    weights = without_masked_rows(scores, (scores - log_sums.rearranged(lambda t: t.unsqueeze(-1))).exp(), -1)
    dscores = weights * (g.matmul(_transposed(v)) - (g * y).total([3], True)) * factor
    by_key, by_value = _transposed(dscores).matmul(q), _transposed(weights).matmul(g)
    return dscores.matmul(k), _shared_backward(by_key, heads), _shared_backward(by_value, heads)


def _reduce(loss: Value, reduction: int) -> Value:
    if reduction == _NONE:
        return loss
    total = loss.total(list(range(loss.element.dim())))
    return total if reduction == _SUM else total / loss.element.numel()


def _loss_cotangent(g: Value, reduction: int, count: int) -> Value:
    return g / count if reduction == _MEAN else g


def _mse(x: Value, y: Value, reduction: int = _MEAN) -> Value:
    return _reduce((x - y).square(), reduction)


def _mse_backward(g: Value, x: Value, y: Value, reduction: int) -> Value:
    difference = x - y
    return _loss_cotangent(g, reduction, difference.element.numel()) * difference * 2


def _huber(x: Value, y: Value, reduction: int = _MEAN, delta: float = 1.0) -> Value:
    z = (x - y) * (x - y).sgn()
    return _reduce(z.lt(delta).where(z * z * 0.5, (z - 0.5 * delta) * delta), reduction)


def _huber_backward(g: Value, x: Value, y: Value, reduction: int, delta: float) -> Value:
    d = x - y
    slope = (d * d.sgn()).lt(delta).where(d, d.sgn() * delta)
    return _loss_cotangent(g, reduction, d.element.numel()) * slope


def _smooth_l1(x: Value, y: Value, reduction: int = _MEAN, beta: float = 1.0) -> Value:
    z = (x - y) * (x - y).sgn()
    return _reduce(z.lt(beta).where(z * z * 0.5 / beta, z - 0.5 * beta), reduction)


def _smooth_l1_backward(g: Value, x: Value, y: Value, reduction: int, beta: float) -> Value:
    d = x - y
    slope = (d * d.sgn()).lt(beta).where(d / beta, d.sgn())
    return _loss_cotangent(g, reduction, d.element.numel()) * slope


def _weights_at(target: Value, weight: Value | None, ignored: int, like: Value) -> tuple[Value, Value]:
    """The class of each target and its weight, which is zero for the ignored class."""
    is_counted = target.element != ignored
    like.field.trace.record_comparison(is_counted)
    chosen = integers(like.field, torch.where(is_counted, target.element, 0))
    counts = integers(like.field, is_counted.to(torch.int64)).as_elements()
    if weight is not None:
        counts = counts * weight.rearranged(lambda t: t[chosen.element])
    return chosen, counts


def _nll(x: Value, target: Value, weight: Value | None, reduction: int, ignored: int) -> tuple[Value, Value]:
    chosen, counts = _weights_at(target, weight, ignored, x)
    dim = 0 if x.element.dim() == 1 else 1
    picked = x.rearranged(lambda t: t.gather(dim, chosen.element.unsqueeze(dim)).squeeze(dim))
    losses = -picked * counts
    dims = list(range(losses.element.dim()))
    total = counts.total(dims)
    if reduction == _NONE:
        return losses, Value(x.field, torch.zeros((), dtype=x.field.dtype))
    return (losses.total(dims) / total if reduction == _MEAN else losses.total(dims)), total


def _nll_backward(
    g: Value, x: Value, target: Value, weight: Value | None, reduction: int, ignored: int, total: Value
) -> Value:
    chosen, counts = _weights_at(target, weight, ignored, x)
    dim = 0 if x.element.dim() == 1 else 1
    each = -(g / total if reduction == _MEAN else g) * counts
    empty = torch.zeros(x.shape, dtype=x.field.dtype)
    return each.linear(lambda t: empty.scatter(dim, chosen.element.unsqueeze(dim), t.unsqueeze(dim)))


def _binary_cross_entropy_with_logits(
    x: Value, y: Value, weight: Value | None = None, pos_weight: Value | None = None, reduction: int = _MEAN
) -> Value:
    if pos_weight is not None:
        raise UnsupportedError("binary_cross_entropy_with_logits with pos_weight")
    z = (-(x * x.sgn())).exp()
    loss = (1 - y) * x - (x.lt(0).where(x, 0) - (1 + z).log())
    return _reduce(loss if weight is None else loss * weight, reduction)


RULES: dict[str, Callable[..., Any]] = {
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    "native_batch_norm": _batch_norm,
    "_native_batch_norm_legit": lambda x, w, b, training, momentum, eps: _batch_norm(
        x, w, b, None, None, training, momentum, eps
    ),
    "native_batch_norm_backward": _batch_norm_backward,
    "glu": _glu,
    "glu_backward": _glu_backward,
    "glu_jvp": _glu_jvp,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "mse_loss": _mse,
    "mse_loss_backward": _mse_backward,
    "huber_loss": _huber,
    "huber_loss_backward": _huber_backward,
    "smooth_l1_loss": _smooth_l1,
    "smooth_l1_loss_backward": _smooth_l1_backward,
    "nll_loss_forward": _nll,
    "nll_loss_backward": _nll_backward,
    "nll_loss2d_forward": _nll,
    "nll_loss2d_backward": _nll_backward,
    "binary_cross_entropy_with_logits": _binary_cross_entropy_with_logits,
}
