"""Which values a dtype can hold: of a number, and element by element of a tensor."""

import math

import torch
from jaxtyping import Bool
from torch import Tensor

Where = Bool[Tensor, "..."]
Number = int | float | complex

_WITHOUT_INF = {
    dtype
    for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2")
    if (dtype := getattr(torch, name, None)) is not None
}
_POSITIVE_ONLY = getattr(torch, "float8_e8m0fnu", None)  # powers of two: neither zero nor a sign
# Not `dtype.to_real()`, which Dynamo cannot trace.
_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


def holds_inf(dtype: torch.dtype) -> bool:
    """Whether a dtype has Inf."""
    return (dtype.is_floating_point or dtype.is_complex) and dtype not in _WITHOUT_INF


def holds(dtype: torch.dtype, value: Number) -> bool:
    """Whether a dtype has this number, or one that it rounds to; an integer dtype has to have it exactly.

    >>> holds(torch.uint8, 256), holds(torch.int64, 0.5), holds(torch.float16, 1e6), holds(torch.bfloat16, 0.1)
    (False, False, False, True)
    """
    if isinstance(value, complex):
        return dtype.is_complex and holds(_REAL[dtype], value.real) and holds(_REAL[dtype], value.imag)
    if dtype.is_complex:
        return holds(_REAL[dtype], value)
    if dtype.is_floating_point:
        # Comparisons alone, as `value` may be a symbol of a graph, which math.isnan cannot take.
        limits = torch.finfo(dtype)
        if (limits.smallest_normal if dtype == _POSITIVE_ONLY else limits.min) <= value <= limits.max:
            return True
        is_inf = value == math.inf or value == -math.inf
        return value != value or (is_inf and holds_inf(dtype))
    low, end = _bounds(dtype)
    return low <= value < end and value == int(value)


def is_wider(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether `dtype` holds every value of `other`, rounded where it is a float."""
    if dtype == other or other == torch.bool:
        return True
    if dtype.is_complex:
        return is_wider(_REAL[dtype], _REAL[other] if other.is_complex else other)
    if other.is_complex or (other.is_floating_point and not dtype.is_floating_point) or dtype == torch.bool:
        return False
    if other.is_floating_point:
        fits = torch.finfo(other).max <= torch.finfo(dtype).max and dtype != _POSITIVE_ONLY
        return fits and (holds_inf(dtype) or not holds_inf(other))
    limits = torch.iinfo(other)
    return holds(dtype, limits.min) and holds(dtype, limits.max)


def lost(values: Tensor, dtype: torch.dtype) -> Where:
    """True where a dtype cannot hold a value: it is out of range, or not an integer where the dtype has no others."""
    if values.is_complex():
        return lost(torch.view_as_real(values.resolve_conj()), _REAL[dtype]).any(-1)
    kind = _REAL[dtype] if dtype.is_complex else dtype
    if kind.is_floating_point:
        return to_floats(values, kind)[0]
    outside, changed = to_integers(values, kind)
    return outside | changed


def range_of(dtype: torch.dtype) -> str:
    """The smallest and the largest value of a dtype, as text."""
    if dtype == torch.bool:
        return "0 to 1"
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return f"{limits.min} to {limits.max}"


def _bounds(dtype: torch.dtype) -> tuple[int, int]:
    """The smallest integer, and the largest plus one: a power of two, which a float represents exactly."""
    return (0, 2) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max + 1)


def to_integers(values: Tensor, dtype: torch.dtype) -> tuple[Where, Where]:
    """Masks of values outside of the range of an integer dtype, and of values that are not integers."""
    low, end = _bounds(dtype)
    if values.is_floating_point():
        exact = values.to(torch.float64)
        return ~((exact >= low) & (exact.ceil() < float(end))), exact != exact.trunc()
    whole = values.to(torch.int64)
    outside = (whole < low) | (whole > min(end - 1, torch.iinfo(torch.int64).max))
    if values.dtype == torch.uint64:  # values from 2**63 up are negative as int64
        outside |= whole < 0
    return outside, torch.zeros_like(outside)


def to_floats(values: Tensor, dtype: torch.dtype) -> tuple[Where, Where]:
    """Masks of values outside of the range of a float dtype, and of values that it cannot represent."""
    cast = values.to(dtype).to(torch.float64)
    largest = torch.finfo(dtype).max
    if values.is_floating_point():
        exact = values.to(torch.float64)
        changed = (cast != exact) & ~exact.isnan()
        return changed & (exact.abs() > largest), changed
    low, end = _bounds(values.dtype)
    held = (cast >= low) & (cast < float(end))
    back = torch.where(held, cast, 0).to(values.dtype).to(torch.int64)
    return values.to(torch.float64).abs() > largest, ~held | (back != values.to(torch.int64))
