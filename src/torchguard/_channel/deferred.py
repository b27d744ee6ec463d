"""Writing errors while a graph is traced: noted down at each push, packed once behind the last.

In a graph, a chain `f = flag_nan(a, m1, f); f = flag_nan(b, m2, f); ...` would pack sixteen slots at every
check, each in a kernel of its own because the location is baked into it. So while a graph is traced, flags
carry a note of what was pushed since they were empty (or since they came in), and each push packs the whole
note anew. Whatever nobody looks at is dead code: what stays in the graph is one mask a check, from kernels that
are all alike, and a single packing behind the last push.

The note hangs on the tensor the tracer hands around, so it needs Dynamo to pass these calls through as they
are. Hence the three operators: Dynamo keeps them whole, and AOTAutograd runs the Python below when it traces.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool
from torch import Tensor

from torchguard._channel.config import AccumulationConfig, Dedupe, ErrorConfig, Order, Priority
from torchguard._channel.layout import SLOT_BITS, slot_code
from torchguard._channel.policy import Evidence, is_first_in, raised, rows, same_bits, write
from torchguard._channel.slots import (
    Flags,
    bits,
    capacity,
    carrier_of,
    unpack,
    words_to_flags,
    zero_flags,
)
from torchguard._channel.validate import is_intact
from torchguard._operators import are_kept_whole, define, revision_of
from torchguard._torch.tensors import mutation_count
from torchguard._torch.tracing import can_read, is_shape_only, is_traced, surely_equal

_REVISION = revision_of(Path(__file__).parent)
_NOTE = "_torchguard_note"
_ANY_CODE = -1
# Up to here a triangle of comparisons counts the errors before each check in the kernel that packs them;
# beyond, a scan (one kernel more) is cheaper than its square.
_TRIANGLE = 64
# Each push traces the packing of all before it. Where that takes a sort, so many are packed together.
_DEAR = 16


@dataclass(frozen=True)
class _Note:
    """What traced flags stand for: `base` (None: empty flags) plus these pushes."""

    base: Flags | None
    masks: tuple[Tensor, ...]
    slots: tuple[int, ...]
    room: int
    policy: AccumulationConfig
    made_at: int

    def goes_on(self, room: int, policy: AccumulationConfig) -> bool:
        """Whether the next push can be added: not where packing is dear and the list grows long."""
        cheap = self.base is None and is_first_in(policy)
        return (self.room, self.policy) == (room, policy) and (cheap or len(self.masks) < _DEAR)

    def tells(self, code: int) -> bool:
        """Whether the flags hold `code` where it was pushed: not if it may have shared a slot, or found none left."""
        apart = self.policy.dedupe in (Dedupe.NONE, Dedupe.UNIQUE) and len(self.masks) <= self.room
        return code == _ANY_CODE or not self.masks or (apart and self.base is None)


def empty(n: int, device: torch.device | str | None, dtype: torch.dtype, config: ErrorConfig) -> Flags:
    """Flags without errors."""
    if are_kept_whole():
        template = zero_flags(n, device, dtype, config)
        return _BEGIN(template, _REVISION)
    return zero_flags(n, device, dtype, config)


def record(f: Flags, masks: list[Evidence], slots: list[int], config: ErrorConfig, surely: bool = True) -> Flags:
    """`f` with each slot value added where its mask is True in a row.

    Args:
        surely: `f` is known to be flags. If it only looks like it, and no push can have written what it holds, it
            stays as it is.
    """
    policy, room = config.accumulation, capacity(f, config)
    if are_kept_whole():
        axes = [int(policy.priority), int(policy.order), int(policy.dedupe)]
        return _RECORD(f, masks, slots, room, axes, surely, _REVISION)
    return _record(f, masks, slots, room, policy, surely)


def rows_with(f: Flags, code: int = _ANY_CODE) -> Bool[Tensor, " batch"]:
    """True where a sample holds that code, or any error if none is given."""
    return _ROWS_WITH(f, code, _REVISION) if are_kept_whole() else _rows_with(f, code)


# The operators.


def _begin_op(template: Flags, revision: int) -> Flags:
    f = template.clone()
    if is_traced(f):
        policy = AccumulationConfig()
        setattr(f, _NOTE, _Note(None, (), (), 0, policy, mutation_count(f)))
    return f


def _record_op(
    f: Flags, masks: list[Tensor], slots: list[int], room: int, axes: list[int], surely: bool, revision: int
) -> Flags:
    policy = AccumulationConfig(Priority(axes[0]), Order(axes[1]), Dedupe(axes[2]))
    return _record(f, masks, slots, room, policy, surely)


def _rows_with_op(f: Flags, code: int, revision: int) -> Bool[Tensor, " batch"]:
    return _rows_with(f, code)


def _record(
    f: Flags, masks: list[Tensor], slots: list[int], room: int, policy: AccumulationConfig, surely: bool
) -> Flags:
    add = _extend if is_traced(f) else write
    if surely or _note_of(f):
        return add(f, masks, slots, room, policy)
    intact = is_intact(unpack(f)).all()
    if can_read(f):
        return add(f, masks, slots, room, policy) if intact else f
    return torch.where(intact, add(f, masks, slots, room, policy), f)


def _rows_with(f: Flags, code: int) -> Bool[Tensor, " batch"]:
    note = _note_of(f)
    if note is None or not note.tells(code):
        if code == _ANY_CODE:
            return (bits(f) != 0).any(-1)
        slots = unpack(f)
        return ((slot_code(slots) == code) & (slots != 0)).any(-1)
    found = [mask for mask, slot in zip(note.masks, note.slots, strict=True) if code in (_ANY_CODE, slot_code(slot))]
    if note.base is not None:
        found.append(_rows_with(note.base, code))
    return _columns(found).any(-1) if found else torch.zeros(f.shape[0], dtype=torch.bool, device=f.device)


_BEGIN = define("begin(Tensor template, int revision) -> Tensor", _begin_op)
_RECORD = define(
    "record(Tensor f, Tensor[] masks, int[] slots, int room, int[] axes, bool surely, int revision) -> Tensor",
    _record_op,
)
_ROWS_WITH = define("rows_with(Tensor f, int code, int revision) -> Tensor", _rows_with_op)


# Tracing: note down, pack what was noted.


def _note_of(f: Flags) -> _Note | None:
    note = getattr(f, _NOTE, None) if is_traced(f) else None
    # One of another copy of this package counts as none: what it stands for is in the flags as well.
    return note if isinstance(note, _Note) and note.made_at == mutation_count(f) else None


def _extend(f: Flags, masks: list[Tensor], slots: list[int], room: int, policy: AccumulationConfig) -> Flags:
    note = _note_of(f)
    # A mask may be the caller's own and change in place later; its clone is a value. Compilers drop the copy.
    masks = [mask.clone() for mask in masks]
    if note and (not note.masks or note.goes_on(room, policy)):
        base, all_masks, all_slots = note.base, (*note.masks, *masks), (*note.slots, *slots)
    else:
        base, all_masks, all_slots = f, tuple(masks), tuple(slots)
    if is_shape_only(f):
        packed = torch.zeros_like(f)
    elif base is None and is_first_in(policy) and (distinct := _distinct(all_masks, all_slots, policy.dedupe)):
        packed = _first_fit(distinct, all_slots, room, like=f)
    else:
        packed = write(torch.zeros_like(f) if base is None else base, all_masks, all_slots, room, policy)
    setattr(packed, _NOTE, _Note(base, all_masks, all_slots, room, policy, mutation_count(packed)))
    return packed


def _distinct(masks: Sequence[Tensor], slots: Sequence[int], dedupe: Dedupe) -> list[Tensor] | None:
    """Masks of which no two raise the same error in a row; None where which of two stays differs from row to row."""
    if dedupe == Dedupe.NONE:
        return list(masks)
    distinct: list[Tensor] = []
    seen: dict[int, tuple[int, Tensor]] = {}
    for mask, slot in zip(masks, slots, strict=True):
        group = slot & same_bits(dedupe)
        if group in seen:
            before, earlier = seen[group]
            if before != slot:
                return None
            mask = rows(mask) & ~rows(earlier)
            seen[group] = slot, mask | rows(earlier)
        else:
            seen[group] = slot, mask
        distinct.append(mask)
    return distinct


def _columns(masks: list[Tensor]) -> Bool[Tensor, "batch masks"]:
    """Masks side by side. Equal shapes are joined before the last reduction, so that one kernel does it for all."""
    first = masks[0]
    if all(mask.dtype == first.dtype and surely_equal(mask.shape, first.shape) for mask in masks):
        joined = raised(torch.stack(masks))
        return (joined.flatten(2).any(-1) if joined.ndim > 2 else joined).t()
    return torch.stack([rows(mask) for mask in masks], dim=-1)


def _first_fit(masks: list[Evidence], slots: Sequence[int], room: int, like: Flags) -> Flags:
    """CHRONO-FIRST into empty flags: a row's k-th error goes to its k-th slot, straight into the words."""
    carrier, device = carrier_of(like), like.device
    lanes = carrier.slots_per_word
    found = _columns(masks)
    step = torch.arange(len(masks), device=device)
    if len(masks) <= _TRIANGLE:
        place = (found.unsqueeze(1) & (step < step.unsqueeze(-1))).sum(-1)
    else:
        place = found.cumsum(-1) - 1
    value = torch.tensor(slots, dtype=carrier.bits, device=device) << ((place % lanes) * SLOT_BITS).to(carrier.bits)
    word = torch.arange(like.shape[1], device=device).unsqueeze(-1)
    if len(masks) > room:
        found = found & (place < room)
    lands = found.unsqueeze(1) & ((place // lanes).unsqueeze(1) == word)
    return words_to_flags(torch.where(lands, value.unsqueeze(1), 0).sum(-1, dtype=carrier.bits), like)
