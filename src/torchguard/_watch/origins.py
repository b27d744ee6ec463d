"""The origin of each sample: the earliest fault among the row statuses of a call.

A key orders the faults. From its lowest bit it holds the fault, the position of the vector (counted down), and the
number of the check (counted down). So the largest key is the earliest fault; 0 stands for none.

On a GPU, kernels do what this file does in most graphs: see `gpu_summary.py`.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchguard._operators import define_opaque
from torchguard._torch.tracing import in_transform, is_surely, is_traced, surely_equal
from torchguard._watch.batch import FOR_ALL, MIXED, Batch
from torchguard._watch.detect import (
    OK,
    compiles_summary,
    faults_of,
)

# In place of a row code: sizes decide.
BY_SIZE = -1
# The rows of `CallSummary.origins` before those of the path.
NUM_ORIGINS = 3
# The bits of a key.
FAULT_MASK, POSITION_SHIFT, MAX_POSITION, ORDER_SHIFT = 0xFF, 8, (1 << 31) - 1, 40


class RowStatuses(NamedTuple):
    """The statuses of a call in the order of its checks: each with its location and its row code, or `BY_SIZE`."""

    statuses: list[Tensor]
    locations: list[int]
    rows: list[int]

    def only(self, numbers: list[int]) -> "RowStatuses":
        """Those of the checks of these numbers."""
        statuses, locations, rows = self
        return RowStatuses([statuses[i] for i in numbers], [locations[i] for i in numbers], [rows[i] for i in numbers])


class StatusGroup(NamedTuple):
    """Statuses of one shape and dtype, `(statuses, batch, ..., pieces)`, and the number of the check of each."""

    stacked: Tensor
    numbers: list[int]


class Faults(NamedTuple):
    """The earliest faults of each sample, earliest first.

    Args:
        fault: `(most, batch)`, `detect.OK` where there is none.
        check: `(most, batch)`, the number of the check that found it; the number of all checks where there is none.
        position: `(batch,)`, the first bad vector of the first fault, -1 where there is none.
        times: `(batch,)`, how many checks found a fault.
        keys: `(keys, batch)`, those of all checks.
    """

    fault: Tensor
    check: Tensor
    position: Tensor
    times: Tensor
    keys: Tensor


def earliest_faults(checked: RowStatuses, batch: Batch, most: int, mixes: bool) -> Faults:
    """The earliest faults of each sample.

    Args:
        most: how many.
        mixes: whether samples may have been mixed: then the earliest fault of all counts for each that has none.
    """
    keys = _keys(checked.statuses, checked.rows, batch)
    if mixes:
        worst = keys.flatten().amax(0) if batch.size else keys.new_zeros(())
        keys = torch.cat([keys, torch.where((keys > 0).any(0, keepdim=True), 0, worst)])
    times = (keys > 0).sum(0)
    if most == 1:
        firsts = keys.amax(0, keepdim=True)
    else:
        missing = max(0, most - keys.shape[0])
        firsts = F.pad(keys, (0, 0, 0, missing)).topk(most, dim=0).values
    fault = firsts & FAULT_MASK
    position = torch.where(fault[0] == OK, -1, MAX_POSITION - ((firsts[0] >> POSITION_SHIFT) & MAX_POSITION))
    return Faults(fault, checks_of(firsts, len(checked.statuses)), position, times, keys)


def checks_of(keys: Tensor, checks: int) -> Tensor:
    """The number of the check of each key; that of all checks where there is no fault."""
    return checks - (keys >> ORDER_SHIFT)


def _keys(statuses: list[Tensor], rows: Sequence[int], batch: Batch) -> Tensor:
    """A key for every check and sample."""
    groups, unbatched = grouped(statuses, rows, batch, [] if is_surely(batch.size == 0) else range(len(statuses)))
    parts, numbers = [], []
    for group in groups:
        faults = faults_of(group.stacked.amax(-1)).to(torch.int64)
        faults = faults.flatten(2) if faults.ndim > 2 else faults.unsqueeze(-1)
        parts.append(_vector_keys(faults, torch.arange(faults.shape[-1], device=faults.device)).amax(-1))
        numbers += group.numbers
    if parts:
        keys = torch.cat(parts)
        parts = [torch.where(keys == 0, 0, keys | _order_bits(len(statuses), numbers, keys))]
    if unbatched:
        # `flatten`, since the ONNX exporter has no `amax` over all dims.
        # A fault of an unbatched tensor counts for all samples, unless one went bad before and may be its cause. One of
        # a tensor that has rows but mixes samples counts for all that were good before.
        faults = torch.stack(
            [faults_of(statuses[i]).flatten().amax(0).to(batch.device, torch.int64) for i in unbatched]
        )
        faults = faults.unsqueeze(-1)
        first = _order_bits(len(statuses), unbatched, faults) | (MAX_POSITION << POSITION_SHIFT) | faults
        keys = torch.where(faults == OK, 0, first)
        earlier = torch.cat(parts).flatten().amax(0) if parts else torch.zeros_like(keys)
        has_rows = [
            rows[i] == FOR_ALL or (rows[i] == MIXED and not batch.is_unbatched(statuses[i].shape)) for i in unbatched
        ]
        if any(has_rows):
            earlier = torch.where(torch.tensor(has_rows, device=keys.device).unsqueeze(-1), 0, earlier)
        parts.append(torch.where(keys > earlier, keys, 0).expand(-1, batch.size))
    return torch.cat(parts) if parts else torch.zeros(1, batch.size, dtype=torch.int64, device=batch.device)


def _vector_keys(fault: Tensor, position: Tensor) -> Tensor:
    """The key of each vector, without the bits of the order."""
    return torch.where(fault == OK, 0, (MAX_POSITION - position).to(torch.int64) << POSITION_SHIFT | fault)


def _order_bits(checks: int, numbers: list[int], like: Tensor) -> Tensor:
    """The bits of a key that hold the order, for the checks of these numbers."""
    return _constant([(checks - i) << ORDER_SHIFT for i in numbers], like).unsqueeze(-1)


def grouped(
    statuses: Sequence[Tensor], rows: Sequence[int], batch: Batch, numbers: Sequence[int]
) -> tuple[list[StatusGroup], list[int]]:
    """The statuses of the checks of some numbers in groups, and the numbers of those of unbatched tensors."""
    groups: list[dict[int, Tensor]] = []
    unbatched = []
    for i in numbers:
        status, code = statuses[i], rows[i]
        by_sample = batch.status_by_sample(status, None if code == BY_SIZE else code)
        if any(is_surely(size == 0) for size in (status.shape if by_sample is None else by_sample.shape[1:])):
            continue  # the tensor that was checked is empty
        if by_sample is None:
            unbatched.append(i)
            continue
        for group in groups:
            first = next(iter(group.values()))
            if first.dtype == by_sample.dtype and surely_equal(first.shape, by_sample.shape):
                group[i] = by_sample
                break
        else:
            groups.append({i: by_sample})
    return [StatusGroup(_stacked([*group.values()]), [*group]) for group in groups], unbatched


def _stacked(statuses: list[Tensor]) -> Tensor:
    """`torch.stack`, in a way that leaves every kernel that makes a status as it is.

    In a graph for the CPU, where vectors have one piece, `cat` has each kernel write to where its status belongs, and
    no memory is allocated between two layers: the next layer would then write to memory that is not in the cache. For
    a GPU, Inductor would not fuse such kernels with others that read the tensor, so stacking is an opaque call.
    """
    if not is_traced(statuses[0]):
        return torch.stack(statuses)
    if not compiles_summary(statuses[0].device):
        return torch.cat(statuses, -1).movedim(-1, 0).unsqueeze(-1)
    return statuses[0].unsqueeze(0) if len(statuses) == 1 else _call_stack_statuses(statuses)


def _call_stack_statuses(statuses: list[Tensor]) -> Tensor:
    """Call the operator `stack_statuses`."""
    return _STACK_STATUSES(statuses)


_STACK_STATUSES = define_opaque(
    "stack_statuses(Tensor[] statuses) -> Tensor",
    lambda statuses: torch.cat(statuses).unflatten(0, (len(statuses), -1)),  # `stack` makes a view of each first
    lambda statuses: statuses[0].new_empty(len(statuses), *statuses[0].shape),
)


def lookup(index: Tensor, values: Sequence[int]) -> Tensor:
    """The value at each index."""
    return _constant(values, index)[index]


def _constant(values: Sequence[int], like: Tensor) -> Tensor:
    """Integers on the device of a tensor, copied there once: a copy from the host waits for the device.

    In a graph, Inductor does so by itself. A tensor made under a `torch.func` transform cannot be used outside of it.
    """
    if torch.compiler.is_compiling() or is_traced(like) or in_transform():
        return torch.tensor(values, device=like.device)
    return _cached_constant(tuple(values), like.device)


@functools.lru_cache(256)
def _cached_constant(values: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(values, device=device)
