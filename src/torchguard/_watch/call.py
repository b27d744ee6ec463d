"""What was seen in the course of one call, and the flags it comes to."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchguard._channel.config import get_config
from torchguard._channel.slots import Flags
from torchguard._operators import are_kept_whole
from torchguard._watch.batch import Batch, as_numbers
from torchguard._watch.detect import EVIDENCE, INF, NAN, REVISION, evidence, narrowed
from torchguard._watch.quarantine import REPAIR, repaired
from torchguard._watch.select import Checks
from torchguard._watch.summarize import UNTOLD, Evidence, at, verdict
from torchguard.checks import can_be_looked_at


class Step(NamedTuple):
    """One call, seen.

    `told` has for each sample the place where it went bad first, in how many more it was seen bad, and which vector of
    the first was the first bad one, counted over the dims between batch and last: -1 for one that is fine. `remarks`
    has a row for each code that is no fault, if there are any: the place where it was met first, times 16, plus the
    code (-1: nowhere).
    """

    flags: Flags
    told: Tensor
    remarks: Tensor | None


class Whole(NamedTuple):
    """What was noted before a part of the model began."""

    found: list[Tensor]
    remarks: list[tuple[int, int, Tensor]]
    known: list[tuple[Tensor, int]]
    marks: Tensor | None
    part: range | None


class Journal:
    """The evidence of one call, in the order in which it was met."""

    def __init__(self, batch: Any, checks: Checks, repairs: bool, places: int, marks: Any = None) -> None:
        self.batch: Batch = batch
        self.checks, self.repairs, self.marks = checks, repairs, marks
        self.looks = repairs or checks.nan or checks.inf
        self.only = None if checks.nan and checks.inf else NAN if checks.nan else INF
        self.ends = (0, places - 1)  # nothing but a look reads what is there
        self._is_turned = batch is not None and batch.dim > 0
        self._samples = as_numbers(batch)
        self._is_quick = are_kept_whole() and batch is not None and batch.dim == 0 and (repairs or self.only is None)
        self.places: list[int] = []
        self.found: list[Tensor] = []
        self.dims: list[int] = []
        self.remarks: list[tuple[int, int, Tensor]] = []
        self.part: range | None = None  # of the places, if a part of the model is a region of its own
        self.parts: list[Tensor] = []  # the marks of all such
        self._known: list[tuple[Tensor, int]] = []

    def see(
        self,
        z: Tensor,
        place: int,
        stops: bool = True,
        is_argument: bool = False,
        squares: int = 0,
        dim: int | None = None,
        in_place: bool = False,
    ) -> Tensor:
        """Note what a tensor holds at a place; in quarantine, the tensor with what is bad replaced.

        Args:
            stops: whether a gradient that is bad ends here.
            is_argument: whether it goes into a module. What is about no sample goes in as it is: a table, or a mask.
            squares: of how many numbers the module is going to sum the squares.
            dim: along which the samples lie, if that is known.
            in_place: whether to mend it so where that can be: no kernel that could replace something as well reads it.
        """
        # Dynamo takes long over every call and comes by here hundreds of times: what can be, is left to an operator.
        if (
            self._is_quick
            and (self.repairs or not is_argument)
            and dim is None
            and not self._known
            and z.is_floating_point()
            and z.layout == torch.strided
            and not z.is_nested
        ):
            if not self.looks:
                return z
            self.places.append(place)
            self.dims.append(UNTOLD)
            if self.repairs:
                about = (stops, squares, is_argument, in_place, REVISION)
                marks, place = self._mark_of(place) if self.part else (self.marks, place)
                z, found = REPAIR(z, marks, place, *self._samples, None, *about)
            else:
                found = EVIDENCE(z, place in self.ends, REVISION)
            self.found.append(found)
            return z
        return self._see(z, place, stops, is_argument, squares, dim, in_place)

    def _see(
        self, z: Tensor, place: int, stops: bool, is_argument: bool, squares: int, dim: int | None, in_place: bool
    ) -> Tensor:
        if not self.looks or not can_be_looked_at(z) or (is_argument and self.is_stray(z)):
            return z
        dim = self.dim_of(z, dim)
        looked_at = z.unsqueeze(-1) if self._is_turned and self.batch.dim == z.ndim - 1 else z
        if not self.repairs:
            found = evidence(looked_at, alone=place in self.ends)
            self.note(place, found if self.only is None else narrowed(found, self.only), dim)
            return z
        marks, at_place = self._mark_of(place)
        mended, found = repaired(looked_at, self.batch, marks, at_place, dim, stops, squares, in_place)
        if found is not None:
            self.note(place, found, dim)
        mended = mended if looked_at is z else mended.squeeze(-1)
        self.dim_of(mended, dim)
        return mended

    def _mark_of(self, place: int) -> tuple[Tensor | None, int]:
        """The marks that have those of a place, and which of them they are. A module from elsewhere has none."""
        part = self.part
        if part is None:
            return self.marks, place
        return (self.marks, place - part.start) if part.start <= place < part.stop else (None, 0)

    def enter(self, part: range, marks: Tensor | None) -> Whole:
        """Begin a part of the model, with these marks. Returns what to leave it with.

        What is noted there is in lists of its own: a region hands out tensors by returning them alone.
        """
        whole = Whole(self.found, self.remarks, self._known, self.marks, self.part)
        self.found, self.remarks, self._known, self.marks, self.part = [], [], [], marks, part
        return whole

    def leave(self, whole: Whole, found: Sequence[Tensor], remarks: Sequence[Tensor]) -> None:
        """End it: with the evidence, and whom its remarks are about, as they came out."""
        told = [(place, code) for place, code, _ in self.remarks]
        self.found, self.remarks, self._known, self.marks, self.part = whole
        self.found.extend(found)
        for (place, code), rows in zip(told, remarks, strict=True):
            self.remark(place, code, rows)

    def note(self, place: int, found: Tensor, dim: int | None = None) -> None:
        """Evidence at a place; its samples lie along `dim`, if that is known."""
        self.places.append(place)
        self.found.append(found)
        self.dims.append(UNTOLD if dim is None else dim)

    def dim_of(self, z: Tensor, told: int | None) -> int | None:
        """Along which dim the samples lie in a tensor, as far as that was told, now or when it was met before."""
        if told is not None:
            self._known.append((z, told))
        elif self._known:
            return next((known for other, known in self._known if other is z), None)
        return told

    def is_stray(self, z: Tensor) -> bool:
        """Whether a tensor is about no sample in particular."""
        return self.batch is not None and not self.batch.has_rows(z.shape, self.dim_of(z, None))

    def remark(self, place: int, code: int, rows: Tensor) -> None:
        """A `(batch,)` mask of samples that are no fault, but worth a warning."""
        self.remarks.append((place, code, rows))

    def close(self, locations: Tensor) -> Step:
        """The step, for places that have these location ids, and 0 behind them."""
        if not self.found:
            self.note(0, torch.zeros(self.batch.size, 1, dtype=torch.int8, device=self.batch.device))
        remarks = self._first_remarks()
        evidence = Evidence(self.found, self.places, self.dims)
        about = (remarks, locations, self.batch, self.repairs, get_config(), self.marks)
        return Step(*verdict(evidence, *about), remarks)

    def _first_remarks(self) -> Tensor | None:
        """Each remark where it was made first: a layer that passes on zeros is no second cause."""
        firsts = []
        for code in sorted({code for _, code, _ in self.remarks}):
            masks = torch.stack([rows for _, other, rows in self.remarks if other == code])
            packed = [place * 16 + code for place, other, _ in self.remarks if other == code]
            first = at(masks.to(torch.int8).argmax(0), packed)
            firsts.append(torch.where(masks.any(0), first, -1))
        return torch.stack(firsts) if firsts else None
