"""The batch of one call: which rows of a tensor belong to which sample."""

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
        size: the number of samples.
        lengths: how many rows a sample may become when the model flattens it: `seq` and `seq * d` for an argument of
            shape `(batch, seq, d)`. A first dim of `size * length` holds the rows of one sample after another.
        dim: the dim along which the samples lie, unless a method is given another.
        device: where the flags of the call are made.
    """

    def __init__(self, size: int, lengths: tuple[int, ...], dim: int, device: torch.device) -> None:
        self.size, self.lengths, self.dim, self.device = size, lengths, dim, device

    def samples_first(self, z: Tensor, dim: int | None = None) -> Tensor | None:
        """`z` with one row per sample as its first dim; None if it is unbatched."""
        z = z if z.device == self.device else z.to(self.device)
        along = self.dim if dim is None else dim
        if z.ndim <= along:
            return None
        z = z.movedim(along, 0) if along else z
        if is_surely(z.shape[0] == self.size):
            return z
        length = self._rows_per_sample(z.shape[0], along)
        return z.reshape(self.size, length, *z.shape[1:]) if length is not None else None

    def status_by_sample(self, status: Tensor, dim: int | None) -> Tensor | None:
        """A row status with one row per sample as its first dim; None if the tensor that was checked is unbatched."""
        along = self.dim if dim is None else dim
        return self.samples_first(status, along) if along < status.ndim - 1 else None

    def has_samples(self, shape: Sequence[int], dim: int | None = None) -> bool:
        """Whether a tensor of that shape has an entry for each sample, so is not unbatched."""
        along = self.dim if dim is None else dim
        if len(shape) <= along:
            return False
        return is_surely(shape[along] == self.size) or self._rows_per_sample(shape[along], along) is not None

    def broadcast(self, per_sample: Tensor, z: Tensor, dim: int | None = None) -> Tensor | None:
        """`(batch,)` values, shaped to broadcast against `z`; None if `z` is unbatched."""
        along = self.dim if dim is None else dim
        if z.ndim <= along:
            return None
        if not holds(z.shape[along] == self.size):
            length = self._rows_per_sample(z.shape[along], along)
            if length is None:
                return None
            per_sample = per_sample.unsqueeze(-1).expand(-1, length).reshape(-1)
        return per_sample.reshape([-1 if i == along else 1 for i in range(z.ndim)])

    def _rows_per_sample(self, size: int, along: int) -> int | None:
        """How many rows a sample has in a first dim of that size that `reshape` flattened; None if it did not."""
        for length in self.lengths if along == 0 else ():
            if is_surely(size == self.size * length):
                return length
        return None


def batch_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], dim: int) -> Batch:
    """The batch of a call, read off its first tensor argument that has that dim."""
    for _, z in tensors_in((args, kwargs)):
        if z.is_nested or z.layout != torch.strided:
            raise WatchError(
                f"watch: got a {'nested' if z.is_nested else z.layout} tensor, whose samples cannot be told apart. "
                "Pass a dense tensor."
            )
        if z.ndim > dim:
            lengths, length = [], 1
            for i, size in enumerate(z.shape):
                if i != dim:
                    length = length * size
                    lengths.append(length)
            return Batch(z.shape[dim], tuple(lengths), dim, z.device)
    raise WatchError(
        f"watch: no argument is a tensor with a dim {dim}, so there are no samples to tell apart. Pass the batch as a "
        "tensor, or give its dim as batch_dim."
    )
