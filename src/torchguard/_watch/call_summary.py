"""What the summary of a call consists of, and how it is computed: row statuses to flags and origins.

Every check of a call leaves a row status. `origins.py` finds the earliest fault of each sample, its origin. Without
quarantine, later faults of the sample count as propagated from it. If quarantine replaced each fault when it was met, a
later one is a fault of its own, and is recorded as well. `summarize.py` has what graphs need of it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchguard._channel.codes import DEFAULT_SEVERITY, ErrorCode, Severity
from torchguard._channel.config import ErrorConfig
from torchguard._channel.packing import Flags, capacity, pack, zero_flags
from torchguard._channel.slot_bits import LOCATION_SHIFT, pack_slot
from torchguard._torch.tracing import can_read, is_exporting
from torchguard._watch.batch import Batch
from torchguard._watch.detect import FAULT_CODES, OK, all_finite
from torchguard._watch.origins import NUM_ORIGINS, RowStatuses, checks_of, earliest_faults, lookup
from torchguard._watch.path_bits import CallOrder

# The slot of each fault, and of each code that a warning may have, without the location.
FAULT_SLOTS = tuple(pack_slot(code, 0, DEFAULT_SEVERITY[code]) for code in FAULT_CODES)
_WARNING_SLOTS = tuple(pack_slot(code, 0, DEFAULT_SEVERITY.get(code, Severity.WARN)) for code in range(16))
# The slot that follows that of a fault which was replaced.
FALLBACK_SLOT = pack_slot(ErrorCode.FALLBACK_VALUE, 0, Severity.WARN)


class CallSummary(NamedTuple):
    """One call, sample by sample. Locations are given by their index in `WatchState.paths`.

    Args:
        origins: `(NUM_ORIGINS, batch)`: the location where the sample went bad first (`CallRecord.check` has the
            numbers of arguments), at how many further locations it was bad, and the position of the first bad vector at
            the origin, counted over the dims between batch and last. All three are -1 for a sample that is finite
            everywhere. Further rows, if there are any, are the path of the sample: see `path_bits.py`.
        warnings: `(codes, batch)`, if there are any: 16 times the location where the warning came up first, plus its
            code; -1 for none.
        ids: `(batch,)`, the ids of the samples, if they were given.
        is_clean: whether it is known without reading that there is no fault.
    """

    flags: Flags
    origins: Tensor
    warnings: Tensor | None
    ids: Tensor | None = None
    is_clean: bool = False


class FaultHandling(NamedTuple):
    """What a call does with faults, as far as its summary depends on it.

    Args:
        quarantine: whether the output of bad samples is replaced.
        replaced: whether each fault was replaced when it was met, so that the next is a fault of its own.
        mixes: whether the model may have mixed samples, so that a fault of one counts for all.
    """

    quarantine: bool
    replaced: bool
    mixes: bool


def flags_and_origins(
    checked: RowStatuses,
    warnings: Tensor | None,
    location_ids: Tensor,
    batch: Batch,
    handling: FaultHandling,
    config: ErrorConfig,
    order: CallOrder,
) -> tuple[Flags, Tensor]:
    """Flags and origins."""
    f = zero_flags(batch.size, batch.device, config.flag_dtype, config)
    room = capacity(f, config)
    most = most_faults(room, len(checked.statuses), handling)
    fault, check, position, times, keys = earliest_faults(checked, batch, most, handling.mixes)
    location = lookup(check, [*checked.locations, -1])
    location_bits = location_ids.to(location.device)[location] << LOCATION_SHIFT
    slots = torch.where(fault == OK, 0, location_bits | lookup(fault, FAULT_SLOTS))
    if handling.quarantine:
        slots = _alternate(slots, torch.where(fault == OK, 0, location_bits | FALLBACK_SLOT))
    if warnings is not None:
        slots = _empty_last(torch.cat([slots, _warning_slots(warnings, location_ids)]))
    origins = torch.stack([location[0], times - 1, position])
    if order.num_rows:
        origins = torch.cat([origins, order.rows(checks_of(keys, len(checked.statuses)))])
    return pack(slots[:room].t(), f), origins


def most_faults(room: int, checks: int, handling: FaultHandling) -> int:
    """How many faults of a sample become slots of its flags."""
    return max(1, min(room // 2, checks)) if handling.replaced else 1


def _alternate(a: Tensor, b: Tensor) -> Tensor:
    """Rows of both tensors in turn."""
    if is_exporting():  # before torch 2.13, `flatten` would limit the batch of an exported program
        return torch.stack([row for pair in zip(a, b, strict=True) for row in pair])
    return torch.stack([a, b], 1).flatten(0, 1)


def all_ok(statuses: list[Tensor]) -> bool:
    """Whether there is no fault, as far as that can be read without waiting for a device."""
    if not statuses:
        return True
    if not can_read(statuses[0]) or not all(status.is_cpu for status in statuses):
        return False
    dtypes = {status.dtype for status in statuses}
    return all(is_ok(torch.cat([one.flatten() for one in statuses if one.dtype == dtype])) for dtype in dtypes)


def is_ok(status: Tensor) -> bool:
    if status.dtype == torch.int8:
        return status.numel() == 0 or status.amax().item() <= OK
    return all_finite(status)


def clean_summary(batch: Batch, config: ErrorConfig, path_rows: int = 0) -> tuple[Flags, Tensor]:
    """Flags and origins of a call without faults."""
    f = zero_flags(batch.size, batch.device, config.flag_dtype, config)
    return f, torch.full((NUM_ORIGINS + path_rows, batch.size), -1, dtype=torch.int64, device=batch.device)


def first_warnings(recorded: Sequence[tuple[int, int, Tensor]]) -> Tensor | None:
    """`CallSummary.warnings`, from the location, the code and the `(batch,)` mask of each warning of a call.

    A warning counts where it comes up first: a layer that passes on zeros is no second cause.
    """
    firsts = []
    for code in sorted({code for _, code, _ in recorded}):
        masks = torch.stack([mask for _, other, mask in recorded if other == code])
        packed = [location * 16 + code for location, other, _ in recorded if other == code]
        first = lookup(masks.to(torch.int8).argmax(0), packed)
        firsts.append(torch.where(masks.any(0), first, -1))
    return torch.stack(firsts) if firsts else None


def _warning_slots(warnings: Tensor, location_ids: Tensor) -> Tensor:
    location, code = warnings >> 4, warnings & 0xF
    location_bits = location_ids.to(location.device)[location] << LOCATION_SHIFT
    return torch.where(warnings < 0, 0, location_bits | lookup(code, _WARNING_SLOTS))


def _empty_last(slots: Tensor) -> Tensor:
    # Keys that differ, not a stable sort: ONNX has none.
    order = torch.where(slots == 0, len(slots), 0) + torch.arange(len(slots), device=slots.device).unsqueeze(-1)
    order = order.sort(dim=0).indices
    return slots.gather(0, order)
