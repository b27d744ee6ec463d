"""Evaluate two graphs at point after point, until every comparison has had both outcomes or the graphs differ."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from torch import Tensor
from torch.fx import GraphModule

from torchguard.compiled.certify.algebra._evaluate import evaluate_in_reals
from torchguard.compiled.certify.algebra._field import (
    PRIMES,
    EvaluationError,
    EvaluationTrace,
    PrimeField,
    UnsupportedError,
)
from torchguard.compiled.certify.algebra._sampling import (
    MAX_BETWEEN,
    RANGES_PER_BOUND,
    IndexRange,
    Sampler,
    Targets,
    find_targets,
    index_leaves,
    index_ranges,
    is_integer,
)
from torchguard.compiled.certify.algebra._values import Value

T = TypeVar("T")

# The number of points beyond the first ones that are tried while a comparison has had only one outcome. Most of them
# are evaluated in real numbers alone.
_MAX_POINTS = 120
# The number of elements wanted in each interval between thresholds.
_PER_INTERVAL = 6


@dataclass(frozen=True)
class SampleResult:
    """The results that differ at one point.

    At a singular point the function itself divides by zero, and a difference there shows nothing. Nor does one between
    results that agree in real numbers: the graphs are equal by a law that the field does not have.
    """

    mismatches: tuple[str, ...]
    is_singular: bool
    agrees_in_reals: bool = False


@dataclass(frozen=True)
class Comparison:
    """Two graphs, the leaves that both take, how to compare them at a point, and the further inputs of each."""

    graphs: tuple[GraphModule, GraphModule]
    leaves: tuple[Tensor, ...]
    compare: Callable[[Sampler], SampleResult]
    further_inputs: Callable[[Sampler], tuple[list[Value], list[Value]]] = lambda sampler: ([], [])


@dataclass
class Search:
    """The points of one comparison, and the outcomes that its comparisons of numbers have had."""

    comparison: Comparison
    seed: int
    outcomes: dict[str, set[bool]] = field(default_factory=dict)
    first_range: int = 0

    @cached_property
    def ranges(self) -> list[IndexRange]:
        leaves = self.comparison.leaves
        return index_ranges(leaves, index_leaves(leaves, *self.comparison.graphs))

    def one_sided_nodes(self) -> list[str]:
        """The names of nodes with a comparison that always had the same outcome."""
        one_sided = (key for key, outcomes in self.outcomes.items() if len(outcomes) < 2)
        return sorted({key.split(":")[1].split("#")[0] for key in one_sided})

    def run(self, count: int) -> Iterator[SampleResult]:
        """Results at `count` free points, then at others, until each comparison had both outcomes or graphs differ."""
        targets, trace = find_targets(*self.comparison.graphs), EvaluationTrace()
        between = self._points_between(targets)
        for number in range(-count, _MAX_POINTS):
            is_free, is_required = number < 0, number < between
            if not is_required and not self.one_sided_nodes():
                return
            sample = number + count
            f = PrimeField(PRIMES[(self.seed + sample) % len(PRIMES)], self.seed * 1_000_004 + sample, trace)
            sampler = Sampler(f, 0 if is_free else number + 1, targets)
            result = self._result(sampler) if is_free else self._useful_result(sampler, is_required)
            if result is not None:
                yield result
                if result.mismatches and not result.is_singular:
                    return

    def _points_between(self, targets: Targets) -> int:
        """How many points it takes to have elements in each interval between thresholds."""
        leaves = self.comparison.leaves
        sizes = [leaf.numel() for leaf in leaves if leaf.numel()]
        may_overflow = bool(targets.integer_limits) and any(map(is_integer, leaves))
        if (len(targets.thresholds) == 1 and not may_overflow) or not sizes:
            return 0
        return min(MAX_BETWEEN, 1 + _PER_INTERVAL * len(targets.intervals) // min(sizes))

    def _with_widest_range(self, sampler: Sampler, run: Callable[[Sampler], T]) -> T:
        """Run something with the widest index range that it can be evaluated with.

        The search starts at a range a little wider than the last one that worked.
        """
        for i in range(self.first_range, len(self.ranges)):
            try:
                result = run(replace(sampler, index_range=self.ranges[i]))
            except EvaluationError:
                if i == len(self.ranges) - 1:
                    raise
            else:
                self.first_range = max(0, i // RANGES_PER_BOUND - 1) * RANGES_PER_BOUND
                return result
        raise AssertionError("there is always a range")

    def _result(self, sampler: Sampler) -> SampleResult:
        def run(sampler: Sampler) -> SampleResult:
            sampler.field.trace.reset()
            return self.comparison.compare(sampler)

        result = self._with_widest_range(sampler, run)
        is_void = bool(result.mismatches) and result.is_singular
        for key, outcomes in sampler.field.trace.outcomes.items():
            self.outcomes.setdefault(key, set()).update(set() if is_void else outcomes)
        return result

    def _useful_result(self, sampler: Sampler, is_required: bool) -> SampleResult | None:
        """The result at a point that is required, or has a new outcome; None for others.

        A difference where the graphs divide by zero or compare NaN is no result.
        """
        try:
            if not is_required and not self._with_widest_range(sampler, self._has_new_outcome):
                return None
            before = {key: set(outcomes) for key, outcomes in self.outcomes.items()}
            result = self._result(sampler)
        except (EvaluationError, UnsupportedError):
            return None
        if result.mismatches and (result.is_singular or sampler.field.trace.has_nan):
            self.outcomes = before
            return None
        return result

    def _has_new_outcome(self, sampler: Sampler) -> bool:
        inputs = sampler.point(self.comparison.leaves)
        found: dict[str, set[bool]] = {}
        for gm, further in zip(self.comparison.graphs, self.comparison.further_inputs(sampler), strict=True):
            found |= evaluate_in_reals(gm, [*inputs, *further], sampler.field).outcomes
        return any(not outcomes <= self.outcomes.get(key, set()) for key, outcomes in found.items())
