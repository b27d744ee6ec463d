"""Intervals that contain what a graph computes, rounding errors included.

Bounds are float64. A rule bounds the exact result; `rounded` then moves the bounds outward by the rounding error of the
graph's dtype, and by that of the rule's own float64 arithmetic.

Before torch computes, it converts operands to the dtype of the computation. Rounding to nearest is monotonic, so the
bounds of a converted number are exactly the converted bounds.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# The error allowed for an elementary function of torch, in units in the last place. Its libraries promise one to four.
SLACK = 16
_OWN_ERROR = 2.0**-50
# The first integer from which on float64 does not represent every integer.
MAX_INTEGER = 2**53


class UnboundedError(Exception):
    """An operator has no finite bounds here: the claim is inconclusive, with this message."""


@dataclass(frozen=True)
class Interval:
    """Lower and upper bounds of the elements of a tensor, and the dtype they are computed in.

    Bounds of integers and booleans are exact, and equal where the value is known.
    """

    low: Tensor
    high: Tensor
    dtype: torch.dtype

    @property
    def is_known(self) -> bool:
        return bool((self.low == self.high).all())

    @property
    def size(self) -> Tensor:
        """The largest absolute value of each element."""
        return torch.maximum(self.low.abs(), self.high.abs())

    def rearranged(self, map_: Callable[[Tensor], Tensor]) -> "Interval":
        """The result of an operator that only moves, repeats or drops elements."""
        return Interval(map_(self.low), map_(self.high), self.dtype)


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of rounding to a dtype: half the machine epsilon."""
    if dtype not in (torch.float32, torch.float64):
        raise UnboundedError(f"arithmetic in {dtype}")
    return torch.finfo(dtype).eps / 2


def accumulated(dtype: torch.dtype, terms: int) -> float:
    """The relative error of a sum of products, in any order, fused or not, by torch and by float64 here."""
    error = (terms + 2) * (unit(dtype) + 4 * unit(torch.float64))
    if error >= 0.5:
        raise UnboundedError(f"a sum of {terms} terms in {dtype}")
    return error / (1 - error)


def bounded(low: Tensor, high: Tensor, dtype: torch.dtype) -> Interval:
    """The interval between given bounds, for a tensor of a dtype."""
    if dtype.is_complex:
        raise UnboundedError("complex numbers")
    both = Interval(low.to(torch.float64), high.to(torch.float64), dtype)
    return both if dtype.is_floating_point else integers(both.low, both.high, dtype)


def known(values: Tensor) -> Interval:
    """The interval that holds one tensor."""
    return bounded(values, values, values.dtype)


def integers(low: Tensor, high: Tensor, dtype: torch.dtype) -> Interval:
    """Bounds of integers or booleans, which are exact unless they overflow and wrap around."""
    least, most = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    least, most = max(least, 1 - MAX_INTEGER), min(most, MAX_INTEGER - 1)
    if not bool(((low >= least) & (high <= most)).all()):
        raise UnboundedError(f"integers that may overflow {dtype}, or reach 2**53")
    return Interval(low, high, dtype)


def rounded(
    low: Tensor,
    high: Tensor,
    dtype: torch.dtype,
    ulps: float = 1,
    slack: Tensor | float = 0.0,
    through: Tensor | float = 0.0,
) -> Interval:
    """Bounds of a computed result, given those of the exact one.

    Args:
        slack: an additional absolute error. Without one, rounding cannot change the sign.
        through: the largest absolute value of intermediate results, which must not overflow either.
    """
    has_slack = isinstance(slack, Tensor) or slack != 0
    floor, ceiling = (low >= 0) & (not has_slack), (high <= 0) & (not has_slack)
    relative = ulps * unit(dtype) * 2 + _OWN_ERROR
    tiny, largest = torch.finfo(dtype).tiny, torch.finfo(dtype).max
    low = torch.nextafter(low - low.abs() * relative - slack - tiny, torch.tensor(-torch.inf, dtype=torch.float64))
    high = torch.nextafter(high + high.abs() * relative + slack + tiny, torch.tensor(torch.inf, dtype=torch.float64))
    low, high = torch.where(floor, low.clamp(min=0), low), torch.where(ceiling, high.clamp(max=0), high)
    is_finite = (low >= -largest) & (high <= largest) & (torch.as_tensor(through) <= largest)
    if not bool(is_finite.all()):
        raise UnboundedError(f"a result that may not be finite in {dtype}")
    return Interval(low, high, dtype)


def computed(low: Tensor, high: Tensor, dtype: torch.dtype, ulps: float = 1) -> Interval:
    """Bounds of a computed result of any dtype: floating-point results are rounded, integers are not."""
    return rounded(low, high, dtype, ulps) if dtype.is_floating_point else integers(low, high, dtype)


Operand = Interval | bool | int | float


def converted(x: Operand, dtype: torch.dtype) -> Interval:
    """An operand converted to a dtype: in float32, 0.1 is another number, and 2**24 + 1 does not exist."""
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
        return integers(x.low, x.high, dtype)
    if dtype not in (torch.float32, torch.float64):
        raise UnboundedError(f"a conversion to {dtype}")
    return Interval(_round_to(x.low, dtype), _round_to(x.high, dtype), dtype)


def common_dtype(a: Operand, b: Operand) -> torch.dtype:
    """The dtype in which torch compares two operands."""
    first, second = (
        torch.empty(x.low.shape, dtype=x.dtype, device="meta") if isinstance(x, Interval) else x for x in (a, b)
    )
    return torch.result_type(first, second)


def _number(x: float) -> Interval:
    """A Python number as the scalar tensor that torch converts it to."""
    if math.isnan(x) or (isinstance(x, int) and abs(x) >= MAX_INTEGER):
        raise UnboundedError(f"the number {x}")
    value = torch.tensor(float(x), dtype=torch.float64)
    dtype = torch.bool if isinstance(x, bool) else torch.int64 if isinstance(x, int) else torch.float64
    return Interval(value, value, dtype)


def _round_to(bound: Tensor, dtype: torch.dtype) -> Tensor:
    result = bound.to(dtype).to(torch.float64)
    if bool((result.isinf() & ~bound.isinf()).any()):
        raise UnboundedError(f"a number that may not be finite in {dtype}")
    return result
