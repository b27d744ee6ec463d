"""What all the evidence of a call comes to, sample by sample."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchguard._torch import can_read, is_shape_only, is_traced
from torchguard.errors.codes import DEFAULT_SEVERITY, ErrorCode, Severity
from torchguard.errors.config import ErrorConfig
from torchguard.errors.layout import LOCATION_SHIFT, pack_slot
from torchguard.errors.slots import Flags, capacity, pack, zero_flags
from torchguard.operators import are_kept_whole, define, define_whole, revision_of
from torchguard.watching.constants import at
from torchguard.watching.earliest import KIND, LAST, ORDER, POSITION, earliest
from torchguard.watching.kinds import CODES, FEW, FINE, is_bad, says_nothing
from torchguard.watching.rows import Batch

# What a slot holds of a kind, beside the location; and so for each code that is no fault.
_FAULTS = tuple(pack_slot(code, 0, DEFAULT_SEVERITY[code]) for code in CODES)
_REMARKS = tuple(pack_slot(code, 0, DEFAULT_SEVERITY.get(code, Severity.WARN)) for code in range(16))
_FALLBACK = pack_slot(ErrorCode.FALLBACK_VALUE, 0, Severity.WARN)
_REVISION = revision_of(Path(__file__).parent)


class Verdict(NamedTuple):
    """The flags; the place where a sample went bad first (-1: nowhere), how often it was seen bad, and which vector of
    the first was the first bad one (-1: none)."""

    flags: Flags
    origin: Tensor
    times: Tensor
    position: Tensor


class Evidence(NamedTuple):
    """Evidence in the order in which it was met.

    `places` are where; `dims` along which its samples lie, or `UNTOLD`; `ranks` of what was looked at.
    """

    found: list[Tensor]
    places: list[int]
    dims: list[int]
    ranks: list[int]


def verdict(
    evidence: Evidence, remarks: Tensor, locations: Tensor, batch: Batch, repairs: bool, config: ErrorConfig
) -> Verdict:
    """What the evidence comes to.

    Args:
        remarks: `(remarks, batch)`, the place times 16, plus the code, of what is no fault (-1: none).
        locations: the location id of each place, and 0 behind them.
        repairs: whether each fault was repaired when it was met, so that the next is another, and no echo.
    """
    given = (evidence, remarks, locations, batch, repairs, config)
    # What is asked of every piece of evidence takes Dynamo long, and a large model has hundreds.
    return Verdict(*torch.ops.torchguard.verdict(*_flat(*given))) if are_kept_whole() else _verdict(*given)


def _verdict(
    evidence: Evidence, remarks: Tensor, locations: Tensor, batch: Batch, repairs: bool, config: ErrorConfig
) -> Verdict:
    found, places, dims, ranks = evidence
    if remarks.shape[0] == 0 and (not found or _is_clean(found)):
        return _clean(batch, config)
    f = zero_flags(batch.size, batch.device, config.flag_dtype, config)
    room = capacity(f, config)
    first, times = earliest(found, dims, ranks, batch, max(1, min(room // 2, len(found))) if repairs else 1)
    kind = first & KIND
    place = at(len(places) - (first >> ORDER), [*places, -1])  # one more, for samples that nothing was found about
    location = locations.to(place.device)[place] << LOCATION_SHIFT
    slots = torch.where(kind == FINE, 0, location | at(kind, _FAULTS))
    if repairs:
        slots = torch.stack([slots, torch.where(kind == FINE, 0, location | _FALLBACK)], 1).flatten(0, 1)
    if remarks.shape[0]:
        slots = _moved_up(torch.cat([slots, _slots_of(remarks, locations)]))
    position = torch.where(kind[0] == FINE, -1, LAST - ((first[0] >> POSITION) & LAST))
    return Verdict(pack(slots[:room].t(), f), place[0], times, position)


def _is_clean(found: list[Tensor]) -> bool:
    """Whether nothing speaks against anything, where asking waits for nobody."""
    if not can_read(found[0]) or not all(one.is_cpu for one in found):
        return False
    for dtype in {one.dtype for one in found}:
        alike = torch.cat([one.flatten() for one in found if one.dtype == dtype])
        if alike.numel() and (alike.amax() > FINE if dtype == torch.int8 else is_bad(alike.amax())):
            return False
    return True


def _clean(batch: Batch, config: ErrorConfig) -> Verdict:
    f = zero_flags(batch.size, batch.device, config.flag_dtype, config)
    origin, times, position = (
        torch.full((batch.size,), fill, dtype=torch.int64, device=batch.device) for fill in (-1, 0, -1)
    )
    return Verdict(f, origin, times, position)


def _slots_of(remarks: Tensor, locations: Tensor) -> Tensor:
    place, code = remarks >> 4, remarks & 0xF
    location = locations.to(place.device)[place] << LOCATION_SHIFT
    return torch.where(remarks < 0, 0, location | at(code, _REMARKS))


def _moved_up(slots: Tensor) -> Tensor:
    """Slots with the empty ones last."""
    order = (slots == 0).to(torch.int8).sort(dim=0, stable=True).indices
    return slots.gather(0, order)


# The operators.


def _flat(
    evidence: Evidence, remarks: Tensor, locations: Tensor, batch: Batch, repairs: bool, config: ErrorConfig
) -> tuple[Any, ...]:
    """What a verdict is made of, as an operator takes it."""
    about = (batch.size, batch.lengths, batch.dim, batch.device)
    transposes_from = config.transpose_threshold if config.use_transposed_layout else None
    return (
        *evidence,
        remarks,
        locations,
        *about,
        repairs,
        config.flag_dtype,
        config.num_slots,
        transposes_from,
        _REVISION,
    )


_SIGNATURE = (
    "(Tensor[] found, int[] places, int[] dims, int[] ranks, Tensor remarks, Tensor locations, SymInt size, "
    "SymInt[] lengths, int dim, Device device, bool repairs, ScalarType dtype, int slots, int? transposes_from, "
    "int revision) -> (Tensor, Tensor, Tensor, Tensor)"
)
_Given = tuple[Evidence, Tensor, Tensor, Batch, bool, ErrorConfig]


def _bundled(*flat: Any) -> _Given:
    """The inverse of `_flat`."""
    *evidence, remarks, locations, size, lengths, dim, device, repairs, dtype, slots, transposes_from, _ = flat
    config = ErrorConfig(num_slots=slots, flag_dtype=dtype, use_transposed_layout=transposes_from is not None)
    config.transpose_threshold = transposes_from or 0
    return Evidence(*evidence), remarks, locations, Batch(size, tuple(lengths), dim, device), repairs, config


def _traced(*flat: Any) -> Verdict:
    evidence, remarks, locations, batch, repairs, config = _bundled(*flat)
    if is_shape_only(evidence.found[0]):
        return _clean(batch, config)
    heard = [i for i, one in enumerate(evidence.found) if not says_nothing(one)]
    places, dims, ranks = ([part[i] for i in heard] for part in evidence[1:])
    found = [evidence.found[i] for i in heard]
    given = (Evidence(found, places, dims, ranks), remarks, locations, batch, repairs, config)
    if len(found) > FEW and batch.device.type == "cpu" and is_traced(evidence.found[0]):
        # It mostly finds nothing and ends at once, but would take long to compile.
        return torch.ops.torchguard.verdict_at_once(*_flat(*given))
    return _verdict(*given)


def _at_once(*flat: Any) -> Verdict:
    return _verdict(*_bundled(*flat))


def _shapes(*flat: Any) -> Verdict:
    *_, batch, _, config = _bundled(*flat)
    return _clean(batch, config)


define("verdict" + _SIGNATURE, _traced)
define_whole("verdict_at_once" + _SIGNATURE, _at_once, _shapes)
