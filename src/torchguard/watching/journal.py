"""What was seen in the course of one call, and the flags it comes to."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchguard._torch import mutation_count, surely_equal
from torchguard.errors.codes import DEFAULT_SEVERITY, ErrorCode, Severity
from torchguard.errors.config import get_config
from torchguard.errors.layout import pack_slot
from torchguard.errors.record import new_t
from torchguard.errors.slots import Flags, capacity, pack
from torchguard.watching.kinds import CODES, FINE, kinds_of
from torchguard.watching.rows import Batch

_CLEAN = "_torchguard_clean"
# A key, from the right: kind, position (counted down), order (counted down).
_KIND, _POSITION, _LAST, _ORDER = 0xFF, 8, (1 << 31) - 1, 40
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
        self.dims: list[int | None] = []
        self.remarks: list[tuple[int, int, Tensor]] = []
        self._known: list[tuple[Tensor, int]] = []
        self._spread: list[tuple[Tensor, int | None, Any]] = []

    def note(self, place: int, found: Tensor, dim: int | None = None) -> None:
        """Evidence at a place; its samples lie along `dim`, if that is known."""
        self.places.append(place)
        self.found.append(found)
        self.dims.append(dim)

    def mark_for(self, place: int, found: Tensor, dim: int | None) -> Tensor | None:
        """The mark of a place, shaped as the evidence. Places share one expansion, so that one sum takes all back."""
        if self.marks is None:
            return None
        for known, other_dim, slices in self._spread:
            if other_dim == dim and _alike(known, found):
                return slices[place]
        slices = self.batch.spread(self.marks, found.shape, dim).unbind(0)
        self._spread.append((found, dim, slices))
        return slices[place]

    def dim_of(self, z: Tensor, told: int | None) -> int | None:
        """Along which dim the samples lie in a tensor, as far as that was told, now or when it was met before."""
        if told is not None:
            self._known.append((z, told))
            return told
        return next((known for other, known in self._known if other is z), None)

    def mark_clean(self, z: Tensor) -> None:
        """Remember a tensor that was just repaired: going into the next module it need not be looked at again."""
        if not torch.compiler.is_compiling():
            setattr(z, _CLEAN, mutation_count(z))  # on the tensor: a checkpoint hands it in again, much later

    def is_clean(self, z: Tensor) -> bool:
        # In a graph nobody can tell whether it was changed in place since.
        return not torch.compiler.is_compiling() and getattr(z, _CLEAN, None) == mutation_count(z)

    def remark(self, place: int, code: int, rows: Tensor) -> None:
        """A `(batch,)` mask of samples that are no fault, but worth a warning."""
        self.remarks.append((place, code, rows))

    def close(self, locations: tuple[int, ...]) -> Step:
        """The step, for places that have these location ids."""
        if not self.found:
            self.note(0, torch.zeros(self.batch.size, dtype=torch.int8, device=self.batch.device))
        keys = self._keys()
        config = get_config()
        f = new_t(self.batch.size, self.batch.device, config)
        # A row that was repaired is fine again: what comes next is another fault, not an echo.
        most = min(capacity(f, config) // 2, len(self.found)) if self.repairs else 1
        first = keys.topk(most, dim=0).values if most > 1 else keys.amax(0, keepdim=True)
        kind, order = first & _KIND, len(self.places) - (first >> _ORDER)
        # One more, for rows where nothing was found.
        location = torch.tensor([*(locations[place] for place in self.places), 0], device=keys.device)[order]
        slots = torch.where(kind == FINE, 0, pack_slot(_table(CODES, kind), location, _table(_SEVERITIES, kind)))
        if self.repairs:
            code = torch.full_like(kind, ErrorCode.FALLBACK_VALUE)
            fallback = pack_slot(code, location, torch.full_like(kind, Severity.WARN))
            slots = torch.stack([slots, torch.where(kind == FINE, 0, fallback)], 1).flatten(0, 1)
        remarks = self._first_remarks()
        if self.remarks:
            slots = _moved_up(torch.cat([slots, _slots_of(remarks, locations)]))
        place = torch.tensor([*self.places, -1], device=keys.device)[order[0]]
        position = torch.where(kind[0] == FINE, -1, _LAST - ((first[0] >> _POSITION) & _LAST))
        return Step(pack(slots[: capacity(f, config)].t(), f), place, (keys > 0).sum(0), position, remarks)

    def _keys(self) -> Tensor:
        """A number for every piece of evidence and sample: 0 if it is fine, else the larger the earlier it was met.

        It holds the order of the evidence, the first bad vector in it, and its kind: one maximum finds all three.
        """
        parts, about_all = [], []
        mapped = [self.batch.rows_first(found, dim) for found, dim in zip(self.found, self.dims, strict=True)]
        for group in self._groups(mapped):
            early = torch.tensor([len(self.found) - i for i in group], device=self.batch.device) << _ORDER
            if mapped[group[0]] is None:
                kinds = kinds_of(self.found[group[0]]).amax().to(torch.int64)
                about_all.append(torch.where(kinds == FINE, 0, early | (_LAST << _POSITION) | kinds))
                continue
            kinds = kinds_of(torch.stack([mapped[i] for i in group])).to(torch.int64)  # pyright: ignore[reportArgumentType]
            kinds = kinds.flatten(2) if kinds.ndim > 2 else kinds.unsqueeze(-1)
            position = (_LAST - torch.arange(kinds.shape[-1], device=kinds.device)).to(torch.int64) << _POSITION
            parts.append(torch.where(kinds == FINE, 0, early.reshape(-1, 1, 1) | position | kinds).amax(-1))
        if about_all:
            # About no sample in particular: about all, unless one went bad before. Then it is an echo of that.
            keys = torch.stack(about_all)
            earlier = torch.cat(parts).amax() if parts else torch.zeros_like(keys)
            parts.append(torch.where(keys > earlier, keys, 0).expand(-1, self.batch.size))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _groups(self, mapped: list[Tensor | None]) -> list[list[int]]:
        """Which pieces of evidence can be stacked: one kernel does for all of them."""
        groups: list[list[int]] = []
        for i, found in enumerate(mapped):
            alike = next((group for group in groups if found is not None and _alike(mapped[group[0]], found)), None)
            if alike is None:
                groups.append([i])
            else:
                alike.append(i)
        return groups

    def _first_remarks(self) -> Tensor:
        """Each remark where it was made first: a layer that passes on zeros is no second cause."""
        firsts = [torch.full((0, self.batch.size), -1, device=self.batch.device)]
        for code in sorted({code for _, code, _ in self.remarks}):
            masks = torch.stack([rows for _, other, rows in self.remarks if other == code])
            packed = torch.tensor([place * 16 + code for place, other, _ in self.remarks if other == code])
            first = packed.to(masks.device)[masks.to(torch.int8).argmax(0)]
            firsts.append(torch.where(masks.any(0), first, -1).unsqueeze(0))
        return torch.cat(firsts)


def _slots_of(remarks: Tensor, locations: tuple[int, ...]) -> Tensor:
    place, code = remarks >> 4, remarks & 0xF
    slots = pack_slot(code, _table(locations, place), _table(_REMARK_SEVERITIES, code))
    return torch.where(remarks < 0, 0, slots)


def _moved_up(slots: Tensor) -> Tensor:
    """Slots with the empty ones last."""
    order = (slots == 0).to(torch.int8).sort(dim=0, stable=True).indices
    return slots.gather(0, order)


def _table(values: tuple[int, ...], index: Tensor) -> Tensor:
    return torch.tensor(values, device=index.device)[index]


def _alike(one: Tensor | None, two: Tensor) -> bool:
    return one is not None and one.dtype == two.dtype and surely_equal(one.shape, two.shape)
