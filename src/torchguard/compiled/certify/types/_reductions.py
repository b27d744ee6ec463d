"""Types of reductions, running sums, sorting and softmax."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchguard.compiled.certify.types._types import (
    Type,
    category,
    dims_of,
    real,
    wrapped,
)

Dims = int | Sequence[int] | None


def _reduced_shape(x: Type, dim: Dims, keepdim: bool) -> tuple[int, ...]:
    dims = dims_of(x, dim)
    if keepdim:
        return tuple(1 if d in dims else n for d, n in enumerate(x.shape))
    return tuple(n for d, n in enumerate(x.shape) if d not in dims)


def _reduce(x: Type, dim: Dims = None, keepdim: bool = False, **options: Any) -> Type:
    return Type(_reduced_shape(x, dim, options.get("keepdim", keepdim)), options.get("dtype") or x.dtype)


def _sum(x: Type, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Type:
    own = x.dtype if category(x.dtype) == 2 else torch.int64
    return Type(_reduced_shape(x, dim, keepdim), dtype or own)


def _norm(x: Type, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Type:
    return Type(_reduced_shape(x, dim, keepdim), dtype or real(x).dtype)


def _variance(x: Type, *args: Any, **options: Any) -> Type:
    return real(_reduce(x, *args, **options))


def _any(x: Type, dim: Dims = None, keepdim: bool = False) -> Type:
    return Type(_reduced_shape(x, dim, keepdim), torch.bool)


def _argmax(x: Type, dim: int | None = None, keepdim: bool = False) -> Type:
    return Type(_reduced_shape(x, dim, keepdim), torch.int64)


def _max(x: Type, dim: int | None = None, keepdim: bool = False) -> Any:
    if dim is None:
        return _reduce(x)
    return _reduce(x, dim, keepdim), _argmax(x, dim, keepdim)


def _cumulative(x: Type, dim: int, *, dtype: torch.dtype | None = None) -> Type:
    wrapped(dim, x.rank)
    return Type(x.shape, dtype or (x.dtype if category(x.dtype) == 2 else torch.int64))


def _topk(x: Type, k: int, dim: int = -1, *_: Any, **__: Any) -> tuple[Type, Type]:
    at = wrapped(dim, x.rank)
    shape = (*x.shape[:at], k, *x.shape[at + 1 :])
    return Type(shape, x.dtype), Type(shape, torch.int64)


def _kth_value(x: Type, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Type, Type]:
    return _reduce(x, dim, keepdim), _argmax(x, dim, keepdim)


def _running_largest(x: Type, dim: int) -> tuple[Type, Type]:
    wrapped(dim, x.rank)
    return x, Type(x.shape, torch.int64)


RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("mean", "amax", "amin", "logsumexp"), _reduce),
    **dict.fromkeys(("var", "std"), _variance),
    "var_mean": lambda *args, **options: (_variance(*args, **options), _reduce(*args, **options)),
    "sum": _sum,
    "prod": _sum,
    "any": _any,
    "all": _any,
    "argmax": _argmax,
    "argmin": _argmax,
    "max": _max,
    "min": _max,
    "median": _max,
    "kthvalue": _kth_value,
    **dict.fromkeys(("cummax", "cummin"), _running_largest),
    "logcumsumexp": _cumulative,
    "linalg_vector_norm": _norm,
    "cumsum": _cumulative,
    "cumprod": _cumulative,
    "sort": lambda x, *_, **__: (x, Type(x.shape, torch.int64)),
    "topk": _topk,
    "_softmax": lambda x, dim, half_to_float: x,
    "_safe_softmax": lambda x, dim, dtype=None: x,
    "_log_softmax": lambda x, dim, half_to_float: x,
    "_softmax_backward_data": lambda g, y, dim, dtype: Type(y.shape, dtype),
    "_log_softmax_backward_data": lambda g, y, dim, dtype: Type(y.shape, dtype),
}
