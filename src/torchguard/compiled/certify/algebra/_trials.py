"""One trial after the other, at points that are drawn freely first, then to take the ways not taken so far."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from torchguard.compiled.certify.algebra._aiming import BETWEEN, Aim, aim_at, places_among
from torchguard.compiled.certify.algebra._evaluate import rehearsed
from torchguard.compiled.certify.algebra._field import Field, Journal, UnfitError, UnsupportedError
from torchguard.compiled.certify.algebra._points import PER_RANGE, Places, fields, point, ways_to_draw
from torchguard.compiled.certify.algebra._values import Value

T = TypeVar("T")

# So many more points are looked at, in real numbers alone, while a comparison has gone only one way.
_MOST_LOOKS = 120
# Between the marks, this many elements are wanted for each gap: a few in each, most likely.
_PER_GAP = 6


@dataclass(frozen=True)
class Outcome:
    """What one trial showed: `wrong` names the results that differ.

    At a singular point the function itself divides by zero, and a difference there says nothing.
    """

    wrong: tuple[str, ...]
    is_singular: bool


@dataclass(frozen=True)
class Case:
    """Two graphs, the leaves both take, how to compare them at a point, and what else the second one takes."""

    graphs: tuple[GraphModule, GraphModule]
    leaves: tuple[Tensor, ...]
    trial: Callable[[Field, Places], Outcome]
    moving: Callable[[Field], list[Value]] = lambda f: []


@dataclass
class Trials:
    """The trials of one case, and which ways its comparisons have gone."""

    case: Case
    seed: int
    taken: dict[str, set[bool]] = field(default_factory=dict)

    first_way: int = 0

    @cached_property
    def ways(self) -> list[Places]:
        return ways_to_draw(self.case.leaves, places_among(self.case.leaves, *self.case.graphs))

    def never_taken(self) -> list[str]:
        """The nodes with a comparison that always went the same way."""
        return sorted({_node_of(place) for place, both in self.taken.items() if len(both) < 2})

    def run(self, count: int) -> Iterator[Outcome]:
        """Trials until all is seen or something is wrong: so many at least, those at free points."""
        aim, drawn = aim_at(*self.case.graphs), fields(self.seed, Journal())
        between = self._points_between(aim)
        for number in range(-count, _MOST_LOOKS):
            is_free, is_wanted = number < 0, number < between
            if not is_wanted and not self.never_taken():
                return
            f = replace(next(drawn), aim=replace(aim, number=0 if is_free else number + 1))
            outcome = self._tried(f) if is_free else self._aimed(f, is_wanted)
            if outcome is not None:
                yield outcome
                if outcome.wrong and not outcome.is_singular:
                    return

    def _points_between(self, aim: Aim) -> int:
        """How many points it takes to have something in each gap between the marks, whatever they are for."""
        sizes = [leaf.numel() for leaf in self.case.leaves if leaf.numel()]
        if (len(aim.marks) == 1 and not self._wraps(aim)) or not sizes:
            return 0
        return min(BETWEEN, 1 + _PER_GAP * len(aim.gaps) // min(sizes))

    def _wraps(self, aim: Aim) -> bool:
        return bool(aim.wraps) and any(_is_integer(leaf) for leaf in self.case.leaves)

    def _fitting(self, run: Callable[[Places], T]) -> T:
        """Run something with the widest range of integers it can be run with, or one a little wider than the last."""
        for i in range(self.first_way, len(self.ways)):
            try:
                result = run(self.ways[i])
            except UnfitError:
                if i == len(self.ways) - 1:
                    raise
            else:
                self.first_way = max(0, i // PER_RANGE - 1) * PER_RANGE
                return result
        raise AssertionError("there is a way at least")

    def _tried(self, f: Field) -> Outcome:
        def run(places: Places) -> Outcome:
            f.journal.start()
            return self.case.trial(f, places)

        outcome = self._fitting(run)
        is_void = bool(outcome.wrong) and outcome.is_singular
        for place, both in f.journal.outcomes.items():
            self.taken.setdefault(place, set()).update(set() if is_void else both)
        return outcome

    def _aimed(self, f: Field, is_wanted: bool) -> Outcome | None:
        """A trial that is wanted or takes a new way. A difference where it divides by zero or by NaN is no outcome."""
        try:
            if not is_wanted and not self._fitting(lambda places: self._is_new(f, places)):
                return None
            known = {place: set(both) for place, both in self.taken.items()}
            outcome = self._tried(f)
        except (UnfitError, UnsupportedError):
            return None
        if outcome.wrong and (outcome.is_singular or f.journal.has_nan):
            self.taken = known
            return None
        return outcome

    def _is_new(self, f: Field, places: Places) -> bool:
        inputs = point(f, self.case.leaves, places)
        first, second = self.case.graphs
        seen = {**rehearsed(first, inputs, f).outcomes}
        seen |= rehearsed(second, [*inputs, *self.case.moving(f)], f).outcomes
        return any(not both <= self.taken.get(place, set()) for place, both in seen.items())


def _is_integer(leaf: Tensor) -> bool:
    return not leaf.is_floating_point() and leaf.dtype != torch.bool


def _node_of(place: str) -> str:
    return place.split(":")[1].split("#")[0]
