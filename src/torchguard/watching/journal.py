"""What was seen in the course of one call, and the flags it comes to."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchguard.errors.config import get_config
from torchguard.errors.slots import Flags
from torchguard.watching.checks import Checks
from torchguard.watching.constants import at
from torchguard.watching.earliest import UNTOLD
from torchguard.watching.kinds import FEW, INF, NAN
from torchguard.watching.rows import Batch
from torchguard.watching.verdict import Evidence, verdict


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

    def __init__(self, batch: Any, checks: Checks, repairs: bool, places: int, marks: Any = None) -> None:
        self.batch: Batch = batch
        self.checks, self.repairs, self.marks = checks, repairs, marks
        self.looks = checks.nan or checks.inf
        self.only = None if checks.nan and checks.inf else NAN if checks.nan else INF
        # The places where nothing but a look reads what is there, in a model large enough not to feel a call.
        self.ends = (0, places - 1) if places > FEW else ()
        self._is_turned = batch is not None and batch.dim > 0
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
        elif self._known:
            return next((known for other, known in self._known if other is z), None)
        return told

    def is_stray(self, z: Tensor) -> bool:
        """Whether a tensor is about no sample in particular."""
        return self.batch is not None and not self.batch.has_rows(z.shape, self.dim_of(z, None))

    def upright(self, z: Tensor) -> Tensor:
        """A tensor whose last dim belongs to one sample: where the samples lie along it, it gets one more."""
        return z.unsqueeze(-1) if self._is_turned and self.batch.dim == z.ndim - 1 else z

    def remark(self, place: int, code: int, rows: Tensor) -> None:
        """A `(batch,)` mask of samples that are no fault, but worth a warning."""
        self.remarks.append((place, code, rows))

    def close(self, locations: Tensor) -> Step:
        """The step, for places that have these location ids, and 0 behind them."""
        if not self.found:
            self.note(0, torch.zeros(self.batch.size, dtype=torch.int8, device=self.batch.device))
        remarks = self._first_remarks()
        evidence = Evidence(self.found, self.places, self.dims, self.ranks)
        return Step(*verdict(evidence, remarks, locations, self.batch, self.repairs, get_config()), remarks)

    def _first_remarks(self) -> Tensor:
        """Each remark where it was made first: a layer that passes on zeros is no second cause."""
        firsts = [torch.full((0, self.batch.size), -1, device=self.batch.device)]
        for code in sorted({code for _, code, _ in self.remarks}):
            masks = torch.stack([rows for _, other, rows in self.remarks if other == code])
            packed = [place * 16 + code for place, other, _ in self.remarks if other == code]
            first = at(masks.to(torch.int8).argmax(0), packed)
            firsts.append(torch.where(masks.any(0), first, -1).unsqueeze(0))
        return torch.cat(firsts)
