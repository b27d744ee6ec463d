"""Operators on complex numbers and Fourier transforms, defined by operators on real numbers.

A complex tensor is a pair of real ones. Fourier transforms are products with matrices of cosines and sines, of angles
between 0 and half a turn: so the symmetries of both functions hold exactly, whatever a layer knows about them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchguard.compiled.certify._definitions import UndefinedCallError

# Longer transforms would take matrices of more than this size squared.
_MAX_LENGTH = 512
_BY_ROOT, _BY_SIZE = 1, 2  # the normalisations of a transform


@dataclass(frozen=True)
class Complex:
    """The real and the imaginary parts of a tensor."""

    real: Tensor
    imag: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> "Complex":
        return Complex(function(self.real), function(self.imag))


def _pair(x: Any, like: Tensor) -> Complex:
    if isinstance(x, Complex):
        return x
    if isinstance(x, Tensor):
        return Complex(x.to(like.dtype), torch.zeros_like(x, dtype=like.dtype))
    number = complex(x)
    return Complex(torch.full((), number.real, dtype=like.dtype), torch.full((), number.imag, dtype=like.dtype))


def _pairs(*operands: Any) -> list[Complex]:
    """Operands as pairs, in the precision of the complex ones, or of the real ones beside a complex number."""
    parts = [x.real for x in operands if isinstance(x, Complex)]
    parts += [x for x in operands if isinstance(x, Tensor) and x.is_floating_point()]
    if not parts:
        raise UndefinedCallError
    return [_pair(x, parts[0]) for x in operands]


def _add(a: Any, b: Any, *, alpha: float = 1) -> Complex:
    x, y = _pairs(a, b)
    return Complex(x.real + alpha * y.real, x.imag + alpha * y.imag)


def _mul(a: Any, b: Any) -> Complex:
    x, y = _pairs(a, b)
    return Complex(x.real * y.real - x.imag * y.imag, x.real * y.imag + x.imag * y.real)


def _conj(x: Complex) -> Complex:
    return Complex(x.real.clone(), -x.imag)


def _reciprocal(x: Complex) -> Complex:
    square = x.real * x.real + x.imag * x.imag
    return Complex(x.real / square, -x.imag / square)


def _div(a: Any, b: Any) -> Complex:
    x, y = _pairs(a, b)
    return _mul(x, _reciprocal(y))


def _pow(x: Any, n: Any) -> Complex:
    if not isinstance(x, Complex) or not isinstance(n, int | float) or not float(n).is_integer() or abs(n) > 16:
        raise UndefinedCallError
    result = x.map(torch.zeros_like)
    result = Complex(result.real + 1, result.imag)
    for _ in range(abs(int(n))):
        result = _mul(result, x)
    return result if n >= 0 else _reciprocal(result)


def _eq(a: Any, b: Any) -> Tensor:
    x, y = _pairs(a, b)
    return (x.real == y.real) & (x.imag == y.imag)


def _exp(x: Complex) -> Complex:
    size = x.real.exp()
    return Complex(size * x.imag.cos(), size * x.imag.sin())


def _abs(x: Complex) -> Tensor:
    return (x.real * x.real + x.imag * x.imag).sqrt()


def _sgn(x: Complex) -> Complex:
    """x / |x|. At 0, where the derivative of |x| divides by zero, nothing is claimed."""
    size = _abs(x)
    return x.map(lambda t: t / size)


def _polar(size: Tensor, angle: Tensor) -> Complex:
    """Torch's gradients hold for a size that is not negative; elsewhere the result counts as undefined."""
    size = torch.where(size < 0, math.nan, size)
    return Complex(size * angle.cos(), size * angle.sin())


def _matmul(a: Any, b: Any) -> Complex:
    x, y = _pairs(a, b)
    return Complex(x.real @ y.real - x.imag @ y.imag, x.real @ y.imag + x.imag @ y.real)


