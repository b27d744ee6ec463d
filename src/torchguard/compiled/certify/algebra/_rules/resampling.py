"""Rules of operators that are linear in each dimension of a plane: average pooling and resampling.

Each dimension is multiplied by a matrix of rationals.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from torchguard.compiled.certify.algebra._field import PrimeField, UnsupportedError
from torchguard.compiled.certify.algebra._rules.windows import Sizes, every_dim, output_size
from torchguard.compiled.certify.algebra._values import Value

Weights = list[list[Fraction]]


def _average_matrix(n: int, kernel: int, stride: int, padding: int, counts_padding: bool, has_partial: bool) -> Weights:
    rows = []
    for i in range(output_size(n, kernel, stride, padding, 1, has_partial)):
        start = i * stride - padding
        end = min(start + kernel, n + padding)
        inside = range(max(start, 0), min(end, n))
        size = end - start if counts_padding else len(inside)
        rows.append([Fraction(1, size) if j in inside else Fraction(0) for j in range(n)])
    return rows


def _adaptive_matrix(n: int, m: int) -> Weights:
    rows = []
    for i in range(m):
        inside = range(i * n // m, -(-(i + 1) * n // m))
        rows.append([Fraction(1, len(inside)) if j in inside else Fraction(0) for j in range(n)])
    return rows


def _ratio(n: int, m: int, scale: float | None) -> Fraction:
    """The distance of two neighbours of `m` samples in the `n` they are made of."""
    return Fraction(n, m) if scale is None else 1 / Fraction(scale).limit_denominator(1000)


def _position(i: int, n: int, m: int, align_corners: bool, scale: float | None) -> Fraction:
    """Where sample `i` of `m` lies in the `n` samples it is made of."""
    if align_corners:
        return Fraction(i * (n - 1), m - 1) if m > 1 else Fraction(0)
    return _ratio(n, m, scale) * (i + Fraction(1, 2)) - Fraction(1, 2)


def _nearest_matrix(n: int, m: int, scale: float | None) -> Weights:
    ratio = _ratio(n, m, scale)
    chosen = [min(math.floor(i * ratio), n - 1) for i in range(m)]
    return [[Fraction(j == c) for j in range(n)] for c in chosen]


def _linear_matrix(n: int, m: int, align_corners: bool, scale: float | None) -> Weights:
    rows = []
    for i in range(m):
        at = max(_position(i, n, m, align_corners, scale), Fraction(0))
        low = min(math.floor(at), n - 1)
        high, part = min(low + 1, n - 1), at - low
        rows.append([(1 - part) * (j == low) + part * (j == high) for j in range(n)])
    return rows


_CUBIC = Fraction(-3, 4)


def _cubic_weight(t: Fraction) -> Fraction:
    """The weight of a sample at a distance, by the kernel of Keys."""
    a, t = _CUBIC, abs(t)
    if t <= 1:
        return ((a + 2) * t - (a + 3)) * t * t + 1
    return ((a * t - 5 * a) * t + 8 * a) * t - 4 * a if t < 2 else Fraction(0)


def _cubic_matrix(n: int, m: int, align_corners: bool, scale: float | None) -> Weights:
    rows = []
    for i in range(m):
        at = _position(i, n, m, align_corners, scale)
        row, low = [Fraction(0)] * n, math.floor(at)
        for j in range(low - 1, low + 3):
            row[min(max(j, 0), n - 1)] += _cubic_weight(at - j)
        rows.append(row)
    return rows


def _multiply_dims(f: PrimeField, t: Tensor, weights: Sequence[Weights], is_transposed: bool) -> Tensor:
    """Each of the last dimensions multiplied by its matrix, or by the transpose."""
    for i, rows in enumerate(weights):
        matrix = torch.tensor([[f.number(w) for w in row] for row in rows], dtype=f.dtype)
        dim = t.dim() - len(weights) + i
        factor = matrix if is_transposed else matrix.t()
        t = f.matmul(t.movedim(dim, -1).contiguous(), factor.contiguous()).movedim(-1, dim)
    return t


def _resample(x: Value, weights: Sequence[Weights]) -> Value:
    return x.linear(lambda t: _multiply_dims(x.field, t, weights, False))


def _resample_backward(g: Value, weights: Sequence[Weights]) -> Value:
    return g.linear(lambda t: _multiply_dims(g.field, t, weights, True))


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
    kernel = every_dim(kernel, rank)
    each = zip(plane, kernel, every_dim(stride, rank, kernel), every_dim(padding, rank), strict=True)
    return [_average_matrix(*sizes, count_include_pad, ceil_mode) for sizes in each]


def _average_pool(rank: int) -> Callable[..., Value]:
    return lambda x, *args, **options: _resample(x, _average_weights(x.shape[-rank:], *args, **options))


def _average_pool_backward(rank: int) -> Callable[..., Value]:
    return lambda g, x, *args, **options: _resample_backward(g, _average_weights(x.shape[-rank:], *args, **options))


def _adaptive_weights(plane: Sizes, sizes: Sizes) -> list[Weights]:
    return [_adaptive_matrix(n, m) for n, m in zip(plane, sizes, strict=True)]


def _nearest_weights(plane: Sizes, sizes: Sizes, *scales: float | None) -> list[Weights]:
    given = scales or (None,) * len(sizes)
    return [_nearest_matrix(n, m, s) for n, m, s in zip(plane, sizes, given, strict=True)]


def _linear_weights(plane: Sizes, sizes: Sizes, align_corners: bool, *scales: float | None) -> list[Weights]:
    given = scales or (None,) * len(sizes)
    return [_linear_matrix(n, m, align_corners, s) for n, m, s in zip(plane, sizes, given, strict=True)]


def _cubic_weights(plane: Sizes, sizes: Sizes, align_corners: bool, *scales: float | None) -> list[Weights]:
    given = scales or (None,) * len(sizes)
    return [_cubic_matrix(n, m, align_corners, s) for n, m, s in zip(plane, sizes, given, strict=True)]


def _upsampling(
    weights_of: Callable[..., list[Weights]], rank: int
) -> tuple[Callable[..., Value], Callable[..., Value]]:
    def forward(x: Value, sizes: Sizes, *options: Any) -> Value:
        return _resample(x, weights_of(x.shape[-rank:], sizes, *options))

    def backward(g: Value, sizes: Sizes, input_sizes: Sizes, *options: Any) -> Value:
        return _resample_backward(g, weights_of(input_sizes[-rank:], sizes, *options))

    return forward, backward


RULES: dict[str, Callable[..., Any]] = {
    "avg_pool1d": _average_pool(1),
    "avg_pool2d": _average_pool(2),
    "avg_pool2d_backward": _average_pool_backward(2),
    "avg_pool3d": _average_pool(3),
    "avg_pool3d_backward": _average_pool_backward(3),
    "_adaptive_avg_pool2d": lambda x, sizes: _resample(x, _adaptive_weights(x.shape[-2:], sizes)),
    "_adaptive_avg_pool2d_backward": lambda g, x: _resample_backward(g, _adaptive_weights(x.shape[-2:], g.shape[-2:])),
    "_adaptive_avg_pool3d": lambda x, sizes: _resample(x, _adaptive_weights(x.shape[-3:], sizes)),
    "_adaptive_avg_pool3d_backward": lambda g, x: _resample_backward(g, _adaptive_weights(x.shape[-3:], g.shape[-3:])),
}
_UPSAMPLING = {
    1: {"nearest1d": _nearest_weights, "linear1d": _linear_weights},
    2: {"nearest2d": _nearest_weights, "bilinear2d": _linear_weights, "bicubic2d": _cubic_weights},
    3: {"nearest3d": _nearest_weights, "trilinear3d": _linear_weights},
}
for _rank, _kinds in _UPSAMPLING.items():
    for _name, _weights_of in _kinds.items():
        RULES[f"upsample_{_name}"], RULES[f"upsample_{_name}_backward"] = _upsampling(_weights_of, _rank)
