"""What all the evidence of a call comes to, sample by sample."""

import functools
import json
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchguard._torch import can_read, is_shape_only, is_traced
from torchguard.checks import floats_of
from torchguard.errors.codes import DEFAULT_SEVERITY, ErrorCode, Severity
from torchguard.errors.config import ErrorConfig
from torchguard.errors.layout import LOCATION_SHIFT, pack_slot
from torchguard.errors.slots import Flags, capacity, pack, zero_flags
from torchguard.operators import are_kept_whole, define, define_whole
from torchguard.watching.constants import at
from torchguard.watching.earliest import KIND, LAST, ORDER, POSITION, earliest, grouped
from torchguard.watching.kinds import CODES, FINE, REVISION, are_finite, look, says_nothing, unread
from torchguard.watching.marking import tell
from torchguard.watching.rows import Batch

# What a slot holds of a kind, beside the location; and so for each code that is no fault.
_FAULTS = tuple(pack_slot(code, 0, DEFAULT_SEVERITY[code]) for code in CODES)
_REMARKS = tuple(pack_slot(code, 0, DEFAULT_SEVERITY.get(code, Severity.WARN)) for code in range(16))
_FALLBACK = pack_slot(ErrorCode.FALLBACK_VALUE, 0, Severity.WARN)
_CPU = torch.device("cpu")


class Verdict(NamedTuple):
    """The flags, and what is told of each sample: `(3, batch)`, -1 for one that is fine.

    The place where it went bad first, in how many more it was seen bad, and which vector of the first was the first bad
    one.
    """

    flags: Flags
    told: Tensor


class Evidence(NamedTuple):
    """Evidence in the order in which it was met: where, and along which dim its samples lie, or `UNTOLD`."""

    found: list[Tensor]
    places: list[int]
    dims: list[int]


def verdict(
    evidence: Evidence,
    remarks: Tensor | None,
    locations: Tensor,
    batch: Batch,
    repairs: bool,
    config: ErrorConfig,
    marks: Tensor | None,
) -> Verdict:
    """What the evidence comes to.

    Args:
        remarks: `(remarks, batch)`, the place times 16, plus the code, of what is no fault (-1: none), if there is any.
        locations: the location id of each place, and 0 behind them.
        repairs: whether each fault was repaired when it was met, so that the next is another, and no echo.
        marks: those of the call, if it has any. They are told.
    """
    about = (remarks, locations, batch, repairs, config)
    if are_kept_whole():
        # What is asked of every piece of evidence takes Dynamo long, and a large model has hundreds.
        return Verdict(*_VERDICT(*evidence, marks, *_flat(*about)))
    found = _verdict(evidence, *about)
    tell(marks, found.told)
    return found


