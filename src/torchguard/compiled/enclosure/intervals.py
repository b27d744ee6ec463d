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
    return torch.finfo(dtype).eps / 2


def accumulated(dtype: torch.dtype, terms: int) -> float:
    """The relative error of adding up products of a dtype, in any order, fused or not."""
    error = (terms + 2) * max(unit(dtype), unit(torch.float64))
    if error >= 0.5:
        raise UnboundedError(f"a sum of {terms} terms in {dtype}")
    return error / (1 - error)


def known(values: Tensor) -> Interval:
    """An interval of one point."""
    exact = values.to(torch.float64)
    return Interval(exact, exact, values.dtype)


def rounded(low: Tensor, high: Tensor, dtype: torch.dtype, ulps: float = 1, slack: Tensor | float = 0.0) -> Interval:
    """Bounds of a computed result, given those of the exact one.

    `slack` is an absolute error on top. Without any, rounding leaves the sign as it is.
    """
    has_slack = isinstance(slack, Tensor) or slack != 0
    floor, ceiling = (low >= 0) & (not has_slack), (high <= 0) & (not has_slack)
    if dtype in (torch.float16, torch.bfloat16):
        ulps = ulps + SLACK  # computed in float32, and rounded twice
    relative = ulps * unit(dtype) * 2 + _OWN_ERROR
    tiny = torch.finfo(dtype).tiny
    low = torch.nextafter(low - low.abs() * relative - slack - tiny, torch.tensor(-torch.inf, dtype=torch.float64))
    high = torch.nextafter(high + high.abs() * relative + slack + tiny, torch.tensor(torch.inf, dtype=torch.float64))
    low, high = torch.where(floor, low.clamp(min=0), low), torch.where(ceiling, high.clamp(max=0), high)
    largest = torch.finfo(dtype).max
    if not bool(((low >= -largest) & (high <= largest)).all()):
        raise UnboundedError(f"a result that may not be finite in {dtype}")
    return Interval(low, high, dtype)
