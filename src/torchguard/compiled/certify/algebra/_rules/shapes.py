"""Rules of views, copies, padding, concatenation, indexing, and of operators that create tensors."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchguard._graphs.op_facts import FACTS
from torchguard.compiled.certify.algebra._field import PrimeField, UnsupportedError
from torchguard.compiled.certify.algebra._values import Value, integers


def _full(f: PrimeField, shape: Sequence[int], number: float | Value) -> Value:
    if isinstance(number, Value):
        return number.rearranged(lambda t: t.expand(tuple(shape)))
    if isinstance(number, bool | int):
        return integers(f, torch.full(tuple(shape), number))
    return Value(f, torch.full(tuple(shape), f.number(number), dtype=f.dtype))


def _empty(f: PrimeField, shape: Sequence[int]) -> Value:
    # Random elements: a result that depends on them differs from one sample to the next.
    return Value(f, f.random("uninitialised", tuple(shape)))


def _arange(f: PrimeField, *bounds: float, **_: Any) -> Value:
    start, end, step = {1: (0, *bounds, 1), 2: (*bounds, 1), 3: bounds}[len(bounds)]
    if all(isinstance(bound, int) for bound in (start, end, step)):
        return integers(f, torch.arange(start, end, step))
    numbers = [start + i * step for i in range(math.ceil((end - start) / step))]
    return Value(f, torch.tensor([f.number(number) for number in numbers], dtype=f.dtype))


def _eye(f: PrimeField, n: int, m: int | None = None) -> Value:
    return integers(f, torch.eye(n, n if m is None else m, dtype=torch.int64))


def _ignoring_options(rule: Callable[..., Value]) -> Callable[..., Value]:
    """The same rule, which ignores dtype, device and layout: the evaluator converts the result to the node's dtype."""

    def wrapper(f: PrimeField, *args: Any, **options: Any) -> Value:
        ignored = {"dtype", "layout", "device", "pin_memory", "memory_format"}
        if unknown := set(options) - ignored:
            raise UnsupportedError(f"the option {', '.join(sorted(unknown))}")
        return rule(f, *args)

    return wrapper


CREATION_RULES: dict[str, Callable[..., Any]] = {
    name: _ignoring_options(rule)
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
        "empty": _empty,
        "empty_like": lambda f, x: _empty(f, x.shape),
        "new_empty": lambda f, x, shape: _empty(f, shape),
        "empty_strided": lambda f, shape, strides: _empty(f, shape),
        "new_empty_strided": lambda f, x, shape, strides: _empty(f, shape),
        "empty_permuted": lambda f, shape, order: _empty(f, shape),
        "arange": _arange,
        "eye": _eye,
    }.items()
}


_IGNORED = {"dtype", "layout", "device", "pin_memory", "non_blocking", "memory_format", "implicit"}


def _rearrangement(map_: Callable[..., Tensor]) -> Callable[..., Value]:
    def rule(x: Value, *args: Any, **options: Any) -> Value:
        used = {name: value for name, value in options.items() if name not in _IGNORED}
        return x.rearranged(lambda t: map_(t, *args, **used))

    return rule


def _linear(map_: Callable[..., Tensor]) -> Callable[..., Value]:
    def rule(x: Value, *args: Any, **options: Any) -> Value:
        return x.linear(lambda t: map_(t, *args, **options))

    return rule


def _splitting(map_: Callable[..., Sequence[Tensor]]) -> Callable[..., list[Value]]:
    def rule(x: Value, *args: Any, **options: Any) -> list[Value]:
        count = len(map_(x.element, *args, **options))
        return [x.rearranged(lambda t, i=i: map_(t, *args, **options)[i]) for i in range(count)]

    return rule


