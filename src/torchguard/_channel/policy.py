"""Accumulation policies: which errors of a sample stay, in which slot; and writing them into flags.

Two rules decide, for every combination of `Priority`, `Order` and `Dedupe`:

1. Errors that `Dedupe` calls the same share one slot. It holds the error that ranks first; under CHRONO-FIRST it has
   the position of the earliest and the content of the most severe.
2. If a sample has more errors than slots, those that rank first stay, the best in slot 0.

The rank of an error never changes, so the result does not depend on how pushes are grouped: one push of ten errors
and ten pushes of one error give the same flags. So does a merge of two halves, unless the later half had already
dropped errors for lack of slots.

Flags may have been written under another policy. A write changes no sample that gains no error. Of a sample that does,
CHRONO-FIRST leaves the errors that it holds where they are, even if `Dedupe` now calls two of them the same (a new one
joins the first of these); every other policy ranks them anew.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from torchguard._channel.config import AccumulationConfig, Dedupe, Order, Priority
from torchguard._channel.packing import Flags, Slots, bits, constant, pack, unpack
from torchguard._channel.slot_bits import (
    CODE_MASK,
    CODE_SHIFT,
    LOCATION_BITS,
    LOCATION_MASK,
    LOCATION_SHIFT,
    SEVERITY_BITS,
    SEVERITY_MASK,
    SLOT_BITS,
    SLOT_MASK,
    slot_location,
    slot_severity,
)
from torchguard._channel.validate import require_intact
from torchguard._torch.tracing import can_read

Stored = Int[Tensor, "batch kept"]

# Up to this number of new errors, appending them one by one is faster than one sort.
_MAX_APPENDED = 2
_EMPTY = torch.iinfo(torch.int64).max

# The bits two errors must share to count as the same.
_SAME_BITS = {
    Dedupe.CODE: CODE_MASK << CODE_SHIFT,
    Dedupe.LOCATION: SLOT_MASK & ~((1 << LOCATION_SHIFT) - 1),
    Dedupe.UNIQUE: SLOT_MASK & ~SEVERITY_MASK,
}


def is_first_in(policy: AccumulationConfig) -> bool:
    return policy.priority == Priority.CHRONO and policy.order == Order.FIRST


def same_bits(dedupe: Dedupe) -> int:
    """The bits that two slots of the same error share; undefined for `Dedupe.NONE`."""
    return _SAME_BITS[dedupe]


def arrival_order(slots: Slots, policy: AccumulationConfig) -> Slots:
    """Stored slots, oldest first as far as the policy preserves the order of arrival."""
    return slots.flip(-1) if policy.priority == Priority.CHRONO and policy.order == Order.LAST else slots


def add(held: Slots, arrived: Sequence[Int[Tensor, "batch _"]], room: int, policy: AccumulationConfig) -> Stored:
    """The slots of each row after new ones arrive; 0 stands for an empty slot."""
    if is_first_in(policy) and len(arrived) <= _MAX_APPENDED and arrived[0].shape[1] == 1:
        slots = held if held.shape[1] == room else held[:, :room]
        for column in arrived:
            slots = append(slots, column, policy.dedupe)
        return slots
    return select(torch.cat([arrival_order(held, policy), *arrived], dim=-1), policy, room, held.shape[1])


def leaves_others_alone(lanes: int, room: int, policy: AccumulationConfig) -> bool:
    """Whether `add` returns rows that gain no error as they were, whatever policy they were written under."""
    return is_first_in(policy) and room >= lanes


def append(slots: Slots, new: Shaped[Tensor, "..."], dedupe: Dedupe) -> Slots:
    """Append one error per row (0 for none) under CHRONO-FIRST: to the slot of the same error, else to a free one.

    Used slots have no gap, so the target is the first slot that is free or matches. In eager mode the cost is per
    operation, not per element, so operands are tensors rather than numbers, and operations as few as possible.
    """
    free = slots.logical_not()
    fits = free
    if dedupe != Dedupe.NONE:
        differ = torch.bitwise_and(torch.bitwise_xor(slots, new), constant(same_bits(dedupe), slots))
        fits = free | differ.logical_not()
    first = fits & (fits.cumsum(-1) == constant(1, fits))
    alike = dedupe == Dedupe.UNIQUE  # then they differ in severity alone
    worse = slots < new if alike else slot_severity(slots) < slot_severity(new)
    return torch.where(first & (free | worse), new, slots)


def append_to_row(held: list[int], arrived: Sequence[int], dedupe: Dedupe) -> None:
    """`append` for one row of numbers, in place: for few rows, faster than operations."""
    same = 0 if dedupe == Dedupe.NONE else same_bits(dedupe)
    for new in arrived:
        for i, slot in enumerate(held):
            if not slot or (same and not (slot ^ new) & same):
                if not slot or slot_severity(slot) < slot_severity(new):
                    held[i] = new
                break


def select(arrived: Int[Tensor, "batch errors"], policy: AccumulationConfig, room: int, held: int = 0) -> Stored:
    """The errors that stay under any policy, by rank. `arrived` is oldest first; 0 stands for none.

    The first `held` columns are those that the flags hold already. Each sorted integer holds rank and slot together, so
    no index, stable sort or pairwise comparison is needed: the cost is one sort, for 16 slots as for 32,768.
    """
    arrived = arrived.to(torch.int64) & SLOT_MASK
    rank, width = _rank(arrived, policy)
    if policy.dedupe == Dedupe.NONE:
        candidates = torch.where(arrived != 0, (rank << SLOT_BITS) | arrived, _EMPTY)
    else:
        candidates = _deduplicated(arrived, rank, width, policy, held)
    best = candidates.sort(-1).values[:, :room]
    return torch.where(best == _EMPTY, 0, best & SLOT_MASK)


class _Ranks(NamedTuple):
    rank: Int[Tensor, "batch errors"]
    width: int  # bits per rank


def _rank(arrived: Tensor, policy: AccumulationConfig) -> _Ranks:
    """Lower ranks first. Arrival breaks ties, so all ranks of a row differ."""
    last = policy.order == Order.LAST
    count = arrived.shape[1]
    age_bits = max(count - 1, 1).bit_length()
    age = torch.arange(count, dtype=torch.int64, device=arrived.device)
    if policy.priority == Priority.CHRONO:
        return _Ranks((count - 1) - age if last else age, age_bits)
    mildness = SEVERITY_MASK - slot_severity(arrived)
    if policy.priority == Priority.SEVERITY:
        axis = mildness if last else slot_severity(arrived)
        return _Ranks((axis << age_bits) | age, age_bits + SEVERITY_BITS)
    location = slot_location(arrived)
    axis = (LOCATION_MASK - location if last else location) << SEVERITY_BITS
    return _Ranks(((axis | mildness) << age_bits) | age, age_bits + SEVERITY_BITS + LOCATION_BITS)


def _deduplicated(arrived: Tensor, rank: Tensor, width: int, policy: AccumulationConfig, held: int) -> Tensor:
    """Rank and slot of the first-ranked error of each group of equal errors; `_EMPTY` for the others."""
    group = arrived & same_bits(policy.dedupe)
    keyed = (((group << width) | rank) << SLOT_BITS) | arrived
    ordered = torch.where(arrived != 0, keyed, _EMPTY).sort(-1).values
    used = ordered != _EMPTY
    group_of = ordered >> (SLOT_BITS + width)
    is_first = torch.nn.functional.pad(group_of[:, 1:] != group_of[:, :-1], (1, 0), value=True) & used
    best = ordered & ((1 << (SLOT_BITS + width)) - 1)
    if not is_first_in(policy):
        return torch.where(is_first, best, _EMPTY)
    # What is held stays, even if it is the same as another, its twin. Here, rank is age, and the oldest are held.
    is_held = best < (held << SLOT_BITS)
    is_twin = is_held > is_first
    # Sorted by severity within each group, twins last, each group still starts at the same column, which then holds the
    # worst.
    order = torch.add((ordered & SEVERITY_MASK) ^ SEVERITY_MASK, is_twin, alpha=SEVERITY_MASK + 1)
    keyed = (((group_of << (SEVERITY_BITS + 1)) | order) << (SLOT_BITS + width)) | best
    worst = torch.where(used, keyed, _EMPTY).sort(-1).values
    best = torch.where(is_first, (best & ~SLOT_MASK) | (worst & SLOT_MASK), best)
    return torch.where(is_first | is_twin, best, _EMPTY)


# The status that a check gives each row: True, or NaN, for a bad one. In a graph, storing the floats that a reduction
# returns, and testing all of them for NaN together at the end, saves one kernel per check.
RowStatus = Bool[Tensor, "batch ..."] | Float[Tensor, "batch ..."]


def write(
    f: Flags, masks: Sequence[RowStatus], slots: Sequence[int | Tensor], room: int, policy: AccumulationConfig
) -> Flags:
    """`f` with each slot (a number, or a `(batch, 1)` tensor) added to the rows where its mask is True."""
    masks = [rows(mask) for mask in masks]
    if can_read(f):
        found = [(mask, slot) for mask, slot in zip(masks, slots, strict=True) if mask.any()]
        if not found:
            return f
        masks, slots = zip(*found, strict=True)
        if len(masks) == 1 and not (masks[0] & bits(f)[:, 0].to(torch.bool)).any():
            return _first_error(f, masks[0], slots[0])
    held = unpack(f)
    if f.is_floating_point() and can_read(f):
        require_intact("err.push", held, held != 0)
    arrived = [_where(mask, slot, held) for mask, slot in zip(masks, slots, strict=True)]
    packed = pack(add(held, arrived, room, policy), f)
    if leaves_others_alone(held.shape[1], room, policy):
        return packed
    gained = masks[0] if len(masks) == 1 else torch.stack(list(masks)).any(0)
    return torch.where(gained.unsqueeze(-1), packed, f)


def rows(mask: RowStatus) -> Bool[Tensor, " batch"]:
    """True where any entry of a row is raised."""
    mask = is_raised(mask)
    return mask if mask.ndim == 1 else mask.flatten(1).any(-1)


def is_raised(mask: RowStatus) -> Bool[Tensor, "..."]:
    return torch.isnan(mask) if mask.is_floating_point() else mask


def _first_error(f: Flags, mask: Bool[Tensor, " batch"], slot: int | Tensor) -> Flags:
    """Write the first error of a row, which goes to slot 0 under every policy: the common case."""
    words = bits(f)
    first = torch.nn.functional.pad(slot, (0, f.shape[1] - 1)) if isinstance(slot, Tensor) else _word(slot, words)
    return torch.where(mask.unsqueeze(-1), first.to(words.dtype), words).view(f.dtype)


def _word(slot: int, words: Tensor) -> Int[Tensor, " words"]:
    return torch.tensor([slot] + [0] * (words.shape[1] - 1), dtype=words.dtype, device="cpu")


def _where(mask: Tensor, slot: int | Tensor, held: Slots) -> Int[Tensor, "batch 1"]:
    """`slot` in the rows of the mask, 0 in the others."""
    value = slot.to(held.dtype) if isinstance(slot, Tensor) else constant(slot, held)
    return torch.where(mask.unsqueeze(-1), value, constant(0, held))