def _to_copy(x: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    if isinstance(x, Complex):
        if dtype is not None and not dtype.is_complex:
            return x.real.to(dtype)
        return x if dtype is None else x.map(lambda t: t.to(dtype.to_real()))
    return Complex(x.to(dtype.to_real()), torch.zeros_like(x, dtype=dtype.to_real()))  # type: ignore[union-attr]


def _created(function: Callable[..., Tensor]) -> Callable[..., Complex]:
    """Zeros of a complex dtype, or ones."""

    def create(x: Any, *args: Any, dtype: torch.dtype | None = None, **_: Any) -> Complex:
        like = x.real if isinstance(x, Complex) else x
        options = {} if dtype is None else {"dtype": dtype.to_real()}
        made = function(like, *args, **options)
        return Complex(made, torch.zeros_like(made))

    return create


def _full(sizes: Sequence[int], number: complex, *, dtype: torch.dtype, **_: Any) -> Complex:
    parts = (
        torch.full(tuple(sizes), part, dtype=dtype.to_real()) for part in (complex(number).real, complex(number).imag)
    )
    return Complex(*parts)


def _where(condition: Tensor, a: Any, b: Any) -> Complex:
    x, y = _pairs(a, b)
    return Complex(torch.where(condition, x.real, y.real), torch.where(condition, x.imag, y.imag))


def _cat(values: Sequence[Any], dim: int = 0) -> Complex:
    pairs = _pairs(*values)
    return Complex(torch.cat([x.real for x in pairs], dim), torch.cat([x.imag for x in pairs], dim))


# Fourier transforms


def _waves(rows: int, columns: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos(2πjk/n) and sin(2πjk/n)."""
    if n > _MAX_LENGTH:
        raise UndefinedCallError
    turns = (torch.arange(rows).unsqueeze(1) * torch.arange(columns)) % n
    folded = torch.minimum(turns, n - turns)
    angle = folded.to(dtype) * (2 * math.pi / n)
    is_half, is_zero = 2 * folded == n, folded == 0
    cos = torch.where(is_zero, 1.0, torch.where(is_half, -1.0, angle.cos()))
    sin = torch.where(is_zero | is_half, 0.0, torch.where(2 * turns > n, -angle.sin(), angle.sin()))
    return cos, sin


def _along(dim: int, x: Tensor, matrix: Tensor) -> Tensor:
    return (x.movedim(dim, -1).unsqueeze(-2) @ matrix).squeeze(-2).movedim(-1, dim)


def _transform(x: Complex, dim: int, sign: int) -> Complex:
    """Sums over j of x[j] exp(sign · 2πi jk / n)."""
    n = x.real.shape[dim]
    cos, sin = _waves(n, n, n, x.real.dtype)
    sin = sin * sign
    return Complex(
        _along(dim, x.real, cos) - _along(dim, x.imag, sin), _along(dim, x.real, sin) + _along(dim, x.imag, cos)
    )


def _scaled(x: Any, count: int, normalization: int) -> Any:
    factor = {_BY_ROOT: 1 / math.sqrt(count), _BY_SIZE: 1 / count}.get(normalization)
    if factor is None:
        return x
    return x.map(lambda t: t * factor) if isinstance(x, Complex) else x * factor


def _count(shape: Sequence[int], dims: Sequence[int]) -> int:
    return math.prod(shape[d] for d in dims)


def _fft_c2c(x: Complex, dims: Sequence[int], normalization: int, forward: bool) -> Complex:
    count = _count(x.real.shape, dims)
    for dim in dims:
        x = _transform(x, dim, -1 if forward else 1)
    return _scaled(x, count, normalization)


def _fft_r2c(x: Tensor, dims: Sequence[int], normalization: int, onesided: bool) -> Complex:
    count, last = _count(x.shape, dims), dims[-1]
    n = x.shape[last]
    cos, sin = _waves(n, n // 2 + 1 if onesided else n, n, x.dtype)
    result = Complex(_along(last, x, cos), -_along(last, x, sin))
    for dim in dims[:-1]:
        result = _transform(result, dim, -1)
    return _scaled(result, count, normalization)


def _fft_c2r(x: Complex, dims: Sequence[int], normalization: int, size: int) -> Tensor:
    """The coefficients from the middle on are the conjugates of those before, and are not read."""
    last = dims[-1]
    count = _count(x.real.shape, dims[:-1]) * size
    for dim in dims[:-1]:
        x = _transform(x, dim, 1)
    terms = size // 2 + 1
    x = x.map(lambda t: t.narrow(last, 0, terms))
    cos, sin = _waves(terms, size, size, x.real.dtype)
    k = torch.arange(terms).unsqueeze(1)
    weight = torch.where((k == 0) | (2 * k == size), 1.0, 2.0).to(x.real.dtype)
    return _scaled(_along(last, x.real, cos * weight) - _along(last, x.imag, sin * weight), count, normalization)


OPERATORS: dict[str, Callable[..., Any]] = {
    "complex": Complex,
    "polar": _polar,
    "view_as_real": lambda x: torch.stack([x.real, x.imag], -1),
    "view_as_complex": lambda x: Complex(x.select(-1, 0).clone(), x.select(-1, 1).clone()),
    "real": lambda x: x.real.clone(),
    "imag": lambda x: x.imag.clone(),
    "add": _add,
    "sub": lambda a, b, alpha=1: _add(a, b, alpha=-alpha),
    **dict.fromkeys(("neg", "_neg_view"), lambda x: x.map(torch.neg)),
    "mul": _mul,
    "div": _div,
    "reciprocal": _reciprocal,
    "pow": _pow,
    "square": lambda x: _mul(x, x),
    "exp": _exp,
    "eq": _eq,
    "ne": lambda a, b: ~_eq(a, b),
    "abs": _abs,
    "sgn": _sgn,
    "angle": lambda x: torch.atan2(x.imag, x.real),
    **dict.fromkeys(("_conj", "_conj_physical", "conj_physical"), _conj),
    **dict.fromkeys(("mm", "bmm", "matmul"), _matmul),
    "_to_copy": _to_copy,
    "where": _where,
    "masked_fill": lambda x, mask, value: _where(mask, value, x),
    "cat": _cat,
    "full": _full,
    "scalar_tensor": lambda number, **options: _full((), number, **options),
    "zeros": lambda sizes, **options: _full(sizes, 0, **options),
    "zeros_like": _created(torch.zeros_like),
    "ones_like": _created(torch.ones_like),
    "new_zeros": _created(lambda x, sizes, **options: x.new_zeros(sizes, **options)),
    "_fft_c2c": _fft_c2c,
    "_fft_r2c": _fft_r2c,
    "_fft_c2r": _fft_c2r,
}
# The operators that treat both parts alike: they are applied to each.
_BY_PARTS = frozenset(
    ("view", "reshape", "_unsafe_view", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "select")
    + ("slice", "diagonal", "flip", "roll", "repeat", "clone", "alias", "detach", "contiguous", "sum", "mean", "cumsum")
    + ("index", "gather", "index_select", "slice_backward", "select_backward", "constant_pad_nd", "resolve_conj")
    + ("lift_fresh", "unfold", "tril", "triu", "diag_embed", "as_strided")
)
# The operators that write one tensor into another: they are applied to the parts of both.
_WRITES = frozenset(("slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter", "copy"))


def _zipped(a: Complex, b: Complex) -> list[tuple[Tensor, Tensor]]:
    return [(a.real, b.real), (a.imag, b.imag)]


def run(name: str, target: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Any:
    """What an operator computes of pairs."""
    if name in OPERATORS:
        return OPERATORS[name](*args, **options)
    if name in _WRITES:
        base, part = _pairs(*args[:2])
        return Complex(*(target(*both, *args[2:], **options) for both in _zipped(base, part)))
    if name not in _BY_PARTS or not isinstance(args[0], Complex):
        raise UndefinedCallError
    return args[0].map(lambda t: target(t, *args[1:], **options))
