"""Rules of operators that read windows of a plane: convolutions, max pooling, im2col and col2im.

A convolution of any rank is a matrix product of unfolded windows.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchguard.compiled.certify.algebra._field import PrimeField, UnsupportedError
from torchguard.compiled.certify.algebra._values import Value, integers

Sizes = Sequence[int]


@dataclass(frozen=True)
class Windows:
    """The windows of one plane: `positions[window, element]`. The index `prod(inner)` means padding.

    Args:
        inner: the sizes of the plane.
        outer: the number of windows along each of its dims.
    """

    positions: Tensor
    inner: tuple[int, ...]
    outer: tuple[int, ...]


def _windows(inner: Sizes, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, outer: Sizes) -> Windows:
    """The windows of a kernel over a plane of size `inner`; there are `outer` of them."""
    outside = math.prod(inner)
    flat, is_inside = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool)
    for size, width, step, pad, spread, count in zip(inner, kernel, stride, padding, dilation, outer, strict=True):
        at = (torch.arange(count) * step - pad).unsqueeze(1) + torch.arange(width) * spread
        within = (at >= 0) & (at < size)
        flat = (flat[:, None, :, None] * size + at[None, :, None, :]).flatten(0, 1).flatten(1, 2)
        is_inside = (is_inside[:, None, :, None] & within[None, :, None, :]).flatten(0, 1).flatten(1, 2)
    return Windows(torch.where(is_inside, flat, outside), tuple(inner), tuple(outer))


def _unfold(x: Tensor, windows: Windows, filling: float = 0) -> Tensor:
    """Each plane as (window, element): im2col."""
    flat = x.reshape(*x.shape[: x.dim() - len(windows.inner)], -1)
    padded = torch.cat([flat, torch.full((*flat.shape[:-1], 1), filling, dtype=x.dtype)], -1)
    return padded[..., windows.positions]


def _fold(f: PrimeField, unfolded: Tensor, windows: Windows) -> Tensor:
    """The transpose of `_unfold`, which sums the elements at each position: col2im."""
    size = math.prod(windows.inner)
    zeros = torch.zeros(*unfolded.shape[:-2], size + 1, dtype=f.dtype)
    added = f.reduced(zeros.index_add(-1, windows.positions.reshape(-1), unfolded.flatten(-2)))
    return added[..., :size].reshape(*unfolded.shape[:-2], *windows.inner)


def _as_groups(t: Tensor, groups: int, dim: int) -> Tensor:
    return t.unflatten(dim, (groups, -1))


def _correlate(f: PrimeField, x: Tensor, w: Tensor, windows: Windows, groups: int) -> Tensor:
    """y[b, o, p] = sum of w[o, c, k] x[b, c, positions[p, k]]."""
    unfolded = _as_groups(_unfold(x, windows), groups, 1).transpose(2, 3).flatten(3)
    kernels = _as_groups(w.flatten(1), groups, 0)
    y = f.matmul(unfolded, kernels.transpose(1, 2))
    return y.transpose(2, 3).flatten(1, 2).unflatten(2, windows.outer)


def _correlate_transposed(f: PrimeField, g: Tensor, w: Tensor, windows: Windows, groups: int) -> Tensor:
    """The transpose of `_correlate` in x."""
    kernels = _as_groups(w.flatten(1), groups, 0)
    unfolded = f.matmul(_as_groups(g.flatten(2), groups, 1).transpose(2, 3), kernels)
    channels = w.shape[1]
    by_channel = unfolded.unflatten(3, (channels, -1)).transpose(2, 3).flatten(1, 2)
    return _fold(f, by_channel, windows)


def _kernel_gradient(f: PrimeField, g: Tensor, x: Tensor, windows: Windows, groups: int, shape: torch.Size) -> Tensor:
    """The transpose of `_correlate` in w."""
    unfolded = _as_groups(_unfold(x, windows), groups, 1).transpose(2, 3).flatten(3)
    each = f.matmul(_as_groups(g.flatten(2), groups, 1), unfolded)
    return f.total(each, [0]).reshape(shape)


@dataclass(frozen=True)
class _Convolution:
    """The geometry of one convolution. The kernel slides over the input; if it is transposed, over the output."""

    windows: Windows
    groups: int
    is_transposed: bool

    def forward(self, f: PrimeField) -> Callable[[Tensor, Tensor], Tensor]:
        product = _correlate_transposed if self.is_transposed else _correlate
        return lambda x, w: product(f, x, w, self.windows, self.groups)

    def input_gradient(self, f: PrimeField) -> Callable[[Tensor, Tensor], Tensor]:
        product = _correlate if self.is_transposed else _correlate_transposed
        return lambda g, w: product(f, g, w, self.windows, self.groups)

    def weight_gradient(self, f: PrimeField, shape: torch.Size) -> Callable[[Tensor, Tensor], Tensor]:
        def product(g: Tensor, x: Tensor) -> Tensor:
            by_window, plane = (x, g) if self.is_transposed else (g, x)
            return _kernel_gradient(f, by_window, plane, self.windows, self.groups, shape)

        return product


def _convolution_call(
    x: Sizes,
    w: Sizes,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
) -> _Convolution:
    rank = len(w) - 2
    if len(x) != rank + 2:
        raise UnsupportedError("a convolution without a batch dimension")
    options = (stride, padding, dilation, output_padding)
    stride, padding, dilation, output_padding = (every_dim(sizes, rank) for sizes in options)
    kernel, plane = list(w[2:]), list(x[2:])
    each = zip(plane, kernel, stride, padding, dilation, strict=True)
    if transposed:
        inner = [_transposed_size(*sizes) + more for sizes, more in zip(each, output_padding, strict=True)]
        outer = plane
    else:
        inner = plane
        outer = [output_size(*sizes, has_partial=False) for sizes in each]
    return _Convolution(_windows(inner, kernel, stride, padding, dilation, outer), groups, transposed)


def _convolution(
    x: Value,
    w: Value,
    bias: Value | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
) -> Value:
    call = _convolution_call(x.shape, w.shape, stride, padding, dilation, transposed, output_padding, groups)
    y = x.bilinear(w, call.forward(x.field))
    return y if bias is None else y + bias.rearranged(lambda t: t.reshape(1, -1, *[1] * (y.element.dim() - 2)))


def _convolution_backward(
    g: Value,
    x: Value,
    w: Value,
    bias_sizes: Sizes | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
    mask: Sequence[bool],
) -> tuple[Value | None, Value | None, Value | None]:
    f = x.field
    call = _convolution_call(x.shape, w.shape, stride, padding, dilation, transposed, output_padding, groups)
    dims = [d for d in range(g.element.dim()) if d != 1]
    return (
        g.bilinear(w, call.input_gradient(f)) if mask[0] else None,
        g.bilinear(x, call.weight_gradient(f, w.shape)) if mask[1] else None,
        g.total(dims) if mask[2] else None,
    )


def output_size(size: int, kernel: int, stride: int, padding: int, dilation: int, has_partial: bool) -> int:
    """How many windows there are along a dim. The last one may be partial."""
    room = size + 2 * padding - dilation * (kernel - 1) - 1 + (stride - 1 if has_partial else 0)
    count = room // stride + 1
    # torch drops a window that starts in the padding after the end.
    return count - 1 if has_partial and (count - 1) * stride >= size + padding else count


def _transposed_size(count: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """The smallest size along a dim that has `count` windows."""
    return (count - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1


def every_dim(sizes: Sizes | int, rank: int, default: Sizes = ()) -> list[int]:
    given = [sizes] if isinstance(sizes, int) else list(sizes) or list(default)
    return given * rank if len(given) == 1 else given


def _max_pool_windows(
    x: Value, rank: int, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil_mode: bool
) -> Windows:
    kernel = every_dim(kernel, rank)
    stride, padding, dilation = every_dim(stride, rank, kernel), every_dim(padding, rank), every_dim(dilation, rank)
    plane = x.shape[-rank:]
    each = zip(plane, kernel, stride, padding, dilation, strict=True)
    return _windows(
        plane, kernel, stride, padding, dilation, [output_size(*sizes, has_partial=ceil_mode) for sizes in each]
    )


def _im2col(x: Value, kernel: Sizes, dilation: Sizes, padding: Sizes, stride: Sizes) -> Value:
    windows = _column_windows(x.shape[-2:], kernel, dilation, padding, stride)
    return x.linear(lambda t: _unfold(t, windows).transpose(-2, -1).flatten(-3, -2))


def _col2im(x: Value, sizes: Sizes, kernel: Sizes, dilation: Sizes, padding: Sizes, stride: Sizes) -> Value:
    windows = _column_windows(sizes, kernel, dilation, padding, stride)
    split = lambda t: t.unflatten(-2, (-1, math.prod(kernel))).transpose(-2, -1)  # noqa: E731
    return x.linear(lambda t: _fold(x.field, split(t), windows))


def _column_windows(plane: Sizes, kernel: Sizes, dilation: Sizes, padding: Sizes, stride: Sizes) -> Windows:
    each = zip(plane, kernel, stride, padding, dilation, strict=True)
    return _windows(
        plane, kernel, stride, padding, dilation, [output_size(*sizes, has_partial=False) for sizes in each]
    )


def _adaptive_windows(plane: Sizes, sizes: Sizes) -> Windows:
    """The windows of adaptive pooling, which differ in size: the smaller ones are filled up with padding."""
    outside, rows = math.prod(plane), [[0]]
    for size, count in zip(plane, sizes, strict=True):
        spans = [range(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]
        rows = [[at * size + j for at in row for j in span] for row in rows for span in spans]
    longest = max(map(len, rows))
    positions = torch.tensor([row + [outside] * (longest - len(row)) for row in rows])
    return Windows(positions, tuple(plane), tuple(sizes))


def _adaptive_max_pool(rank: int) -> Callable[..., tuple[Value, Value]]:
    return lambda x, sizes: _pool(x, _adaptive_windows(x.shape[-rank:], sizes))


def _max_pool(rank: int) -> Callable[..., tuple[Value, Value]]:
    def rule(
        x: Value,
        kernel: Sizes,
        stride: Sizes = (),
        padding: Sizes = (0,),
        dilation: Sizes = (1,),
        ceil_mode: bool = False,
    ) -> tuple[Value, Value]:
        return _pool(x, _max_pool_windows(x, rank, kernel, stride, padding, dilation, ceil_mode))

    return rule


def _pool(x: Value, windows: Windows) -> tuple[Value, Value]:
    """The largest element of each window, and its position in the plane."""
    rank = len(windows.inner)
    reals = _unfold(x.real_values(), windows, filling=-math.inf)
    chosen = reals.argmax(-1, keepdim=True)
    is_inside = (windows.positions < math.prod(windows.inner)).expand(reals.shape)
    x.field.trace.record_index(chosen, reals.shape[-1], is_inside)
    positions = windows.positions.expand(*reals.shape).gather(-1, chosen).squeeze(-1)
    shape = (*x.shape[:-rank], *windows.outer)
    return _select(x, positions, rank, shape), integers(x.field, positions.reshape(shape))


def _select(x: Value, positions: Tensor, rank: int, shape: Sizes) -> Value:
    return x.rearranged(lambda t: t.flatten(-rank).gather(-1, positions).reshape(tuple(shape)))


def _max_pool_backward(rank: int) -> Callable[..., Value]:
    def rule(g: Value, x: Value, *args: Any) -> Value:
        positions = args[-1].element.flatten(-rank)
        empty = torch.zeros(*positions.shape[:-1], math.prod(x.shape[-rank:]), dtype=g.field.dtype)
        put = lambda t: empty.scatter_add(-1, positions, t.flatten(-rank)).reshape(x.shape)  # noqa: E731
        return g.linear(lambda t: g.field.reduced(put(t)))

    return rule


RULES: dict[str, Callable[..., Any]] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "max_pool2d_with_indices": _max_pool(2),
    "max_pool2d_with_indices_backward": _max_pool_backward(2),
    "max_pool3d_with_indices": _max_pool(3),
    "max_pool3d_with_indices_backward": _max_pool_backward(3),
    "adaptive_max_pool2d": _adaptive_max_pool(2),
    "adaptive_max_pool2d_backward": _max_pool_backward(2),
    "adaptive_max_pool3d": _adaptive_max_pool(3),
    "adaptive_max_pool3d_backward": _max_pool_backward(3),
    "im2col": _im2col,
    "col2im": _col2im,
}
