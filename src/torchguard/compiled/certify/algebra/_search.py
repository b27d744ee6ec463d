"""Evaluate two graphs at point after point, until every comparison has had both outcomes or the graphs differ."""

import hashlib
import random
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchguard.compiled._nodes import attribute, op_name
from torchguard.compiled.certify.algebra._evaluate import evaluate_in_float64, evaluate_in_reals
from torchguard.compiled.certify.algebra._field import (
    EvaluationError,
    EvaluationTrace,
    PrimeField,
    TakenFor,
    UnsupportedError,
    draw_prime,
)
from torchguard.compiled.certify.algebra._sampling import (
    DOMAINS,
    MAX_BETWEEN,
    RANGES_PER_BOUND,
    IndexRange,
    Sampler,
    Targets,
    find_targets,
    index_leaves,
    index_ranges,
    indexed_sizes,
    is_integer,
)
from torchguard.compiled.certify.algebra._values import Value

T = TypeVar("T")

# The number of points beyond the first ones that are tried while a comparison has had only one outcome. Most of them
# are evaluated in real numbers alone.
_MAX_POINTS = 240
# What tests for infinity and NaN take numbers for, at every fourth of the further points.
_TAKEN_FOR: tuple[TakenFor, ...] = ("some", "some", "infinite", "negative", "nan")
# The number of elements wanted in each interval between thresholds.
_PER_INTERVAL = 6


@dataclass(frozen=True)
class SampleResult:
    """The results that differ at one point.

    At a singular point the function itself divides by zero, and a difference there shows nothing.

    Attributes:
        in_reals: for a point of real numbers where results differ in the field, how they compare as real numbers. None
            where these are not known.
    """

    mismatches: tuple[str, ...]
    is_singular: bool
    in_reals: "InReals | None" = None


class InReals(StrEnum):
    """How results that differ in the field compare in real numbers."""

    EQUAL = "equal"
    DIFFERENT = "different"
    NOT_FINITE = "not finite"  # the right result is not


@dataclass(frozen=True)
class Comparison:
    """Two graphs, the leaves that both take, how to compare them at a point, and the further inputs of each."""

    graphs: tuple[GraphModule, GraphModule]
    leaves: tuple[Tensor, ...]
    compare: Callable[[Sampler], SampleResult]
    further_inputs: Callable[[Sampler], tuple[list[Value], list[Value]]] = lambda sampler: ([], [])


@dataclass(frozen=True)
class OutcomeCoverage:
    """Which outcomes each element of each comparison, index and step function has had.

    Attributes:
        seen: by comparison or index, a boolean for each element and outcome; by step function, for each element whether
            it had a first value, another one, and one beyond -1, 0 and 1, of which a polynomial may be zero.
        possible: the outcomes that an element can have: a masked position is never that of a maximum.
        first: by step function, the first values.
        irrelevant: the comparisons whose outcomes are not wanted.
    """

    seen: dict[str, Tensor] = field(default_factory=dict)
    possible: dict[str, Tensor] = field(default_factory=dict)
    first: dict[str, Tensor] = field(default_factory=dict)
    irrelevant: frozenset[str] = frozenset()

    def without(self, keys: Set[str]) -> "OutcomeCoverage":
        """The coverage in which the outcomes of some comparisons are not wanted."""
        seen, possible = ({k: v for k, v in of.items() if k not in keys} for of in (self.seen, self.possible))
        return OutcomeCoverage(seen, possible, self.first, self.irrelevant | keys)

    def with_trace(self, trace: EvaluationTrace, *, is_void: bool = False) -> "OutcomeCoverage":
        """The coverage with that of another point. At one that is void no outcome counts, but all are wanted."""
        first = {**trace.steps, **self.first}
        seen, possible = dict(self.seen), dict(self.possible)
        found = {key: outcomes for key, outcomes in trace.outcomes.items() if key not in self.irrelevant}
        for key, values in trace.steps.items():
            is_other = values != first[key]
            outcomes = torch.stack([~is_other, is_other, values.abs() > 1], 1)
            found[key] = outcomes, torch.ones_like(outcomes)
        for key, (here, can_be) in found.items():
            here = torch.zeros_like(here) if is_void else here
            seen[key] = seen[key] | here if key in seen else here
            possible[key] = possible[key] | can_be if key in possible else can_be
        return OutcomeCoverage(seen, possible, self.first if is_void else first, self.irrelevant)

    def adds_to(self, other: "OutcomeCoverage") -> bool:
        """Whether another coverage has an element with fewer outcomes."""
        return any(key not in other.seen or bool((seen & ~other.seen[key]).any()) for key, seen in self.seen.items())

    def one_sided(self) -> list[str]:
        """The keys of which an element lacks an outcome."""
        return [key for key, seen in self.seen.items() if bool((self.possible[key] & ~seen).any())]


