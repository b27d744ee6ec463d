"""Validation of arguments, before anything is written."""

from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from torchguard._channel.config import CARRIERS
from torchguard._channel.slot_bits import CODE_MASK, LOCATION_MASK, SEVERITY_MASK, slot_code
from torchguard._torch.tracing import can_read
from torchguard.exceptions import BatchMismatchError, CorruptFlagsError, NotFlagsError, OutOfRangeError

_INT64 = torch.iinfo(torch.int64)


def require_flags(who: str, f: Any) -> None:
    if not isinstance(f, Tensor):
        raise NotFlagsError(f"{who}: flags must be a tensor, got {type(f).__name__}. Make them with err.new(x).")
    if f.dtype not in CARRIERS or f.ndim != 2:
        raise NotFlagsError(
            f"{who}: a {f.dtype} tensor of shape {tuple(f.shape)} cannot be flags. "
            "Flags are (batch, words) in int64, int32, float32 or float64: make them with err.new(x)."
        )


def require_batch(who: str, f: Tensor, other: Any, name: str) -> None:
    if not isinstance(other, Tensor):
        raise NotFlagsError(f"{who}: {name} must be a tensor, got {type(other).__name__}.")
    if other.ndim == 0:
        raise BatchMismatchError(
            f"{who}: {name} has no batch dimension. Give a tensor whose first dimension is the {f.shape[0]} samples."
        )
    if f.shape[0] != other.shape[0]:
        raise BatchMismatchError(
            f"{who}: flags hold {f.shape[0]} samples but {name} has {other.shape[0]}. "
            "Make them from the same batch: err.new(x)."
        )


def require_mask(who: str, f: Tensor, mask: Any, name: str) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise NotFlagsError(f"{who}: {name} must be a bool tensor, got {got}. Compare first: {name}=x > limit.")
    require_batch(who, f, mask, name)


def require_domain(who: str, domain: Any) -> None:
    _require(who, "domain", domain, 3, "Use ErrorDomain.NUMERIC, INDEX, QUALITY or RUNTIME.")


def require_size(who: str, name: str, size: Any) -> None:
    """Raise unless `size` is a whole number that an int64 index can be compared with."""
    if isinstance(size, bool) or not isinstance(size, (int, torch.SymInt)):
        raise NotFlagsError(f"{who}: {name} is {size!r}, it must be an integer.")
    if isinstance(size, int) and not 0 <= size <= _INT64.max:
        raise OutOfRangeError(f"{who}: {name} is {size}, it must lie in 0 to {_INT64.max}.")


def require_in_range(who: str, *, code: Any = 0, location: Any = 0, severity: Any = None) -> None:
    """Raise for integers outside of their bit field; tensors are read only where that costs no device sync."""
    _require(who, "code", code, CODE_MASK, "Use one of err.NAN, err.INF, ...")
    require_location(who, location)
    if severity is None:
        return
    if isinstance(severity, Tensor):
        raise NotFlagsError(f"{who}: severity is a {severity.dtype} tensor. Give one integer; a mask is where=mask.")
    _require(who, "severity", severity, SEVERITY_MASK, "Use err.WARN, err.ERROR or err.CRITICAL.")


def require_location(who: str, location: Any) -> None:
    _require(who, "location", location, LOCATION_MASK, "Use a module, or an id from ErrorLocation.register(path).")


def _require(who: str, name: str, value: Any, most: int, advice: str) -> None:
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise NotFlagsError(f"{who}: {name} is a {value.dtype} tensor. Give integers.")
        if not can_read(value) or value.numel() == 0:
            return
        low, high = (int(end) for end in value.to(torch.int64).aminmax())
        if low < 0 or high > most:
            raise OutOfRangeError(f"{who}: {name} ranges from {low} to {high}, expected 0 to {most}. {advice}")
    elif isinstance(value, bool) or not isinstance(value, int):
        raise NotFlagsError(f"{who}: {name} is {value!r}, it must be an integer or a tensor of them. {advice}")
    elif not 0 <= value <= most:
        raise OutOfRangeError(f"{who}: {name} is {value}, it must lie in 0 to {most}. {advice}")


def is_intact(slots: Int[Tensor, "batch slots"]) -> Bool[Tensor, " batch"]:
    """True where a row is one that pushes can write: no gap between used slots, and no error without a code."""
    used = slots != 0
    gap = (used[:, 1:] & ~used[:, :-1]).any(-1)
    return ~(gap | (used & (slot_code(slots) == 0)).any(-1))


def require_intact(who: str, slots: Int[Tensor, "batch slots"], used: Bool[Tensor, "batch slots"]) -> None:
    """Raise if the slots hold bits that no push can have written."""
    if (used[:, 1:] > used[:, :-1]).any() or (slot_code(slots[used]) == 0).any():
        rows = (~is_intact(slots)).nonzero().flatten().tolist()
        raise CorruptFlagsError(
            f"{who}: the flags of samples {rows[:8]} hold bits no push can have written. "
            "Was there arithmetic on them, or is this another tensor? Change flags with err.* only."
        )
