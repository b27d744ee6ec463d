"""The entries of a history on a device: one row of integers for each bad sample of each call.

A call must not wait for its device to record what it found, so entries are written where they are found. The table has
room for the first `HALF` entries of a run and for the last. Rows of good samples go to one more row, which is never
read. The numbers of calls and of entries are in a tensor of their own: the kernel that writes the table reads them, and
in one tensor it might read what it has written.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchguard._channel.packing import unpack
from torchguard._channel.slot_bits import slot_code
from torchguard._operators import use_operators
from torchguard._torch.tracing import is_surely
from torchguard._watch.origins import NUM_ORIGINS
from torchguard._watch.path_bits import MAX_WORDS, NO_ORDER

HALF = 512
# The columns of the table: the fields of `history.Entry`, of which the last, the path, takes several.
FIELDS = 8
COLUMNS = FIELDS + 1 + MAX_WORDS
# In place of the id of a sample that has none.
NO_ID = -(2**63)
# The row of the table where entries of good samples go.
_UNREAD = 2 * HALF
# For more samples, comparing all pairs of them takes longer than a further kernel.
_MAX_COMPARED = 256


class HistoryTable(NamedTuple):
    """The entries, and how many calls and entries there were so far."""

    entries: Tensor
    counts: Tensor

    def write(self, flags: Tensor, origins: Tensor, ids: Tensor | None) -> None:
        """Write the entries of a call, given its flags and origins, without waiting for the device."""
        with torch.no_grad():
            columns = columns_of(flags, origins, ids)
            samples, is_bad = columns[1], origins[0] >= 0
            so_far, total = _counted(is_bad, samples), is_bad.sum()
            rank = so_far + (self.counts[1] - 1)
            slot = torch.where(rank < HALF, rank, HALF + (rank - HALF) % HALF)
            is_kept = is_bad
            if not is_surely(samples.shape[0] <= HALF):
                # Of a call with more entries than the second half has room for, the last ones are kept.
                is_kept = is_bad & ((rank < HALF) | (so_far > total - HALF))
            entries = torch.stack([self.counts[0].expand_as(samples), *columns], -1)
            path = origins[NUM_ORIGINS:].t()
            entries = F.pad(torch.cat([entries, path], -1), (0, COLUMNS - FIELDS - path.shape[1]), value=NO_ORDER)
            self.entries.index_copy_(0, torch.where(is_kept, slot, _UNREAD), entries)
            self.counts.add_(torch.stack([torch.ones_like(total), total]))

    def mark_written(self) -> None:
        """Have a tracer that needs no values know that a call changes the table."""
        self.entries.zero_()
        self.counts.zero_()


def empty_table(calls: int, device: torch.device) -> HistoryTable:
    """A table without entries, after that many calls."""
    entries = torch.zeros(_UNREAD + 1, COLUMNS, dtype=torch.int64, device=device)
    return HistoryTable(entries, torch.tensor([calls, 0], device=device))


def slot_of(rank: int) -> int:
    """The row of an entry, given how many there were before it."""
    return rank if rank < HALF else HALF + (rank - HALF) % HALF


def columns_of(flags: Tensor, origins: Tensor, ids: Tensor | None) -> list[Tensor]:
    """What an entry has beside the step and the path, each for all samples of a call."""
    batch = origins.shape[1]
    samples = torch.arange(batch, device=origins.device)
    code = slot_code(unpack(flags)[:, 0].to(torch.int64))
    ids = torch.full_like(samples, NO_ID) if ids is None else ids.to(origins.device)
    return [torch.full_like(samples, batch), samples, ids, *origins[:NUM_ORIGINS], code]


def _counted(is_bad: Tensor, samples: Tensor) -> Tensor:
    """How many are bad up to each sample.

    In a graph, `cumsum` is a kernel of its own. For few samples, comparing all pairs is a sum that fuses.
    """
    if use_operators() and is_surely(samples.shape[0] <= _MAX_COMPARED):
        return (is_bad & (samples <= samples.unsqueeze(1))).sum(1)
    return is_bad.cumsum(0)
