"""Sums, products, extrema, orders, and what is built on them: variances, softmax, norms of vectors."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchguard.compiled.certify.algebra._field import UnsupportedError
from torchguard.compiled.certify.algebra._values import Value, exact

Dims = int | Sequence[int] | None


def dims_of(x: Value, dim: Dims) -> list[int]:
    """The dimensions meant, counted from the front; all of them for None and for an empty list."""
    rank = x.element.dim()
    chosen = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
    return [d % rank for d in chosen] if chosen and rank else list(range(rank))


def count_of(x: Value, dims: list[int]) -> int:
    return math.prod(x.shape[d] for d in dims)


def total(x: Value, dim: Dims = None, keepdim: bool = False, **_: Any) -> Value:
    return x.total(dims_of(x, dim), keepdim)


def mean(x: Value, dim: Dims = None, keepdim: bool = False, **_: Any) -> Value:
    dims = dims_of(x, dim)
    return x.as_elements().total(dims, keepdim) / count_of(x, dims)


def _spread_about_mean(x: Value, dim: Dims, correction: float | None, keepdim: bool) -> Value:
    dims = dims_of(x, dim)
    centred = x - mean(x, dims, True)
    return centred.square().total(dims, keepdim) / (count_of(x, dims) - (1 if correction is None else int(correction)))


def _var(x: Value, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Value:
    return _spread_about_mean(x, dim, correction, keepdim)


def _var_mean(x: Value, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    return _spread_about_mean(x, dim, correction, keepdim), mean(x, dim, keepdim)


def _std(x: Value, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Value:
    return _spread_about_mean(x, dim, correction, keepdim).sqrt()


def _rows(x: Value, dims: list[int]) -> tuple[Tensor, list[int]]:
    """The sizes with the reduced dimensions made one, the last, and the order of dimensions that does so."""
    order = [d for d in range(x.element.dim()) if d not in dims] + dims
    sizes = x.sizes().permute(order)
    return sizes.reshape(*sizes.shape[: sizes.dim() - len(dims)], -1), order


def extreme(x: Value, dim: Dims = None, keepdim: bool = False, *, is_max: bool = True) -> Value:
    """The largest or smallest; equal ones share its derivative evenly, as in torch."""
    dims = dims_of(x, dim)
    sizes, order = _rows(x, dims)
    place = (sizes if is_max else -sizes).argmax(-1, keepdim=True)

    def pick(t: Tensor) -> Tensor:
        rows = t.permute(order).reshape(sizes.shape).gather(-1, place).squeeze(-1)
        return _with_kept(rows, dims) if keepdim else rows

    value = Value(x.field, pick(x.element), is_exact=x.is_exact)
    if x.tangent is None:
        return value
    is_it = x.element == (value.element if keepdim else _with_kept(value.element, dims))
    f, count = x.field, is_it.sum(dims, keepdim=keepdim)
    shared = f.total(torch.where(is_it, x.tangent, 0), dims, keepdim)
    return Value(f, value.element, f.mul(shared, f.inverse(count)))


def _with_kept(t: Tensor, dims: list[int]) -> Tensor:
    for d in sorted(dims):
        t = t.unsqueeze(d)
    return t


def _position(x: Value, dim: int | None = None, keepdim: bool = False, *, is_max: bool = True) -> Value:
    sizes = x.sizes() if is_max else -x.sizes()
    return exact(x.field, sizes.argmax(dim, keepdim=keepdim))


def _extreme_and_position(is_max: bool) -> Callable[..., Any]:
    def rule(x: Value, dim: Any = None, keepdim: bool = False) -> Any:
        if dim is None:
            return extreme(x, is_max=is_max)
        if isinstance(dim, Value):
            raise UnsupportedError("max or min of two tensors: use maximum or minimum")
        place = _position(x, dim, True, is_max=is_max).element
        shown = place if keepdim else place.squeeze(dim)
        kept = (lambda t: t.gather(dim, place)) if keepdim else (lambda t: t.gather(dim, place).squeeze(dim))
        return x.arranged(kept), exact(x.field, shown)

    return rule


def _sort(x: Value, *args: Any, dim: int = -1, descending: bool = False, stable: bool = True) -> tuple[Value, Value]:
    """Sorted, stably, whether or not that was asked for."""
    for given in args:
        if isinstance(given, bool):
            descending = given
        else:
            dim = given
    places = x.sizes().sort(dim=dim, descending=descending, stable=True).indices
    return x.arranged(lambda t: t.gather(dim, places)), exact(x.field, places)


def _topk(x: Value, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Value, Value]:
    places = x.sizes().sort(dim=dim, descending=largest, stable=True).indices.narrow(dim, 0, k)
    return x.arranged(lambda t: t.gather(dim, places)), exact(x.field, places)


def _cumulative(x: Value, dim: int, step: Callable[[Value, Value], Value]) -> list[Value]:
    rows = [x.arranged(lambda t, i=i: t.select(dim, i)) for i in range(x.shape[dim])]
    totals = rows[:1]
    for row in rows[1:]:
        totals.append(step(totals[-1], row))
    return totals


def _cumprod(x: Value, dim: int, **_: Any) -> Value:
    return stacked(_cumulative(x, dim, lambda a, b: a * b), dim) if x.element.dim() else x


def _cumsum(x: Value, dim: int, **_: Any) -> Value:
    if x.is_exact:
        return exact(x.field, x.element.to(torch.int64).cumsum(dim))
    return x.linear(lambda t: x.field.reduced(t.cumsum(dim)))


def _prod(x: Value, dim: int | None = None, keepdim: bool = False, **_: Any) -> Value:
    flat = x.arranged(lambda t: t.reshape(-1)) if dim is None else x
    whole = _cumulative(flat, dim or 0, lambda a, b: a * b)[-1]
    return whole.arranged(lambda t: t.unsqueeze(dim)) if keepdim and dim is not None else whole


def stacked(values: Sequence[Value], dim: int) -> Value:
    """Values of one shape along a new dimension."""
    return joined([v.arranged(lambda t: t.unsqueeze(dim)) for v in values], dim)


def joined(values: Sequence[Value], dim: int = 0) -> Value:
    """Values one after the other along a dimension."""
    if all(v.is_exact for v in values):
        return exact(values[0].field, torch.cat([v.element for v in values], dim))
    values = [v.as_elements() for v in values]
    element = torch.cat([v.element for v in values], dim)
    if all(v.tangent is None for v in values):
        return Value(values[0].field, element)
    tangents = [torch.zeros_like(v.element) if v.tangent is None else v.tangent for v in values]
    return Value(values[0].field, element, torch.cat(tangents, dim))


def _shifted_exponentials(x: Value, dims: list[int]) -> tuple[Value, Value, Value]:
    """The largest of each row, exp(x - largest), and their sum. The largest is a constant: it cancels."""
    largest = extreme(x.without_tangent(), dims, True)
    exponentials = (x - largest).exp()
    return largest, exponentials, exponentials.total(dims, True)


def softmax(x: Value, dim: int, half_to_float: bool = False) -> Value:
    _, exponentials, total = _shifted_exponentials(x, dims_of(x, dim))
    return exponentials / total


def _log_softmax(x: Value, dim: int, half_to_float: bool = False) -> Value:
    largest, _, total = _shifted_exponentials(x, dims_of(x, dim))
    return x - largest - total.log()


def logsumexp(x: Value, dim: Dims, keepdim: bool = False) -> Value:
    dims = dims_of(x, dim)
    largest, _, total = _shifted_exponentials(x, dims)
    result = total.log() + largest
    return result if keepdim else result.arranged(lambda t: _without(t, dims))


def _without(t: Tensor, dims: list[int]) -> Tensor:
    return t.reshape([n for d, n in enumerate(t.shape) if d not in dims])


def _softmax_backward(g: Value, y: Value, dim: int, dtype: Any) -> Value:
    return y * (g - (g * y).total(dims_of(y, dim), True))


def _log_softmax_backward(g: Value, y: Value, dim: int, dtype: Any) -> Value:
    return g - y.exp() * g.total(dims_of(y, dim), True)


def _vector_norm(x: Value, ord: float = 2, dim: Dims = None, keepdim: bool = False, **_: Any) -> Value:
    dims = dims_of(x, dim)
    absolute = x * x.sgn()
    if ord == 2:
        return x.square().total(dims, keepdim).sqrt()
    if ord == 1:
        return absolute.total(dims, keepdim)
    if ord in (math.inf, -math.inf):
        return extreme(absolute, dims, keepdim, is_max=ord > 0)
    if ord == 0:
        return x.eq(0).inverted().as_elements().total(dims, keepdim)
    raise UnsupportedError(f"linalg_vector_norm of order {ord}: only 0, 1, 2 and inf")


def _any(x: Value, dim: Dims = None, keepdim: bool = False) -> Value:
    return exact(x.field, (x.element != 0).any(dim=dims_of(x, dim), keepdim=keepdim))


def _all(x: Value, dim: Dims = None, keepdim: bool = False) -> Value:
    return exact(x.field, (x.element != 0).all(dim=dims_of(x, dim), keepdim=keepdim))


RULES: dict[str, Callable[..., Any]] = {
    "sum": total,
    "mean": mean,
    "var": _var,
    "var_mean": _var_mean,
    "std": _std,
    "amax": extreme,
    "amin": lambda x, dim=None, keepdim=False: extreme(x, dim, keepdim, is_max=False),
    "max": _extreme_and_position(is_max=True),
    "min": _extreme_and_position(is_max=False),
    "argmax": _position,
    "argmin": lambda x, dim=None, keepdim=False: _position(x, dim, keepdim, is_max=False),
    "sort": _sort,
    "topk": _topk,
    "cumsum": _cumsum,
    "cumprod": _cumprod,
    "prod": _prod,
    "cat": joined,
    "stack": lambda values, dim=0: stacked(values, dim % (values[0].element.dim() + 1)),
    "_softmax": softmax,
    # It differs from softmax where a whole row is -inf, which stands for an unknown here, like any other number.
    "_safe_softmax": lambda x, dim, dtype=None: softmax(x, dim),
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax": _log_softmax,
    "_log_softmax_backward_data": _log_softmax_backward,
    "logsumexp": logsumexp,
    "linalg_vector_norm": _vector_norm,
    "any": _any,
    "all": _all,
}
