"""Types of convolutions, pools, resampling, norms, attention and losses."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchguard.compiled.certify.types._types import (
    Type,
    broadcast,
    promoted,
    require,
    same_as,
    wrapped,
)

Sizes = Sequence[int]


def _convolution(
    x: Type,
    w: Type,
    bias: Type | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    extra: Sizes,
    groups: int,
) -> Type:
    rank = w.rank - 2
    require(x.rank == w.rank and x.dtype == w.dtype, f"{x} convolved with {w}")
    channels = w.shape[0] if transposed else w.shape[1] * groups
    require(x.shape[1] == channels, f"{x} convolved with {w} in {groups} groups")
    each = [list(s) * rank if len(s) == 1 else list(s) for s in (stride, padding, dilation, extra)]
    plane = []
    for n, k, s, p, d, e in zip(x.shape[2:], w.shape[2:], *each, strict=True):
        plane.append(
            (n - 1) * s - 2 * p + d * (k - 1) + e + 1 if transposed else (n + 2 * p - d * (k - 1) - 1) // s + 1
        )
    made = w.shape[1] * groups if transposed else w.shape[0]
    require(bias is None or bias.shape == (made,), f"a bias {bias} for {made} channels")
    return Type((x.shape[0], made, *plane), x.dtype)


def _convolution_backward(g: Type, x: Type, w: Type, bias: Sizes | None, *args: Any) -> tuple[Type | None, ...]:
    mask = args[-1]
    expected = _convolution(x, w, None, *args[:-1])
    require(g.shape == expected.shape, f"a gradient {g} of {expected}")
    made = (x, w, Type((g.shape[1],), g.dtype))
    return tuple(t if is_wanted else None for t, is_wanted in zip(made, mask, strict=True))


def _pooled_size(n: int, k: int, s: int, p: int, d: int, ceil_mode: bool) -> int:
    count = (n + 2 * p - d * (k - 1) - 1 + (s - 1 if ceil_mode else 0)) // s + 1
    return count - 1 if ceil_mode and (count - 1) * s >= n + p else count


def _every(sizes: Sizes | int, rank: int) -> list[int]:
    given = [sizes] if isinstance(sizes, int) else list(sizes)
    return given * rank if len(given) == 1 else given


def _pool(x: Type, rank: int, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil: bool) -> Type:
    each = [_every(s, rank) for s in (kernel, stride or kernel, padding, dilation)]
    plane = [_pooled_size(n, k, s, p, d, ceil) for n, k, s, p, d in zip(x.shape[-rank:], *each, strict=True)]
    return Type((*x.shape[:-rank], *plane), x.dtype)


def _max_pool(rank: int) -> Callable[..., tuple[Type, Type]]:
    def rule(
        x: Type, kernel: Sizes, stride: Sizes = (), padding: Sizes = (0,), dilation: Sizes = (1,), ceil: bool = False
    ) -> tuple[Type, Type]:
        pooled = _pool(x, rank, kernel, stride, padding, dilation, ceil)
        return _with_indices(pooled)

    return rule


def _with_indices(x: Type) -> tuple[Type, Type]:
    return x, Type(x.shape, torch.int64)


def _im2col(x: Type, kernel: Sizes, dilation: Sizes, padding: Sizes, stride: Sizes) -> Type:
    pooled = _pool(x, 2, kernel, stride, padding, dilation, False)
    return Type((*x.shape[:-3], x.shape[-3] * math.prod(kernel), math.prod(pooled.shape[-2:])), x.dtype)


def _average_pool(rank: int) -> Callable[..., Type]:
    def rule(
        x: Type, kernel: Sizes, stride: Sizes = (), padding: Sizes = (0,), ceil: bool = False, *_: Any, **__: Any
    ) -> Type:
        return _pool(x, rank, kernel, stride, padding, (1,), ceil)

    return rule


def _resize(rank: int) -> Callable[..., Type]:
    return lambda x, sizes, *_: Type((*x.shape[:-rank], *sizes), x.dtype)


def _resize_backward(g: Type, sizes: Sizes, input_sizes: Sizes, *_: Any) -> Type:
    return Type(tuple(input_sizes), g.dtype)


def _layer_norm(x: Type, shape: Sizes, *_: Any) -> tuple[Type, Type, Type]:
    outer = x.rank - len(shape)
    require(x.shape[outer:] == tuple(shape), f"{x} normalised over {list(shape)}")
    saved = Type((*x.shape[:outer], *[1] * len(shape)), x.dtype)
    return x, saved, saved


def _norm_backward(
    x: Type, weight: Type | None, bias: Any, mask: Sequence[bool], inner: tuple[int, ...]
) -> tuple[Type | None, ...]:
    made = (x, Type(inner, x.dtype), Type(inner, x.dtype))
    return tuple(t if is_wanted else None for t, is_wanted in zip(made, mask, strict=True))


def _layer_norm_backward(g: Type, x: Type, shape: Sizes, m: Type, s: Type, w: Any, b: Any, mask: Any) -> Any:
    return _norm_backward(x, w, b, mask, tuple(shape))


def _group_norm(x: Type, w: Any, b: Any, n: int, c: int, hw: int, groups: int, eps: float) -> Any:
    require(x.numel == n * c * hw and c % groups == 0, f"{x} in {groups} groups")
    return x, Type((n, groups), x.dtype), Type((n, groups), x.dtype)


def _batch_norm(x: Type, w: Any, b: Any, mean: Any, var: Any, training: bool, *_: Any) -> Any:
    saved = Type((x.shape[1] if training else 0,), x.dtype)
    return x, saved, saved


def _loss(x: Type, y: Type, reduction: int = 1, *_: Any) -> Type:
    return Type(() if reduction else broadcast(x.shape, y.shape), promoted(x, y))


def _loss_backward(g: Type, x: Type, y: Type, *_: Any) -> Type:
    return Type(broadcast(x.shape, y.shape), promoted(x, y))


def _nll_loss(x: Type, target: Type, weight: Any, reduction: int, ignored: int) -> tuple[Type, Type]:
    require(not target.dtype.is_floating_point, f"classes of {target.dtype}")
    return Type(() if reduction else target.shape, x.dtype), Type((), x.dtype)


def _glu(x: Type, dim: int = -1) -> Type:
    at = wrapped(dim, x.rank)
    require(x.shape[at] % 2 == 0, f"{x} has an odd size along dimension {dim}")
    return Type((*x.shape[:at], x.shape[at] // 2, *x.shape[at + 1 :]), x.dtype)


def _cross_entropy(x: Type, y: Type, weight: Any = None, pos: Any = None, reduction: int = 1) -> Type:
    return _loss(x, y, reduction)


def _attention(q: Type, k: Type, v: Type, *_: Any, **__: Any) -> tuple[Type, Type]:
    require(q.shape[-1] == k.shape[-1] and k.shape[-2] == v.shape[-2], f"{q}, {k} and {v} in attention")
    return Type((*q.shape[:-1], v.shape[-1]), q.dtype), Type(q.shape[:-1], q.dtype)


_UPSAMPLING = {
    "nearest1d": 1,
    "linear1d": 1,
    "nearest2d": 2,
    "bilinear2d": 2,
    "bicubic2d": 2,
    "nearest3d": 3,
    "trilinear3d": 3,
}

RULES: dict[str, Callable[..., Any]] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "max_pool2d_with_indices": _max_pool(2),
    "max_pool3d_with_indices": _max_pool(3),
    "avg_pool1d": _average_pool(1),
    "avg_pool2d": _average_pool(2),
    "avg_pool3d": _average_pool(3),
    **{
        name: same_as(1)
        for name in ("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward", "avg_pool2d_backward")
        + ("avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward", "glu_backward")
        + ("adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward")
    },
    "_adaptive_avg_pool2d": _resize(2),
    "_adaptive_avg_pool3d": _resize(3),
    "adaptive_max_pool2d": lambda x, sizes: _with_indices(_resize(2)(x, sizes)),
    "adaptive_max_pool3d": lambda x, sizes: _with_indices(_resize(3)(x, sizes)),
    "im2col": _im2col,
    "col2im": lambda x, sizes, kernel, *_: Type((*x.shape[:-2], x.shape[-2] // math.prod(kernel), *sizes), x.dtype),
    **{f"upsample_{name}": _resize(rank) for name, rank in _UPSAMPLING.items()},
    **{f"upsample_{name}_backward": _resize_backward for name in _UPSAMPLING},
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": lambda g, x, m, s, w, n, c, hw, groups, mask: _norm_backward(x, w, None, mask, (c,)),
    "native_batch_norm": _batch_norm,
    "_native_batch_norm_legit": lambda x, w, b, training, *_: _batch_norm(x, w, b, None, None, training),
    "native_batch_norm_backward": lambda g, x, w, *rest: _norm_backward(x, w, None, rest[-1], (x.shape[1],)),
    "glu": _glu,
    "glu_jvp": same_as(0),
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda g, q, k, v, *_, **__: (q, k, v),
    **dict.fromkeys(("mse_loss", "huber_loss", "smooth_l1_loss"), _loss),
    **dict.fromkeys(("mse_loss_backward", "huber_loss_backward", "smooth_l1_loss_backward"), _loss_backward),
    "nll_loss_forward": _nll_loss,
    "nll_loss2d_forward": _nll_loss,
    "nll_loss_backward": same_as(1),
    "nll_loss2d_backward": same_as(1),
    "binary_cross_entropy_with_logits": _cross_entropy,
}
