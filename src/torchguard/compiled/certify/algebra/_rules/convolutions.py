"""Convolutions of any rank, as sums over windows of exact products."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchguard.compiled.certify.algebra._field import Field, UnsupportedError
from torchguard.compiled.certify.algebra._values import Value

Sizes = Sequence[int]


@dataclass(frozen=True)
class Windows:
    """Where the windows of one plane lie: `places[window, element]`, the number past the end for padding."""

    places: Tensor
    inner: tuple[int, ...]
    outer: tuple[int, ...]


def windows_of(inner: Sizes, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, outer: Sizes) -> Windows:
    """The windows of a kernel over a plane of some size, of which there are `outer`."""
    outside = math.prod(inner)
    flat, is_inside = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool)
    for size, k, s, p, d, count in zip(inner, kernel, stride, padding, dilation, outer, strict=True):
        at = (torch.arange(count) * s - p).unsqueeze(1) + torch.arange(k) * d
        within = (at >= 0) & (at < size)
        flat = (flat[:, None, :, None] * size + at[None, :, None, :]).flatten(0, 1).flatten(1, 2)
        is_inside = (is_inside[:, None, :, None] & within[None, :, None, :]).flatten(0, 1).flatten(1, 2)
    return Windows(torch.where(is_inside, flat, outside), tuple(inner), tuple(outer))


def looked_at(x: Tensor, windows: Windows, filling: float = 0) -> Tensor:
    """Each plane as (window, element)."""
    flat = x.reshape(*x.shape[: x.dim() - len(windows.inner)], -1)
    padded = torch.cat([flat, torch.full((*flat.shape[:-1], 1), filling, dtype=x.dtype)], -1)
    return padded[..., windows.places]


def _put_back(f: Field, seen: Tensor, windows: Windows) -> Tensor:
    """The transpose of `looked_at`: everything added up where it was read."""
    size = math.prod(windows.inner)
    whole = torch.zeros(*seen.shape[:-2], size + 1, dtype=f.dtype)
    added = f.reduced(whole.index_add(-1, windows.places.reshape(-1), seen.flatten(-2)))
    return added[..., :size].reshape(*seen.shape[:-2], *windows.inner)


def _as_groups(t: Tensor, groups: int, dim: int) -> Tensor:
    return t.unflatten(dim, (groups, -1))


def _correlated(f: Field, x: Tensor, w: Tensor, windows: Windows, groups: int) -> Tensor:
    """y[b, o, p] = sum of w[o, c, k] x[b, c, places[p, k]]."""
    seen = _as_groups(looked_at(x, windows), groups, 1).transpose(2, 3).flatten(3)
    kernels = _as_groups(w.flatten(1), groups, 0)
    y = f.matmul(seen, kernels.transpose(1, 2))
    return y.transpose(2, 3).flatten(1, 2).unflatten(2, windows.outer)


def _spread(f: Field, g: Tensor, w: Tensor, windows: Windows, groups: int) -> Tensor:
    """The transpose of `_correlated` in x."""
    kernels = _as_groups(w.flatten(1), groups, 0)
    seen = f.matmul(_as_groups(g.flatten(2), groups, 1).transpose(2, 3), kernels)
    channels = w.shape[1]
    by_channel = seen.unflatten(3, (channels, -1)).transpose(2, 3).flatten(1, 2)
    return _put_back(f, by_channel, windows)


def _kernel_gradient(f: Field, g: Tensor, x: Tensor, windows: Windows, groups: int, shape: torch.Size) -> Tensor:
    """The transpose of `_correlated` in w."""
    seen = _as_groups(looked_at(x, windows), groups, 1).transpose(2, 3).flatten(3)
    each = f.matmul(_as_groups(g.flatten(2), groups, 1), seen)
    return f.total(each, [0]).reshape(shape)


@dataclass(frozen=True)
class _Convolution:
    """One call: `inner` is the plane the kernel moves over, which is the output of a transposed one."""

    windows: Windows
    groups: int
    is_transposed: bool

    def forward(self, f: Field) -> Callable[[Tensor, Tensor], Tensor]:
        product = _spread if self.is_transposed else _correlated
        return lambda x, w: product(f, x, w, self.windows, self.groups)

    def input_gradient(self, f: Field) -> Callable[[Tensor, Tensor], Tensor]:
        product = _correlated if self.is_transposed else _spread
        return lambda g, w: product(f, g, w, self.windows, self.groups)

    def weight_gradient(self, f: Field, shape: torch.Size) -> Callable[[Tensor, Tensor], Tensor]:
        def product(g: Tensor, x: Tensor) -> Tensor:
            over, moved = (x, g) if self.is_transposed else (g, x)
            return _kernel_gradient(f, over, moved, self.windows, self.groups, shape)

        return product


def _call(
    x: Sizes, w: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, transposed: bool, extra: Sizes, groups: int
) -> _Convolution:
    rank = len(w) - 2
    if len(x) != rank + 2:
        raise UnsupportedError("convolution of one sample without a batch dimension")
    every = [[sizes[0]] * rank if len(sizes) == 1 else list(sizes) for sizes in (stride, padding, dilation, extra)]
    stride, padding, dilation, extra = every
    kernel, plane = list(w[2:]), list(x[2:])
    each = list(zip(plane, kernel, stride, padding, dilation, extra, strict=True))
    if transposed:
        inner = [(n - 1) * s - 2 * p + d * (k - 1) + e + 1 for n, k, s, p, d, e in each]
        outer = plane
    else:
        inner = plane
        outer = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d, _ in each]
    return _Convolution(windows_of(inner, kernel, stride, padding, dilation, outer), groups, transposed)


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
    call = _call(x.shape, w.shape, stride, padding, dilation, transposed, output_padding, groups)
    y = x.bilinear(w, call.forward(x.field))
    return y if bias is None else y + bias.arranged(lambda t: t.reshape(1, -1, *[1] * (y.element.dim() - 2)))


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
    call, f = _call(x.shape, w.shape, stride, padding, dilation, transposed, output_padding, groups), x.field
    dims = [d for d in range(g.element.dim()) if d != 1]
    return (
        g.bilinear(w, call.input_gradient(f)) if mask[0] else None,
        g.bilinear(x, call.weight_gradient(f, w.shape)) if mask[1] else None,
        g.total(dims) if mask[2] else None,
    )


RULES: dict[str, Callable[..., Any]] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
}
