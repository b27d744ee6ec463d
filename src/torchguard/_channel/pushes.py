"""Pushes packed together: as operations that a graph can hold, or by one call that is not compiled.

Compiled for the CPU, the kernel that packs would take longer to compile than the model: it is a second C++ source, and
the largest. Nearly every call finds nothing to pack. So where Inductor compiles for the CPU, the statuses of all checks
are stacked, and one opaque operator, `pack_pushes`, looks for a raised entry. It returns empty flags at once if there
is none, and otherwise runs the same functions eagerly. Other backends, and exports, get the operations: they can
neither call Python nor fuse around it. On a GPU the operations stay as well, since the call would wait for the device.
"""

import json
import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool
from torch import Tensor

from torchguard._channel.config import AccumulationConfig, Dedupe, Order, Priority
from torchguard._channel.packing import Flags, carrier_of, is_transposed, joined, unpack, words_to_flags
from torchguard._channel.policy import (
    RowStatus,
    append_to_row,
    is_first_in,
    is_raised,
    leaves_others_alone,
    rows,
    same_bits,
    write,
)
from torchguard._channel.slot_bits import SLOT_BITS
from torchguard._operators import define_opaque
from torchguard._torch.tracing import can_read, is_compiled_by_inductor, surely_equal

# Up to this number of checks, pairwise comparisons count the errors before each check inside the packing kernel;
# beyond it, a scan (one more kernel) is cheaper.
_MAX_PAIRWISE = 64
# Up to this many samples with errors are packed one by one.
_FEW_ROWS = 16
_SIGN = 1 << (SLOT_BITS - 1)


def packed(
    base: Flags | None,
    masks: Sequence[RowStatus],
    slots: Sequence[int],
    room: int,
    policy: AccumulationConfig,
    like: Flags,
) -> Flags:
    """`base` (None: empty flags) with each slot added to the rows of its mask. `like` has the form of the result."""
    if base is None and is_first_in(policy) and (distinct := _distinct(masks, slots, policy.dedupe)):
        return _packed_in_order(distinct, slots, room, like)
    return write(torch.zeros_like(like) if base is None else base, masks, slots, room, policy)


def _distinct(masks: Sequence[Tensor], slots: Sequence[int], dedupe: Dedupe) -> list[Tensor] | None:
    """Masks of which no two record the same error for a row; None if the severity to keep differs from row to row."""
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


def columns(masks: Sequence[RowStatus]) -> Bool[Tensor, "batch masks"]:
    """Masks as columns. Masks of one shape are stacked before the last reduction, which is then one kernel."""
    if len(_alike(masks)) == 1:
        return _raised_rows(torch.stack(list(masks))).t()
    return torch.stack([rows(mask) for mask in masks], dim=-1)


def _raised_rows(stacked: Tensor) -> Bool[Tensor, "masks batch"]:
    raised = is_raised(stacked)
    return raised.flatten(2).any(-1) if raised.ndim > 2 else raised


def _alike(masks: Sequence[Tensor]) -> list[list[int]]:
    """The numbers of masks that have one dtype and shape, group by group."""
    groups: list[list[int]] = []
    for i, mask in enumerate(masks):
        for group in groups:
            first = masks[group[0]]
            if mask.dtype == first.dtype and surely_equal(mask.shape, first.shape):
                group.append(i)
                break
        else:
            groups.append([i])
    return groups


