"""What was seen in the course of one call, and the flags it comes to."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchguard.errors.codes import DEFAULT_SEVERITY, ErrorCode, Severity
from torchguard.errors.config import get_config
from torchguard.errors.layout import pack_slot
from torchguard.errors.record import new_t
from torchguard.errors.slots import Flags, capacity, pack
from torchguard.watching.constants import constant
from torchguard.watching.earliest import KIND, LAST, ORDER, POSITION, UNTOLD, earliest
from torchguard.watching.kinds import CODES, FINE
from torchguard.watching.rows import Batch

_SEVERITIES = tuple(DEFAULT_SEVERITY[code] for code in CODES)
_REMARK_SEVERITIES = tuple(DEFAULT_SEVERITY.get(code, Severity.WARN) for code in range(16))


class Step(NamedTuple):
    """One call, seen.

    `origin` is for each sample the place where it went bad first (-1: nowhere), `times` in how many places it was seen
    bad, and `position` which vector of the origin was the first bad one, counted over the dims between batch and last.
    `remarks` has a row for each code that is no fault: the place where it was met first, times 16, plus the code
    (-1: nowhere).
    """

    flags: Flags
    origin: Tensor
    times: Tensor
    position: Tensor
    remarks: Tensor


class Journal:
    """The evidence of one call, in the order in which it was met."""

    def __init__(self, batch: Any, repairs: bool, marks: Any = None) -> None:
        self.batch: Batch = batch
        self.repairs, self.marks = repairs, marks
        self.places: list[int] = []
        self.found: list[Tensor] = []
        self.dims: list[int] = []
        self.ranks: list[int] = []
        self.remarks: list[tuple[int, int, Tensor]] = []
        self._known: list[tuple[Tensor, int]] = []

    def note(self, place: int, found: Tensor, dim: int | None = None, rank: int = 0) -> None:
        """Evidence at a place, about a tensor of that rank; its samples lie along `dim`, if that is known."""
        self.places.append(place)
        self.found.append(found)
        self.dims.append(UNTOLD if dim is None else dim)
        self.ranks.append(rank)

    def dim_of(self, z: Tensor, told: int | None) -> int | None:
        """Along which dim the samples lie in a tensor, as far as that was told, now or when it was met before."""
        if told is not None:
            self._known.append((z, told))
            return told
        return next((known for other, known in self._known if other is z), None) if self._known else None

    def is_stray(self, z: Tensor) -> bool:
        """Whether a tensor is about no sample in particular."""
        return self.batch is not None and not self.batch.has_rows(z.shape, self.dim_of(z, None))

    def upright(self, z: Tensor) -> Tensor:
        """A tensor whose last dim belongs to one sample: where the samples lie along it, it gets one more."""
        is_last = self.batch is not None and z.ndim > 1 and self.batch.dim == z.ndim - 1
        return z.unsqueeze(-1) if is_last else z

    def remark(self, place: int, code: int, rows: Tensor) -> None:
        """A `(batch,)` mask of samples that are no fault, but worth a warning."""
        self.remarks.append((place, code, rows))

    def close(self, locations: Tensor) -> Step:
        """The step, for places that have these location ids, and 0 behind them."""
        if not self.found:
            self.note(0, torch.zeros(self.batch.size, dtype=torch.int8, device=self.batch.device))
        config = get_config()
        f = new_t(self.batch.size, self.batch.device, config)
        # A row that was repaired is fine again: what comes next is another fault, not an echo.
        most = min(capacity(f, config) // 2, len(self.found)) if self.repairs else 1
        first, times = earliest(self.found, self.dims, self.ranks, self.batch, most)
        kind, order = first & KIND, len(self.places) - (first >> ORDER)
        places = _at(order, [*self.places, -1])  # one more, for samples that nothing was found about
        location = (locations if locations.device == places.device else locations.to(places.device))[places]
        slots = torch.where(kind == FINE, 0, pack_slot(_at(kind, CODES), location, _at(kind, _SEVERITIES)))
        if self.repairs:
            code = torch.full_like(kind, ErrorCode.FALLBACK_VALUE)
            fallback = pack_slot(code, location, torch.full_like(kind, Severity.WARN))
            slots = torch.stack([slots, torch.where(kind == FINE, 0, fallback)], 1).flatten(0, 1)
        remarks = self._first_remarks()
        if self.remarks:
            slots = _moved_up(torch.cat([slots, _slots_of(remarks, locations)]))
        position = torch.where(kind[0] == FINE, -1, LAST - ((first[0] >> POSITION) & LAST))
        return Step(pack(slots[: capacity(f, config)].t(), f), places[0], times, position, remarks)

    def _first_remarks(self) -> Tensor:
        """Each remark where it was made first: a layer that passes on zeros is no second cause."""
        firsts = [torch.full((0, self.batch.size), -1, device=self.batch.device)]
        for code in sorted({code for _, code, _ in self.remarks}):
            masks = torch.stack([rows for _, other, rows in self.remarks if other == code])
            packed = [place * 16 + code for place, other, _ in self.remarks if other == code]
            first = _at(masks.to(torch.int8).argmax(0), packed)
            firsts.append(torch.where(masks.any(0), first, -1).unsqueeze(0))
        return torch.cat(firsts)


def _slots_of(remarks: Tensor, locations: Tensor) -> Tensor:
    place, code = remarks >> 4, remarks & 0xF
    slots = pack_slot(code, locations.to(place.device)[place], _at(code, _REMARK_SEVERITIES))
    return torch.where(remarks < 0, 0, slots)


def _moved_up(slots: Tensor) -> Tensor:
    """Slots with the empty ones last."""
    order = (slots == 0).to(torch.int8).sort(dim=0, stable=True).indices
    return slots.gather(0, order)


def _at(index: Tensor, values: Sequence[int]) -> Tensor:
    return constant(values, index.device)[index]
