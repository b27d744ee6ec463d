"""Creating flags and recording errors in them. Flags never change in place: each call returns new ones."""

from collections.abc import Iterable, Sequence, Set

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from torchguard._channel import deferred
from torchguard._channel.codes import DEFAULT_SEVERITY, ErrorCode
from torchguard._channel.config import AccumulationConfig, ErrorConfig, config_of
from torchguard._channel.detect import can_be_bad, fault_slots, row_statuses
from torchguard._channel.packing import Flags, bits, capacity, pack, unpack
from torchguard._channel.policy import add, append_to_row, arrival_order, leaves_others_alone, rows, write
from torchguard._channel.slot_bits import CODE_MASK, LOCATION_MASK, SLOT_BITS, SLOT_MASK, pack_slot, slot_code
from torchguard._channel.validate import require_batch, require_flags, require_in_range, require_mask
from torchguard._operators import use_operators
from torchguard._renamed import renamed
from torchguard._torch.tracing import can_read
from torchguard.exceptions import BatchMismatchError, NotFlagsError

_REMOVED = torch.iinfo(torch.int64).max

Mask = Bool[Tensor, "batch *rest"]
Record = tuple[int, int, Mask] | tuple[int, int, Mask, int]


# Up to this many samples with errors are merged one by one.
_FEW_ROWS = 16


@renamed(reference="x")
def new(x: Shaped[Tensor, "batch *rest"], config: ErrorConfig | None = None) -> Flags:
    """Empty flags for the samples of `x`.

    >>> err.new(torch.zeros(3, 5)).shape
    torch.Size([3, 4])
    """
    if not isinstance(x, Tensor) or x.ndim == 0:
        raise BatchMismatchError(f"err.new: {_describe(x)} has no batch dimension. Give a tensor of rank 1 or more.")
    return new_t(x.shape[0], x.device, config)


@renamed(batch_size="n")
def new_t(n: int, device: torch.device | str | None = None, config: ErrorConfig | None = None) -> Flags:
    """Empty flags for `n` samples."""
    config = config_of("err.new", config)
    return deferred.empty(n, device, config.flag_dtype, config)


@renamed(loc="location", batch_size="n")
def from_code(
    code: int,
    location: int,
    n: int,
    device: torch.device | str | None = None,
    severity: int | None = None,
    config: ErrorConfig | None = None,
) -> Flags:
    """Flags for `n` samples that all hold the same one error."""
    return push(new_t(n, device, config), code, location, severity, config)


def push(
    f: Flags,
    code: int | Tensor,
    location: int | Tensor,
    severity: int | None = None,
    config: ErrorConfig | None = None,
    *,
    where: Mask | None = None,
) -> Flags:
    """`err.push` at an id, or at a tensor of ids."""
    config = config_of("err.push", config)
    require_flags("err.push", f)
    require_in_range("err.push", code=code, location=location, severity=severity)
    if where is None:
        where = torch.ones(f.shape[0], dtype=torch.bool, device=f.device)
    require_mask("err.push", f, where, "where")
    if isinstance(code, Tensor) or isinstance(location, Tensor):
        return _push_tensors(f, code, location, severity, config, where)
    if code == ErrorCode.OK:
        return f
    return deferred.record(f, [where], [pack_slot(code, location, _severity(code, severity, config))], config)


def push_faults(
    f: Flags, z: Tensor, location: int, codes: Set[int], config: ErrorConfig | None = None, *, is_known: bool = True
) -> Flags:
    """Record each of `codes` (NAN, INF) for the samples of `z` that have it. Arguments are not validated.

    Args:
        is_known: False if `f` may be another tensor of the same dtype and rank, see `deferred.record`.
    """
    if not can_be_bad(z):
        return f
    nan, inf = ErrorCode.NAN in codes, ErrorCode.INF in codes
    if use_operators():
        return deferred.check(f, z, nan, inf, location, config_of("push_faults", config), is_known)
    statuses = row_statuses(z, nan, inf)
    if not statuses:
        return f
    return deferred.record(f, statuses, fault_slots(nan, inf, location), config_of("push_faults", config), is_known)


