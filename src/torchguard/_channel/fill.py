"""Values that replace others: numbers and tensors in the dtype of the tensor they go into.

torch casts what a dtype cannot hold without a word: 300 becomes 44 in uint8, 0.5 becomes 0, 1e6 becomes Inf in float16.
Here it is an error. The values of a tensor can be read in eager mode on the CPU only; elsewhere the caller gets a mask
of the elements that were lost, to record them.
"""

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from torchguard._casts import Number, holds, holds_inf, is_wider, lost
from torchguard._torch.tracing import can_read
from torchguard.exceptions import BatchMismatchError, NotFlagsError, OutOfRangeError

Lost = Bool[Tensor, "*rest"] | None


def fill_like(who: str, z: Tensor, fill: Number | Tensor, name: str = "fill") -> Tensor:
    """`fill` in the dtype of `z`, which must hold every value of the dtype of a tensor: no loss can be recorded."""
    if not isinstance(fill, Tensor):
        return _number_like(who, z, fill, name)
    if not is_wider(z.dtype, fill.dtype):
        raise OutOfRangeError(
            f"{who}: {name} is a {fill.dtype} tensor, and {z.dtype} does not hold every value of it. Give a number."
        )
    return fallback_like(who, z, fill, name)[0]


def fallback_like(who: str, z: Tensor, fallback: Number | Tensor, name: str = "fallback") -> tuple[Tensor, Lost]:
    """`fallback` in the dtype of `z`, checked to broadcast to its shape; and where its values could not be held.

    The second is None if every value is known to be held.
    """
    if not isinstance(fallback, Tensor):
        return _number_like(who, z, fallback, name), None
    sizes = zip(reversed(fallback.shape), reversed(z.shape), strict=False)
    if fallback.ndim > z.ndim or any(size not in (1, wanted) for size, wanted in sizes):
        got, wanted = tuple(fallback.shape), tuple(z.shape)
        raise BatchMismatchError(
            f"{who}: expected a {name} of shape {wanted}, got {got}. Give one that broadcasts to it."
        )
    if is_wider(z.dtype, fallback.dtype):
        return fallback.to(z.dtype), None
    if fallback.is_complex() and not z.is_complex():
        raise OutOfRangeError(f"{who}: {name} is {fallback.dtype}, which {z.dtype} does not hold. Give a real {name}.")
    missing = lost(fallback.detach(), z.dtype)
    if not can_read(fallback):
        return fallback.to(z.dtype), missing
    if missing.any():
        first = fallback.detach()[missing][0].item()
        raise OutOfRangeError(f"{who}: {name} has {first}, which {z.dtype} does not hold. Give values that it holds.")
    return fallback.to(z.dtype), None


def matches(who: str, t: Tensor, number: Number) -> Bool[Tensor, "..."]:
    """True where `t` is `number`, as its dtype rounds it."""
    if number in (float("inf"), float("-inf")):
        # Compared in a dtype without Inf, Inf would become its largest number.
        return t == number if holds_inf(t.dtype) else torch.zeros_like(t, dtype=torch.bool)
    _require_number(who, t, number, "target")
    return t == number


def _number_like(who: str, z: Tensor, value: Any, name: str) -> Tensor:
    _require_number(who, z, value, name)
    return torch.full((), value, dtype=z.dtype, device=z.device)


def _require_number(who: str, z: Tensor, value: Any, name: str) -> None:
    if not isinstance(value, (int, float, complex)):
        raise NotFlagsError(f"{who}: {name} is {value!r}. Give a number or a tensor.")
    if not holds(z.dtype, value):
        # While Dynamo traces, the number may be a symbol, which it cannot format.
        shown = "a number" if torch.compiler.is_dynamo_compiling() else value
        raise OutOfRangeError(f"{who}: {name} is {shown}, which {z.dtype} does not hold. Give a {name} that it holds.")
