"""Gathering and scattering by integer tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchguard.compiled.certify.algebra._field import UnsupportedError
from torchguard.compiled.certify.algebra._values import Value, exact


def _gather(x: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value:
    return x.arranged(lambda t: t.gather(dim, index.element))


def _index(x: Value, indices: Sequence[Value | None]) -> Value:
    places = tuple(slice(None) if i is None else i.element for i in indices)
    return x.arranged(lambda t: t[places])


def _embedding(weight: Value, ids: Value, *_: Any, **__: Any) -> Value:
    # Unlike an index, it takes no places counted from the end.
    chosen = ids.element.reshape(-1)
    return weight.arranged(lambda t: t.index_select(0, chosen).reshape(*ids.shape, *t.shape[1:]))


def _embedding_backward(g: Value, ids: Value, rows: int, padding: int, scale_by_frequency: bool) -> Value:
    if scale_by_frequency:
        raise UnsupportedError("embedding with scale_grad_by_freq")
    width = g.shape[ids.element.dim() :]
    places = ids.element.reshape(-1)
    counted = (places != padding).to(g.field.dtype).unsqueeze(-1)

    def put(t: Tensor) -> Tensor:
        flat = t.reshape(places.numel(), -1) * counted
        whole = torch.zeros(rows, flat.shape[1], dtype=g.field.dtype).index_add(0, places, flat)
        return g.field.reduced(whole.reshape(rows, *width))

    return g.linear(put)


def _merged(x: Value, source: Value, put: Callable[[Tensor, Tensor], Tensor]) -> Value:
    """A linear function of two values: the tangents' is the same."""
    if x.is_exact and source.is_exact:
        return exact(x.field, put(x.element, source.element.to(x.element.dtype)))
    x, source = x.as_elements(), source.as_elements()
    element = x.field.reduced(put(x.element, source.element))
    if x.tangent is None and source.tangent is None:
        return Value(x.field, element)
    tangents = (torch.zeros_like(v.element) if v.tangent is None else v.tangent for v in (x, source))
    return Value(x.field, element, x.field.reduced(put(*tangents)))


def _source(x: Value, source: Value | float, like: Tensor) -> Value:
    if isinstance(source, Value):
        return source
    return (x.without_tangent() * 0 + source).arranged(lambda t: t.reshape(-1)[:1].expand(like.shape))


def _require_apart(writes: Tensor, source: Value) -> None:
    """What is written twice to one place is undefined, unless it is the same."""
    is_same = bool((source.element == source.element.reshape(-1)[:1]).all()) and source.tangent is None
    if not is_same and bool((writes > 1).any()):
        raise ValueError("two writes to one place")


def _scatter(x: Value, dim: int, index: Value, source: Value | float, *, reduce: str | None = None) -> Value:
    if reduce is not None:
        raise UnsupportedError(f"scatter with reduce={reduce!r}")
    if isinstance(source, Value):
        ones = torch.ones(index.shape, dtype=torch.int64)
        _require_apart(torch.zeros(x.shape, dtype=torch.int64).scatter_add(dim, index.element, ones), source)
    return _merged(x, _source(x, source, index.element), lambda a, b: a.scatter(dim, index.element, b))


def _scatter_add(x: Value, dim: int, index: Value, source: Value) -> Value:
    return _merged(x, source, lambda a, b: a.scatter_add(dim, index.element, b))


def _index_add(x: Value, dim: int, index: Value, source: Value, *, alpha: float = 1) -> Value:
    scaled = source if alpha == 1 else source * alpha
    return _merged(x, scaled, lambda a, b: a.index_add(dim, index.element, b))


def _index_put(x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False) -> Value:
    given = {dim: index.element for dim, index in enumerate(indices) if index is not None}
    if len(given) == len(indices):
        places = tuple(given.values())
        if not accumulate and all(p.dtype != torch.bool for p in places):
            whole = torch.zeros(x.shape[: len(places)], dtype=torch.int64)
            _require_apart(whole.index_put(places, torch.ones((), dtype=torch.int64), accumulate=True), values)
        return _merged(x, values, lambda a, b: a.index_put(places, b, accumulate=accumulate))
    if len(given) > 1 or next(iter(given.values())).dim() != 1:
        raise UnsupportedError("index_put with several indices, some of them missing")
    ((dim, places),) = given.items()
    if not accumulate:
        _require_apart(places.bincount() if bool((places >= 0).all()) else torch.full((1,), 2), values)
    return _merged(x, values, lambda a, b: _put_along(a, b, dim, places, accumulate))


def _put_along(a: Tensor, b: Tensor, dim: int, places: Tensor, accumulate: bool) -> Tensor:
    shape = [*a.shape[:dim], places.numel(), *a.shape[dim + 1 :]]
    whole = b.expand(shape)
    return a.index_add(dim, places, whole) if accumulate else a.index_copy(dim, places, whole)


RULES: dict[str, Callable[..., Any]] = {
    "gather": _gather,
    "index": _index,
    "index_select": lambda x, dim, index: x.arranged(lambda t: t.index_select(dim, index.element)),
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "scatter": _scatter,
    "scatter_add": _scatter_add,
    "index_add": _index_add,
    "index_put": _index_put,
    "_unsafe_index": _index,
    "_unsafe_index_put": _index_put,
}
