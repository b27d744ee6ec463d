"""Which rows of the batch a tensor is about."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchguard._torch import is_surely
from torchguard.exceptions import WatchError
from torchguard.nested import tensors_in


class Batch:
    """The samples of one call: how many there are, and along which dim of a tensor they lie.

    Args:
        lengths: what a sample may be flattened to: `(batch, seq, d)` to `(batch * seq, d)`.
    """

    def __init__(self, size: int, lengths: tuple[int, ...], dim: int, device: torch.device) -> None:
        self.size, self.lengths, self.dim, self.device = size, lengths, dim, device

    def rows_first(self, z: Tensor, dim: int | None = None) -> Tensor | None:
        """`z` with one row for each sample in front, None if it has none; along `dim`, if that is known."""
        z = z if z.device == self.device else z.to(self.device)
        if dim is not None:
            return z.movedim(dim, 0) if z.ndim > dim else None
        if z.ndim > self.dim and is_surely(z.shape[self.dim] == self.size):
            return z if self.dim == 0 else z.movedim(self.dim, 0)
        for length in self.lengths if self.dim == 0 and z.ndim > 0 else ():
            # As reshape flattens: the samples lie one behind another.
            if is_surely(z.shape[0] == self.size * length):
                return z.unflatten(0, (self.size, length))
        return None

    def spread(self, marks: Tensor, shape: Sequence[int], dim: int | None = None) -> Tensor:
        """`(places, batch)` marks as `(places, *shape)`, for evidence of that shape."""
        places, along = marks.shape[0], self.dim if dim is None else dim
        if len(shape) > along and is_surely(shape[along] == self.size):
            across = [1] * len(shape)
            across[along] = self.size
            return marks.reshape(places, *across).expand(places, *shape)
        for length in self.lengths if self.dim == 0 and len(shape) > 0 else ():
            if is_surely(shape[0] == self.size * length):
                rows = marks.reshape(places, self.size, *[1] * len(shape))
                return rows.expand(places, self.size, length, *shape[1:]).flatten(1, 2)
        return marks.sum(1).reshape(places, *[1] * len(shape)).expand(places, *shape)


def batch_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], dim: int) -> Batch:
    """The batch of a call, read off its first tensor."""
    for _, z in tensors_in((args, kwargs)):
        if z.is_nested or z.layout != torch.strided:
            raise WatchError(f"watch: got a {'nested' if z.is_nested else z.layout} tensor, whose rows cannot be told.")
        if z.ndim > dim:
            lengths, length = [], 1
            for i, size in enumerate(z.shape):
                if i != dim:
                    length = length * size
                    lengths.append(length)
            return Batch(z.shape[dim], tuple(lengths), dim, z.device)
    raise WatchError(f"watch: no argument is a tensor with a dim {dim}, so there are no samples to tell apart.")