def _packed_in_order(masks: list[RowStatus], slots: Sequence[int], room: int, like: Flags) -> Flags:
    """Pack into empty flags under CHRONO-FIRST: the k-th error of a row goes to its k-th slot."""
    carrier, device = carrier_of(like), like.device
    lanes = carrier.slots_per_word
    found = columns(masks)
    step = torch.arange(len(masks), device=device)
    if len(masks) <= _MAX_PAIRWISE:
        position = (found.unsqueeze(1) & (step < step.unsqueeze(-1))).sum(-1)
    else:
        position = found.cumsum(-1) - 1
    value = torch.tensor(slots, dtype=carrier.bits, device=device) << ((position % lanes) * SLOT_BITS).to(carrier.bits)
    word = torch.arange(like.shape[1], device=device).unsqueeze(-1)
    if len(masks) > room:
        found = found & (position < room)
    is_target = found.unsqueeze(1) & ((position // lanes).unsqueeze(1) == word)
    return words_to_flags(joined(torch.where(is_target, value.unsqueeze(1), 0), carrier.bits), like)


# The call.


def packs_by_call(base: Flags | None, like: Flags) -> bool:
    """Whether a graph packs by a call that is not compiled.

    Not onto float flags that came into the graph: eager code raises an error where these are not flags, which a graph
    leaves to the caller.
    """
    return like.is_cpu and is_compiled_by_inductor() and (base is None or not base.is_floating_point())


def call_pack_pushes(
    base: Flags | None,
    masks: Sequence[RowStatus],
    slots: Sequence[int],
    room: int,
    policy: AccumulationConfig,
    like: Flags,
) -> Flags:
    """`packed`, by the operator `pack_pushes`."""
    groups = _alike(masks)
    stacks = [torch.stack([masks[i] for i in group]) for group in groups]
    pushes = json.dumps([groups, slots, room, [policy.priority, policy.order, policy.dedupe]])
    return _PACK_PUSHES(base, stacks, pushes, *like.shape, like.dtype, is_transposed(like))


def _pack_pushes_op(
    base: Flags | None, stacks: list[Tensor], pushes: str, batch: int, words: int, dtype: torch.dtype, transposed: bool
) -> Flags:
    like = _zeros(batch, words, dtype, transposed)
    if not any(map(_may_be_raised, stacks)):
        return like if base is None else like.copy_(base)
    groups, slots, room, (priority, order, dedupe) = json.loads(pushes)
    policy = AccumulationConfig(Priority(priority), Order(order), Dedupe(dedupe))
    raised = [(i, mask) for group, one in zip(groups, stacks, strict=True) for i, mask in _raised_in(group, one)]
    if base is not None:
        like.copy_(base)
    if not raised:
        return like
    found, masks = zip(*sorted(raised, key=lambda pair: pair[0]), strict=True)
    found = [slots[i] for i in found]
    if _appended_by_row(like, masks, found, room, policy):
        return like
    return like.copy_(packed(base, masks, found, room, policy, like))  # in the declared strides


def _raised_in(group: list[int], stacked: Tensor) -> list[tuple[int, Bool[Tensor, " batch"]]]:
    """The numbers and masks of a group that are raised for a sample."""
    raised = _raised_rows(stacked)
    return [(group[k], raised[k]) for k, is_any in enumerate(raised.any(-1).tolist()) if is_any]


def _appended_by_row(
    f: Flags, masks: Sequence[Tensor], slots: list[int], room: int, policy: AccumulationConfig
) -> bool:
    """Write the pushes of few samples into `f`, in place, as numbers: operations take five times as long.

    Returns False, and leaves `f` as it is, if there are too many samples or `packed` has to decide.
    """
    held = unpack(f)
    if held.dtype != torch.int16 or not can_read(f) or not leaves_others_alone(held.shape[1], room, policy):
        return False
    stacked = torch.stack(list(masks))
    found, index = stacked.numpy(), stacked.any(0).nonzero().flatten().tolist()
    if len(index) > _FEW_ROWS:
        return False
    rows, arrived = held.numpy(), [slot - ((slot & _SIGN) << 1) for slot in slots]  # as int16 has them
    for i in index:
        row = rows[i].tolist()
        append_to_row(
            row, [slot for slot, is_new in zip(arrived, found[:, i].tolist(), strict=True) if is_new], policy.dedupe
        )
        rows[i] = row
    return True


def _may_be_raised(stacked: Tensor) -> bool:
    """False if no entry is raised. Any NaN makes the sum NaN; so does Inf - Inf, and then each entry is looked at."""
    return math.isnan(stacked.sum().item()) if stacked.is_floating_point() else bool(stacked.any().item())


def _zeros(batch: int, words: int, dtype: torch.dtype, transposed: bool) -> Flags:
    return torch.zeros(words, batch, dtype=dtype).t() if transposed else torch.zeros(batch, words, dtype=dtype)


_PACK_PUSHES = define_opaque(
    # Numbers as JSON: passing a list of integers to an operator takes longer than all its work.
    "pack_pushes(Tensor? base, Tensor[] stacks, str pushes, SymInt batch, int words, ScalarType dtype, bool transposed)"
    " -> Tensor",
    _pack_pushes_op,
    lambda base, stacks, pushes, batch, words, dtype, transposed: _zeros(batch, words, dtype, transposed),
)
