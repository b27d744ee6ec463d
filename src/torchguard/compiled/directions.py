"""Tangents and seeds: what a derivative is applied to, checked and laid out as its code takes it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchguard.compiled.leaves import LeafType, check_all
from torchguard.compiled.nesting import Nest
from torchguard.exceptions import LeafTypeError


@dataclass(frozen=True)
class Directions:
    """Tangents or seeds: one for each of some values that is differentiable, in the layout the code was made for."""

    what: str
    types: tuple[LeafType, ...]
    chosen: tuple[bool, ...]
    nest: Nest | None
    fit: Callable[[tuple[Any, ...]], bool]

    def open(self, given: Any) -> tuple[Any, ...]:
        """What the code takes, from one tensor, a flat tuple, or what is nested as the values are."""
        flat = given if type(given) is tuple else (given,)
        return flat if self.fit(flat) else self._open_slowly(given)

    def _open_slowly(self, given: Any) -> tuple[Any, ...]:
        count = len(self.chosen)
        if (
            isinstance(given, (tuple, list))
            and len(given) == count
            and all(isinstance(one, Tensor | None) for one in given)
        ):
            values = list(given)
        elif count == 1 and isinstance(given, (Tensor, int, float)):
            values = [given]
        elif self.nest is None:
            raise LeafTypeError(f"{self.what}: expected a tuple of {count} tensors, got {type(given).__name__}.")
        else:
            values = self.nest.take_apart(given, self.what)
        values = [value for value, is_chosen in zip(values, self.chosen, strict=True) if is_chosen or value is not None]
        if len(values) != len(self.types):
            raise LeafTypeError(f"{self.what}: pass None for what is not differentiable.")
        values = [_laid_out(value, leaf) for value, leaf in zip(values, self.types, strict=True)]
        check_all(self.types, values, self.what)
        return tuple(values)


def _laid_out(value: Any, leaf: LeafType) -> Any:
    """A tangent or seed with the strides the code was made for; it is a direction, so a copy will do."""
    if isinstance(value, (int, float)) and leaf.shape == ():
        return torch.full((), value, dtype=leaf.dtype, device=leaf.device)
    if isinstance(value, Tensor) and value.shape == leaf.shape and (value.stride() != leaf.stride or value.is_neg()):
        laid = torch.empty_strided(leaf.shape, leaf.stride, dtype=value.dtype, device=value.device)
        return laid.copy_(value.detach())
    return value
