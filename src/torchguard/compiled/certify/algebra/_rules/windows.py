"""Pooling and resampling. What weighs and adds does so one dimension at a time, by a matrix of rationals."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from torchguard.compiled.certify.algebra._field import Field, UnsupportedError
from torchguard.compiled.certify.algebra._rules.convolutions import Windows, looked_at, windows_of
from torchguard.compiled.certify.algebra._values import Value, exact

Sizes = Sequence[int]
Weights = list[list[Fraction]]
Rule = Callable[..., Any]


def _output_size(n: int, k: int, s: int, p: int, d: int, has_partial: bool) -> int:
    count = (n + 2 * p - d * (k - 1) - 1 + (s - 1 if has_partial else 0)) // s + 1
    # A window that starts in the padding after the end is left out.
    return count - 1 if has_partial and (count - 1) * s >= n + p else count


def _every(sizes: Sizes | int, rank: int, default: Sizes = ()) -> list[int]:
    given = [sizes] if isinstance(sizes, int) else list(sizes) or list(default)
    return given * rank if len(given) == 1 else given


def _max_pool_windows(
    x: Value, rank: int, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil_mode: bool
) -> Windows:
    kernel = _every(kernel, rank)
    stride, padding, dilation = _every(stride, rank, kernel), _every(padding, rank), _every(dilation, rank)
    plane = x.shape[-rank:]
    each = zip(plane, kernel, stride, padding, dilation, strict=True)
    return windows_of(plane, kernel, stride, padding, dilation, [_output_size(*sizes, ceil_mode) for sizes in each])


def _max_pool(rank: int) -> Callable[..., tuple[Value, Value]]:
    def rule(
        x: Value,
        kernel: Sizes,
        stride: Sizes = (),
        padding: Sizes = (0,),
        dilation: Sizes = (1,),
        ceil_mode: bool = False,
    ) -> tuple[Value, Value]:
        windows = _max_pool_windows(x, rank, kernel, stride, padding, dilation, ceil_mode)
        sizes = looked_at(x.sizes(), windows, filling=-math.inf)
        chosen = sizes.argmax(-1, keepdim=True)
        places = windows.places.expand(*sizes.shape).gather(-1, chosen).squeeze(-1)
        shape = (*x.shape[:-rank], *windows.outer)
        return _picked(x, places, rank, shape), exact(x.field, places.reshape(shape))

    return rule


def _picked(x: Value, places: Tensor, rank: int, shape: Sizes) -> Value:
    return x.arranged(lambda t: t.flatten(-rank).gather(-1, places).reshape(tuple(shape)))


def _max_pool_backward(rank: int) -> Callable[..., Value]:
    def rule(g: Value, x: Value, *args: Any) -> Value:
        places = args[-1].element.flatten(-rank)
        empty = torch.zeros(*places.shape[:-1], math.prod(x.shape[-rank:]), dtype=g.field.dtype)
        put = lambda t: empty.scatter_add(-1, places, t.flatten(-rank)).reshape(x.shape)  # noqa: E731
        return g.linear(lambda t: g.field.reduced(put(t)))

    return rule


def _averaging(n: int, k: int, s: int, p: int, counts_padding: bool, has_partial: bool) -> Weights:
    rows = []
    for i in range(_output_size(n, k, s, p, 1, has_partial)):
        start, end = i * s - p, min(i * s - p + k, n + p)
        inside = range(max(start, 0), min(end, n))
        size = end - start if counts_padding else len(inside)
        rows.append([Fraction(1, size) if j in inside else Fraction(0) for j in range(n)])
    return rows


def _adaptive(n: int, m: int) -> Weights:
    rows = []
    for i in range(m):
        inside = range(i * n // m, -(-(i + 1) * n // m))
        rows.append([Fraction(1, len(inside)) if j in inside else Fraction(0) for j in range(n)])
    return rows


def _nearest(n: int, m: int, scale: float | None) -> Weights:
    ratio = Fraction(n, m) if scale is None else 1 / Fraction(scale).limit_denominator(1000)
    chosen = [min(math.floor(i * ratio), n - 1) for i in range(m)]
    return [[Fraction(j == c) for j in range(n)] for c in chosen]


def _interpolating(n: int, m: int, align_corners: bool, scale: float | None) -> Weights:
    rows = []
    for i in range(m):
        if align_corners:
            at = Fraction(i * (n - 1), m - 1) if m > 1 else Fraction(0)
        else:
            ratio = Fraction(n, m) if scale is None else 1 / Fraction(scale).limit_denominator(1000)
            at = max(ratio * (i + Fraction(1, 2)) - Fraction(1, 2), Fraction(0))
        low = min(math.floor(at), n - 1)
        high, part = min(low + 1, n - 1), at - low
        rows.append([(1 - part) * (j == low) + part * (j == high) for j in range(n)])
    return rows


def _weighed(f: Field, t: Tensor, weights: Sequence[Weights], is_transposed: bool) -> Tensor:
    """One matrix for each of the last dimensions, or its transpose."""
    for i, rows in enumerate(weights):
        matrix = torch.tensor([[f.number(w) for w in row] for row in rows], dtype=f.dtype)
        dim = t.dim() - len(weights) + i
        turned = matrix if is_transposed else matrix.t()
        t = f.matmul(t.movedim(dim, -1).contiguous(), turned.contiguous()).movedim(-1, dim)
    return t


def _resampled(x: Value, weights: Sequence[Weights]) -> Value:
    return x.linear(lambda t: _weighed(x.field, t, weights, False))


def _resampled_back(g: Value, weights: Sequence[Weights]) -> Value:
    return g.linear(lambda t: _weighed(g.field, t, weights, True))


def _average_weights(
    plane: Sizes,
    kernel: Sizes,
    stride: Sizes = (),
    padding: Sizes = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> list[Weights]:
    if divisor_override is not None:
        raise UnsupportedError("avg_pool with divisor_override")
    rank = len(plane)
    kernel = _every(kernel, rank)
    each = zip(plane, kernel, _every(stride, rank, kernel), _every(padding, rank), strict=True)
    return [_averaging(*sizes, count_include_pad, ceil_mode) for sizes in each]


def _average_pool(rank: int) -> Callable[..., Value]:
    return lambda x, *args, **options: _resampled(x, _average_weights(x.shape[-rank:], *args, **options))


def _average_pool_backward(rank: int) -> Callable[..., Value]:
    return lambda g, x, *args, **options: _resampled_back(g, _average_weights(x.shape[-rank:], *args, **options))


def _adaptive_weights(plane: Sizes, sizes: Sizes) -> list[Weights]:
    return [_adaptive(n, m) for n, m in zip(plane, sizes, strict=True)]


def _nearest_weights(plane: Sizes, sizes: Sizes, *scales: float | None) -> list[Weights]:
    given = scales or (None,) * len(sizes)
    return [_nearest(n, m, s) for n, m, s in zip(plane, sizes, given, strict=True)]


def _linear_weights(plane: Sizes, sizes: Sizes, align_corners: bool, *scales: float | None) -> list[Weights]:
    given = scales or (None,) * len(sizes)
    return [_interpolating(n, m, align_corners, s) for n, m, s in zip(plane, sizes, given, strict=True)]


def _upsampled(
    weights_of: Callable[..., list[Weights]], rank: int
) -> tuple[Callable[..., Value], Callable[..., Value]]:
    def forward(x: Value, sizes: Sizes, *options: Any) -> Value:
        return _resampled(x, weights_of(x.shape[-rank:], sizes, *options))

    def backward(g: Value, sizes: Sizes, input_sizes: Sizes, *options: Any) -> Value:
        return _resampled_back(g, weights_of(input_sizes[-rank:], sizes, *options))

    return forward, backward


RULES: dict[str, Rule] = {
    "max_pool2d_with_indices": _max_pool(2),
    "max_pool2d_with_indices_backward": _max_pool_backward(2),
    "max_pool3d_with_indices": _max_pool(3),
    "max_pool3d_with_indices_backward": _max_pool_backward(3),
    "avg_pool1d": _average_pool(1),
    "avg_pool2d": _average_pool(2),
    "avg_pool2d_backward": _average_pool_backward(2),
    "avg_pool3d": _average_pool(3),
    "avg_pool3d_backward": _average_pool_backward(3),
    "_adaptive_avg_pool2d": lambda x, sizes: _resampled(x, _adaptive_weights(x.shape[-2:], sizes)),
    "_adaptive_avg_pool2d_backward": lambda g, x: _resampled_back(g, _adaptive_weights(x.shape[-2:], g.shape[-2:])),
}
_UPSAMPLING = {
    1: {"nearest1d": _nearest_weights, "linear1d": _linear_weights},
    2: {"nearest2d": _nearest_weights, "bilinear2d": _linear_weights},
    3: {"nearest3d": _nearest_weights, "trilinear3d": _linear_weights},
}
for _rank, _kinds in _UPSAMPLING.items():
    for _name, _weights_of in _kinds.items():
        RULES[f"upsample_{_name}"], RULES[f"upsample_{_name}_backward"] = _upsampled(_weights_of, _rank)
