"""The batch of one call: which rows of a tensor belong to which sample.

Where the samples lie in a tensor is given by a number, its *row code*, since operators take numbers. The samples lie
along one dim of the size `outer * size * inner`: in `outer` turns, with `inner` consecutive rows for each sample.
`reshape` of `(batch, time, width)` gives one turn of `time` rows, `cat([a, b])` two turns, and a batch that is
flattened time first `time` turns. One of `outer` and `inner` may be 0: it follows from the size of the dim. `owners.py`
finds the code of a tensor. Without one (None), sizes decide.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchguard._torch.tracing import is_surely

# Row codes of tensors that belong to no sample, of those that mix samples, and, for statuses alone, of those in which a
# fault of one sample counts for all.
UNBATCHED, MIXED, FOR_ALL = -2, -3, -4
# Added to the number of a sample that a whole tensor belongs to.
_ONE_SAMPLE = 1 << 60
_OUTER_SHIFT, _INNER_SHIFT, _MASK = 8, 34, (1 << 26) - 1


def row_code(dim: int, outer: int = 1, inner: int = 0) -> int:
    return dim | outer << _OUTER_SHIFT | inner << _INNER_SHIFT


def row_code_of_sample(number: int) -> int:
    return _ONE_SAMPLE + number


def size_free(code: int) -> int:
    """A row code that holds for other sizes as well; `MIXED` in place of one that does not."""
    is_sized = code >= 0 and bool(code >> _OUTER_SHIFT & _MASK and code >> _INNER_SHIFT & _MASK)
    return MIXED if code >= _ONE_SAMPLE or is_sized else code


class Layout(NamedTuple):
    """Where samples lie along a dim of a certain size."""

    dim: int
    outer: int
    inner: int


class Batch:
    """The samples of one call: how many there are, and along which dim of a tensor they lie.

    Args:
        size: the number of samples.
        lengths: how many rows a sample may become when the model flattens it: `seq` and `seq * d` for an argument of
            shape `(batch, seq, d)`. A first dim of `size * length` holds the rows of one sample after another. Used
            only for tensors without a row code.
        dim: the dim along which the samples lie, for tensors without a row code.
        device: where the flags of the call are made.
    """

    def __init__(self, size: int, lengths: tuple[int, ...], dim: int, device: torch.device) -> None:
        self.size, self.lengths, self.dim, self.device = size, lengths, dim, device

    def samples_first(self, z: Tensor, rows: int | None = None) -> Tensor | None:
        """`z` with one row per sample as its first dim; None if it is unbatched or mixes samples."""
        z = z if z.device == self.device else z.to(self.device)
        if rows is not None and rows >= _ONE_SAMPLE:
            number = rows - _ONE_SAMPLE
            return F.pad(z.unsqueeze(0), [*[0, 0] * z.ndim, number, self.size - 1 - number])
        layout = self._layout(z.shape, rows)
        if layout is None:
            return None
        z = z.movedim(layout.dim, 0) if layout.dim else z
        if layout.outer == 1 and is_surely(z.shape[0] == self.size):
            return z
        if is_surely(layout.outer == 1):
            return z.reshape(self.size, layout.inner, *z.shape[1:])
        return z.reshape(layout.outer, self.size, layout.inner, *z.shape[1:]).movedim(1, 0)

    def status_by_sample(self, status: Tensor, rows: int | None) -> Tensor | None:
        """A row status with one row per sample as its first dim; None if the tensor that was checked has none."""
        layout = None if rows is not None and rows >= _ONE_SAMPLE else self._layout(status.shape, rows)
        if layout is not None and layout.dim >= status.ndim - 1:
            return None
        return self.samples_first(status, rows)

    def has_samples(self, shape: Sequence[int], rows: int | None = None) -> bool:
        """Whether a tensor of that shape has entries of each sample, or of one."""
        return (rows is not None and rows >= _ONE_SAMPLE) or self._layout(shape, rows) is not None

    def is_unbatched(self, shape: Sequence[int], rows: int | None = None) -> bool:
        """Whether a tensor of that shape belongs to no sample. One that mixes samples does not count as unbatched."""
        return rows == UNBATCHED or (rows is None and self._layout_by_size(shape) is None)

    def is_last(self, shape: Sequence[int], rows: int | None) -> bool:
        """Whether the samples lie along the last of several dims."""
        if len(shape) < 2 or (rows is not None and rows >= _ONE_SAMPLE):
            return False
        layout = self._layout(shape, rows)
        return layout is not None and layout.dim == len(shape) - 1

    def is_sample_major(self, shape: Sequence[int], rows: int | None) -> bool:
        """Whether all that belongs to a sample is contiguous along the first dim, sample after sample."""
        if rows is not None and rows >= _ONE_SAMPLE:
            return False
        layout = self._layout(shape, rows)
        return layout is not None and layout.dim == 0 and is_surely(layout.outer == 1)

    def broadcast(self, per_sample: Tensor, z: Tensor, rows: int | None = None) -> Tensor | None:
        """`(batch,)` values, shaped to broadcast against `z`; None if `z` is unbatched or mixes samples."""
        if rows is not None and rows >= _ONE_SAMPLE:
            return per_sample[rows - _ONE_SAMPLE].reshape([1] * z.ndim)
        layout = self._layout(z.shape, rows)
        if layout is None:
            return None
        if not is_surely(z.shape[layout.dim] == self.size):
            turns = per_sample.reshape(1, -1, 1).expand(layout.outer, self.size, layout.inner)
            per_sample = turns.reshape(-1)
        return per_sample.reshape([-1 if i == layout.dim else 1 for i in range(z.ndim)])

    def code_by_size(self, shape: Sequence[int]) -> int:
        """The row code that sizes suggest."""
        layout = self._layout(shape, None)
        return UNBATCHED if layout is None else row_code(layout.dim)

    def _layout(self, shape: Sequence[int], rows: int | None) -> Layout | None:
        if rows is None:
            return self._layout_by_size(shape)
        if rows < 0:
            return None
        dim, outer, inner = rows & 0xFF, rows >> _OUTER_SHIFT & _MASK, rows >> _INNER_SHIFT & _MASK
        if dim >= len(shape):
            return None
        size = shape[dim]
        if outer and inner and not is_surely(size == outer * self.size * inner):
            return None
        return Layout(dim, outer or size // (self.size * inner), inner or size // (self.size * outer))

    def _layout_by_size(self, shape: Sequence[int]) -> Layout | None:
        if len(shape) <= self.dim:
            return None
        size = shape[self.dim]
        if is_surely(size == self.size):
            return Layout(self.dim, 1, 1)
        for length in self.lengths if self.dim == 0 else ():
            if is_surely(size == self.size * length):
                return Layout(0, 1, length)
        return None
