"""The faults of a run: what `guarded.history` has, call by call.

A call must not wait for its device, break a graph or cause a recompile to record what it found. So there are two ways:

- **On the CPU** the origins of a call can be read at once, and mostly there are none. In a graph, reading is the body
  of an opaque operator, `record_call`. It gets the number of the history in a tensor, because values of tensors are not
  guarded on, and returns the flags, which the call returns in turn: so it is not removed as dead code.
- **On other devices** the entries are written to a table on the device. Rows of good samples go to one more row of the
  table, which is never read. The numbers of calls and of entries are in a tensor of their own: the kernel that writes
  the table reads them, and in one tensor it might read what it has written. Reading the history waits for the device,
  and empties the table.

Of a run with more entries than there is room for, the first half and the last half are kept.
"""

import itertools
import threading
import weakref
from collections import deque
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchguard._channel.packing import unpack
from torchguard._channel.slot_bits import slot_code
from torchguard._operators import define_opaque, use_operators
from torchguard._torch.dynamo import keep_in_place
from torchguard._torch.tracing import backward_number, is_plain, is_surely
from torchguard._watch.path_bits import MAX_WORDS, NO_ORDER, read_path
from torchguard._watch.summarize import NUM_ORIGINS, CallSummary

HALF = 512
# The row of the table where entries of good samples go.
_UNREAD = 2 * HALF
# For more samples, comparing all pairs of them takes longer than a further kernel.
_MAX_COMPARED = 256
# In place of the id of a sample that has none.
NO_ID = -(2**63)


class Entry(NamedTuple):
    """A fault of one sample in one call, as integers.

    Args:
        size: that of the batch.
        origin: as in `CallSummary`.
        path: the locations where the sample was bad, in the order of the checks; empty where that is not known.
    """

    step: int
    size: int
    sample: int
    id: int
    origin: int
    further: int
    position: int
    code: int
    path: tuple[int, ...] = ()


# The columns of the table: the fields of an entry, of which `path` takes several.
_FIELDS = len(Entry._fields) - 1
_COLUMNS = _FIELDS + 1 + MAX_WORDS
_HISTORIES: weakref.WeakValueDictionary[int, "History"] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


class History:
    """The faults of all calls of a watched model."""

    def __init__(self) -> None:
        self.number, self._lock = next(_NUMBERS), threading.Lock()
        _HISTORIES[self.number] = self
        self.handle = torch.tensor([self.number], device="cpu")
        self.calls = self.total = 0
        self._first: list[Entry] = []
        self._last: deque[Entry] = deque(maxlen=HALF)
        self.table: Tensor | None = None
        self.counts: Tensor | None = None  # of calls and of entries so far

    def allocate(self, device: torch.device, on_device: bool | None = None) -> None:
        """Make the table that a device needs. What the table of another device has is read before."""
        self._read_table()
        self.table = self.counts = None
        if device.type != "cpu" if on_device is None else on_device:
            with torch.inference_mode(False):
                table = torch.zeros(_UNREAD + 1, _COLUMNS, dtype=torch.int64, device=device)
                self.table = keep_in_place(table)
                self.counts = keep_in_place(torch.tensor([self.calls, 0], device=device))

    def record(self, summary: CallSummary, ids: Tensor | None) -> CallSummary:
        """Record a call, unless its findings cannot be read: under transforms and in exports.

        Returns the summary to use from now on.
        """
        summary = CallSummary(*summary[:3], ids, *summary[4:]) if ids is not None else summary
        f, origins, warnings, _, _ = summary
        in_graph = use_operators()
        if not in_graph and (not is_plain(f) or backward_number() != -1):  # in backward, a checkpoint repeats a call
            return summary
        if self.table is not None and self.counts is not None and self.table.device == f.device:
            _write(self.table, self.counts, summary)
        elif in_graph:
            return CallSummary(_RECORD_CALL(f, origins, ids, self.handle), origins, warnings, ids)
        else:
            self.add_call(summary)
        return summary

    def add_call(self, summary: CallSummary) -> None:
        """Add the faults of a call. Reads them, so waits for the device if there is one."""
        with self._lock:
            step, self.calls = self.calls, self.calls + 1
        if summary.is_clean or summary.origins.numel() == 0 or summary.origins[0].amax().item() < 0:  # all are -1
            return
        found = torch.stack([*_columns(summary), *summary.origins[NUM_ORIGINS:]], -1).tolist()
        with self._lock:
            for size, sample, id_, origin, *rest in found:
                if origin >= 0:
                    self._add(_entry([step, size, sample, id_, origin, *rest]))

    def entries(self) -> tuple[list[Entry], int]:
        """All entries in the order of the run, and how many of the middle of the run were not kept."""
        self._read_table()
        with self._lock:
            kept = [*self._first, *self._last]
            return kept, self.total - len(kept)

    def clear(self) -> None:
        """Forget all entries. Calls are counted on."""
        self._read_table()
        with self._lock:
            self.total = 0
            self._first.clear()
            self._last.clear()

    def _add(self, entry: Entry) -> None:
        self.total += 1
        (self._first if len(self._first) < HALF else self._last).append(entry)

    def _read_table(self) -> None:
        """Add what the table has, and empty it. Waits for the device."""
        if self.table is None or self.counts is None:
            return
        with self._lock, torch.inference_mode(False), torch.no_grad():
            self.calls, count = self.counts.tolist()
            rows = self.table.tolist() if count else []
            for rank in range(count):
                if rank < HALF or rank >= count - HALF:
                    self._add(_entry(rows[_slot(rank)]))
                else:
                    self.total += 1
            self.counts[1] = 0

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # a copy begins a history of its own


