"""`type_cast[dtype](t)`: a cast that returns an error where it would change values."""

from typing import Any

import torch
from torch import Tensor

from torchguard._casts import Where, range_of, to_floats, to_integers
from torchguard.exceptions import AnnotationError, CastError, CastOverflowError, LossyCastError
from torchguard.flags import require_boundary
from torchguard.result import Err, Ok, Result
from torchguard.typing._dtypes import DTYPES, ERROR, DType, dtype_of

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
        outside, changed = to_floats(parts, kind) if kind.is_floating_point else to_integers(parts, kind)
        if outside.any():
            return Err(CastOverflowError(self._message(parts, outside, f"are outside of {range_of(kind)}")))
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
