"""Deferred packing: while a graph is traced, pushes are noted, and packed into slots once, behind the last push.

In a graph, a chain `f = flag_nan(a, m1, f); f = flag_nan(b, m2, f); ...` would pack sixteen slots at every check, each
in a kernel of its own because the location is a constant of that kernel. So while a graph is traced, flags carry a note
of everything pushed since they were empty (or entered the graph), and each push packs the whole note anew. All packings
but the last are dead code, which the compiler removes: what stays in the graph is one mask per check, from identical
kernels, and a single packing.

The note is an attribute (`_torchguard_note`) of the tensor that the tracer passes from call to call. Dynamo would trace
into these functions and lose it. So there are four operators: Dynamo does not trace into an operator, and AOTAutograd
runs the Python below when it traces. This can be removed once tracers let Python attributes travel with a tensor.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from torchguard._channel.config import AccumulationConfig, Dedupe, ErrorConfig, Order, Priority
from torchguard._channel.detect import REVISION, fault_slots, row_statuses
from torchguard._channel.packing import Flags, bits, capacity, unpack, zero_flags
from torchguard._channel.policy import RowStatus, is_first_in, write
from torchguard._channel.pushes import call_pack_pushes, columns, packed, packs_by_call
from torchguard._channel.slot_bits import slot_code
from torchguard._channel.validate import is_intact
from torchguard._operators import define, use_operators
from torchguard._torch.tensors import mutation_count
from torchguard._torch.tracing import can_read, is_shape_only, is_traced

_NOTE = "_torchguard_note"
_ANY_CODE = -1
# Each push traces the packing of all pushes before it. Where that takes a sort, a note holds at most this many.
_MAX_SORTED = 16


@dataclass(frozen=True)
class _Note:
    """The content of traced flags: `base` (None: empty flags) plus these pushes."""

    base: Flags | None
    masks: tuple[Tensor, ...]
    slots: tuple[int, ...]
    room: int
    policy: AccumulationConfig
    made_at: int

    def can_be_extended(self, room: int, policy: AccumulationConfig) -> bool:
        """Whether the next push can be added to this note rather than start a new one."""
        cheap = self.base is None and is_first_in(policy)
        return (self.room, self.policy) == (room, policy) and (cheap or len(self.masks) < _MAX_SORTED)

    def answers(self, code: int) -> bool:
        """Whether the masks alone say where the flags hold `code`: no push shared a slot or was dropped."""
        apart = self.policy.dedupe in (Dedupe.NONE, Dedupe.UNIQUE) and len(self.masks) <= self.room
        return code == _ANY_CODE or not self.masks or (apart and self.base is None)


def empty(n: int, device: torch.device | str | None, dtype: torch.dtype, config: ErrorConfig) -> Flags:
    """Flags without errors."""
    if use_operators():
        template = zero_flags(n, device, dtype, config)
        return _BEGIN(template, REVISION)
    return zero_flags(n, device, dtype, config)


def record(f: Flags, masks: list[RowStatus], slots: list[int], config: ErrorConfig, is_known: bool = True) -> Flags:
    """`f` with each slot added to the rows where its mask is True.

    Args:
        is_known: `f` is known to be flags. If it only has their dtype and rank, and holds bits that no push can have
            written, it is returned unchanged.
    """
    policy, room = config.accumulation, capacity(f, config)
    if use_operators():
        axes = [int(policy.priority), int(policy.order), int(policy.dedupe)]
        return _RECORD(f, masks, slots, room, axes, is_known, REVISION)
    return _record(f, _copies(masks, f), slots, room, policy, is_known)


def check(
    f: Flags, z: Tensor, nan: bool, inf: bool, location: int, config: ErrorConfig, is_known: bool = True
) -> Flags:
    """`f` with NaN, Inf or both recorded for the rows of `z` that have them; only while Dynamo traces.

    It sees one operator, since it takes long to trace the Python code of a check.
    """
    policy, room = config.accumulation, capacity(f, config)
    axes = [int(policy.priority), int(policy.order), int(policy.dedupe)]
    return _CHECK(f, z, nan, inf, location, room, axes, is_known, REVISION)


def rows_with(f: Flags, code: int = _ANY_CODE) -> Bool[Tensor, " batch"]:
    """True where a sample holds that code; without a code, where it holds any error."""
    return _ROWS_WITH(f, code, REVISION) if use_operators() else _rows_with(f, code)


# The operators.


def _begin_op(template: Flags, revision: int) -> Flags:
    f = template.clone()
    if is_traced(f):
        policy = AccumulationConfig()
        setattr(f, _NOTE, _Note(None, (), (), 0, policy, mutation_count(f)))
    return f


def _record_op(
    f: Flags, masks: list[Tensor], slots: list[int], room: int, axes: list[int], is_known: bool, revision: int
) -> Flags:
    return _record(f, _copies(masks, f), slots, room, _policy(axes), is_known)


def _check_op(
    f: Flags,
    z: Tensor,
    nan: bool,
    inf: bool,
    location: int,
    room: int,
    axes: list[int],
    is_known: bool,
    revision: int,
) -> Flags:
    if is_known and is_shape_only(f):
        return torch.zeros_like(f)
    statuses = row_statuses(z, nan, inf)
    if not statuses:
        return f
    return _record(f, statuses, fault_slots(nan, inf, location), room, _policy(axes), is_known)


def _policy(axes: list[int]) -> AccumulationConfig:
    return AccumulationConfig(Priority(axes[0]), Order(axes[1]), Dedupe(axes[2]))


def _copies(masks: list[RowStatus], f: Flags) -> list[RowStatus]:
    """Masks as a note may store them: the caller may change its own in place later. Compilers remove the copies."""
    return [mask.clone() for mask in masks] if is_traced(f) else masks


def _rows_with_op(f: Flags, code: int, revision: int) -> Bool[Tensor, " batch"]:
    return _rows_with(f, code)


def _record(
    f: Flags, masks: list[Tensor], slots: list[int], room: int, policy: AccumulationConfig, is_known: bool
) -> Flags:
    add = _extend if is_traced(f) else write
    if is_known or _note_of(f):
        return add(f, masks, slots, room, policy)
    intact = is_intact(unpack(f)).all()
    if can_read(f):
        return add(f, masks, slots, room, policy) if intact else f
    return torch.where(intact, add(f, masks, slots, room, policy), f)


def _rows_with(f: Flags, code: int) -> Bool[Tensor, " batch"]:
    note = _note_of(f)
    if note is None or not note.answers(code):
        if code == _ANY_CODE:
            return (bits(f) != 0).any(-1)
        slots = unpack(f)
        return ((slot_code(slots) == code) & (slots != 0)).any(-1)
    found = [mask for mask, slot in zip(note.masks, note.slots, strict=True) if code in (_ANY_CODE, slot_code(slot))]
    if note.base is not None:
        found.append(_rows_with(note.base, code))
    return columns(found).any(-1) if found else torch.zeros(f.shape[0], dtype=torch.bool, device=f.device)


_BEGIN = define("begin(Tensor template, int revision) -> Tensor", _begin_op)
_RECORD = define(
    "record(Tensor f, Tensor[] masks, int[] slots, int room, int[] axes, bool is_known, int revision) -> Tensor",
    _record_op,
)
_CHECK = define(
    "check(Tensor f, Tensor z, bool nan, bool inf, int location, int room, int[] axes, bool is_known, int revision)"
    " -> Tensor",
    _check_op,
)
_ROWS_WITH = define("rows_with(Tensor f, int code, int revision) -> Tensor", _rows_with_op)


# While tracing: extend the note, and pack it.


def _note_of(f: Flags) -> _Note | None:
    note = getattr(f, _NOTE, None) if is_traced(f) else None
    # A note of another copy of this package is ignored: the flags themselves hold the same errors.
    return note if isinstance(note, _Note) and note.made_at == mutation_count(f) else None


def _extend(f: Flags, masks: list[Tensor], slots: list[int], room: int, policy: AccumulationConfig) -> Flags:
    note = _note_of(f)
    if note and (not note.masks or note.can_be_extended(room, policy)):
        base, all_masks, all_slots = note.base, (*note.masks, *masks), (*note.slots, *slots)
    else:
        base, all_masks, all_slots = f, tuple(masks), tuple(slots)
    if is_shape_only(f):
        result = torch.zeros_like(f)
    else:
        pack = call_pack_pushes if packs_by_call(base, f) else packed
        result = pack(base, all_masks, all_slots, room, policy, like=f)
    setattr(result, _NOTE, _Note(base, all_masks, all_slots, room, policy, mutation_count(result)))
    return result