def _entry(columns: list[int]) -> Entry:
    return Entry(*columns[:_FIELDS], path=read_path(columns[_FIELDS:]))


def _slot(rank: int) -> int:
    return rank if rank < HALF else HALF + (rank - HALF) % HALF


def _columns(summary: CallSummary) -> list[Tensor]:
    """What an entry has beside the step and the path, each for all samples of a call."""
    origins, batch = summary.origins, summary.origins.shape[1]
    samples = torch.arange(batch, device=origins.device)
    code = slot_code(unpack(summary.flags)[:, 0].to(torch.int64))
    ids = torch.full_like(samples, NO_ID) if summary.ids is None else summary.ids.to(origins.device)
    return [torch.full_like(samples, batch), samples, ids, *origins[:NUM_ORIGINS], code]


def _write(table: Tensor, counts: Tensor, summary: CallSummary) -> None:
    """Write the entries of a call to the table, without waiting for its device."""
    with torch.no_grad():
        columns = _columns(summary)
        samples, is_bad = columns[1], summary.origins[0] >= 0
        so_far, total = _counted(is_bad, samples), is_bad.sum()
        rank = so_far + (counts[1] - 1)
        slot = torch.where(rank < HALF, rank, HALF + (rank - HALF) % HALF)
        is_kept = is_bad
        if not is_surely(samples.shape[0] <= HALF):
            # Of a call with more entries than the second half has room for, the last ones are kept.
            is_kept = is_bad & ((rank < HALF) | (so_far > total - HALF))
        entries = torch.stack([counts[0].expand_as(samples), *columns], -1)
        path = summary.origins[NUM_ORIGINS:].t()
        entries = F.pad(torch.cat([entries, path], -1), (0, _COLUMNS - _FIELDS - path.shape[1]), value=NO_ORDER)
        table.index_copy_(0, torch.where(is_kept, slot, _UNREAD), entries)
        counts += torch.stack([torch.ones_like(total), total])


def _counted(is_bad: Tensor, samples: Tensor) -> Tensor:
    """How many are bad up to each sample.

    In a graph, `cumsum` is a kernel of its own. For few samples, comparing all pairs is a sum that fuses.
    """
    if use_operators() and is_surely(samples.shape[0] <= _MAX_COMPARED):
        return (is_bad & (samples <= samples.unsqueeze(1))).sum(1)
    return is_bad.cumsum(0)


def _record_call_op(flags: Tensor, origins: Tensor, ids: Tensor | None, handle: Tensor) -> Tensor:
    history = _HISTORIES.get(int(handle))
    if history is not None and backward_number() == -1:
        history.add_call(CallSummary(flags, origins, None, ids))
    return flags.clone()


_RECORD_CALL = define_opaque(
    "record_call(Tensor flags, Tensor origins, Tensor? ids, Tensor handle) -> Tensor",
    _record_call_op,
    lambda flags, origins, ids, handle: torch.empty_like(flags),
)
