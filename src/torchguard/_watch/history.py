"""The faults of a run: what `guarded.history` has, call by call.

A call must not wait for its device, break a graph or cause a recompile to record what it found. So there are two ways:

- **On the CPU** the origins of a call can be read at once, and mostly there are none. In a graph, reading is the body
  of an opaque operator, `record_call`. It gets the number of the history in a tensor, because values of tensors are not
  guarded on, and returns the flags, which the call returns in turn: so it is not removed as dead code.
- **On other devices** the entries are written to a table on the device (`history_table.py`), in a graph by the operator
  that summarizes the call. Reading the history waits for the device, and empties the table.

Of a run with more entries than there is room for, the first half and the last half are kept.
"""

import itertools
import threading
import weakref
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchguard._operators import define_opaque, use_operators
from torchguard._torch.dynamo import keep_in_place
from torchguard._torch.tracing import backward_number, is_plain
from torchguard._watch.call_summary import CallSummary
from torchguard._watch.history_table import FIELDS, HALF, HistoryTable, columns_of, empty_table, slot_of
from torchguard._watch.origins import NUM_ORIGINS
from torchguard._watch.path_bits import read_path


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
        self.table: HistoryTable | None = None

    def allocate(self, device: torch.device, on_device: bool | None = None) -> None:
        """Make the table that a device needs. What the table of another device has is read before."""
        self._read_table()
        self.table = None
        if device.type != "cpu" if on_device is None else on_device:
            with torch.inference_mode(False):
                self.table = HistoryTable(*map(keep_in_place, empty_table(self.calls, device)))

    def table_on(self, device: torch.device) -> HistoryTable | None:
        """The table, if calls on this device are recorded in it."""
        return self.table if self.table is not None and self.table.entries.device == device else None

    def record(self, summary: CallSummary, ids: Tensor | None) -> CallSummary:
        """Record a call, unless its findings cannot be read: under transforms and in exports.

        Returns the summary to use from now on.
        """
        summary = CallSummary(*summary[:3], ids, *summary[4:]) if ids is not None else summary
        f, origins, warnings, _, _ = summary
        in_graph = use_operators()
        if not in_graph and (not is_plain(f) or backward_number() != -1):  # in backward, a checkpoint repeats a call
            return summary
        table = self.table_on(f.device)
        if table is not None:
            if not in_graph:  # else the operator that made the summary has
                table.write(f, origins, ids)
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
        of_samples = columns_of(summary.flags, summary.origins, summary.ids)
        found = torch.stack([*of_samples, *summary.origins[NUM_ORIGINS:]], -1).tolist()
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
        if self.table is None:
            return
        with self._lock, torch.inference_mode(False), torch.no_grad():
            self.calls, count = self.table.counts.tolist()
            rows = self.table.entries.tolist() if count else []
            for rank in range(count):
                if rank < HALF or rank >= count - HALF:
                    self._add(_entry(rows[slot_of(rank)]))
                else:
                    self.total += 1
            self.table.counts[1] = 0

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # a copy begins a history of its own


def _entry(columns: list[int]) -> Entry:
    return Entry(*columns[:FIELDS], path=read_path(columns[FIELDS:]))


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
