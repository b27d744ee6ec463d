"""Operators that move, repeat, drop or pad elements.

Operators that make tensors out of numbers.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchguard.compiled.certify.algebra._field import Field, UnsupportedError
from torchguard.compiled.certify.algebra._values import Value, exact


def _full(f: Field, shape: Sequence[int], number: float | Value) -> Value:
    if isinstance(number, Value):
        return number.arranged(lambda t: t.expand(tuple(shape)))
    if isinstance(number, bool | int):
        return exact(f, torch.full(tuple(shape), number))
    return Value(f, torch.full(tuple(shape), f.number(number), dtype=f.dtype))


def _uninitialised(f: Field, shape: Sequence[int]) -> Value:
    # Unknown elements: a result that depends on them differs from one trial to the next.
    return Value(f, f.random("uninitialised", tuple(shape)))


def _arange(f: Field, *bounds: float, **_: Any) -> Value:
    start, end, step = {1: (0, *bounds, 1), 2: (*bounds, 1), 3: bounds}[len(bounds)]
    if all(isinstance(bound, int) for bound in (start, end, step)):
        return exact(f, torch.arange(start, end, step))
    numbers = [start + i * step for i in range(math.ceil((end - start) / step))]
    return Value(f, torch.tensor([f.number(number) for number in numbers], dtype=f.dtype))


def _eye(f: Field, n: int, m: int | None = None) -> Value:
    return exact(f, torch.eye(n, n if m is None else m, dtype=torch.int64))


def _of_options(rule: Callable[..., Value]) -> Callable[..., Value]:
    """The same rule, heedless of dtype, device and layout: the evaluator knows the dtype of a node."""

    def heedless(f: Field, *args: Any, **options: Any) -> Value:
        ignored = {"dtype", "layout", "device", "pin_memory", "memory_format"}
        if unknown := set(options) - ignored:
            raise UnsupportedError(f"the option {', '.join(sorted(unknown))}")
        return rule(f, *args)

    return heedless


MAKING: dict[str, Callable[..., Any]] = {
    name: _of_options(rule)
    for name, rule in {
        "full": _full,
        "full_like": lambda f, x, number: _full(f, x.shape, number),
        "new_full": lambda f, x, shape, number: _full(f, shape, number),
        "fill": lambda f, x, number: _full(f, x.shape, number),
        "zeros": lambda f, shape: _full(f, shape, 0),
        "zeros_like": lambda f, x: _full(f, x.shape, 0),
        "new_zeros": lambda f, x, shape: _full(f, shape, 0),
        "_new_zeros_with_same_feature_meta": lambda f, x, other: _full(f, other.shape, 0),
        "ones": lambda f, shape: _full(f, shape, 1),
        "ones_like": lambda f, x: _full(f, x.shape, 1),
        "new_ones": lambda f, x, shape: _full(f, shape, 1),
        "scalar_tensor": lambda f, number: _full(f, (), number),
        "empty": _uninitialised,
        "empty_like": lambda f, x: _uninitialised(f, x.shape),
        "new_empty": lambda f, x, shape: _uninitialised(f, shape),
        "empty_strided": lambda f, shape, strides: _uninitialised(f, shape),
        "new_empty_strided": lambda f, x, shape, strides: _uninitialised(f, shape),
        "empty_permuted": lambda f, shape, order: _uninitialised(f, shape),
        "arange": _arange,
        "eye": _eye,
    }.items()
}


_IGNORED = {"dtype", "layout", "device", "pin_memory", "non_blocking", "memory_format", "implicit"}


def _arranged(map_: Callable[..., Tensor]) -> Callable[..., Value]:
    def rule(x: Value, *args: Any, **options: Any) -> Value:
        kept = {name: value for name, value in options.items() if name not in _IGNORED}
        return x.arranged(lambda t: map_(t, *args, **kept))

    return rule


def _linear(map_: Callable[..., Tensor]) -> Callable[..., Value]:
    def rule(x: Value, *args: Any, **options: Any) -> Value:
        return x.linear(lambda t: map_(t, *args, **options))

    return rule


def _parts(map_: Callable[..., Sequence[Tensor]]) -> Callable[..., list[Value]]:
    def rule(x: Value, *args: Any, **options: Any) -> list[Value]:
        count = len(map_(x.element, *args, **options))
        return [x.arranged(lambda t, i=i: map_(t, *args, **options)[i]) for i in range(count)]

    return rule


def _sliced(t: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    places: list[slice] = [slice(None)] * t.dim()
    places[dim] = slice(start, end, step)
    return t[tuple(places)]


def _squeezed(t: Tensor, dim: int | Sequence[int] | None = None) -> Tensor:
    if dim is None:
        return t.squeeze()
    return t.squeeze(dim if isinstance(dim, int) else tuple(dim))


def _expanded(t: Tensor, sizes: Sequence[int]) -> Tensor:
    return t.expand(tuple(sizes))


def _transposed(t: Tensor) -> Tensor:
    return t.t()


def _zeros_with(put: Callable[..., Tensor]) -> Callable[..., Value]:
    """The transpose of a selection: what it gave, put back where it came from, in zeros."""

    def rule(g: Value, sizes: Sequence[int], *args: Any) -> Value:
        return g.linear(lambda t: put(torch.zeros(tuple(sizes), dtype=t.dtype), t, *args))

    return rule


def _put_slice(base: Tensor, t: Tensor, dim: int, start: int | None, end: int | None, step: int) -> Tensor:
    return torch.slice_scatter(base, t, dim, start, end, step)


def _put_windows(base: Tensor, t: Tensor, dim: int, size: int, step: int) -> Tensor:
    places = torch.arange(base.shape[dim]).unfold(0, size, step).reshape(-1)
    moved = t.movedim(dim if dim >= 0 else dim + base.dim(), -2).flatten(-2)
    return base.movedim(dim, -1).index_add(-1, places, moved).movedim(-1, dim)


def _put_in(put: Callable[..., Tensor]) -> Callable[..., Value]:
    """One value written over a part of another."""

    def rule(base: Value, part: Value, *args: Any, **options: Any) -> Value:
        if base.is_exact and part.is_exact:
            return exact(base.field, put(base.element, part.element.to(base.element.dtype), *args, **options))
        base, part = base.as_elements(), part.as_elements()
        element = put(base.element, part.element, *args, **options)
        if base.tangent is None and part.tangent is None:
            return Value(base.field, element)
        zeros = (torch.zeros_like(v.element) if v.tangent is None else v.tangent for v in (base, part))
        return Value(base.field, element, put(*zeros, *args, **options))

    return rule


def _padded(x: Value, pad: Sequence[int], value: float = 0) -> Value:
    filling = x.field.number(value) if not x.is_exact else value
    element = F.pad(x.element, list(pad), value=filling)
    return Value(x.field, element, None if x.tangent is None else F.pad(x.tangent, list(pad)), is_exact=x.is_exact)


def _copied(x: Value, source: Value, non_blocking: bool = False) -> Value:
    return source.arranged(lambda t: t.expand(x.shape))


def _converted(x: Value, *args: Any, **_: Any) -> Value:
    return x


RULES: dict[str, Callable[..., Any]] = {
    "view": _arranged(lambda t, sizes: t.reshape(tuple(sizes))),
    "reshape": _arranged(lambda t, sizes: t.reshape(tuple(sizes))),
    "_unsafe_view": _arranged(lambda t, sizes: t.reshape(tuple(sizes))),
    "permute": _arranged(lambda t, dims: t.permute(tuple(dims))),
    "transpose": _arranged(lambda t, a, b: t.transpose(a, b)),
    "t": _arranged(_transposed),
    "expand": _arranged(_expanded),
    "unsqueeze": _arranged(lambda t, dim: t.unsqueeze(dim)),
    "squeeze": _arranged(_squeezed),
    "select": _arranged(lambda t, dim, index: t.select(dim, index)),
    "slice": _arranged(_sliced),
    "diagonal": _arranged(lambda t, offset=0, dim1=0, dim2=1: t.diagonal(offset, dim1, dim2)),
    "unfold": _arranged(lambda t, dim, size, step: t.unfold(dim, size, step)),
    "flip": _arranged(lambda t, dims: t.flip(dims)),
    "roll": _arranged(lambda t, shifts, dims=(): t.roll(shifts, dims)),
    "repeat": _arranged(lambda t, repeats: t.repeat(tuple(repeats))),
    "clone": _arranged(lambda t: t),
    "alias": _arranged(lambda t: t),
    "contiguous": _arranged(lambda t: t),
    "lift_fresh": _arranged(lambda t: t),
    "detach": lambda x: x.without_tangent(),
    "_to_copy": _converted,
    "to": _converted,
    "copy": _copied,
    "tril": _linear(lambda t, diagonal=0: t.tril(diagonal)),
    "triu": _linear(lambda t, diagonal=0: t.triu(diagonal)),
    "diag_embed": _linear(lambda t, offset=0, dim1=-2, dim2=-1: t.diag_embed(offset, dim1, dim2)),
    "constant_pad_nd": _padded,
    "split": _parts(lambda t, size, dim=0: t.split(size, dim)),
    "unsafe_split": _parts(lambda t, size, dim=0: t.split(size, dim)),
    "split_with_sizes": _parts(lambda t, sizes, dim=0: t.split(list(sizes), dim)),
    "unbind": _parts(lambda t, dim=0: t.unbind(dim)),
    "chunk": _parts(lambda t, count, dim=0: t.chunk(count, dim)),
    "select_backward": _zeros_with(lambda base, t, dim, index: base.select_scatter(t, dim, index)),
    "slice_backward": _zeros_with(_put_slice),
    "diagonal_backward": _zeros_with(lambda base, t, offset, a, b: base.diagonal_scatter(t, offset, a, b)),
    "unfold_backward": _zeros_with(_put_windows),
    "select_scatter": _put_in(lambda base, t, dim, index: base.select_scatter(t, dim, index)),
    "slice_scatter": _put_in(torch.slice_scatter),
    "diagonal_scatter": _put_in(torch.diagonal_scatter),
}
