"""What all the evidence of a call comes to, sample by sample.

Tables to look numbers up in.

Much evidence, put side by side.

Which of all the evidence of a call is the earliest, sample by sample.
"""

import functools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchguard._channel.codes import DEFAULT_SEVERITY, ErrorCode, Severity
from torchguard._channel.config import ErrorConfig
from torchguard._channel.layout import LOCATION_SHIFT, pack_slot
from torchguard._channel.slots import Flags, capacity, pack, zero_flags
from torchguard._operators import are_kept_whole, define, define_whole
from torchguard._torch.tracing import can_read, in_transform, is_shape_only, is_surely, is_traced, surely_equal
from torchguard._watch.backward import tell
from torchguard._watch.batch import Batch, rows_of
from torchguard._watch.detect import CODES, FINE, REVISION, are_finite, kinds_of, look, says_nothing, unread
from torchguard.checks import floats_of


def at(index: Tensor, values: Sequence[int]) -> Tensor:
    """The value at each index."""
    return constant(values, index)[index]


def constant(values: Sequence[int], like: Tensor) -> Tensor:
    """Whole numbers where a tensor is, put there once: copying them from the host would wait for the device.

    In a graph, Inductor does so by itself. Under a `torch.func` transform, what is made is of no use outside of it.
    """
    if torch.compiler.is_compiling() or is_traced(like) or in_transform():
        return torch.tensor(values, device=like.device)
    return _placed(tuple(values), like.device)


@functools.lru_cache(256)
def _placed(values: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(values, device=device)


def side_by_side(evidence: Sequence[Tensor]) -> Tensor:
    """`torch.stack`, so that every kernel that makes one of them stays as it is.

    In a graph for the CPU, where vectors have one piece, each is written to where it belongs, and no memory is asked
    for between two layers: that would have the next layer write to where nothing is cached. For a GPU, Inductor would
    not fuse such kernels with what else reads a tensor, so it is a call that is not compiled.
    """
    if not is_traced(evidence[0]):
        return torch.stack([*evidence])
    if evidence[0].is_cpu:
        return torch.cat([*evidence], -1).movedim(-1, 0).unsqueeze(-1)
    return _SIDE_BY_SIDE(evidence)


def _shape(evidence: Sequence[Tensor]) -> Tensor:
    return evidence[0].new_empty(len(evidence), *evidence[0].shape)


_SIDE_BY_SIDE = define_whole("side_by_side(Tensor[] evidence) -> Tensor", torch.stack, _shape)


# A key, from the right: kind, position (counted down), order (counted down).
KIND, POSITION, LAST, ORDER = 0xFF, 8, (1 << 31) - 1, 40
# In the place of a dim along which samples lie: that is to be found out.
UNTOLD = -1


class Group(NamedTuple):
    """Evidence of one shape and dtype: `(evidence, batch, ..., pieces)`, and the number of each."""

    several: Tensor
    numbers: list[int]


def earliest(found: list[Tensor], dims: list[int], batch: Batch, most: int) -> tuple[Tensor, Tensor]:
    """The keys of the earliest evidence against each sample, so many, and how much there is in all.

    A key holds the order of the evidence, the first bad vector in it, and its kind. The larger it is the earlier the
    evidence was met; 0 stands for none.

    Args:
        dims: along which the samples of each piece of evidence lie, or `UNTOLD`.
    """
    keys = _keys(found, dims, batch)
    if most == 1:
        return keys.amax(0, keepdim=True), (keys > 0).sum(0)
    missing = max(0, most - keys.shape[0])
    return F.pad(keys, (0, 0, 0, missing)).topk(most, dim=0).values, (keys > 0).sum(0)


def _keys(found: list[Tensor], dims: Sequence[int], batch: Batch) -> Tensor:
    """A key for every piece of evidence and sample."""
    groups, strays = ([], []) if is_surely(batch.size == 0) else grouped(found, dims, batch)
    parts, numbers = [], []
    for group in groups:
        kinds = kinds_of(group.several.amax(-1)).to(torch.int64)
        kinds = kinds.flatten(2) if kinds.ndim > 2 else kinds.unsqueeze(-1)
        position = (LAST - torch.arange(kinds.shape[-1], device=kinds.device)).to(torch.int64) << POSITION
        parts.append(torch.where(kinds == FINE, 0, position | kinds).amax(-1))
        numbers += group.numbers
    if parts:
        keys = torch.cat(parts)
        parts = [torch.where(keys == 0, 0, keys | _early(len(found), numbers, keys))]
    if strays:
        # About no sample in particular: about all, unless one went bad before. Then it is an echo of that.
        kinds = torch.stack([kinds_of(found[i]).amax().to(batch.device, torch.int64) for i in strays]).unsqueeze(-1)
        keys = torch.where(kinds == FINE, 0, _early(len(found), strays, kinds) | (LAST << POSITION) | kinds)
        earlier = torch.cat(parts).amax() if parts else torch.zeros_like(keys)
        parts.append(torch.where(keys > earlier, keys, 0).expand(-1, batch.size))
    return torch.cat(parts) if parts else torch.zeros(1, batch.size, dtype=torch.int64, device=batch.device)


def _early(n: int, numbers: list[int], like: Tensor) -> Tensor:
    """The part of a key that tells the order, for evidence of these numbers, of `n`."""
    return constant([(n - i) << ORDER for i in numbers], like).unsqueeze(-1)


def grouped(found: list[Tensor], dims: Sequence[int], batch: Batch) -> tuple[list[Group], list[int]]:
    """The evidence in groups, and the numbers of what is about no sample."""
    alike: list[dict[int, Tensor]] = []
    strays = []
    for i, (one, dim) in enumerate(zip(found, dims, strict=True)):
        rows = rows_of(one, None if dim == UNTOLD else dim, batch)
        if any(is_surely(size == 0) for size in (one.shape if rows is None else rows.shape[1:])):
            continue  # nothing is there that could be bad
        if rows is None:
            strays.append(i)
            continue
        for group in alike:
            first = next(iter(group.values()))
            if first.dtype == rows.dtype and surely_equal(first.shape, rows.shape):
                group[i] = rows
                break
        else:
            alike.append({i: rows})
    return [Group(side_by_side([*group.values()]), [*group]) for group in alike], strays


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
