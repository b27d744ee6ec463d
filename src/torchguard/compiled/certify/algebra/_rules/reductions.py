"""Rules of sums, products, maxima and sorting, and of variances, softmax and vector norms."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchguard.compiled.certify.algebra._field import UnsupportedError
from torchguard.compiled.certify.algebra._rules.choices import FINITENESS_RULES
from torchguard.compiled.certify.algebra._rules.pointwise import power
from torchguard.compiled.certify.algebra._rules.shapes import stacked
from torchguard.compiled.certify.algebra._values import Value, integers

Dims = int | Sequence[int] | None


def dims_of(x: Value, dim: Dims) -> list[int]:
    """The dimensions that an argument names, counted from the front; None and an empty list name all."""
    rank = x.element.dim()
    chosen = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
    return [d % rank for d in chosen] if chosen and rank else list(range(rank))


def count_of(x: Value, dims: list[int]) -> int:
    return math.prod(x.shape[d] for d in dims)


def _sum(x: Value, dim: Dims = None, keepdim: bool = False, **_: Any) -> Value:
    return x.total(dims_of(x, dim), keepdim)


def mean(x: Value, dim: Dims = None, keepdim: bool = False, **_: Any) -> Value:
    dims = dims_of(x, dim)
    return x.as_elements().total(dims, keepdim) / count_of(x, dims)


def _variance(x: Value, dim: Dims, correction: float | None, keepdim: bool) -> Value:
    dims = dims_of(x, dim)
    centred = x - mean(x, dims, True)
    return centred.square().total(dims, keepdim) / (count_of(x, dims) - (1 if correction is None else int(correction)))


def _var(x: Value, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Value:
    return _variance(x, dim, correction, keepdim)


def _var_mean(x: Value, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    return _variance(x, dim, correction, keepdim), mean(x, dim, keepdim)


def _std(x: Value, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Value:
    return _variance(x, dim, correction, keepdim).sqrt()


def _rows(x: Value, dims: list[int]) -> tuple[Tensor, list[int]]:
    """The real numbers with the reduced dimensions flattened into the last, and the permutation that does so."""
    order = [d for d in range(x.element.dim()) if d not in dims] + dims
    reals = x.real_values().permute(order)
    return reals.reshape(*reals.shape[: reals.dim() - len(dims)], -1), order


def _extremum(
    x: Value, dim: Dims = None, keepdim: bool = False, *, is_max: bool = True, is_recorded: bool = True
) -> Value:
    """The maximum or minimum; equal elements share its derivative evenly, as in torch."""
    dims = dims_of(x, dim)
    reals, order = _rows(x, dims)
    index = (reals if is_max else -reals).argmax(-1, keepdim=True)
    is_free = x.field.trace.frees_extrema and x.tangent is None and not x.is_integer
    if is_recorded:
        x.field.trace.record_index(index, reals.shape[-1], ~reals.isinf(), is_free=is_free)
    if is_free:
        return _free_extremum(x, dims, keepdim, is_max)

    def pick(t: Tensor) -> Tensor:
        rows = t.permute(order).reshape(reals.shape).gather(-1, index).squeeze(-1)
        return _keep_dims(rows, dims) if keepdim else rows

    value = Value(x.field, pick(x.element), is_integer=x.is_integer)
    return value if x.tangent is None else _with_shared_tangent(x, value, dims, keepdim)


def _free_extremum(x: Value, dims: list[int], keepdim: bool, is_max: bool) -> Value:
    """Any elements instead of the extrema: equal ones for equal rows alone."""
    by_element = x.field.unknown_function(f"extremum {is_max}", x.element)
    return Value(x.field, x.field.total(by_element, dims, keepdim))


def _with_shared_tangent(x: Value, chosen: Value, dims: list[int], keepdim: bool) -> Value:
    """A chosen element, with the mean tangent of all that are equal to it."""
    assert x.tangent is not None
    is_equal = x.element == (chosen.element if keepdim else _keep_dims(chosen.element, dims))
    f, count = x.field, is_equal.sum(dims, keepdim=keepdim)
    shared = f.total(torch.where(is_equal, x.tangent, 0), dims, keepdim)
    return Value(f, chosen.element, f.mul(shared, f.inverse(count)))


def _keep_dims(t: Tensor, dims: list[int]) -> Tensor:
    for d in sorted(dims):
        t = t.unsqueeze(d)
    return t


def _argmax(x: Value, dim: int | None = None, keepdim: bool = False, *, is_max: bool = True) -> Value:
    reals = x.real_values() if is_max else -x.real_values()
    index = reals.argmax(dim, keepdim=keepdim)
    x.field.trace.record_index(index, reals.numel() if dim is None else reals.shape[dim] if reals.dim() else 1)
    return integers(x.field, index)


def _extremum_and_index(is_max: bool) -> Callable[..., Any]:
    def rule(x: Value, dim: Any = None, keepdim: bool = False) -> Any:
        if dim is None:
            return _extremum(x, is_max=is_max)
        if isinstance(dim, Value):
            raise UnsupportedError("max or min of two tensors: use maximum or minimum")
        index = _argmax(x, dim, True, is_max=is_max).element
        drop = (lambda t: t) if keepdim else (lambda t: t.squeeze(dim))
        return x.rearranged(lambda t: drop(t.gather(dim, index))), integers(x.field, drop(index))

    return rule


def _sort(x: Value, *args: Any, dim: int = -1, descending: bool = False, stable: bool = True) -> tuple[Value, Value]:
    """Sorted, always stably."""
    for given in args:
        if isinstance(given, bool):
            descending = given
        else:
            dim = given
    return _sorted(x, dim, descending, x.shape[dim] if x.element.dim() else 1)


def _sorted(x: Value, dim: int, descending: bool, count: int) -> tuple[Value, Value]:
    """The first of the sorted elements, and their indices."""
    if not x.element.dim():
        return x, integers(x.field, torch.zeros((), dtype=torch.int64))
    indices = x.real_values().sort(dim=dim, descending=descending, stable=True).indices.narrow(dim, 0, count)
    x.field.trace.record_index(indices, x.shape[dim])
    return x.rearranged(lambda t: t.gather(dim, indices)), integers(x.field, indices)


def _topk(x: Value, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Value, Value]:
    return _sorted(x, dim, largest, k)


def _cumulative(x: Value, dim: int, step: Callable[[Value, Value], Value]) -> list[Value]:
    rows = [x.rearranged(lambda t, i=i: t.select(dim, i)) for i in range(x.shape[dim])]
    totals = rows[:1]
    for row in rows[1:]:
        totals.append(step(totals[-1], row))
    return totals


def _cumprod(x: Value, dim: int, **_: Any) -> Value:
    return stacked(_cumulative(x, dim, lambda a, b: a * b), dim) if x.element.dim() else x


def _cumsum(x: Value, dim: int, **_: Any) -> Value:
    if x.is_integer:
        return integers(x.field, x.element.to(torch.int64).cumsum(dim))
    return x.linear(lambda t: x.field.reduced(t.cumsum(dim)))


def _prod(x: Value, dim: int | None = None, keepdim: bool = False, **_: Any) -> Value:
    flat = x.rearranged(lambda t: t.reshape(-1)) if dim is None else x
    product = _cumulative(flat, dim or 0, lambda a, b: a * b)[-1]
    return product.rearranged(lambda t: t.unsqueeze(dim)) if keepdim and dim is not None else product


def _shifted_exponentials(x: Value, dims: list[int]) -> tuple[Value, Value, Value]:
    """The largest of each row, exp(x - largest), and the sum of these. The derivative by the largest cancels."""
    largest = _extremum(x.without_tangent(), dims, True, is_recorded=False)
    exponentials = (x - largest).exp()
    return largest, exponentials, exponentials.total(dims, True)


def softmax(x: Value, dim: int, half_to_float: bool = False) -> Value:
    _, exponentials, total = _shifted_exponentials(x, dims_of(x, dim))
    return exponentials / total


def safe_softmax(x: Value, dim: int, dtype: Any = None) -> Value:
    """The softmax, and zeros for a row of -inf."""
    return without_masked_rows(x, softmax(x, dim), dim)


def without_masked_rows(x: Value, weights: Value, dim: int) -> Value:
    """Weights made of x, and zeros where a row of x is -inf."""
    is_masked = FINITENESS_RULES["isneginf"](x).element.all(dim, keepdim=True)
    return integers(x.field, is_masked).where(0.0, weights)


def _log_softmax(x: Value, dim: int, half_to_float: bool = False) -> Value:
    largest, _, total = _shifted_exponentials(x, dims_of(x, dim))
    return x - largest - total.log()


def logsumexp(x: Value, dim: Dims, keepdim: bool = False) -> Value:
    dims = dims_of(x, dim)
    largest, _, total = _shifted_exponentials(x, dims)
    result = total.log() + largest
    return result if keepdim else result.rearranged(lambda t: _drop_dims(t, dims))


def _drop_dims(t: Tensor, dims: list[int]) -> Tensor:
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
        return _extremum(absolute, dims, keepdim, is_max=ord > 0)
    if ord == 0:
        return x.eq(0).inverted().as_elements().total(dims, keepdim)
    powers = power(absolute, ord).total(dims, keepdim)
    return power(powers, 1 / ord)


def _order_statistic(x: Value, k: int, dim: int, keepdim: bool) -> tuple[Value, Value]:
    """The k-th smallest element, counted from 0, and its index."""
    if not x.element.dim():
        return _sorted(x, dim, False, 1)
    values, indices = _sorted(x, dim, False, x.shape[dim])
    pick = lambda t: t.narrow(dim, k, 1) if keepdim else t.select(dim, k)  # noqa: E731
    return values.rearranged(pick), indices.rearranged(pick)


def _median(x: Value, dim: int | None = None, keepdim: bool = False) -> Any:
    if dim is None:
        flat = x.rearranged(lambda t: t.reshape(-1))
        middle = _order_statistic(flat, (x.element.numel() - 1) // 2, 0, False)[0]
        return middle if x.tangent is None else _with_shared_tangent(flat, middle, [0], False)
    return _order_statistic(x, ((x.shape[dim] if x.element.dim() else 1) - 1) // 2, dim, keepdim)


def _running_extremum(is_max: bool) -> Callable[..., tuple[Value, Value]]:
    """Of equal elements the last one is taken, as in torch."""

    def rule(x: Value, dim: int) -> tuple[Value, Value]:
        if not x.element.dim():
            return x, integers(x.field, torch.zeros((), dtype=torch.int64))
        reals = x.real_values() if is_max else -x.real_values()
        indices = reals.cummax(dim).indices
        shape = [-1 if d == dim % reals.dim() else 1 for d in range(reals.dim())]
        positions = torch.arange(reals.shape[dim])
        is_before = positions.unsqueeze(0) <= positions.unsqueeze(1)
        possible = is_before.reshape(*shape, reals.shape[dim]).expand(*reals.shape, reals.shape[dim])
        x.field.trace.record_index(indices, reals.shape[dim], possible)
        return x.rearranged(lambda t: t.gather(dim, indices)), integers(x.field, indices)

    return rule


def _any(x: Value, dim: Dims = None, keepdim: bool = False) -> Value:
    return integers(x.field, (x.element != 0).any(dim=dims_of(x, dim), keepdim=keepdim))


def _all(x: Value, dim: Dims = None, keepdim: bool = False) -> Value:
    return integers(x.field, (x.element != 0).all(dim=dims_of(x, dim), keepdim=keepdim))


RULES: dict[str, Callable[..., Any]] = {
    "sum": _sum,
    "mean": mean,
    "var": _var,
    "var_mean": _var_mean,
    "std": _std,
    "amax": _extremum,
    "amin": lambda x, dim=None, keepdim=False: _extremum(x, dim, keepdim, is_max=False),
    "max": _extremum_and_index(is_max=True),
    "min": _extremum_and_index(is_max=False),
    "argmax": _argmax,
    "argmin": lambda x, dim=None, keepdim=False: _argmax(x, dim, keepdim, is_max=False),
    "sort": _sort,
    "topk": _topk,
    "kthvalue": lambda x, k, dim=-1, keepdim=False: _order_statistic(x, k - 1, dim, keepdim),
    "median": _median,
    "cummax": _running_extremum(is_max=True),
    "cummin": _running_extremum(is_max=False),
    "cumsum": _cumsum,
    "cumprod": _cumprod,
    "prod": _prod,
    "_softmax": softmax,
    "_safe_softmax": safe_softmax,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax": _log_softmax,
    "_log_softmax_backward_data": _log_softmax_backward,
    "logsumexp": logsumexp,
    "linalg_vector_norm": _vector_norm,
    "any": _any,
    "all": _all,
}
