"""Conversion between flags tensors and one integer per slot, for every carrier."""

import functools
import sys

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from torchguard._channel.config import CARRIERS, Carrier, ErrorConfig, config_of
from torchguard._channel.slot_bits import SLOT_BITS, SLOT_MASK
from torchguard._torch.tracing import can_read, is_exporting, is_plain, is_traced
from torchguard.exceptions import ConfigError

Flags = Shaped[Tensor, "batch words"]
Slots = Int[Tensor, "batch slots"]


def zero_flags(batch: int, device: torch.device | str | None, dtype: torch.dtype, config: ErrorConfig) -> Flags:
    words = config.words_for(dtype)
    if words > 1 and config.should_transpose(batch):
        return torch.zeros(words, batch, dtype=dtype, device=device).t()
    return torch.zeros(batch, words, dtype=dtype, device=device)


def carrier_of(f: Flags) -> Carrier:
    return CARRIERS[f.dtype]


def capacity(f: Flags, config: ErrorConfig) -> int:
    """The number of slots of `f` in use: the configured number if `f` has that many words, else all of its slots."""
    words = f.shape[1]
    return config.num_slots if words == config.words_for(f.dtype) else words * carrier_of(f).slots_per_word


def readable(who: str, f: Flags, config: ErrorConfig | None) -> int | None:
    """The number of slots that a query of `f` with this config reads; None for all of them."""
    if config is None:
        return None
    num_slots = config_of(who, config).num_slots
    if f.shape[1] != config.words_for(f.dtype):
        all_slots = f.shape[1] * carrier_of(f).slots_per_word
        raise ConfigError(
            f"{who}: config has {num_slots} slots but the flags have room for {all_slots}. "
            "Give the config they were made with, or none."
        )
    return None if num_slots == f.shape[1] * carrier_of(f).slots_per_word else num_slots


def bits(f: Flags) -> Int[Tensor, "batch words"]:
    """The words as integers; float carriers are reinterpreted, never converted."""
    carrier = carrier_of(f)
    return f if f.dtype == carrier.bits else f.view(carrier.bits)


def unpack(f: Flags) -> Slots:
    """All slots of all rows, slot 0 first.

    In eager mode the result is a view of `f` as int16, so slots from 32,768 up are negative. `& SLOT_MASK` makes them
    positive; the field readers of `slot_bits` work either way.
    """
    if _is_viewable_as_slots(f):
        return f.view(torch.int16)
    # Shifts, not view(int16): ONNX has no reinterpret cast, and Inductor does not fuse one between sizes.
    words = bits(f)
    lanes = torch.bitwise_right_shift(words.unsqueeze(-1), _shifts(words))
    return torch.bitwise_and(lanes, SLOT_MASK).flatten(1)


def pack(slots: Slots, like: Flags) -> Flags:
    """The flags that hold `slots`, with the carrier, width and memory layout of `like`."""
    carrier = carrier_of(like)
    lanes = like.shape[1] * carrier.slots_per_word
    if slots.shape[1] < lanes:
        slots = torch.nn.functional.pad(slots, (0, lanes - slots.shape[1]))
    if _is_viewable_as_slots(like):
        # Flat, since the stride of a dim of size 1 can be anything, and `view` to a wider dtype looks at it.
        return slots.to(torch.int16).reshape(-1).view(like.dtype).view(slots.shape[0], like.shape[1])
    slots = slots.to(carrier.bits).unflatten(1, (-1, carrier.slots_per_word))
    words = joined(torch.bitwise_left_shift(slots & SLOT_MASK, _shifts(slots)), carrier.bits)
    return words_to_flags(words, like)


def joined(lanes: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the last dim, whose entries have no bit in common.

    In an export by `or`: onnxruntime sums int64 in floating point, which loses the lowest bits.
    """
    if not is_exporting():
        return lanes.sum(-1, dtype=dtype)
    return functools.reduce(torch.bitwise_or, [lanes.select(-1, i) for i in range(lanes.shape[-1])])


def words_to_flags(words: Int[Tensor, "batch words"], like: Shaped[Tensor, "_ words"]) -> Flags:
    if is_transposed(like):
        words = words.t().contiguous().t()
    return words if words.dtype == like.dtype else words.view(like.dtype)


def is_transposed(f: Flags) -> bool:
    return f.stride(0) == 1 and f.shape[1] > 1


_CONSTANTS: dict[tuple[int, torch.dtype], Tensor] = {}


def constant(slot: int, like: Tensor) -> Tensor | int:
    """`slot` as an operand for `like`: a cached tensor in eager mode on the CPU, where a number costs twice as much."""
    if not can_read(like):
        return slot
    if like.dtype == torch.int16 and slot >> (SLOT_BITS - 1):
        slot -= 1 << SLOT_BITS
    known = _CONSTANTS.get((slot, like.dtype))
    if known is None:
        known = torch.tensor(slot, dtype=like.dtype, device="cpu")
        if not is_traced(known):
            _CONSTANTS[slot, like.dtype] = known
    return known


def _is_viewable_as_slots(f: Flags) -> bool:
    return is_plain(f) and f.is_contiguous() and f.stride(-1) == 1 and sys.byteorder == "little"


def _shifts(words: Tensor) -> Int[Tensor, " lanes"]:
    return torch.arange(0, words.element_size() * 8, SLOT_BITS, dtype=words.dtype, device=words.device)