@renamed(flags="f")
def push_scalar(
    f: Flags, code: int, location: int, severity: int | None = None, config: ErrorConfig | None = None
) -> Flags:
    """Record the same error for every sample."""
    return push(f, code, location, severity, config)


def push_many(f: Flags, records: Iterable[Record], config: ErrorConfig | None = None) -> Flags:
    """Record many errors and pack them once: the same as pushing `(code, location, mask)` one after another.

    A record may have a severity as fourth entry.

    >>> nan, inf = torch.tensor([True, False]), torch.tensor([True, True])
    >>> err.count_errors(err.push_many(err.new_t(2), [(err.NAN, 1, nan), (err.INF, 2, inf)]))
    tensor([2, 1], dtype=torch.int32)
    """
    config = config_of("err.push_many", config)
    require_flags("err.push_many", f)
    masks, slots = [], []
    for code, location, mask, *rest in records:
        severity = rest[0] if rest else None
        require_in_range("err.push_many", code=code, location=location, severity=severity)
        require_mask("err.push_many", f, mask, "mask")
        if code != ErrorCode.OK:
            masks.append(mask)
            slots.append(pack_slot(code, location, _severity(code, severity, config)))
    return deferred.record(f, masks, slots, config) if masks else f


def merge(*flags: Flags, config: ErrorConfig | None = None) -> Flags:
    """One flags tensor with the errors of all; those of the first count as the oldest.

    A sample with errors in one of them alone has these in the result, as they are. Where several have errors, those of
    the later ones are pushed onto those of the first.
    """
    config = config_of("err.merge", config)
    if not flags:
        raise NotFlagsError("err.merge: no flags were given. Pass at least one flags tensor.")
    first = flags[0]
    for f in flags:
        require_flags("err.merge", f)
        require_batch("err.merge", first, f, "one of them")
        if f.dtype != first.dtype:
            raise NotFlagsError(f"err.merge: cannot merge {f.dtype} flags into {first.dtype} flags. Use one carrier.")
    may_read = can_read(first)
    if may_read and len(flags) == 2:
        merged = _merged_by_row(first, flags[1], config)
        if merged is not None:
            return merged
    holders = ((f, _has_errors(f)) for f in flags[1:])
    later = [(f, theirs) for f, theirs in holders if not may_read or theirs.any()]
    if not later:
        return first
    shared = _in_several([_has_errors(first), *(theirs for _, theirs in later)])
    ranked = None
    if not may_read or shared.any():
        held, policy, room = unpack(first), config.accumulation, capacity(first, config)
        columns = _used_columns if may_read else _all_columns
        arrived = [column for f, _ in later for column in columns(f, policy)]
        ranked = pack(add(held, arrived, room, policy), first)
        # A single error is ranked as it is. If each of them holds one, a sample in one of them alone is right already.
        if may_read and len(arrived) == len(later) and leaves_others_alone(held.shape[1], room, policy):
            return ranked
    merged = first
    for f, theirs in later:
        merged = torch.where(theirs.unsqueeze(-1), _resized(f, first), merged)
    return merged if ranked is None else torch.where(shared.unsqueeze(-1), ranked, merged)


def _merged_by_row(first: Flags, f: Flags, config: ErrorConfig) -> Flags | None:
    """Two flags merged under CHRONO-FIRST as numbers, if few samples of `f` have errors; None if that cannot be done.

    An operation of torch takes as long as NumPy takes for a row.
    """
    held, new, policy = unpack(first), unpack(f), config.accumulation
    if not (
        first.shape == f.shape
        and can_read(f)
        and held.dtype == new.dtype == torch.int16
        and leaves_others_alone(held.shape[1], capacity(first, config), policy)
    ):
        return None
    theirs = new.numpy()
    index = theirs[:, 0].nonzero()[0].tolist()  # slots have no gap between them
    if not index:
        return first
    if len(index) > _FEW_ROWS:
        return None
    merged = first.clone()
    rows = unpack(merged).numpy()
    for i in index:
        stored, arrived = rows[i].tolist(), theirs[i].tolist()
        if stored[0]:
            append_to_row(stored, arrived[: arrived.index(0)] if 0 in arrived else arrived, policy.dedupe)
        rows[i] = stored if stored[0] else arrived
    return merged


