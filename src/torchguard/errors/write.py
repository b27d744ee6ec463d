"""Writing errors into flags here and now."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from torchguard._torch import can_read
from torchguard.errors.config import AccumulationConfig
from torchguard.errors.policy import add
from torchguard.errors.slots import Flags, Slots, bits, constant, pack, unpack
from torchguard.errors.validate import require_intact

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
