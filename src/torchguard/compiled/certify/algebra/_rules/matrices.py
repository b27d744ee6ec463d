"""Rules of matrix products, inverses and factorisations."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchguard.compiled.certify.algebra._field import PrimeField, Reals, UnsupportedError
from torchguard.compiled.certify.algebra._values import Value, integers


def _transposed(x: Value) -> Value:
    return x.rearranged(lambda t: t.transpose(-2, -1))


def _addmm(c: Value, a: Value, b: Value, *, beta: float = 1, alpha: float = 1) -> Value:
    product = a.matmul(b)
    return (c if beta == 1 else c * beta) + (product if alpha == 1 else product * alpha)


def _column(x: Value) -> Value:
    return x.rearranged(lambda t: t.unsqueeze(-1))


def _mv(a: Value, x: Value) -> Value:
    return a.matmul(_column(x)).rearranged(lambda t: t.squeeze(-1))


def _dot(a: Value, b: Value) -> Value:
    return (a * b).total([0])


def eliminate(f: PrimeField, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a⁻¹b, and the LU factors of a in one matrix. There is no pivoting: arithmetic is exact."""
    n, factors, right = a.shape[-1], a.clone(), b.clone()
    for i in range(n):
        _inverse = f.inverse(factors[..., i, i])
        ratio = f.mul(factors[..., i + 1 :, i], _inverse.unsqueeze(-1)).unsqueeze(-1)
        right[..., i + 1 :, :] = f.sub(right[..., i + 1 :, :], f.mul(ratio, right[..., i : i + 1, :]))
        tail = f.sub(factors[..., i + 1 :, i:], f.mul(ratio, factors[..., i : i + 1, i:]))
        factors[..., i + 1 :, i:] = tail
        factors[..., i + 1 :, i] = ratio.squeeze(-1)
    return substitute(f, factors, right, is_upper=True), factors


def substitute(f: PrimeField, a: Tensor, b: Tensor, *, is_upper: bool, has_unit_diagonal: bool = False) -> Tensor:
    """a⁻¹b for a triangular a; the other triangle is not read."""
    shape = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, right = a.expand(*shape, *a.shape[-2:]), b.expand(*shape, *b.shape[-2:]).clone()
    n = a.shape[-1]
    for i in reversed(range(n)) if is_upper else range(n):
        if not has_unit_diagonal:
            right[..., i, :] = f.mul(right[..., i, :], f.inverse(a[..., i, i]).unsqueeze(-1))
        rest = slice(0, i) if is_upper else slice(i + 1, n)
        right[..., rest, :] = f.sub(right[..., rest, :], f.mul(a[..., rest, i : i + 1], right[..., i : i + 1, :]))
    return right


def _lu(f: PrimeField, a: Tensor) -> Tensor:
    return eliminate(f, a, torch.zeros_like(a))[1]


def _factors(f: PrimeField, a: Tensor, tangent: Tensor | None) -> Value:
    """The LU factors of a in one matrix: dl = l * lower(l⁻¹ da u⁻¹), du = upper(l⁻¹ da u⁻¹) * u."""
    factors = _lu(f, a)
    if tangent is None:
        return Value(f, factors)
    lower, upper = _unpacked(f, factors)
    left = substitute(f, factors, tangent, is_upper=False, has_unit_diagonal=True)
    turned = substitute(f, upper.transpose(-2, -1), left.transpose(-2, -1), is_upper=False)
    inner = turned.transpose(-2, -1)
    moved = f.add(f.matmul(lower, inner.tril(-1)).tril(-1), f.matmul(inner.triu(), upper).triu())
    return Value(f, factors, moved)


def _unpacked(f: PrimeField, factors: Tensor) -> tuple[Tensor, Tensor]:
    eye = torch.eye(factors.shape[-1], dtype=f.dtype, device=factors.device)
    return factors.tril(-1) + eye, factors.triu()


def _solve(a: Value, b: Value) -> Value:
    """x with ax = b; dx = a⁻¹(db - da x)."""
    f = a.field
    x = eliminate(f, a.element, b.element)[0]
    residual = _residual_tangent(a, b, x)
    return Value(f, x, None if residual is None else eliminate(f, a.element, residual)[0])


