"""Types of products and factorisations of matrices."""

from collections.abc import Callable
from typing import Any

import torch

from torchguard.compiled.certify.types._types import (
    Type,
    broadcast,
    category,
    promoted,
    real,
    require,
    same_as,
    wrapped,
)


def _trace(x: Type) -> Type:
    require(x.rank == 2, f"the trace of {x}")
    return Type((), x.dtype if category(x.dtype) == 2 else torch.int64)


def _outer_sum(x: Type, a: Type, b: Type, **_: Any) -> Type:
    require(a.rank == b.rank == 1, f"the outer product of {a} and {b}")
    return Type(broadcast(x.shape, (*a.shape, *b.shape)), promoted(x, a, b))


def _cross(a: Type, b: Type, *, dim: int = -1) -> Type:
    shape = broadcast(a.shape, b.shape)
    require(a.rank == b.rank and shape[wrapped(dim, len(shape))] == 3, f"the cross product of {a} and {b}")
    return Type(shape, promoted(a, b))


def _matmul(a: Type, b: Type) -> Type:
    require(a.rank == b.rank >= 2 and a.shape[-1] == b.shape[-2], f"{a} times {b}")
    require(a.shape[:-2] == b.shape[:-2] and a.dtype == b.dtype, f"{a} times {b}")
    return Type((*a.shape[:-1], b.shape[-1]), a.dtype)


def _addmm(c: Type, a: Type, b: Type, **_: Any) -> Type:
    product = _matmul(a, b)
    require(broadcast(c.shape, product.shape) == product.shape and c.dtype == a.dtype, f"{c} added to {product}")
    return product


def _matrix_vector(a: Type, x: Type) -> Type:
    require(a.rank == 2 and x.rank == 1 and a.shape[1] == x.shape[0], f"{a} times {x}")
    return Type(a.shape[:1], a.dtype)


def _dot(a: Type, b: Type) -> Type:
    require(a.rank == b.rank == 1 and a.shape == b.shape, f"{a} times {b}")
    return Type((), a.dtype)


def _info(a: Type) -> Type:
    return Type(a.shape[:-2], torch.int32)


def _pivots(a: Type) -> Type:
    return Type(a.shape[:-1], torch.int32)


def _solve(a: Type, b: Type, *_: Any, **__: Any) -> Type:
    require(a.shape[-1] == a.shape[-2], f"{a} is not square")
    batch = broadcast(a.shape[:-2], b.shape[:-2])
    return Type((*batch, *b.shape[-2:]), b.dtype)


def _solve_or_vector(a: Type, b: Type) -> Type:
    is_vector = b.rank == 1 or b.shape == a.shape[:-1]  # one for each matrix
    return Type(a.shape[:-1], b.dtype) if is_vector else _solve(a, b)


def _eigh(a: Type, uplo: str = "L", compute_v: bool = True) -> tuple[Type, Type]:
    return real(Type(a.shape[:-1], a.dtype)), Type(a.shape if compute_v else (0,), a.dtype)


def _svd(a: Type, full: bool = False, compute_uv: bool = True, **_: Any) -> tuple[Type, Type, Type]:
    m, n = a.shape[-2:]
    k = min(m, n)
    shapes = ((m, m if full else k), (k,), (n if full else k, n)) if compute_uv else ((0,), (k,), (0,))
    batch = a.shape[:-2]
    u, s, v = (Type((*batch, *shape), a.dtype) for shape in shapes)
    return (u, real(s), v) if compute_uv else (Type((0,), a.dtype), real(s), Type((0,), a.dtype))


def _qr(a: Type, mode: str = "reduced") -> tuple[Type, Type]:
    *batch, m, n = a.shape
    k = m if mode == "complete" else min(m, n)
    q = Type((0,), a.dtype) if mode == "r" else Type((*batch, m, k), a.dtype)
    return q, Type((*batch, k, n), a.dtype)


RULES: dict[str, Callable[..., Any]] = {
    "trace": _trace,
    "addr": _outer_sum,
    "linalg_cross": _cross,
    **dict.fromkeys(("mm", "bmm"), _matmul),
    **dict.fromkeys(("addmm", "baddbmm"), _addmm),
    "mv": _matrix_vector,
    "dot": _dot,
    "linalg_inv_ex": lambda a, **_: (a, _info(a)),
    "_linalg_solve_ex": lambda a, b, **options: (_solve_or_vector(a, b), a, _pivots(a), _info(a)),
    "linalg_lu_solve": lambda lu, pivots, b, **options: _solve(lu, b),
    "linalg_solve_triangular": _solve,
    "_linalg_det": lambda a: (Type(a.shape[:-2], a.dtype), a, _pivots(a)),
    "_linalg_slogdet": lambda a: (Type(a.shape[:-2], a.dtype), real(Type(a.shape[:-2], a.dtype)), a, _pivots(a)),
    "linalg_cholesky_ex": lambda a, **_: (a, _info(a)),
    "_linalg_eigh": _eigh,
    "_linalg_svd": _svd,
    "linalg_qr": _qr,
    "_linalg_check_errors": lambda *_, **__: None,
    "linalg_matrix_exp": same_as(0),
}