def _in_several(holders: list[Bool[Tensor, " batch"]]) -> Bool[Tensor, " batch"]:
    """True for the samples that have errors in more than one of them."""
    if len(holders) == 2:
        return holders[0] & holders[1]
    return torch.stack(holders).sum(0) > 1


def _has_errors(f: Flags) -> Bool[Tensor, " batch"]:
    """Whether the first word is used: slots have no gap between them."""
    return bits(f)[:, 0].to(torch.bool)


def _resized(f: Flags, like: Flags) -> Flags:
    """`f` in the width of `like`: a narrower one gets empty slots, of a wider one the first slots stay."""
    missing = like.shape[1] - f.shape[1]
    return torch.nn.functional.pad(f, (0, missing)) if missing > 0 else f if missing == 0 else f[:, :missing]


@renamed(flags="f")
def clear(f: Flags, code: int, config: ErrorConfig | None = None) -> Flags:
    """Remove every error of that code; the others move up.

    With a config of the same width but fewer slots, a sample that loses an error retains as many as it has slots for.
    """
    require_flags("err.clear", f)
    require_in_range("err.clear", code=code)
    slots = unpack(f).to(torch.int64) & SLOT_MASK
    # Each integer holds column and slot: sorting moves removed slots to the end and preserves the order of the rest.
    column = torch.arange(slots.shape[1], device=f.device) << SLOT_BITS
    gone = (slot_code(slots) == code) | (slots == 0)
    kept = torch.where(gone, _REMOVED, column | slots).sort(-1).values
    kept = torch.where(kept == _REMOVED, 0, kept & SLOT_MASK)
    if config is None:
        return pack(kept, f)
    cleared = pack(kept[:, : capacity(f, config_of("err.clear", config))], f)
    return torch.where((slot_code(slots) == code).any(-1, keepdim=True), cleared, f)


def _all_columns(f: Flags, policy: AccumulationConfig) -> Sequence[Int[Tensor, "batch _"]]:
    return [arrival_order(unpack(f), policy)]


def _used_columns(f: Flags, policy: AccumulationConfig) -> Sequence[Int[Tensor, "batch _"]]:
    slots = unpack(f)
    used = slots[:, : sum(slots.any(0).tolist())]
    return arrival_order(used, policy).split(1, dim=-1)


def _push_tensors(
    f: Flags, code: int | Tensor, location: int | Tensor, severity: int | None, config: ErrorConfig, where: Mask
) -> Flags:
    code = _per_sample(f, code, "code", CODE_MASK)
    location = _per_sample(f, location, "location", LOCATION_MASK)
    if severity is None:
        defaults = [DEFAULT_SEVERITY.get(code, config.default_severity) for code in range(CODE_MASK + 1)]
        level = torch.tensor(defaults, device=f.device)[code]
    else:
        level = torch.full_like(code, severity)
    slot = torch.where(code == ErrorCode.OK, 0, pack_slot(code, location, level))
    mask = rows(where) & (slot != 0)
    return write(f, [mask], [slot.unsqueeze(-1)], capacity(f, config), config.accumulation)


def _per_sample(f: Flags, value: int | Tensor, name: str, most: int) -> Tensor:
    if isinstance(value, int):
        return torch.full((f.shape[0],), value, dtype=torch.int64, device=f.device)
    if value.ndim == 0:
        value = value.expand(f.shape[0])
    require_batch("err.push", f, value, name)
    value = value.to(torch.int64)  # in int8, the largest location would wrap around
    # Values that could not be read, and are out of range, become 0 (unknown) rather than the id of another location.
    return torch.where((value < 0) | (value > most), 0, value)


def _severity(code: int, severity: int | None, config: ErrorConfig) -> int:
    return DEFAULT_SEVERITY.get(code, config.default_severity) if severity is None else severity


def _describe(x: object) -> str:
    return "a 0-d tensor" if isinstance(x, Tensor) else type(x).__name__