def _slice(t: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    slices: list[slice] = [slice(None)] * t.dim()
    slices[dim] = slice(start, end, step)
    return t[tuple(slices)]


def _squeeze(t: Tensor, dim: int | Sequence[int] | None = None) -> Tensor:
    if dim is None:
        return t.squeeze()
    return t.squeeze(dim if isinstance(dim, int) else tuple(dim))


def _expand(t: Tensor, sizes: Sequence[int]) -> Tensor:
    return t.expand(tuple(sizes))


def _selection_backward(put: Callable[..., Tensor]) -> Callable[..., Value]:
    """The transpose of a selection: the selected elements written into zeros, at the positions they came from."""

    def rule(g: Value, sizes: Sequence[int], *args: Any) -> Value:
        return g.linear(lambda t: put(torch.zeros(tuple(sizes), dtype=t.dtype), t, *args))

    return rule


def _write_slice(base: Tensor, t: Tensor, dim: int, start: int | None, end: int | None, step: int) -> Tensor:
    return torch.slice_scatter(base, t, dim, start, end, step)


def _add_windows(base: Tensor, t: Tensor, dim: int, size: int, step: int) -> Tensor:
    positions = torch.arange(base.shape[dim]).unfold(0, size, step).reshape(-1)
    moved = t.movedim(dim if dim >= 0 else dim + base.dim(), -2).flatten(-2)
    return base.movedim(dim, -1).index_add(-1, positions, moved).movedim(-1, dim)


def _overwrite(put: Callable[..., Tensor]) -> Callable[..., Value]:
    """A value with a part of it overwritten by another."""

    def rule(base: Value, part: Value, *args: Any, **options: Any) -> Value:
        if base.is_integer and part.is_integer:
            return integers(base.field, put(base.element, part.element.to(base.element.dtype), *args, **options))
        base, part = base.as_elements(), part.as_elements()
        element = put(base.element, part.element, *args, **options)
        if base.tangent is None and part.tangent is None:
            return Value(base.field, element)
        tangents = (torch.zeros_like(v.element) if v.tangent is None else v.tangent for v in (base, part))
        return Value(base.field, element, put(*tangents, *args, **options))

    return rule


def _pad(x: Value, pad: Sequence[int], value: float = 0) -> Value:
    filling = x.field.number(value) if not x.is_integer else value
    element = F.pad(x.element, list(pad), value=filling)
    return Value(x.field, element, None if x.tangent is None else F.pad(x.tangent, list(pad)), is_integer=x.is_integer)


def _copy(x: Value, source: Value, non_blocking: bool = False) -> Value:
    return source.rearranged(lambda t: t.expand(x.shape))


def _to(x: Value, *args: Any, **_: Any) -> Value:
    return x


def stacked(values: Sequence[Value], dim: int) -> Value:
    """Values of one shape, stacked along a new dimension."""
    return concatenated([v.rearranged(lambda t: t.unsqueeze(dim)) for v in values], dim)


def concatenated(values: Sequence[Value], dim: int = 0) -> Value:
    """Values concatenated along a dimension."""
    if all(v.is_integer for v in values):
        return integers(values[0].field, torch.cat([v.element for v in values], dim))
    values = [v.as_elements() for v in values]
    element = torch.cat([v.element for v in values], dim)
    if all(v.tangent is None for v in values):
        return Value(values[0].field, element)
    tangents = [torch.zeros_like(v.element) if v.tangent is None else v.tangent for v in values]
    return Value(values[0].field, element, torch.cat(tangents, dim))


def _gather(x: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value:
    return x.rearranged(lambda t: t.gather(dim, index.element))


def _index(x: Value, indices: Sequence[Value | None]) -> Value:
    positions = tuple(slice(None) if i is None else i.element for i in indices)
    return x.rearranged(lambda t: t[positions])


def _embedding(weight: Value, ids: Value, *_: Any, **__: Any) -> Value:
    # Unlike an index, an embedding takes no negative positions.
    chosen = ids.element.reshape(-1)
    return weight.rearranged(lambda t: t.index_select(0, chosen).reshape(*ids.shape, *t.shape[1:]))


def _embedding_backward(g: Value, ids: Value, rows: int, padding: int, scale_by_frequency: bool) -> Value:
    if scale_by_frequency:
        raise UnsupportedError("embedding with scale_grad_by_freq")
    width = g.shape[ids.element.dim() :]
    positions = ids.element.reshape(-1)
    if 0 <= padding < rows:
        g.field.trace.record_comparison(positions != padding)
    counted = (positions != padding).to(g.field.dtype).unsqueeze(-1)

    def put(t: Tensor) -> Tensor:
        flat = t.reshape(positions.numel(), -1) * counted
        summed = torch.zeros(rows, flat.shape[1], dtype=g.field.dtype).index_add(0, positions, flat)
        return g.field.reduced(summed.reshape(rows, *width))

    return g.linear(put)


def _combine(x: Value, source: Value, put: Callable[[Tensor, Tensor], Tensor]) -> Value:
    """A linear function of two values, applied to their tangents as well."""
    if x.is_integer and source.is_integer:
        return integers(x.field, put(x.element, source.element.to(x.element.dtype)))
    x, source = x.as_elements(), source.as_elements()
    element = x.field.reduced(put(x.element, source.element))
    if x.tangent is None and source.tangent is None:
        return Value(x.field, element)
    tangents = (torch.zeros_like(v.element) if v.tangent is None else v.tangent for v in (x, source))
    return Value(x.field, element, x.field.reduced(put(*tangents)))


def _source(x: Value, source: Value | float, like: Tensor) -> Value:
    if isinstance(source, Value):
        return source
    return (x.without_tangent() * 0 + source).rearranged(lambda t: t.reshape(-1)[:1].expand(like.shape))


def _require_single_writes(writes: Tensor, source: Value) -> None:
    """Raise if different values are written to one position: which of them remains is undefined."""
    is_same = bool((source.element == source.element.reshape(-1)[:1]).all()) and source.tangent is None
    if not is_same and bool((writes > 1).any()):
        raise ValueError("two writes to one position")


def _scatter(x: Value, dim: int, index: Value, source: Value | float, *, reduce: str | None = None) -> Value:
    if reduce is not None:
        raise UnsupportedError(f"scatter with reduce={reduce!r}")
    if isinstance(source, Value):
        ones = torch.ones(index.shape, dtype=torch.int64)
        _require_single_writes(torch.zeros(x.shape, dtype=torch.int64).scatter_add(dim, index.element, ones), source)
    return _combine(x, _source(x, source, index.element), lambda a, b: a.scatter(dim, index.element, b))


def _scatter_add(x: Value, dim: int, index: Value, source: Value) -> Value:
    return _combine(x, source, lambda a, b: a.scatter_add(dim, index.element, b))


def _index_add(x: Value, dim: int, index: Value, source: Value, *, alpha: float = 1) -> Value:
    scaled = source if alpha == 1 else source * alpha
    return _combine(x, scaled, lambda a, b: a.index_add(dim, index.element, b))


def _index_put(x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False) -> Value:
    given = {dim: index.element for dim, index in enumerate(indices) if index is not None}
    if len(given) == len(indices):
        positions = tuple(given.values())
        if not accumulate and all(p.dtype != torch.bool for p in positions):
            one, zeros = torch.ones((), dtype=torch.int64), torch.zeros(x.shape[: len(positions)], dtype=torch.int64)
            _require_single_writes(zeros.index_put(positions, one, accumulate=True), values)
        return _combine(x, values, lambda a, b: a.index_put(positions, b, accumulate=accumulate))
    if len(given) > 1 or next(iter(given.values())).dim() != 1:
        raise UnsupportedError("index_put with several indices, some of them missing")
    ((dim, positions),) = given.items()
    if not accumulate:
        _require_single_writes(positions.bincount() if bool((positions >= 0).all()) else torch.full((1,), 2), values)
    return _combine(x, values, lambda a, b: _index_put_along(a, b, dim, positions, accumulate))


def _index_put_along(a: Tensor, b: Tensor, dim: int, positions: Tensor, accumulate: bool) -> Tensor:
    shape = [*a.shape[:dim], positions.numel(), *a.shape[dim + 1 :]]
    source = b.expand(shape)
    return a.index_add(dim, positions, source) if accumulate else a.index_copy(dim, positions, source)


RULES: dict[str, Callable[..., Any]] = {
    "view": _rearrangement(lambda t, sizes: t.reshape(tuple(sizes))),
    "reshape": _rearrangement(lambda t, sizes: t.reshape(tuple(sizes))),
    "_unsafe_view": _rearrangement(lambda t, sizes: t.reshape(tuple(sizes))),
    "permute": _rearrangement(lambda t, dims: t.permute(tuple(dims))),
    "transpose": _rearrangement(lambda t, a, b: t.transpose(a, b)),
    "t": _rearrangement(lambda t: t.t()),
    "expand": _rearrangement(_expand),
    "unsqueeze": _rearrangement(lambda t, dim: t.unsqueeze(dim)),
    "squeeze": _rearrangement(_squeeze),
    "select": _rearrangement(lambda t, dim, index: t.select(dim, index)),
    "slice": _rearrangement(_slice),
    "diagonal": _rearrangement(lambda t, offset=0, dim1=0, dim2=1: t.diagonal(offset, dim1, dim2)),
    "unfold": _rearrangement(lambda t, dim, size, step: t.unfold(dim, size, step)),
    "flip": _rearrangement(lambda t, dims: t.flip(dims)),
    "roll": _rearrangement(lambda t, shifts, dims=(): t.roll(shifts, dims)),
    "repeat": _rearrangement(lambda t, repeats: t.repeat(tuple(repeats))),
    **{name: _rearrangement(lambda t: t) for name, facts in FACTS.items() if facts.identity},
    "detach": lambda x: x.without_tangent(),
    "_to_copy": _to,
    "to": _to,
    "copy": _copy,
    "tril": _linear(lambda t, diagonal=0: t.tril(diagonal)),
    "triu": _linear(lambda t, diagonal=0: t.triu(diagonal)),
    "diag_embed": _linear(lambda t, offset=0, dim1=-2, dim2=-1: t.diag_embed(offset, dim1, dim2)),
    "constant_pad_nd": _pad,
    "cat": concatenated,
    "stack": lambda values, dim=0: stacked(values, dim % (values[0].element.dim() + 1)),
    "split": _splitting(lambda t, size, dim=0: t.split(size, dim)),
    "unsafe_split": _splitting(lambda t, size, dim=0: t.split(size, dim)),
    "split_with_sizes": _splitting(lambda t, sizes, dim=0: t.split(list(sizes), dim)),
    "unbind": _splitting(lambda t, dim=0: t.unbind(dim)),
    "chunk": _splitting(lambda t, count, dim=0: t.chunk(count, dim)),
    "select_backward": _selection_backward(lambda base, t, dim, index: base.select_scatter(t, dim, index)),
    "slice_backward": _selection_backward(_write_slice),
    "diagonal_backward": _selection_backward(lambda base, t, offset, a, b: base.diagonal_scatter(t, offset, a, b)),
    "unfold_backward": _selection_backward(_add_windows),
    "select_scatter": _overwrite(lambda base, t, dim, index: base.select_scatter(t, dim, index)),
    "slice_scatter": _overwrite(torch.slice_scatter),
    "diagonal_scatter": _overwrite(torch.diagonal_scatter),
    "gather": _gather,
    "index": _index,
    "index_select": lambda x, dim, index: x.rearranged(lambda t: t.index_select(dim, index.element)),
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "scatter": _scatter,
    "scatter_add": _scatter_add,
    "index_add": _index_add,
    "index_put": _index_put,
    "_unsafe_index": _index,
    "_unsafe_index_put": _index_put,
}
