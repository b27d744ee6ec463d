"""Random points to evaluate graphs at, and the signatures that say what a point is made of."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor
from torch.fx import GraphModule

from torchguard.compiled.certify.algebra._aiming import Aim, Drawing, Mode
from torchguard.compiled.certify.algebra._field import PRIMES, Field, Journal, UnsupportedError
from torchguard.compiled.certify.algebra._values import Value, exact
from torchguard.exceptions import GraphMismatchError

_COMMON = 3
# A real number is a whole number of these, so that it is an element as well.
_UNIT, _SCALE = 2**24, 2**4
_SMALL, _WIDE, _WIDEST = 8, 300, 2**40


@dataclass(frozen=True)
class Places:
    """How integers that are places in other tensors are drawn: they have to fit tensors of unknown size.

    Attributes:
        leaves: which leaves are such places; the other integers may be anything.
        distinct: the dimension along which no two are equal.
        has_marks: whether numbers that places are compared with are among them.
    """

    leaves: frozenset[int]
    bound: int = 1
    is_signed: bool = False
    has_marks: bool = False
    distinct: int | None = None


# Tried in this order, and so many have the same range.
PER_RANGE = 8
_WAYS = tuple(
    Places(frozenset(), bound, is_signed, has_marks, distinct)
    for bound in (64, 32, 16, 8, 5, 4, 3, 2, 1)
    for has_marks in (True, False)
    for is_signed, distinct in ((True, None), (False, None), (False, -1), (False, 0))
)


def placeholders(gm: GraphModule, name: str) -> list[Tensor]:
    """What a graph takes, as the fake tensors its placeholders are recorded with."""
    nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
    without = [node.name for node in nodes if not isinstance(node.meta.get("val"), Tensor)]
    if without:
        raise GraphMismatchError(
            f"{name}: the placeholders {', '.join(without)} have no meta['val']. Trace it with make_fx, or run "
            "torch.fx.passes.fake_tensor_prop.FakeTensorProp over it."
        )
    return [node.meta["val"] for node in nodes]


def fields(seed: int, journal: Journal) -> Iterator[Field]:
    """A field for each trial: another prime and other unknown functions."""
    trial = 0
    while True:
        yield Field(PRIMES[(seed + trial) % len(PRIMES)], seed * 1_000_004 + trial, journal)
        trial += 1


def point(field: Field, leaves: Sequence[Tensor], places: Places) -> list[Value]:
    """A random value for each leaf.

    In every fourth field many elements are equal, so that what happens at ties is seen.
    """
    return [_leaf(field, f"leaf {i}", leaf, places if i in places.leaves else None) for i, leaf in enumerate(leaves)]


def _leaf(field: Field, name: str, leaf: Tensor, places: Places | None) -> Value:
    if leaf.is_complex():
        raise UnsupportedError("complex numbers")
    if leaf.is_floating_point():
        return drawn(field, name, leaf.shape, has_ties=field.key % 4 == 3)
    whole, how = field.random(name, leaf.shape), field.aim.of(name)
    if leaf.dtype == torch.bool:
        return exact(field, _booleans(whole, how))
    drawn_ = _integers(field.aim, whole, how) if places is None else _places(field.aim, whole, places)
    return exact(field, drawn_.to(leaf.dtype).to(torch.int64))


def _booleans(whole: Tensor, how: Drawing) -> Tensor:
    if how.mode in (Mode.SCALED, Mode.IN_ONE) and how.sign:
        return torch.full_like(whole, how.sign > 0, dtype=torch.bool)
    return torch.zeros_like(whole, dtype=torch.bool) if how.mode is Mode.ZERO else whole % 2 == 1


def _whole_marks(aim: Aim) -> Tensor:
    marks = [int(m) for m in aim.marks if abs(m) < _WIDEST]
    return torch.tensor([*marks, *aim.wraps], dtype=torch.int64)


def _integers(aim: Aim, whole: Tensor, how: Drawing) -> Tensor:
    """Integers of either sign, small ones and large ones, and close to what they are compared with."""
    marks, kind, rest = _whole_marks(aim), whole % 4, whole // 4
    if how.mode is Mode.ZERO:
        return torch.zeros_like(whole)
    if how.mode is Mode.IN_ONE:
        return marks[how.shift % marks.numel()] + how.sign + torch.zeros_like(whole)
    if how.mode is Mode.SCALED:
        size = rest % (2 ** abs(how.shift))
        return size * how.sign if how.sign else torch.where(kind < 2, size, -size)
    near = marks[rest % marks.numel()] + rest // marks.numel() % 3 - 1
    anywhere = torch.where(kind == 2, rest % (2 * _SMALL) - _SMALL, rest % (2 * _WIDE) - _WIDE)
    return torch.where(kind < 2, near, anywhere)


def _places(aim: Aim, whole: Tensor, places: Places) -> Tensor:
    if places.distinct is not None and whole.dim():
        rows = whole.argsort(places.distinct)
        return (rows + whole.flatten()[0]) % max(places.bound, whole.shape[places.distinct])
    drawn_ = whole // 4 % places.bound
    if places.is_signed:
        drawn_ = torch.where(whole // 2 % 2 == 0, drawn_, -1 - drawn_)
    # Not all of them: a loss of which every target is ignored divides by zero.
    marks = _whole_marks(aim)
    chosen = marks[whole // 16 % marks.numel()]
    return torch.where(whole // 8 % 3 == 0, chosen, drawn_) if places.has_marks else drawn_


def drawn(field: Field, name: str, shape: Sequence[int], *, has_ties: bool = False) -> Value:
    """Random elements that stand for real numbers: most up to 4 either way, some up to 64, if not aimed elsewhere."""
    how, whole = field.aim.of(name), field.random(name, tuple(shape)) - field.prime // 2
    if how.mode in (Mode.BETWEEN, Mode.IN_ONE):
        return _between(field, whole + field.prime // 2, how)
    if has_ties or how.mode is Mode.TIES:
        common = field.random("common", (_COMMON,)) - field.prime // 2
        is_one = how.mode is Mode.TIES and not how.sign
        some = torch.where(whole % 2 == 0, common[whole // 2 % _COMMON], whole)
        whole = common[0].expand(whole.shape) if is_one else some
    near, unit = torch.where(whole % 8 < 6, whole // _SCALE | 1, whole), Fraction(1, _UNIT)
    if how.mode is Mode.ZERO:
        near = torch.zeros_like(near)
    if how.mode is Mode.SCALED:
        near, unit = near.abs() * how.sign if how.sign else near, unit * Fraction(2) ** how.shift
    element = field.mul(field.reduced(near), field.constant(unit))
    return Value(field, element, real=near.to(torch.float64) * float(unit))


def _between(field: Field, whole: Tensor, how: Drawing) -> Value:
    """Elements in the gaps between marks, in each one or all in the same, and on the marks that something may equal."""
    aim = field.aim
    starts = [*(low for low, _ in aim.gaps), *aim.equals]
    widths = [*(Fraction(high) - Fraction(low) for low, high in aim.gaps), *[Fraction(0)] * len(aim.equals)]
    which = torch.full_like(whole, how.shift) if how.mode is Mode.IN_ONE else whole // 2**8
    which = which % len(starts)
    inside = whole // 2 % _UNIT | 1
    low, width = (
        torch.tensor([field.number(Fraction(n)) for n in numbers], dtype=torch.int64)[which]
        for numbers in (starts, widths)
    )
    at = field.mul(inside, field.constant(Fraction(1, _UNIT)))
    real_low, real_width = (
        torch.tensor([float(n) for n in numbers], dtype=torch.float64)[which] for numbers in (starts, widths)
    )
    real = real_low + real_width * (inside.to(torch.float64) / _UNIT)
    return Value(field, field.add(low, field.mul(width, at)), real=real)


def ways_to_draw(leaves: Sequence[Tensor], places: frozenset[int]) -> list[Places]:
    """How to draw integers, the widest range first, if some of them are places. Last, each integer is taken for one."""
    integers = frozenset(
        i for i, leaf in enumerate(leaves) if not leaf.is_floating_point() and leaf.dtype != torch.bool
    )
    ways = [replace(way, leaves=places) for way in (_WAYS if places else _WAYS[:1])]
    return ways if integers == places else [*ways, *(replace(way, leaves=integers) for way in _WAYS)]
