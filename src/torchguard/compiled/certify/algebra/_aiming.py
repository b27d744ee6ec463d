"""Where to look: which leaves are places in other tensors, what things are compared with, how a point is drawn."""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchguard.compiled._nodes import attribute, op_name

# Numbers that these operators compare with where the graph does not say so.
_OWN_MARKS: dict[str, tuple[float, ...]] = {
    "hardswish": (3,),
    "hardswish_backward": (3,),
    "hardsigmoid": (3,),
    "hardsigmoid_backward": (3,),
    "hardtanh": (1,),
    "softplus": (20,),
    "softshrink": (0.5,),
    "hardshrink": (0.5,),
    "huber_loss": (1,),
    "smooth_l1_loss": (1,),
}
_COMPARING = {"gt", "lt", "ge", "le", "eq", "ne", "clamp", "clamp_min", "clamp_max", "threshold", "threshold_backward"}
_COMPARING |= {"softplus_backward", "hardtanh_backward", "softshrink_backward", "hardshrink_backward", *_OWN_MARKS}
_COMPARING |= {"huber_loss_backward", "smooth_l1_loss_backward", "nll_loss_forward", "nll_loss2d_forward"}
# What a comparison of two tensors may have for one of them.
_NUMBERS = {"full", "full_like", "new_full", "scalar_tensor", "fill"}
_MAX_CONSTANTS = 8
_INDEXING = {"index", "_unsafe_index", "gather", "embedding", "embedding_dense_backward", "index_select", "scatter"}
_INDEXING |= {"scatter_add", "index_add", "index_put", "_unsafe_index_put", "nll_loss_forward", "nll_loss_backward"}
_INDEXING |= {"nll_loss2d_forward", "nll_loss2d_backward"}
_SHIFTS = (-30, -20, -12, -6, -3, 3, 6, 12, 20)
# So many points are between the numbers that things are compared with; all further ones are drawn in any way.
BETWEEN = 8
# None of the first points has all zeros in a leaf.
_NONZERO = 60
_NARROW = (torch.int8, torch.uint8, torch.int16, torch.int32)


class Mode(StrEnum):
    """How the elements of one leaf are drawn."""

    FREE = "free"
    TIES = "ties"
    SCALED = "scaled"
    BETWEEN = "between"
    IN_ONE = "in one"
    ZERO = "zero"


@dataclass(frozen=True)
class Drawing:
    """How the elements of one leaf are drawn, by which power of two and to which side of zero."""

    mode: Mode = Mode.FREE
    shift: int = 0
    sign: int = 0


@dataclass(frozen=True)
class Aim:
    """How a point is drawn: the first freely, the others with an eye on the marks, which things are compared with.

    Attributes:
        marks: in order, zero and both signs of each among them.
        equals: the marks that something is tested to be equal to.
        wraps: where the integers of a graph wrap around.
    """

    number: int = 0
    marks: tuple[float, ...] = (0.0,)
    equals: tuple[float, ...] = ()
    wraps: tuple[int, ...] = ()

    def of(self, name: str) -> Drawing:
        """How to draw the leaf of a name."""
        if self.number <= BETWEEN:
            return Drawing(Mode.BETWEEN if self.number else Mode.FREE)
        # Every other point has all its leaves drawn in one way.
        rng = random.Random(f"{self.number} {name if self.number % 2 else ''}")
        # A wrong derivative may be zero at zero, as the right one is; along zero every derivative is.
        modes = tuple(Mode)[: None if self.number > _NONZERO else -1]
        found = Drawing(rng.choice(modes), rng.choice(_SHIFTS), rng.choice((-1, 0, 1)))
        return Drawing() if found.mode is Mode.ZERO and not name.startswith("leaf") else found

    @cached_property
    def gaps(self) -> tuple[tuple[float, float], ...]:
        """The intervals that the marks part the line into, as far as they are looked into."""
        end = 2 * self.marks[-1] + 1
        ends = (-end, *self.marks, end)
        return tuple(itertools.pairwise(ends))


def aim_at(*graphs: GraphModule) -> Aim:
    """An aim with the marks of some graphs."""
    found, equals, wraps = {0.0}, set(), set()
    for gm in graphs:
        for node in gm.graph.nodes:
            numbers = [n for n in _numbers(gm, node) if math.isfinite(n)]
            found.update(side * n for n in numbers for side in (1.0, -1.0))
            if op_name(node) in ("eq", "ne"):
                equals.update(numbers)
            value = node.meta.get("val")
            if isinstance(value, Tensor) and value.dtype in _NARROW:
                limits = torch.iinfo(value.dtype)
                wraps.update((limits.min, limits.max, 2 * limits.max))
    return Aim(0, tuple(sorted(found)), tuple(sorted(equals)), tuple(sorted(wraps)))


def _numbers(gm: GraphModule, node: Node) -> Iterator[float]:
    if node.op == "get_attr":
        constant = attribute(gm, node.target)
        if isinstance(constant, Tensor) and constant.numel() <= _MAX_CONSTANTS and not constant.is_complex():
            yield from map(float, constant.flatten().tolist())
    if node.op != "call_function":
        return
    name = op_name(node)
    yield from _OWN_MARKS.get(name, ())
    if name in _COMPARING or name in _NUMBERS:
        given = (*node.args, *node.kwargs.values())
        yield from (float(a) for a in given if isinstance(a, int | float) and not isinstance(a, bool))


def places_among(leaves: Sequence[Tensor], *graphs: GraphModule) -> frozenset[int]:
    """Which integer leaves tell places in other tensors: they have to stay in range."""
    found: set[int] = set()
    for gm in graphs:
        wanted: set[Node] = set()
        taken = gm.graph.find_nodes(op="placeholder")
        for node in reversed(gm.graph.nodes):
            if node in wanted or (node.op == "call_function" and op_name(node) in _INDEXING):
                wanted.update(n for n in node.all_input_nodes if _is_integer(n.meta.get("val")))
        found.update(i for i, node in enumerate(taken[: len(leaves)]) if node in wanted)
    return frozenset(found)


def _is_integer(value: object) -> bool:
    if not isinstance(value, Tensor):
        return isinstance(value, tuple | list)
    return not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool


def deciding_nodes(gm: GraphModule, making: frozenset[str]) -> frozenset[Node]:
    """The nodes whose elements depend on those of a leaf; `making` names operators that read shapes only.

    Whether a number is infinite or none depends on nothing: all numbers of a point are finite.
    """
    found: set[Node] = set()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            found.add(node)
        elif node.op == "call_function" and not _asks_if_finite(node):
            read = [n for n in node.all_input_nodes if not (op_name(node) in making and n is node.args[0])]
            if any(n in found for n in read):
                found.add(node)
    return frozenset(found)


def _asks_if_finite(node: Node) -> bool:
    if op_name(node) not in ("eq", "ne"):
        return False
    a, b = node.args
    if isinstance(b, Node) and op_name(b) in _NUMBERS:
        return any(isinstance(n, float) and not math.isfinite(n) for n in b.args)
    return a is b or (isinstance(b, float) and not math.isfinite(b))
