"""Intervals that hold what a graph computes, its rounding errors included.

Bounds are kept in float64. Each rule bounds the exact result, and the bound is then moved outward by what the graph's
own dtype may have rounded, and by what we have rounded ourselves.
"""

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
