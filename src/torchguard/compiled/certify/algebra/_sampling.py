"""Random points to evaluate graphs at, and what they have to cover.

The first points of a check are drawn freely. The next ones lie between the numbers that a graph compares with, its
thresholds, so that each comparison has both outcomes. Of all further ones, half have a peak, one slice of each leaf
that is much larger or smaller than the rest, so that each position is the largest once, and the smallest; the others
have other magnitudes, signs and ties.

Integers that index other tensors have to be in range, and the range is not known. They are drawn in ever narrower
ranges until the graph can be evaluated.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchguard._graphs.op_facts import facts_of
from torchguard.compiled._nodes import attribute, op_name
from torchguard.compiled.certify.algebra._field import PrimeField, UnsupportedError
from torchguard.compiled.certify.algebra._values import Value, integers

# Constant tensors with more elements are no thresholds.
_MAX_CONSTANTS = 8
_SHIFTS = (12, 6, -6, 3, -12, 20, -3, -20, -30)
# The largest number of points that lie between thresholds; all later ones are drawn in any mode.
MAX_BETWEEN = 8
_NARROW = (torch.int8, torch.uint8, torch.int16, torch.int32)
# The number of values that elements share in a point with ties.
_TIED_VALUES = 3
# A real number is a multiple of 1 / _UNIT, so that it is an element of the field as well.
_UNIT, _SCALE = 2**24, 2**4
_SMALL, _WIDE, _WIDEST = 8, 300, 2**40
# Numbers from here on, such as the largest of a dtype, are no thresholds.
_FAR = 1e30
# How much higher a peak is than the rest.
_PEAK = 2**8


# What to cover


@dataclass(frozen=True)
class Targets:
    """The numbers at which graphs change their behaviour.

    Attributes:
        thresholds: the numbers that values are compared with, sorted, with zero and both signs of each.
        equalities: those that values are tested to be equal to.
        integer_limits: where the narrow integers of the graphs overflow.
    """

    thresholds: tuple[float, ...] = (0.0,)
    equalities: tuple[float, ...] = ()
    integer_limits: tuple[int, ...] = ()

    @cached_property
    def intervals(self) -> tuple[tuple[float, float], ...]:
        """The intervals between thresholds, and one beyond each end."""
        end = 2 * self.thresholds[-1] + 1
        return tuple(itertools.pairwise((-end, *self.thresholds, end)))

    @cached_property
    def integer_thresholds(self) -> Tensor:
        thresholds = [int(number) for number in self.thresholds if abs(number) < _WIDEST]
        return torch.tensor([*thresholds, *self.integer_limits], dtype=torch.int64)


def find_targets(*graphs: GraphModule) -> Targets:
    """The targets of some graphs."""
    thresholds, equalities, limits = {0.0}, set(), set()
    for gm in graphs:
        for node in gm.graph.nodes:
            numbers = [n for n in _compared_numbers(gm, node) if abs(n) < _FAR]
            thresholds.update(sign * n for n in numbers for sign in (1.0, -1.0))
            if op_name(node) in ("eq", "ne"):
                equalities.update(numbers)
            value = node.meta.get("val")
            if isinstance(value, Tensor) and value.dtype in _NARROW:
                info = torch.iinfo(value.dtype)
                limits.update((info.min, info.max, 2 * info.max))
    return Targets(tuple(sorted(thresholds)), tuple(sorted(equalities)), tuple(sorted(limits)))


def _compared_numbers(gm: GraphModule, node: Node) -> Iterator[float]:
    if node.op == "get_attr":
        constant = attribute(gm, node.target)
        if isinstance(constant, Tensor) and constant.numel() <= _MAX_CONSTANTS and not constant.is_complex():
            yield from map(float, constant.flatten().tolist())
    if node.op != "call_function":
        return
    facts = facts_of(op_name(node))
    yield from facts.thresholds
    # A comparison of two tensors may have a filled one as an operand. That of x - 2 with 0 is one of x with 2.
    is_shift = op_name(node) in ("add", "sub", "rsub") and any(map(_changes_behaviour, node.users))
    if facts.compares or facts.has_fill_value or is_shift:
        arguments = (*node.args, *node.kwargs.values())
        yield from (float(a) for a in arguments if isinstance(a, int | float) and not isinstance(a, bool))


def _changes_behaviour(node: Node) -> bool:
    facts = facts_of(op_name(node))
    return node.op == "call_function" and bool(facts.compares or facts.nonsmooth)


def index_leaves(leaves: Sequence[Tensor], *graphs: GraphModule) -> frozenset[int]:
    """Which integer leaves index other tensors, directly or after integer arithmetic."""
    positions: set[int] = set()
    for gm in graphs:
        indices: set[Node] = set()
        placeholders = gm.graph.find_nodes(op="placeholder")
        for node in reversed(gm.graph.nodes):
            if node in indices or (node.op == "call_function" and facts_of(op_name(node)).indexes):
                indices.update(n for n in node.all_input_nodes if _may_index(n.meta.get("val")))
        positions.update(i for i, node in enumerate(placeholders[: len(leaves)]) if node in indices)
    return frozenset(positions)


def _may_index(value: object) -> bool:
    if not isinstance(value, Tensor):
        return isinstance(value, tuple | list)
    return is_integer(value) and not value.is_complex()


def is_integer(leaf: Tensor) -> bool:
    """Whether a leaf holds integers, and not booleans."""
    return not leaf.is_floating_point() and leaf.dtype != torch.bool


# How to draw


class Mode(StrEnum):
    """How the elements of one leaf are drawn."""

    FREE = "free"
    TIES = "ties"
    SCALED = "scaled"
    BETWEEN = "between thresholds"
    ONE_INTERVAL = "in one interval"
    PEAK = "with a peak"


# The modes of points that have no peak.
_SPREAD_MODES = tuple(mode for mode in Mode if mode is not Mode.PEAK)


@dataclass(frozen=True)
class Distribution:
    """The mode in which one leaf is drawn, its power of two, and its sign: 0 for both."""

    mode: Mode = Mode.FREE
    shift: int = 0
    sign: int = 0


# Points for a function that is not finite everywhere: positive, negative and mixed numbers of several magnitudes.
DOMAINS = tuple(Distribution(Mode.SCALED, shift, sign) for shift in (0, -3, -7, 2) for sign in (1, 0, -1))


@dataclass(frozen=True)
class IndexRange:
    """How integers that index other tensors are drawn.

    Attributes:
        leaves: the leaves that hold indices.
        bound: one more than the largest index.
        is_signed: whether negative indices are drawn as well.
        thresholds: which numbers that indices are compared with are among them: all, or those in range.
        distinct_dim: the dimension along which no two indices are equal.
    """

    leaves: frozenset[int]
    bound: int = 1
    is_signed: bool = False
    thresholds: Literal["", "all", "in range"] = ""
    distinct_dim: int | None = None


_BOUNDS = (64, 32, 16, 8, 5, 4, 3, 2, 1)
_WAYS = tuple(
    IndexRange(frozenset(), 1, is_signed, thresholds, distinct_dim)
    for thresholds in ("all", "in range", "")
    for is_signed, distinct_dim in ((True, None), (False, None), (False, -1), (False, 0))
)
# The number of consecutive ranges with the same bound.
RANGES_PER_BOUND = len(_WAYS)


def index_ranges(leaves: Sequence[Tensor], indices: frozenset[int], sizes: frozenset[int]) -> list[IndexRange]:
    """The ranges to try, the widest first. The last ones treat each integer leaf as an index.

    Args:
        sizes: those of the dims that are indexed.
    """
    bounds = sorted({*_BOUNDS, *sizes}, reverse=True)
    every = [replace(one, bound=bound) for bound in bounds for one in _WAYS]
    all_integers = frozenset(i for i, leaf in enumerate(leaves) if is_integer(leaf))
    ranges = [replace(one, leaves=indices) for one in (every if indices else every[:1])]
    if all_integers == indices:
        return ranges
    return [*ranges, *(replace(one, leaves=all_integers) for one in every)]


def indexed_sizes(*graphs: GraphModule) -> frozenset[int]:
    """The sizes of tensors that are indexed."""
    found: set[int] = set()
    for gm in graphs:
        for node in gm.graph.nodes:
            if node.op == "call_function" and facts_of(op_name(node)).indexes:
                values = [n.meta.get("val") for n in node.all_input_nodes]
                found.update(size for value in values if isinstance(value, Tensor) for size in value.shape if size)
    return frozenset(found)


@dataclass(frozen=True)
class Sampler:
    """Draws one point: the value of each leaf, and further elements, in a field.

    Attributes:
        index: 0 for a free point; from 1 on, points that cover the targets.
        common: how all leaves are drawn, whatever the index.
    """

    field: PrimeField
    index: int = 0
    targets: Targets = Targets()
    index_range: IndexRange = IndexRange(frozenset())
    common: Distribution | None = None

    def distribution(self, name: str) -> Distribution:
        """How the leaf of a name is drawn."""
        if self.common is not None and name.startswith("leaf"):
            return self.common
        if self.index <= MAX_BETWEEN:
            return Distribution(Mode.BETWEEN if self.index else Mode.FREE)
        if self.index % 2 == 0 and name.startswith("leaf"):
            return Distribution(Mode.PEAK, (self.index - MAX_BETWEEN) // 2 - 1)
        # In every other of the remaining points all leaves have the same distribution, each mode in turn.
        is_common = self.index % 4 == 3
        rng = random.Random(f"{self.index} {'' if is_common else name}")
        if not is_common:
            return Distribution(rng.choice(_SPREAD_MODES), rng.choice(_SHIFTS), rng.choice((-1, 0, 1)))
        turn, mode = divmod(self.index // 4, len(_SPREAD_MODES))
        return Distribution(_SPREAD_MODES[mode], _SHIFTS[turn // 2 % len(_SHIFTS)], (-1, 1)[turn % 2])

    def point(self, leaves: Sequence[Tensor]) -> list[Value]:
        """A value for each leaf. In every fourth field many elements are equal, for the sake of ties."""
        return [self._leaf(i, leaf) for i, leaf in enumerate(leaves)]

    def _leaf(self, i: int, leaf: Tensor) -> Value:
        if leaf.is_complex():
            raise UnsupportedError("complex numbers")
        name = f"leaf {i}"
        if leaf.is_floating_point():
            return self.elements(name, leaf.shape, has_ties=self.field.key % 4 == 3)
        raw, how = self.field.random(name, leaf.shape), self.distribution(name)
        if leaf.dtype == torch.bool:
            return integers(self.field, _booleans(raw, how))
        drawn = self._indices(raw) if i in self.index_range.leaves else self._integers(raw, how)
        return integers(self.field, drawn.to(leaf.dtype).to(torch.int64))

    def _integers(self, raw: Tensor, how: Distribution) -> Tensor:
        """Integers of either sign, small and large, and near the thresholds."""
        thresholds, kind, rest = self.targets.integer_thresholds, raw % 4, raw // 4
        if how.mode is Mode.ONE_INTERVAL:
            return thresholds[how.shift % thresholds.numel()] + how.sign + torch.zeros_like(raw)
        if how.mode is Mode.SCALED:
            size = rest % (2 ** abs(how.shift))
            return size * how.sign if how.sign else torch.where(kind < 2, size, -size)
        near = thresholds[rest % thresholds.numel()] + rest // thresholds.numel() % 3 - 1
        anywhere = torch.where(kind == 2, rest % (2 * _SMALL) - _SMALL, rest % (2 * _WIDE) - _WIDE)
        return torch.where(kind < 2, near, anywhere)

    def _indices(self, raw: Tensor) -> Tensor:
        how, thresholds = self.index_range, self.targets.integer_thresholds
        if how.distinct_dim is not None and raw.dim():
            order = raw.argsort(how.distinct_dim)
            return (order + raw.flatten()[0]) % max(how.bound, raw.shape[how.distinct_dim])
        indices = raw // 4 % how.bound
        if how.is_signed:
            indices = torch.where(raw // 2 % 2 == 0, indices, -1 - indices)
        if how.thresholds == "in range":
            lowest = -how.bound if how.is_signed else 0
            thresholds = thresholds[(thresholds >= lowest) & (thresholds < how.bound)]
        if not how.thresholds or not thresholds.numel():
            return indices
        # Only some are thresholds: a loss whose targets are all ignored divides by zero.
        chosen = thresholds[raw // 16 % thresholds.numel()]
        return torch.where(raw // 8 % 3 == 0, chosen, indices)

    def elements(self, name: str, shape: Sequence[int], *, has_ties: bool = False) -> Value:
        """Random elements and the real numbers they stand for: freely drawn, most within 4 of zero, some within 64."""
        f, how = self.field, self.distribution(name)
        raw = f.random(name, tuple(shape)) - f.prime // 2
        if how.mode in (Mode.BETWEEN, Mode.ONE_INTERVAL):
            return self._elements_between(raw + f.prime // 2, how)
        if has_ties or how.mode is Mode.TIES:
            common = f.random("common", (_TIED_VALUES,)) - f.prime // 2
            is_one_value = how.mode is Mode.TIES and not how.sign
            tied = torch.where(raw % 2 == 0, common[raw // 2 % _TIED_VALUES], raw)
            raw = common[0].expand(raw.shape) if is_one_value else tied
        multiple, unit = torch.where(raw % 8 < 6, raw // _SCALE | 1, raw), Fraction(1, _UNIT)
        if how.mode is Mode.SCALED:
            multiple, unit = multiple.abs() * how.sign if how.sign else multiple, unit * Fraction(2) ** how.shift
        if how.mode is Mode.PEAK:
            multiple = multiple + _peak(tuple(shape), how.shift) * _UNIT
        element = f.mul(f.reduced(multiple), f.constant(unit))
        return Value(f, element, real=multiple.to(torch.float64) * float(unit))

    def _elements_between(self, raw: Tensor, how: Distribution) -> Value:
        """Elements inside the intervals, in each one or all in the same, and on the numbers tested for equality."""
        f, targets = self.field, self.targets
        starts = [*(low for low, _ in targets.intervals), *targets.equalities]
        widths = [Fraction(high) - Fraction(low) for low, high in targets.intervals]
        widths += [Fraction(0)] * len(targets.equalities)
        which = torch.full_like(raw, how.shift) if how.mode is Mode.ONE_INTERVAL else raw // 2**8
        which = which % len(starts)
        inside = raw // 2 % _UNIT | 1
        low, width = (
            torch.tensor([f.number(Fraction(n)) for n in numbers], dtype=torch.int64)[which]
            for numbers in (starts, widths)
        )
        at = f.mul(inside, f.constant(Fraction(1, _UNIT)))
        real_low, real_width = (
            torch.tensor([float(n) for n in numbers], dtype=torch.float64)[which] for numbers in (starts, widths)
        )
        real = real_low + real_width * (inside.to(torch.float64) / _UNIT)
        return Value(f, f.add(low, f.mul(width, at)), real=real)


def _peak(shape: tuple[int, ...], number: int) -> Tensor:
    """The height of a peak over one slice of a tensor. Each number up has its own dim, position and sign."""
    height, dims = torch.zeros(shape, dtype=torch.int64), [d for d, size in enumerate(shape) if size > 1]
    if not dims:
        return height + (_PEAK if number % 2 else -_PEAK)
    number, turn = divmod(number, 2 * len(dims))
    dim, sign = dims[turn // 2], -1 if turn % 2 else 1
    height.select(dim, number % shape[dim]).fill_(sign * _PEAK)
    return height


def _booleans(raw: Tensor, how: Distribution) -> Tensor:
    if how.mode in (Mode.SCALED, Mode.ONE_INTERVAL) and how.sign:
        return torch.full_like(raw, how.sign > 0, dtype=torch.bool)
    return raw % 2 == 1
