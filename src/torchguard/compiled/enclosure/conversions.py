"""What torch makes of an operand before it computes: a value of the dtype it computes in.

Rounding to nearest never turns the order of two numbers, so that the bounds of a converted number are the converted
bounds, exactly.
"""

import math

import torch
from torch import Tensor

from torchguard.compiled.enclosure.intervals import INTEGERS_END, Interval, UnboundedError, whole

Operand = Interval | bool | int | float


def converted(x: Operand, dtype: torch.dtype) -> Interval:
    """An operand in a dtype: 0.1 is not 0.1 in float32, and 2**24 + 1 is not there at all."""
    if not isinstance(x, Interval):
        return converted(_number(x), dtype)
    if x.dtype == dtype:
        return x
    if dtype == torch.bool:
        is_surely, is_maybe = (x.low > 0) | (x.high < 0), (x.low != 0) | (x.high != 0)
        return Interval(is_surely.to(torch.float64), is_maybe.to(torch.float64), dtype)
    if not dtype.is_floating_point:
        if x.dtype.is_floating_point:
            raise UnboundedError(f"a conversion from {x.dtype} to {dtype}")
        return whole(x.low, x.high, dtype)
    if dtype not in (torch.float32, torch.float64):
        raise UnboundedError(f"a conversion to {dtype}")
    return Interval(_stored(x.low, dtype), _stored(x.high, dtype), dtype)


def common_dtype(a: Operand, b: Operand) -> torch.dtype:
    """The dtype in which torch compares two operands."""
    first, second = (
        torch.empty(x.low.shape, dtype=x.dtype, device="meta") if isinstance(x, Interval) else x for x in (a, b)
    )
    return torch.result_type(first, second)


def _number(x: float) -> Interval:
    """A number of Python as the tensor without dimensions that torch takes it for."""
    if math.isnan(x) or (isinstance(x, int) and abs(x) >= INTEGERS_END):
        raise UnboundedError(f"the number {x}")
    value = torch.tensor(float(x), dtype=torch.float64)
    dtype = torch.bool if isinstance(x, bool) else torch.int64 if isinstance(x, int) else torch.float64
    return Interval(value, value, dtype)


def _stored(bound: Tensor, dtype: torch.dtype) -> Tensor:
    stored = bound.to(dtype).to(torch.float64)
    if bool((stored.isinf() & ~bound.isinf()).any()):
        raise UnboundedError(f"a number that may not be finite in {dtype}")
    return stored