@dataclass
class Search:
    """The points of one comparison, and the outcomes that its comparisons of numbers have had."""

    comparison: Comparison
    seed: int
    coverage: OutcomeCoverage = OutcomeCoverage()
    first_range: int = 0

    @cached_property
    def ranges(self) -> list[IndexRange]:
        leaves = self.comparison.leaves
        graphs = self.comparison.graphs
        return index_ranges(leaves, index_leaves(leaves, *graphs), indexed_sizes(*graphs))

    @cached_property
    def primes(self) -> random.Random:
        """Draws the primes of fields."""
        return self._new_random()

    def _new_random(self, purpose: str = "") -> random.Random:
        """Random numbers. The graphs are part of their seed: none can be made for certain primes."""
        return random.Random(f"{self.seed}{purpose} {' '.join(map(_digest, self.comparison.graphs))}")

    def one_sided_nodes(self) -> list[str]:
        """The names of nodes with a comparison, step or index of which an element always had the same outcome."""
        return sorted({key.split(":")[1].split("#")[0] for key in self.coverage.one_sided()})

    def run(self, count: int) -> Iterator[SampleResult]:
        """Results at `count` free points, then at others, until each comparison had both outcomes or graphs differ."""
        targets, trace = find_targets(*self.comparison.graphs), EvaluationTrace()
        between = self._points_between(targets)
        for number in range(-count, _MAX_POINTS):
            is_free, is_required = number < 0, number < between
            if number == 0 and self.one_sided_nodes():
                self._drop_irrelevant_extrema(count, targets, trace)
            if not is_required and not self.one_sided_nodes():
                return
            sample = number + count
            taken_for = _TAKEN_FOR[number // 4 % len(_TAKEN_FOR)] if number > MAX_BETWEEN and number % 4 == 0 else ""
            f = PrimeField(draw_prime(self.primes), 4 * self.primes.getrandbits(48) + sample % 4, trace, taken_for)
            sampler = Sampler(f, 0 if is_free else number + 1, targets)
            result = self._result(sampler) if is_free else self._useful_result(sampler, is_required)
            if result is not None:
                yield result
                if result.mismatches and not result.is_singular:
                    if result.in_reals not in (None, InReals.DIFFERENT):
                        yield from self._results_in_domains(targets, trace)
                    return

    def _drop_irrelevant_extrema(self, count: int, targets: Targets, trace: EvaluationTrace) -> None:
        """Want no outcomes of maxima and minima if the graphs agree whatever these are.

        So it is where one is only subtracted before exponentials, as in a softmax. If the graphs agree at points where
        extrema are random elements of the field, they agree for all values of the extrema, whichever position has them.
        """
        if not any(op_name(node) in ("amax", "amin") for gm in self.comparison.graphs for node in gm.graph.nodes):
            return
        primes = self._new_random("extrema")  # the other points are the same with and without these
        trace.frees_extrema, trace.free = True, set()
        try:
            for _ in range(count):
                f = PrimeField(draw_prime(primes), 4 * primes.getrandbits(48), trace)
                result = self._with_widest_range(Sampler(f, 0, targets), self.comparison.compare)
                if result.mismatches or result.is_singular:
                    return
        except (EvaluationError, UnsupportedError):
            return
        finally:
            trace.frees_extrema = False
        self.coverage = self.coverage.without(trace.free)

    def _results_in_domains(self, targets: Targets, trace: EvaluationTrace) -> Iterator[SampleResult]:
        """Results at points of other domains: whether a difference in the field is one in real numbers as well."""
        for i, common in enumerate(DOMAINS):
            f = PrimeField(draw_prime(self.primes), 4 * self.primes.getrandbits(48) + i % 3, trace)
            try:
                yield self._result(Sampler(f, 0, targets, common=common))
            except (EvaluationError, UnsupportedError):
                continue

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
                self.first_range = max(0, i - RANGES_PER_BOUND // 2)
                return result
        raise AssertionError("there is always a range")

    def _result(self, sampler: Sampler) -> SampleResult:
        def run(sampler: Sampler) -> SampleResult:
            sampler.field.trace.reset()
            return self.comparison.compare(sampler)

        result = self._with_widest_range(sampler, run)
        is_void = bool(result.mismatches) and result.is_singular
        self.coverage = self.coverage.with_trace(sampler.field.trace, is_void=is_void)
        return result

    def _useful_result(self, sampler: Sampler, is_required: bool) -> SampleResult | None:
        """The result at a point that is required, or has a new outcome; None for others.

        A difference where the graphs divide by zero, compare NaN, or take a number for infinite is no result.
        """
        try:
            if not is_required and not self._with_widest_range(sampler, self._has_new_outcome):
                return None
            before = self.coverage
            result = self._result(sampler)
        except (EvaluationError, UnsupportedError):
            return None
        trace = sampler.field.trace
        if result.mismatches and (result.is_singular or trace.has_nan or trace.has_nonfinite):
            self.coverage = before
            return None
        if not result.mismatches and any(bool((x.element == 0).all()) for x in sampler.point(self.comparison.leaves)):
            self._discount(sampler, before)
        return result

    def _discount(self, sampler: Sampler, before: OutcomeCoverage) -> None:
        """Take back the new outcomes that make no difference at a point where a leaf is all zeros.

        There a wrong derivative may be zero like the right one. An outcome counts if inverting it changes results in
        the field, or those in real numbers, which may be NaN; and if it tests a norm, which is zero nowhere else.
        """
        for key, seen in list(self.coverage.seen.items()):
            known = before.seen.get(key, torch.zeros_like(seen))
            if not bool((seen & ~known).any()) or key.partition("#")[0] in self.tests_of_norms:
                continue
            if not self._with_widest_range(sampler, partial(self._matters, key)):
                self.coverage.seen[key] = known

    @cached_property
    def tests_of_norms(self) -> frozenset[str]:
        """The keys of nodes that test whether a norm is zero."""
        pairs = [
            (gm, node) for gm in self.comparison.graphs for node in gm.graph.nodes if op_name(node) in ("eq", "ne")
        ]
        return frozenset(
            f"{id(gm)}:{node.name}"
            for gm, node in pairs
            if isinstance(node.args[0], Node) and op_name(node.args[0]) == "linalg_vector_norm" and node.args[1] == 0
        )

    def _matters(self, key: str, sampler: Sampler) -> bool:
        """Whether the results change where the boolean results of a node are inverted."""
        trace, node = sampler.field.trace, key.partition("#")[0]
        trace.flipped = node
        try:
            if self.comparison.compare(sampler).mismatches:
                return True
        finally:
            trace.flipped = ""
        inputs = sampler.point(self.comparison.leaves)
        for gm, further in zip(self.comparison.graphs, self.comparison.further_inputs(sampler), strict=True):
            both = [evaluate_in_float64(gm, [*inputs, *further], flipped=flipped) for flipped in ("", node)]
            for a, b in zip(*both, strict=True):
                if isinstance(a, Value) and not torch.allclose(a.element, b.element, equal_nan=True):
                    return True
        return False

    def _has_new_outcome(self, sampler: Sampler) -> bool:
        inputs = sampler.point(self.comparison.leaves)
        found = self.coverage
        for gm, further in zip(self.comparison.graphs, self.comparison.further_inputs(sampler), strict=True):
            found = found.with_trace(evaluate_in_reals(gm, [*inputs, *further], sampler.field))
        return found.adds_to(self.coverage)


def _digest(gm: GraphModule) -> str:
    """A hash of what a graph computes, numbers and constants included."""
    digest = hashlib.sha256()
    for node in gm.graph.nodes:
        digest.update(f"{node.op} {node.target} {node.args} {node.kwargs}".encode())
        if node.op == "get_attr":
            digest.update(repr(attribute(gm, node.target).tolist()).encode())
    return digest.hexdigest()
