"""Location ids of other ranks. An id is a number of one process: another may have given it to another location."""

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from torchguard._channel.packing import Flags, pack, unpack
from torchguard._channel.slot_bits import LOCATION_MASK, LOCATION_SHIFT, SLOT_MASK, slot_location
from torchguard._torch.tracing import constant_in_graphs
from torchguard.locations._registry import registry


@constant_in_graphs
def checksum() -> int:
    """A number that two ranks share if they have given the same ids to the same locations."""
    return zlib.crc32(repr(sorted(_names().items())).encode())


def _names() -> dict[int, str]:
    entries = registry.entries().items()
    return {location: entry.full_name if entry.model else entry.path for location, entry in entries}


def translated(parts: list[Flags], checksums: Sequence[int], group: dist.ProcessGroup) -> list[Flags]:
    """The flags of each rank with the ids that this rank has for their locations.

    If the ranks have the same ids, nothing is sent. Otherwise they exchange their names.
    """
    if len({*checksums}) == 1:
        return parts
    of_ranks: list[dict[int, str]] = [{}] * len(checksums)
    own = _names()
    dist.all_gather_object(of_ranks, own, group=group)
    return [_renumbered(f, names, own) for f, names in zip(parts, of_ranks, strict=True)]


def _renumbered(f: Flags, theirs: dict[int, str], own: dict[int, str]) -> Flags:
    slots = unpack(f).to(torch.int64) & SLOT_MASK
    used = {*slot_location(slots)[slots != 0].tolist()}
    moved = {one: theirs[one] for one in used if one in theirs and own.get(one) != theirs[one]}
    if not moved:
        return f
    by_name = {name: location for location, name in own.items()}
    new_ids = torch.arange(LOCATION_MASK + 1, dtype=torch.int64)
    for location, name in moved.items():
        new_ids[location] = by_name.get(name) or registry.register(name)
    new_ids = new_ids.to(f.device)[slot_location(slots)]
    slots = torch.where(slots == 0, 0, (slots & ((1 << LOCATION_SHIFT) - 1)) | (new_ids << LOCATION_SHIFT))
    return pack(slots, f)
