"""Layer, group and batch normalisation, gated units and fused attention, as the formulas they stand for."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchguard.compiled.certify.algebra._field import UnsupportedError
from torchguard.compiled.certify.algebra._rules.reductions import count_of, joined, logsumexp, mean, softmax
from torchguard.compiled.certify.algebra._values import Value, exact


def _statistics(x: Value, dims: list[int], eps: float) -> tuple[Value, Value]:
    average = mean(x, dims, True)
    return average, 1 / (mean((x - average).square(), dims, True) + eps).sqrt()


def _centred_backward(g: Value, x: Value, average: Value, scale: Value, dims: list[int]) -> Value:
    """The derivative of (x - average) * scale, with g the cotangent of that."""
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
    dx = _centred_backward(inner, x, average, scale, list(range(rank - len(shape), rank)))
    return dx, (g * hat).total(outer), g.total(outer)


def _along_channels(v: Value, rank: int) -> Value:
    return v.arranged(lambda t: t.reshape(1, -1, *[1] * (rank - 2)))


def _group_norm(
    x: Value, weight: Value | None, bias: Value | None, n: int, c: int, hw: int, groups: int, eps: float
) -> Any:
    grouped = x.arranged(lambda t: t.reshape(n, groups, -1))
    average, scale = _statistics(grouped, [2], eps)
    y = ((grouped - average) * scale).arranged(lambda t: t.reshape(x.shape))
    rank = x.element.dim()
    y = y if weight is None else y * _along_channels(weight, rank)
    y = y if bias is None else y + _along_channels(bias, rank)
    return y, average.arranged(lambda t: t.squeeze(2)), scale.arranged(lambda t: t.squeeze(2))


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
    average, scale = (v.arranged(lambda t: t.unsqueeze(2)) for v in (average, scale))
    as_groups = lambda v: v.arranged(lambda t: t.reshape(n, groups, -1))  # noqa: E731
    as_channels = lambda v: v.arranged(lambda t: t.reshape(n, c, -1))  # noqa: E731
    grouped = as_groups(x)
    inner = as_groups(g if weight is None else g * _along_channels(weight, x.element.dim()))
    dx = _centred_backward(inner, grouped, average, scale, [2]).arranged(lambda t: t.reshape(x.shape))
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
        saved = average.arranged(lambda t: t.reshape(-1)), scale.arranged(lambda t: t.reshape(-1))
    else:
        if running_mean is None or running_var is None:
            raise UnsupportedError("batch_norm in eval mode without statistics")
        average, scale = (_along_channels(v, rank) for v in (running_mean, 1 / (running_var + eps).sqrt()))
        empty = exact(x.field, torch.zeros(0, dtype=torch.int64)).as_elements()
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
        dx = _centred_backward(inner, x, average, scale, dims)
    else:
        if running_mean is None or running_var is None:
            raise UnsupportedError("batch_norm backward in eval mode without statistics")
        average = _along_channels(running_mean, rank)
        scale = _along_channels(1 / (running_var + eps).sqrt(), rank)
        dx = inner * scale
    return dx, (g * (x - average) * scale).total(dims), g.total(dims)


def _halves(x: Value, dim: int) -> tuple[Value, Value]:
    size = x.shape[dim] // 2
    return x.arranged(lambda t: t.narrow(dim, 0, size)), x.arranged(lambda t: t.narrow(dim, size, size))


def _glu(x: Value, dim: int = -1) -> Value:
    a, b = _halves(x, dim)
    return a * b.sigmoid()


def _glu_backward(g: Value, x: Value, dim: int) -> Value:
    a, b = _halves(x, dim)
    s = b.sigmoid()
    return joined([g * s, g * a * s * (1 - s)], dim)


def _glu_jvp(y: Value, x: Value, dx: Value, dim: int) -> Value:
    _, b = _halves(x, dim)
    da, db = _halves(dx, dim)
    s = b.sigmoid()
    return da * s + db * (y - s * y)


def _scores(q: Value, k: Value, is_causal: bool, mask: Value | None, factor: float) -> Value:
    scores = q.matmul(_flipped(k)) * factor
    if is_causal:
        kept = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores + exact(q.field, kept).where(0, -math.inf)
    return scores if mask is None else scores + mask


def _flipped(x: Value) -> Value:
    return x.arranged(lambda t: t.transpose(-2, -1))


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
    scores = _scores(q, k, is_causal, attn_mask, 1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    return softmax(scores, -1).matmul(v), logsumexp(scores, -1)


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
    scores = _scores(q, k, is_causal, attn_mask, factor)
    weights = (scores - log_sums.arranged(lambda t: t.unsqueeze(-1))).exp()
    dscores = weights * (g.matmul(_flipped(v)) - (g * y).total([3], True)) * factor
    return dscores.matmul(k), _flipped(dscores).matmul(q), _flipped(weights).matmul(g)


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
}
