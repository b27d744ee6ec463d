"""Random points to evaluate graphs at, and the signatures that say what a point is made of."""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from torchguard.compiled.algebra.field import PRIMES, Field, Journal
from torchguard.compiled.algebra.unsupported import UnfitError, UnsupportedError
from torchguard.compiled.algebra.values import Value, exact
from torchguard.exceptions import GraphMismatchError

# Integers may be places in a tensor of unknown size: the widest range that fits is used.
_RANGES = (64, 32, 16, 8, 4, 2, 1)

_COMMON = 3
# A real number is a whole number of these, so that it is an element as well.
_UNIT, _SCALE = 2**24, 2**4

T = TypeVar("T")


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


def fields(seed: int, count: int, journal: Journal) -> Iterator[Field]:
    """A field for each trial: another prime and other unknown functions."""
    for trial in range(count):
        yield Field(PRIMES[(seed + trial) % len(PRIMES)], seed * 1_000_004 + trial, journal)


def point(field: Field, leaves: Sequence[Tensor], integers: int) -> list[Value]:
    """A random value for each leaf; integers stay under a bound.

    In every fourth field many elements are equal, so that what happens at ties is seen.
    """
    return [_leaf(field, f"leaf {i}", leaf, integers) for i, leaf in enumerate(leaves)]


def _leaf(field: Field, name: str, leaf: Tensor, integers: int) -> Value:
    if leaf.is_complex():
        raise UnsupportedError("complex numbers")
    if leaf.is_floating_point():
        return drawn(field, name, leaf.shape, has_ties=field.key % 4 == 3)
    whole = field.random(name, leaf.shape)
    return exact(field, whole % 2 == 1 if leaf.dtype == torch.bool else whole % integers)


def drawn(field: Field, name: str, shape: Sequence[int], *, has_ties: bool = False) -> Value:
    """Random elements that stand for real numbers: most up to 4 either way, some up to 64."""
    whole = field.random(name, tuple(shape)) - field.prime // 2
    if has_ties:
        common = field.random("common", (_COMMON,)) - field.prime // 2
        whole = torch.where(whole % 2 == 0, common[whole // 2 % _COMMON], whole)
    near = torch.where(whole % 8 < 6, whole // _SCALE | 1, whole)
    unit = field.constant(Fraction(1, _UNIT))
    return Value(field, field.mul(field.reduced(near), unit), real=near.to(torch.float64) / _UNIT)


def with_widest_integers(leaves: Sequence[Tensor], run: Callable[[int], T]) -> T:
    """Run something with the widest range of integer inputs it can be run with."""
    if all(leaf.is_floating_point() or leaf.dtype == torch.bool for leaf in leaves):
        return run(1)
    for bound in _RANGES[:-1]:
        try:
            return run(bound)
        except UnfitError:
            continue
    return run(_RANGES[-1])