def _residual_tangent(a: Value, b: Value, x: Tensor) -> Tensor | None:
    f = a.field
    if a.tangent is None:
        return b.tangent
    moved = f.matmul(a.tangent, x)
    return f.reduced(-moved) if b.tangent is None else f.sub(b.tangent, moved)


def _identity_like(a: Value) -> Value:
    return Value(a.field, torch.eye(a.shape[-1], dtype=a.field.dtype).expand(a.shape))


def _inverse(a: Value) -> Value:
    return _solve(a, _identity_like(a))


def _info(a: Value) -> Value:
    return integers(a.field, torch.zeros(a.shape[:-2], dtype=torch.int64))


def _pivots(a: Value) -> Value:
    return integers(a.field, torch.arange(1, a.shape[-1] + 1).expand(a.shape[:-1]))


def _solve_ex(a: Value, b: Value, *, left: bool = True, check_errors: bool = False) -> tuple[Value, ...]:
    if b.element.dim() == 1 or b.shape == a.shape[:-1]:
        right = b.rearranged(lambda t: t.expand(a.shape[:-1]).unsqueeze(-1))
        solved = _solve(a, right).rearranged(lambda t: t.squeeze(-1))
    elif left:
        solved = _solve(a, b)
    else:
        solved = _transposed(_solve(_transposed(a), _transposed(b)))
    return solved, _factors(a.field, a.element, a.tangent), _pivots(a), _info(a)


def _lu_solve(lu: Value, pivots: Value, b: Value, *, left: bool = True, adjoint: bool = False) -> Value:
    if not left:
        return _transposed(_lu_solve(lu, pivots, _transposed(b), adjoint=not adjoint))
    f, a = lu.field, lu.element

    def solve(t: Tensor) -> Tensor:
        if adjoint:
            transposed = a.transpose(-2, -1)
            inner = substitute(f, transposed, t, is_upper=False)
            return substitute(f, transposed, inner, is_upper=True, has_unit_diagonal=True)
        inner = substitute(f, a, t, is_upper=False, has_unit_diagonal=True)
        return substitute(f, a, inner, is_upper=True)

    x = b.linear(solve)
    if lu.tangent is None:
        return x
    (lower, upper), (dl, du) = _unpacked(f, a), (lu.tangent.tril(-1), lu.tangent.triu())
    moved = f.add(f.matmul(dl, upper), f.matmul(lower, du))
    change = f.reduced(-solve(f.matmul(moved.transpose(-2, -1) if adjoint else moved, x.element)))
    return Value(f, x.element, change if x.tangent is None else f.add(x.tangent, change))


def _determinant(a: Value, *, is_contiguous: bool) -> tuple[Value, Value, Value]:
    """d det = det * trace(a⁻¹ da)."""
    f = a.field
    inverted, factors = eliminate(f, a.element, _identity_like(a).element)
    det = torch.ones(a.shape[:-2], dtype=f.dtype)
    for i in range(a.shape[-1]):
        det = f.mul(det, factors[..., i, i])
    tangent = None
    if a.tangent is not None:
        trace = f.reduced(f.matmul(inverted, a.tangent).diagonal(dim1=-2, dim2=-1).sum(-1))
        tangent = f.mul(det, trace)
    # Torch factorises the transpose of a contiguous matrix, and its derivatives rely on that.
    factored = _transposed(a) if is_contiguous else a
    return Value(f, det, tangent), _factors(f, factored.element, factored.tangent), _pivots(a)


def _log_determinant(a: Value, *, is_contiguous: bool) -> tuple[Value, Value, Value, Value]:
    """The sign of the determinant and the logarithm of its absolute value: d log|det| = trace(a⁻¹ da)."""
    det, factors, pivots = _determinant(a, is_contiguous=is_contiguous)
    sign = det.without_tangent().sgn()
    return sign, (det * sign).log(), factors, pivots


# The degree of the polynomial that stands for the exponential of a matrix.
_DEGREE = 12


