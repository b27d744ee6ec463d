"""Writing errors into flags here and now.

Which errors of a row are kept, and in which slot.

A row's errors arrive one after another. Two rules decide, for every combination of `Priority`, `Order` and
`Dedupe`:

1. Errors that `Dedupe` calls the same share one slot. It holds the one that ranks first; under CHRONO-FIRST it
   keeps the place of the earliest and the content of the most severe.
2. If there are more than fit, those that rank first stay, the best in slot 0.

Ranks never change once given, so the outcome does not depend on how pushes were grouped: one push of ten errors
and ten pushes of one leave the same flags. So does a merge of two halves, unless the later one had no slot left
and thus dropped something.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from torchguard._channel.config import AccumulationConfig, Dedupe, Order, Priority
from torchguard._channel.layout import (
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
from torchguard._channel.slots import Flags, Slots, bits, constant, pack, unpack
from torchguard._channel.validate import require_intact
from torchguard._torch.tracing import can_read

Kept = Int[Tensor, "batch kept"]

# Up to so many errors, one after another is faster than all at once.
_FEW = 2
_NOTHING = torch.iinfo(torch.int64).max

# The bits two errors must share to count as the same.
_SAME_BITS = {
    Dedupe.CODE: CODE_MASK << CODE_SHIFT,
    Dedupe.LOCATION: SLOT_MASK & ~((1 << LOCATION_SHIFT) - 1),
    Dedupe.UNIQUE: SLOT_MASK & ~SEVERITY_MASK,
}


def is_first_in(policy: AccumulationConfig) -> bool:
    return policy.priority == Priority.CHRONO and policy.order == Order.FIRST


def same_bits(dedupe: Dedupe) -> int:
    """Mask of the bits that make two slots the same error; `Dedupe.NONE` has no such bits."""
    return _SAME_BITS[dedupe]


def arrival_order(slots: Slots, policy: AccumulationConfig) -> Slots:
    """Stored slots, oldest first as far as the policy can still tell ages apart."""
    return slots.flip(-1) if policy.priority == Priority.CHRONO and policy.order == Order.LAST else slots


def add(held: Slots, arrived: Sequence[Int[Tensor, "batch _"]], room: int, policy: AccumulationConfig) -> Kept:
    """What a row keeps of the slots it holds and of those that arrived, 0 being none."""
    if is_first_in(policy) and len(arrived) <= _FEW and arrived[0].shape[1] == 1:
        slots = held if held.shape[1] == room else held[:, :room]
        for column in arrived:
            slots = append(slots, column, policy.dedupe)
        return slots
    return select(torch.cat([arrival_order(held, policy), *arrived], dim=-1), policy, room)


def append(slots: Slots, new: Shaped[Tensor, "..."], dedupe: Dedupe) -> Slots:
    """CHRONO-FIRST for one more error a row, 0 for none: to its own place if the row has it, else to the first free.

    Used slots have no gap, so that is the first place that is free or matches. Eager mode pays by the operation,
    not by the element: hence tensors rather than numbers as operands, and no step more than it takes.
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


def select(arrived: Int[Tensor, "batch errors"], policy: AccumulationConfig, room: int) -> Kept:
    """Any policy, any number of errors: `arrived` oldest first (0 = none), the kept ones by rank.

    Sorting integers that carry rank and slot together needs no index, no stable sort and no pairwise comparison:
    the cost is that of the sort, at 16 slots as at 32,768.
    """
    arrived = arrived.to(torch.int64) & SLOT_MASK
    rank, width = _rank(arrived, policy)
    if policy.dedupe == Dedupe.NONE:
        candidates = torch.where(arrived != 0, (rank << SLOT_BITS) | arrived, _NOTHING)
    else:
        candidates = _one_of_each(arrived, rank, width, policy)
    best = candidates.sort(-1).values[:, :room]
    return torch.where(best == _NOTHING, 0, best & SLOT_MASK)


class _Ranks(NamedTuple):
    rank: Int[Tensor, "batch errors"]
    width: int  # how many bits a rank takes


def _rank(arrived: Tensor, policy: AccumulationConfig) -> _Ranks:
    """Lower is more important; arrival breaks every tie, so no two errors rank the same."""
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


def _one_of_each(arrived: Tensor, rank: Tensor, width: int, policy: AccumulationConfig) -> Tensor:
    """`rank, slot` of the first-ranked error of each group, nothing for the others."""
    group = arrived & same_bits(policy.dedupe)

    def sorted_by_group(rank: Tensor, width: int) -> Tensor:
        keyed = (((group << width) | rank) << SLOT_BITS) | arrived
        return torch.where(arrived != 0, keyed, _NOTHING).sort(-1).values

    ordered = sorted_by_group(rank, width)
    owner = ordered >> (SLOT_BITS + width)
    leads = torch.nn.functional.pad(owner[:, 1:] != owner[:, :-1], (1, 0), value=True) & (ordered != _NOTHING)
    best = ordered & ((1 << (SLOT_BITS + width)) - 1)
    if is_first_in(policy):
        # Sorted by severity within each group, the groups still start at the same columns: there stands the worst.
        mildness = (SEVERITY_MASK - slot_severity(arrived)) << width
        worst = sorted_by_group(mildness | rank, width + SEVERITY_BITS)
        best = (best & ~SLOT_MASK) | (worst & SLOT_MASK)
    return torch.where(leads, best, _NOTHING)


# What speaks against a sample: True, or NaN. In a graph, keeping the floats a reduction left and asking all of them
# at once in the end saves a kernel at each check.
Evidence = Bool[Tensor, "batch *rest"] | Float[Tensor, "batch *rest"]


def write(
    f: Flags, masks: Sequence[Evidence], slots: Sequence[int | Tensor], room: int, policy: AccumulationConfig
) -> Flags:
    """`f` with each slot value (a number, or a `(batch, 1)` tensor) added where its mask is True in a row."""
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
    return pack(add(held, arrived, room, policy), f)


def rows(mask: Evidence) -> Bool[Tensor, " batch"]:
    """True where any entry of a row is."""
    mask = raised(mask)
    return mask if mask.ndim == 1 else mask.flatten(1).any(-1)


def raised(mask: Evidence) -> Bool[Tensor, "..."]:
    return torch.isnan(mask) if mask.is_floating_point() else mask


def _first_error(f: Flags, mask: Bool[Tensor, " batch"], slot: int | Tensor) -> Flags:
    """The first error of a row goes to slot 0 whatever the policy; most rows that go wrong come by here."""
    words = bits(f)
    first = torch.nn.functional.pad(slot, (0, f.shape[1] - 1)) if isinstance(slot, Tensor) else _word(slot, words)
    return torch.where(mask.unsqueeze(-1), first.to(words.dtype), words).view(f.dtype)


def _word(slot: int, words: Tensor) -> Int[Tensor, " words"]:
    return torch.tensor([slot] + [0] * (words.shape[1] - 1), dtype=words.dtype, device="cpu")


def _where(mask: Tensor, slot: int | Tensor, held: Slots) -> Int[Tensor, "batch 1"]:
    """The slot in the rows of the mask, 0 in the others."""
    value = slot.to(held.dtype) if isinstance(slot, Tensor) else constant(slot, held)
    return torch.where(mask.unsqueeze(-1), value, constant(0, held))
