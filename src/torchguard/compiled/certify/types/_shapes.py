"""Types of views, copies, concatenations, indexing, and of new tensors."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchguard._graphs.op_facts import FACTS
from torchguard.compiled.certify.types._types import (
    Operand,
    Type,
    UnsupportedTypeError,
    broadcast,
    join,
    number_dtype,
    require,
    same_as,
    wrapped,
)

Sizes = Sequence[int]


def _view(x: Type, sizes: Sizes) -> Type:
    if not isinstance(sizes, list | tuple):
        raise UnsupportedTypeError("a view as another dtype")
    known = math.prod(n for n in sizes if n != -1)
    require(sizes.count(-1) <= 1, f"{list(sizes)} leaves more than one size to be inferred")
    if -1 in sizes:
        require(known > 0 and x.numel % known == 0, f"{x} cannot be viewed as {list(sizes)}")
        return Type(tuple(x.numel // known if n == -1 else n for n in sizes), x.dtype)
    require(known == x.numel, f"{x} cannot be viewed as {list(sizes)}")
    return Type(tuple(sizes), x.dtype)


def _permute(x: Type, dims: Sizes) -> Type:
    order = [wrapped(d, x.rank) for d in dims]
    require(sorted(order) == list(range(x.rank)), f"{list(dims)} is not a permutation of {x.rank} dimensions")
    return Type(tuple(x.shape[d] for d in order), x.dtype)


def _transpose(x: Type, a: int, b: int) -> Type:
    shape = list(x.shape)
    a, b = wrapped(a, x.rank), wrapped(b, x.rank)
    if shape:
        shape[a], shape[b] = shape[b], shape[a]
    return Type(tuple(shape), x.dtype)


def _expand(x: Type, sizes: Sizes, **_: Any) -> Type:
    new = len(sizes) - x.rank
    require(new >= 0, f"{x} cannot be expanded to {list(sizes)}")
    own = [1] * new + list(x.shape)
    for n, m in zip(own, sizes, strict=True):
        require(m in (-1, n) or n == 1, f"{x} cannot be expanded to {list(sizes)}")
    return Type(tuple(n if m == -1 else m for n, m in zip(own, sizes, strict=True)), x.dtype)


def _unsqueeze(x: Type, dim: int) -> Type:
    at = wrapped(dim, x.rank + 1)
    return Type((*x.shape[:at], 1, *x.shape[at:]), x.dtype)


def _squeeze(x: Type, dim: int | Sizes | None = None) -> Type:
    chosen = range(x.rank) if dim is None else [wrapped(d, x.rank) for d in ([dim] if isinstance(dim, int) else dim)]
    return Type(tuple(n for d, n in enumerate(x.shape) if not (d in chosen and n == 1)), x.dtype)


def _select(x: Type, dim: int, index: int) -> Type:
    at = wrapped(dim, x.rank)
    require(-x.shape[at] <= index < x.shape[at], f"index {index} of a dimension of size {x.shape[at]}")
    return Type((*x.shape[:at], *x.shape[at + 1 :]), x.dtype)


def _slice(x: Type, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Type:
    at = wrapped(dim, x.rank)
    return Type((*x.shape[:at], len(range(x.shape[at])[start:end:step]), *x.shape[at + 1 :]), x.dtype)


def _diagonal(x: Type, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Type:
    a, b = wrapped(dim1, x.rank), wrapped(dim2, x.rank)
    size = min(x.shape[a] + min(offset, 0), x.shape[b] - max(offset, 0))
    return Type((*(n for d, n in enumerate(x.shape) if d not in (a, b)), max(size, 0)), x.dtype)


def _diag_embed(x: Type, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Type:
    size, (a, b) = x.shape[-1] + abs(offset), sorted(wrapped(d, x.rank + 1) for d in (dim1, dim2))
    shape = list(x.shape[:-1])
    shape.insert(a, size)
    shape.insert(b, size)
    return Type(tuple(shape), x.dtype)


def _unfold(x: Type, dim: int, size: int, step: int) -> Type:
    at = wrapped(dim, x.rank)
    count = (x.shape[at] - size) // step + 1
    return Type((*x.shape[:at], count, *x.shape[at + 1 :], size), x.dtype)


def _repeat(x: Type, repeats: Sizes) -> Type:
    own = [1] * (len(repeats) - x.rank) + list(x.shape)
    return Type(tuple(n * m for n, m in zip(own, repeats, strict=True)), x.dtype)


def _pad(x: Type, pad: Sizes, value: float = 0) -> Type:
    shape = list(x.shape)
    for i in range(len(pad) // 2):
        shape[-1 - i] += pad[2 * i] + pad[2 * i + 1]
    return Type(tuple(shape), x.dtype)


def _cat(values: Sequence[Type], dim: int = 0) -> Type:
    # torch.cat ignores tensors of shape [0], whatever the others are.
    given = [v for v in values if v.shape != (0,)] or list(values[:1])
    at = wrapped(dim, given[0].rank)
    rests = {(*v.shape[:at], *v.shape[at + 1 :]) for v in given}
    require(len(rests) == 1, f"{', '.join(map(str, given))} cannot be concatenated along dimension {dim}")
    size = sum(v.shape[at] for v in given)
    return Type((*given[0].shape[:at], size, *given[0].shape[at + 1 :]), _common_dtype(values))


def _common_dtype(values: Sequence[Type]) -> torch.dtype:
    dtype = values[0].dtype
    for value in values[1:]:
        dtype = join(dtype, value.dtype)
    return dtype


def _stack(values: Sequence[Type], dim: int = 0) -> Type:
    return _cat([_unsqueeze(v, dim) for v in values], wrapped(dim, values[0].rank + 1))


def _split_sizes(x: Type, sizes: Sizes, dim: int) -> list[Type]:
    at = wrapped(dim, x.rank)
    require(sum(sizes) == x.shape[at], f"{list(sizes)} do not add up to {x.shape[at]}")
    return [Type((*x.shape[:at], n, *x.shape[at + 1 :]), x.dtype) for n in sizes]


def _split(x: Type, size: int | Sizes, dim: int = 0) -> list[Type]:
    if not isinstance(size, int):
        return _split_sizes(x, size, dim)
    total = x.shape[wrapped(dim, x.rank)]
    return _split_sizes(x, [min(size, total - at) for at in range(0, total, size)], dim)


def _selection_backward(g: Type, sizes: Sizes, *_: Any) -> Type:
    return Type(tuple(sizes), g.dtype)


def _to(x: Type, *, dtype: torch.dtype | None = None, **_: Any) -> Type:
    return Type(x.shape, dtype or x.dtype)


def _create(sizes: Sizes, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Type:
    return Type(tuple(sizes), dtype or torch.get_default_dtype())


def _like(x: Type, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Type:
    return Type(x.shape, dtype or x.dtype)


def _new(x: Type, sizes: Sizes, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Type:
    return Type(tuple(sizes), dtype or x.dtype)


def _full(sizes: Sizes, number: Operand, *, dtype: torch.dtype | None = None, **_: Any) -> Type:
    if isinstance(number, Type):
        return Type(tuple(sizes), dtype or number.dtype)
    return Type(tuple(sizes), dtype or number_dtype(number))


def _arange(*bounds: float, dtype: torch.dtype | None = None, **_: Any) -> Type:
    start, end, step = {1: (0, *bounds, 1), 2: (*bounds, 1), 3: bounds}[len(bounds)]
    is_integer = all(isinstance(bound, int) for bound in bounds)
    return Type((math.ceil((end - start) / step),), dtype or (torch.int64 if is_integer else torch.get_default_dtype()))


def _eye(n: int, m: int | None = None, *, dtype: torch.dtype | None = None, **_: Any) -> Type:
    return Type((n, n if m is None else m), dtype or torch.get_default_dtype())


def _shape_of_second(x: Type, y: Type, **_: Any) -> Type:
    return Type(y.shape, x.dtype)


def _gather(x: Type, dim: int, index: Type, **_: Any) -> Type:
    require(index.dtype in (torch.int64, torch.int32), f"indices of {index.dtype}")
    require(index.rank == x.rank or not x.rank or not index.rank, f"{x} gathered at {index}")
    return Type(index.shape, x.dtype)


def _index(x: Type, indices: Sequence[Type | None]) -> Type:
    given = [d for d, i in enumerate(indices) if i is not None]
    if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        raise UnsupportedTypeError("indexing with a mask: its shape depends on values")
    seen = broadcast(*(i.shape for i in indices if i is not None))
    rest = [n for d, n in enumerate(x.shape) if d not in given]
    is_together = given == list(range(given[0], given[-1] + 1))
    at = given[0] if is_together else 0
    return Type((*rest[:at], *seen, *rest[at:]), x.dtype)


def _index_select(x: Type, dim: int, index: Type) -> Type:
    if not x.rank:
        return x
    at = wrapped(dim, x.rank)
    return Type((*x.shape[:at], index.numel, *x.shape[at + 1 :]), x.dtype)


def _embedding(weight: Type, ids: Type, *_: Any, **__: Any) -> Type:
    require(not ids.dtype.is_floating_point, f"indices of {ids.dtype}")
    return Type((*ids.shape, *weight.shape[1:]), weight.dtype)


def _embedding_backward(g: Type, ids: Type, rows: int, *_: Any) -> Type:
    return Type((rows, *g.shape[ids.rank :]), g.dtype)


def _pixel_shuffle(x: Type, factor: int) -> Type:
    require(x.rank >= 3 and x.shape[-3] % factor**2 == 0, f"pixels of {x} shuffled by {factor}")
    *batch, channels, height, width = x.shape
    return Type((*batch, channels // factor**2, height * factor, width * factor), x.dtype)


def _pixel_unshuffle(x: Type, factor: int) -> Type:
    require(x.rank >= 3 and x.shape[-2] % factor == x.shape[-1] % factor == 0, f"pixels of {x} split by {factor}")
    *batch, channels, height, width = x.shape
    return Type((*batch, channels * factor**2, height // factor, width // factor), x.dtype)


def _rotate(x: Type, k: int = 1, dims: Sequence[int] = (0, 1)) -> Type:
    first, second = (wrapped(dim, x.rank) for dim in dims)
    require(first != second, f"a rotation of {x} in the dimensions {dims}")
    shape = list(x.shape)
    if k % 2:
        shape[first], shape[second] = shape[second], shape[first]
    return Type(tuple(shape), x.dtype)


RULES: dict[str, Callable[..., Any]] = {
    "view": _view,
    "reshape": _view,
    "_unsafe_view": _view,
    "permute": _permute,
    "transpose": _transpose,
    "t": lambda x: _transpose(x, 0, 1) if x.rank == 2 else x,
    "expand": _expand,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "select": _select,
    "slice": _slice,
    "diagonal": _diagonal,
    "diag_embed": _diag_embed,
    "unfold": _unfold,
    "repeat": _repeat,
    "constant_pad_nd": _pad,
    "cat": _cat,
    "stack": _stack,
    "split": _split,
    "unsafe_split": _split,
    "split_with_sizes": _split,
    "chunk": lambda x, count, dim=0: _split(x, -(-x.shape[dim] // count), dim),
    "unbind": lambda x, dim=0: [_select(x, dim, i) for i in range(x.shape[wrapped(dim, x.rank)])],
    **dict.fromkeys(("select_backward", "slice_backward", "diagonal_backward", "unfold_backward"), _selection_backward),
    **dict.fromkeys(
        ("select_scatter", "slice_scatter", "diagonal_scatter", "scatter", "scatter_add", "index_add")
        + ("index_put", "_unsafe_index_put", "flip", "roll", "tril", "triu", "copy"),
        same_as(0),
    ),
    **{name: same_as(0) for name, facts in FACTS.items() if facts.identity},
    "_to_copy": _to,
    "to": _to,
    **dict.fromkeys(("zeros", "ones", "empty", "empty_strided", "empty_permuted"), _create),
    **dict.fromkeys(("zeros_like", "ones_like", "empty_like", "full_like"), _like),
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"), _new),
    "_new_zeros_with_same_feature_meta": _shape_of_second,
    "full": _full,
    "scalar_tensor": lambda number, **options: _create((), **options),
    "arange": _arange,
    "eye": _eye,
    "gather": _gather,
    "index": _index,
    "_unsafe_index": _index,
    "index_select": _index_select,
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "pixel_shuffle": _pixel_shuffle,
    "pixel_unshuffle": _pixel_unshuffle,
    "rot90": _rotate,
}