def _verdict(
    evidence: Evidence, remarks: Tensor | None, locations: Tensor, batch: Batch, repairs: bool, config: ErrorConfig
) -> Verdict:
    found, places, dims = evidence
    if remarks is None and _is_clean(found):
        return _clean(batch, config)
    f = zero_flags(batch.size, batch.device, config.flag_dtype, config)
    room = capacity(f, config)
    first, times = earliest(found, dims, batch, max(1, min(room // 2, len(found))) if repairs else 1)
    kind = first & KIND
    place = at(len(places) - (first >> ORDER), [*places, -1])  # one more, for samples that nothing was found about
    location = locations.to(place.device)[place] << LOCATION_SHIFT
    slots = torch.where(kind == FINE, 0, location | at(kind, _FAULTS))
    if repairs:
        slots = torch.stack([slots, torch.where(kind == FINE, 0, location | _FALLBACK)], 1).flatten(0, 1)
    if remarks is not None:
        slots = _moved_up(torch.cat([slots, _slots_of(remarks, locations)]))
    position = torch.where(kind[0] == FINE, -1, LAST - ((first[0] >> POSITION) & LAST))
    return Verdict(pack(slots[:room].t(), f), torch.stack([place[0], times - 1, position]))


def _is_clean(found: list[Tensor]) -> bool:
    """Whether nothing speaks against anything, where asking waits for nobody."""
    if not found:
        return True
    if not can_read(found[0]) or not all(one.is_cpu for one in found):
        return False
    dtypes = {one.dtype for one in found}
    return all(_is_fine(torch.cat([one.flatten() for one in found if one.dtype == dtype])) for dtype in dtypes)


def _is_fine(found: Tensor) -> bool:
    if found.dtype == torch.int8:
        return found.numel() == 0 or found.amax().item() <= FINE
    return are_finite(found)


def _clean(batch: Batch, config: ErrorConfig) -> Verdict:
    f = zero_flags(batch.size, batch.device, config.flag_dtype, config)
    return Verdict(f, torch.full((3, batch.size), -1, dtype=torch.int64, device=batch.device))


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
    remarks: Tensor | None, locations: Tensor, batch: Batch, repairs: bool, config: ErrorConfig
) -> tuple[Any, ...]:
    """What a verdict is made of beside evidence, as an operator takes it."""
    transposes_from = config.transpose_threshold if config.use_transposed_layout else None
    layout = (config.flag_dtype, config.num_slots, transposes_from)
    return remarks, locations, batch.size, batch.lengths, batch.dim, batch.device, repairs, *layout, REVISION


@functools.lru_cache(64)
def _config(dtype: torch.dtype, slots: int, transposes_from: int | None) -> ErrorConfig:
    config = ErrorConfig(num_slots=slots, flag_dtype=dtype, use_transposed_layout=transposes_from is not None)
    config.transpose_threshold = transposes_from or 0
    return config


def _verdict_op(found: list[Tensor], places: list[int], dims: list[int], marks: Tensor | None, *about: Any) -> Verdict:
    came_to = _traced_verdict(found, places, dims, *about)
    tell(marks, came_to.told)
    return came_to


def _traced_verdict(
    found: list[Tensor],
    places: list[int],
    dims: list[int],
    remarks: Tensor | None,
    locations: Tensor,
    size: int,
    lengths: list[int],
    dim: int,
    device: torch.device,
    repairs: bool,
    dtype: torch.dtype,
    slots: int,
    transposes_from: int | None,
    revision: int,
) -> Verdict:
    batch, config = Batch(size, tuple(lengths), dim, device), _config(dtype, slots, transposes_from)
    if is_shape_only(found[0]):
        return _clean(batch, config)
    heard = [i for i, one in enumerate(found) if not says_nothing(one)]
    found, places, dims = [found[i] for i in heard], [places[i] for i in heard], [dims[i] for i in heard]
    if not found or batch.device.type != "cpu" or not is_traced(found[0]):
        return _verdict(Evidence(found, places, dims), remarks, locations, batch, repairs, config)
    # It mostly finds nothing and ends at once, but would take long to compile.
    whole = {i: z for i, z in enumerate(map(unread, found)) if z is not None}
    rest = [i for i in range(len(found)) if i not in whole]
    groups, strays = grouped([found[i] for i in rest], [dims[i] for i in rest], batch)
    in_groups = [rest[i] for group in groups for i in group.numbers]
    alone = [rest[i] for i in strays]
    dims = [0 if i in in_groups else told for i, told in enumerate(dims)]
    numbers = json.dumps([in_groups, alone, [*whole], places, dims])  # lists take longer to hand over than all the rest
    return Verdict(
        *_VERDICT_AT_ONCE(
            [group.several for group in groups],
            [found[i] for i in alone],
            [*whole.values()],
            numbers,
            remarks,
            locations,
            size,
            lengths,
            dim,
            repairs,
            dtype,
            slots,
            transposes_from,
        )
    )


def _at_once(
    groups: list[Tensor],
    alone: list[Tensor],
    whole: list[Tensor],
    numbers: str,
    remarks: Tensor | None,
    locations: Tensor,
    size: int,
    lengths: list[int],
    dim: int,
    repairs: bool,
    dtype: torch.dtype,
    slots: int,
    transposes_from: int | None,
) -> Verdict:
    """The verdict, by evidence side by side, by evidence alone, and by tensors that are yet to be looked at.

    Args:
        numbers: of each of these, in the order in which they were met; then all their places, and their dims.
    """
    batch, config = Batch(size, tuple(lengths), dim, _CPU), _config(dtype, slots, transposes_from)
    is_fine = all(map(_is_fine, groups)) and all(map(_is_fine, alone)) and all(are_finite(floats_of(z)) for z in whole)
    if remarks is None and is_fine:
        return _clean(batch, config)
    in_groups, their, of_whole, places, dims = json.loads(numbers)
    found = dict(zip(in_groups, (one for group in groups for one in group), strict=True))
    found |= zip(their, alone, strict=True)
    found |= zip(of_whole, map(look, whole), strict=True)
    met = sorted(found)
    evidence = Evidence([found[i] for i in met], [places[i] for i in met], [dims[i] for i in met])
    return _verdict(evidence, remarks, locations, batch, repairs, config)


def _shapes(*given: Any) -> Verdict:
    size, lengths, dim, _, *layout = given[6:]
    return _clean(Batch(size, tuple(lengths), dim, _CPU), _config(*layout))


_VERDICT = define(
    "verdict(Tensor[] found, int[] places, int[] dims, Tensor? marks, Tensor? remarks, Tensor locations, SymInt size, "
    "SymInt[] lengths, int dim, Device device, bool repairs, ScalarType dtype, int slots, int? transposes_from, "
    "int revision) -> (Tensor, Tensor)",
    _verdict_op,
)
_VERDICT_AT_ONCE = define_whole(
    "verdict_at_once(Tensor[] groups, Tensor[] alone, Tensor[] whole, str numbers, Tensor? remarks, Tensor locations, "
    "SymInt size, SymInt[] lengths, int dim, bool repairs, ScalarType dtype, int slots, int? transposes_from) "
    "-> (Tensor, Tensor)",
    _at_once,
    _shapes,
)
