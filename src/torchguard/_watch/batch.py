"""Which rows of the batch a tensor is about."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchguard._pytrees import tensors_in
from torchguard._torch.tracing import holds, is_surely
from torchguard.exceptions import WatchError


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
        along = self.dim if dim is None else dim
        if z.ndim <= along:
            return None
        z = z.movedim(along, 0) if along else z
        if is_surely(z.shape[0] == self.size):
            return z
        length = self._flattened(z.shape[0], along)
        return z.reshape(self.size, length, *z.shape[1:]) if length is not None else None

    def has_rows(self, shape: Sequence[int], dim: int | None = None) -> bool:
        """Whether a tensor of that shape has a row for each sample."""
        along = self.dim if dim is None else dim
        if len(shape) <= along:
            return False
        return is_surely(shape[along] == self.size) or self._flattened(shape[along], along) is not None

    def _flattened(self, size: int, along: int) -> int | None:
        """How many entries a sample has along a dim of that size, as reshape flattens: one sample behind another."""
        for length in self.lengths if along == 0 else ():
            if is_surely(size == self.size * length):
                return length
        return None

    def over(self, rows: Tensor, z: Tensor, dim: int | None = None) -> Tensor | None:
        """`(batch,)` rows, shaped to go with `z`; None if that has none."""
        along = self.dim if dim is None else dim
        if z.ndim <= along:
            return None
        if not holds(z.shape[along] == self.size):
            length = self._flattened(z.shape[along], along)
            if length is None:
                return None
            rows = rows.unsqueeze(-1).expand(-1, length).reshape(-1)
        return rows.reshape([-1 if i == along else 1 for i in range(z.ndim)])


def as_numbers(batch: Batch | None) -> tuple[int, tuple[int, ...], int | None]:
    """A batch as operators take it: size, lengths and dim; that is None where the batch is not known."""
    return (0, (), None) if batch is None else (batch.size, batch.lengths, batch.dim)


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


def rows_of(found: Tensor, dim: int | None, batch: Batch) -> Tensor | None:
    """Evidence with one row for each sample in front, None if it has none."""
    along = batch.dim if dim is None else dim
    return batch.rows_first(found, along) if along < found.ndim - 1 else None
