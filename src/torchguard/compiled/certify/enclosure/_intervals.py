"""What torch makes of an operand before it computes: a value of the dtype it computes in.

Rounding to nearest never turns the order of two numbers, so that the bounds of a converted number are the converted
bounds, exactly.

Intervals that hold what a graph computes, its rounding errors included.

Bounds are kept in float64. Each rule bounds the exact result, and the bound is then moved outward by what the graph's
own dtype may have rounded, and by what we have rounded ourselves.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# How many units in the last place an elementary function of torch may be off. Its own libraries promise one to four.
SLACK = 16
_OWN_ERROR = 2.0**-50
# From here on a float64 does not hold every integer.
INTEGERS_END = 2**53


class UnboundedError(Exception):
    """No finite bounds follow: the claim is inconclusive, and says this."""


@dataclass(frozen=True)
class Interval:
    """Lower and upper bounds of the elements of a tensor, and the dtype they are computed in.

    Bounds of integers and booleans are the numbers themselves, and equal where the value is known.
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

    def arranged(self, map_: Callable[[Tensor], Tensor]) -> "Interval":
        """A map that only moves, repeats or drops elements."""
        return Interval(map_(self.low), map_(self.high), self.dtype)


def unit(dtype: torch.dtype) -> float:
    """How much rounding to a dtype changes a number at most, relatively."""
    if dtype not in (torch.float32, torch.float64):
        raise UnboundedError(f"arithmetic in {dtype}")
    return torch.finfo(dtype).eps / 2


def accumulated(dtype: torch.dtype, terms: int) -> float:
    """The relative error of adding up products of a dtype, in any order, fused or not, by torch and then by us."""
    error = (terms + 2) * (unit(dtype) + 4 * unit(torch.float64))
    if error >= 0.5:
        raise UnboundedError(f"a sum of {terms} terms in {dtype}")
    return error / (1 - error)


def bounded(low: Tensor, high: Tensor, dtype: torch.dtype) -> Interval:
    """The bounds of given numbers of a dtype, as float64 holds them."""
    if dtype.is_complex:
        raise UnboundedError("complex numbers")
    both = Interval(low.to(torch.float64), high.to(torch.float64), dtype)
    return both if dtype.is_floating_point else whole(both.low, both.high, dtype)


def known(values: Tensor) -> Interval:
    """An interval of one point."""
    return bounded(values, values, values.dtype)


def whole(low: Tensor, high: Tensor, dtype: torch.dtype) -> Interval:
    """Bounds of integers or booleans. They are exact, unless they wrap around."""
    least, most = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    least, most = max(least, 1 - INTEGERS_END), min(most, INTEGERS_END - 1)
    if not bool(((low >= least) & (high <= most)).all()):
        raise UnboundedError(f"integers that may leave {dtype}, or reach 2**53")
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
        slack: an absolute error on top. Without any, rounding leaves the sign as it is.
        through: how large what is computed on the way may get. It must not overflow either.
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


def settled(low: Tensor, high: Tensor, dtype: torch.dtype, ulps: float = 1) -> Interval:
    """Bounds of a computed result of any dtype: floats are rounded, integers are not."""
    return rounded(low, high, dtype, ulps) if dtype.is_floating_point else whole(low, high, dtype)


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
