"""Rules of factorisations whose factors are no rational functions of a matrix: eigenvalues, singular values, QR.

A field does not hold the eigenvalues of most of its matrices, nor the square roots in an orthogonal factor. So the
factors are unknown functions of the matrix: orthogonal or triangular as they should be, otherwise random, and their
product is not the matrix. Their tangents follow from the equations that define them. A derivative that is right for all
such factors is right for those of the matrix; one that needs their product to be the matrix is inconclusive. In real
numbers, which decide comparisons, they are the factors that torch computes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchguard.compiled.certify.algebra._field import PrimeField, Reals, UnsupportedError
from torchguard.compiled.certify.algebra._rules.matrices import eliminate, substitute
from torchguard.compiled.certify.algebra._values import Value


def _key(f: PrimeField, name: str, a: Tensor) -> Tensor:
    """One unknown number for each matrix, which all its factors depend on."""
    return f.unknown_function(name, *a.flatten(-2).unbind(-1))


def _unknown(f: PrimeField, name: str, key: Tensor, *shape: int) -> Tensor:
    positions = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return f.unknown_function(name, key.reshape(*key.shape, *[1] * len(shape)), positions)


def _orthonormal(f: PrimeField, name: str, key: Tensor, rows: int, columns: int) -> Tensor:
    """Some columns of the orthogonal matrix (1 + s)⁻¹(1 - s), for an unknown skew matrix s."""
    upper = _unknown(f, name, key, rows, rows).triu(1)
    skew, one = f.sub(upper, upper.mT), torch.eye(rows, dtype=f.dtype)
    return eliminate(f, f.add(one, skew), f.sub(one, skew))[0][..., :columns]


def _inverse_gaps(f: PrimeField, numbers: Tensor) -> Tensor:
    """1 / (n_j - n_i) off the diagonal, and 0 on it."""
    one = torch.eye(numbers.shape[-1], dtype=f.dtype)
    gaps = f.sub(numbers.unsqueeze(-2), numbers.unsqueeze(-1))
    return f.sub(f.inverse(f.add(gaps, one)), one)


def _eigh(a: Value, uplo: str = "L", compute_v: bool = True) -> tuple[Value, Value]:
    """Eigenvalues and eigenvectors of the symmetric matrix of which one triangle is read.

    With p = vᵀ da v: the tangent of an eigenvalue is on the diagonal of p, and v⁻¹ dv is p_ij / (l_j - l_i).
    """
    f, n = a.field, a.shape[-1]
    symmetric = a.linear(lambda t: t.tril() + t.tril(-1).mT if uplo.upper() == "L" else t.triu() + t.triu(1).mT)
    if isinstance(f, Reals):
        numbers, vectors = torch.linalg.eigh(symmetric.element)
    else:
        key = _key(f, "eigh", symmetric.element)
        numbers, vectors = _unknown(f, "eigenvalue", key, n), _orthonormal(f, "eigenvector", key, n, n)
    if symmetric.tangent is None:
        return Value(f, numbers), Value(f, vectors)
    turned = f.matmul(vectors.mT, f.matmul(symmetric.tangent, vectors))
    moved = f.matmul(vectors, f.mul(turned, _inverse_gaps(f, numbers)))
    return Value(f, numbers, turned.diagonal(dim1=-2, dim2=-1)), Value(f, vectors, moved)


def _svd(
    a: Value, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[Value, Value, Value]:
    """Singular values and vectors of a matrix that has only different ones, none of them zero."""
    f, (m, n) = a.field, a.shape[-2:]
    if full_matrices and m != n:
        raise UnsupportedError("linalg_svd with full_matrices=True of a matrix that is not square")
    k = min(m, n)
    if isinstance(f, Reals):
        left, numbers, right = torch.linalg.svd(a.element, full_matrices=False)
        right = right.mT
    else:
        key = _key(f, "svd", a.element)
        numbers = _unknown(f, "singular value", key, k)
        left, right = _orthonormal(f, "left vector", key, m, k), _orthonormal(f, "right vector", key, n, k)
    if a.tangent is None:
        return Value(f, left), Value(f, numbers), Value(f, right.mT)
    inner = f.matmul(left.mT, f.matmul(a.tangent, right))
    gaps, inverses = _inverse_gaps(f, f.mul(numbers, numbers)), f.inverse(numbers).unsqueeze(-2)

    def moved(own: Tensor, other: Tensor, tangent: Tensor, turned: Tensor) -> Tensor:
        """The tangent of vectors: within the space that they span, and out of it."""
        scaled = f.mul(turned, numbers.unsqueeze(-2))
        within = f.matmul(own, f.mul(f.add(scaled, scaled.mT), gaps))
        out = f.mul(f.sub(f.matmul(tangent, other), f.matmul(own, turned)), inverses)
        return f.add(within, out)

    return (
        Value(f, left, moved(left, right, a.tangent, inner)),
        Value(f, numbers, inner.diagonal(dim1=-2, dim2=-1)),
        Value(f, right.mT, moved(right, left, a.tangent.mT, inner.mT).mT),
    )


def _qr(a: Value, mode: str = "reduced") -> tuple[Value, Value]:
    """The factors of a = qr: with x = da r⁻¹, dq = x - q u for the upper u with u + uᵀ = qᵀx + xᵀq."""
    f, (m, n) = a.field, a.shape[-2:]
    k = min(m, n)
    if mode == "r" or (mode == "complete" and m > n):
        raise UnsupportedError(f"linalg_qr with mode={mode!r}")
    if isinstance(f, Reals):
        q, r = torch.linalg.qr(a.element)
    else:
        key = _key(f, "qr", a.element)
        q, r = _orthonormal(f, "q", key, m, k), _unknown(f, "r", key, k, n).triu()
    if a.tangent is None:
        return Value(f, q), Value(f, r)
    x = substitute(f, r[..., :k].mT, a.tangent[..., :k].mT, is_upper=False).mT
    both = f.matmul(q.mT, x)
    upper = f.add(both.triu(), both.tril(-1).mT)
    dq = f.sub(x, f.matmul(q, upper))
    return Value(f, q, dq), Value(f, r, f.matmul(q.mT, f.sub(a.tangent, f.matmul(dq, r))))


RULES: dict[str, Callable[..., Any]] = {"_linalg_eigh": _eigh, "_linalg_svd": _svd, "linalg_qr": _qr}