def _matrix_exponential(a: Value) -> Value:
    """A polynomial with unknown coefficients: what torch's derivatives use holds for each power series alike.

    In real numbers it is the exponential itself.
    """
    f = a.field
    if isinstance(f, Reals):
        return Value(f, torch.linalg.matrix_exp(a.element), None if a.tangent is None else _differential(a))
    power = _identity_like(a)
    result = power * Value(f, f.unknown_function("matrix_exp", torch.tensor(0)))
    for n in range(1, _DEGREE + 1):
        power = power.matmul(a)
        result = result + power * Value(f, f.unknown_function("matrix_exp", torch.tensor(n)))
    return result


def _differential(a: Value) -> Tensor:
    """The derivative of the exponential along the tangent: a block of that of a larger matrix."""
    n, zero = a.shape[-1], torch.zeros_like(a.element)
    upper = torch.cat([a.element, a.element if a.tangent is None else a.tangent], -1)
    block = torch.cat([upper, torch.cat([zero, a.element], -1)], -2)
    return torch.linalg.matrix_exp(block)[..., :n, n:]


def _triangular(a: Value, b: Value, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Value:
    """x with ax = b, or with xa = b; only one triangle of a and da is read."""
    if not left:
        return _transposed(_triangular(_transposed(a), _transposed(b), upper=not upper, unitriangular=unitriangular))
    f = a.field
    triangle = a.linear((lambda t: t.triu(int(unitriangular))) if upper else (lambda t: t.tril(-int(unitriangular))))
    solve = lambda t: substitute(f, a.element, t, is_upper=upper, has_unit_diagonal=unitriangular)  # noqa: E731
    x = solve(b.element)
    residual = _residual_tangent(triangle, b, x)
    return Value(f, x, None if residual is None else solve(residual))


def _cholesky(a: Value, *, upper: bool = False, check_errors: bool = False) -> tuple[Value, Value]:
    """The lower factor l; dl = l * lower(l⁻¹ da l⁻ᵀ), with the diagonal halved."""
    if upper:
        raise UnsupportedError("linalg_cholesky with upper=True")
    f, n = a.field, a.shape[-1]
    lower = torch.zeros_like(a.element)
    for i in range(n):
        done = f.matmul(lower[..., :, :i], lower[..., i : i + 1, :i].transpose(-2, -1)).squeeze(-1)
        column = f.sub(a.element[..., :, i], done)
        root = f.unknown_function("sqrt", column[..., i])
        lower[..., i:, i] = f.mul(column, f.inverse(root).unsqueeze(-1))[..., i:]
        lower[..., i, i] = root
    if a.tangent is None:
        return Value(f, lower), _info(a)
    left = substitute(f, lower, a.tangent, is_upper=False)
    both = substitute(f, lower, left.transpose(-2, -1), is_upper=False).transpose(-2, -1)
    half = f.constant(0.5)
    inner = f.add(both.tril(-1), f.mul(both.diagonal(dim1=-2, dim2=-1), half).diag_embed())
    return Value(f, lower, f.matmul(lower, inner)), _info(a)


# The rules of these take an argument `is_contiguous`: whether their first operand is.
NEEDS_LAYOUT = frozenset({"_linalg_det", "_linalg_slogdet"})
RULES: dict[str, Callable[..., Any]] = {
    "mm": lambda a, b: a.matmul(b),
    "bmm": lambda a, b: a.matmul(b),
    "matmul": lambda a, b: a.matmul(b),
    "addmm": _addmm,
    "baddbmm": _addmm,
    "mv": _mv,
    "dot": _dot,
    "linalg_inv_ex": lambda a, check_errors=False: (_inverse(a), _info(a)),
    "_linalg_solve_ex": _solve_ex,
    "linalg_lu_solve": _lu_solve,
    "_linalg_det": _determinant,
    "_linalg_slogdet": _log_determinant,
    "linalg_solve_triangular": _triangular,
    "linalg_matrix_exp": _matrix_exponential,
    "linalg_cholesky_ex": _cholesky,
    "_linalg_check_errors": lambda *_, **__: None,
}
