"""`type_cast[dtype](t)`: a cast that returns an error where it would change values."""

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from torchguard.exceptions import AnnotationError, CastError, CastOverflowError, LossyCastError
from torchguard.flags import require_boundary
from torchguard.result import Err, Ok, Result
from torchguard.typing._dtypes import DTYPES, ERROR, DType, dtype_of

Where = Bool[Tensor, "..."]
_QUANTIZED = (torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4)


class Cast:
    """A cast to one dtype."""

    def __init__(self, dtype: DType) -> None:
        self.name = dtype.name
        self.dtype = torch.int64 if dtype is ERROR else next(iter(dtype.members))
        if self.dtype in _QUANTIZED:
            raise AnnotationError(f"{self!r}: a quantized tensor has a scale. Use torch.quantize_per_tensor.")
        if not any(self.dtype in known.members for known in DTYPES.values()):
            raise AnnotationError(f"{self!r}: torch casts to {self.dtype} only in parts. Use another dtype.")

    def __call__(self, tensor: Tensor, *, rounding: bool = False) -> Result[Tensor, CastError]:
        """`Ok` with the tensor in that dtype, `Err` if any value would change. Waits for the device.

        Args:
            rounding: allow values to be rounded to the nearest float; values out of range are an error nevertheless.
        """
        require_boundary("type_cast", "t.to(dtype)")
        if not isinstance(tensor, Tensor):
            return Err(CastError(f"{self!r}: got a {type(tensor).__name__}. Give a tensor."))
        if tensor.is_quantized:
            return Err(CastError(f"{self!r}: got a {tensor.dtype} tensor. Dequantize it first."))
        if tensor.is_meta or tensor.layout != torch.strided:
            kind = "meta" if tensor.is_meta else tensor.layout
            return Err(CastError(f"{self!r}: got a {kind} tensor. Give one that holds its values."))
        if tensor.dtype == self.dtype:
            return Ok(tensor)
        values = tensor.detach()
        if values.is_complex() and not self.dtype.is_complex:
            if (imaginary := values.imag != 0).any():
                return Err(LossyCastError(self._message(values, imaginary, "have an imaginary part")))
            tensor, values = tensor.real, values.real
        parts = torch.view_as_real(values) if values.is_complex() else values
        kind = self.dtype.to_real() if self.dtype.is_complex else self.dtype
        outside, changed = _to_floats(parts, kind) if kind.is_floating_point else _to_integers(parts, kind)
        if outside.any():
            return Err(CastOverflowError(self._message(parts, outside, f"are outside of {_range(kind)}")))
        if changed.any() and not (rounding and kind.is_floating_point):
            return Err(LossyCastError(self._message(parts, changed, "cannot be represented exactly")))
        return Ok(tensor.to(self.dtype))

    def _message(self, values: Tensor, where: Where, what: str) -> str:
        index = tuple(where.nonzero()[0].tolist())
        count, first = f"{int(where.sum())} of {where.numel()}", values[index].item()
        return f"{self!r}: {count} values {what}, the first {first} at {index}."

    def __repr__(self) -> str:
        return f"type_cast[{self.name}]"


class _Casts:
    """`type_cast[float32_t]` is the cast to float32.

    >>> from torchguard.typing import float32_t, int8_t, type_cast
    >>> type_cast[float32_t](torch.tensor([1, 2])).unwrap()
    tensor([1., 2.])
    >>> type_cast[int8_t](torch.tensor([1, 300])).unwrap_err()
    CastOverflowError('type_cast[int8_t]: 1 of 2 values are outside of -128 to 127, the first 300 at (1,).')
    """

    def __getitem__(self, dtype: Any) -> Cast:
        return Cast(dtype_of(dtype))


type_cast = _Casts()


def _range(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "0 to 1"
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return f"{limits.min} to {limits.max}"


def _bounds(dtype: torch.dtype) -> tuple[int, int]:
    """The smallest integer, and the largest plus one: a power of two, which a float represents exactly."""
    return (0, 2) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max + 1)


def _to_integers(values: Tensor, dtype: torch.dtype) -> tuple[Where, Where]:
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


def _to_floats(values: Tensor, dtype: torch.dtype) -> tuple[Where, Where]:
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
