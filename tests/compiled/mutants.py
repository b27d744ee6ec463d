"""Small changes to a derivative graph, each of a kind that a wrong rule or a wrong pass would make."""

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchguard.compiled._nodes import op_name

aten = torch.ops.aten
Mutation = Callable[[GraphModule, Node, random.Random], bool]


@dataclass(frozen=True)
class Mutant:
    kind: str
    node: str
    gm: GraphModule


def _value(node: object) -> Tensor | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


def _is_float(node: object) -> bool:
    value = _value(node)
    return value is not None and value.is_floating_point()


def _scaled(factor: float) -> Mutation:
    def mutate(gm: GraphModule, node: Node, rng: random.Random) -> bool:
        if not _is_float(node):
            return False
        with gm.graph.inserting_after(node):
            new = gm.graph.call_function(aten.mul.Tensor, (node, factor))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        return True

    return mutate


def _wrong_operand(gm: GraphModule, node: Node, rng: random.Random) -> bool:
    """Another tensor of the same type where an operand stands."""
    positions = [i for i, a in enumerate(node.args) if _is_float(a)]
    if not positions or op_name(node) in ("alias", "clone", "detach"):
        return False
    position = rng.choice(positions)
    old = node.args[position]
    earlier = []
    for other in gm.graph.nodes:
        if other is node:
            break
        value = _value(other)
        if (
            other is not old
            and _is_float(other)
            and (value.shape, value.dtype) == (_value(old).shape, _value(old).dtype)
        ):
            earlier.append(other)
    if not earlier:
        return False
    node.args = tuple(rng.choice(earlier) if i == position else a for i, a in enumerate(node.args))
    return True


def _dropped_term(gm: GraphModule, node: Node, rng: random.Random) -> bool:
    if op_name(node) not in ("add", "sub") or not all(_is_float(a) for a in node.args[:2]):
        return False
    if _value(node.args[0]).shape != _value(node).shape:
        return False
    node.replace_all_uses_with(node.args[0])
    return True


def _swapped(gm: GraphModule, node: Node, rng: random.Random) -> bool:
    if op_name(node) not in ("sub", "div", "mm", "bmm", "where") or len(node.args) < 2:
        return False
    first = 1 if op_name(node) == "where" else 0
    a, b = node.args[first : first + 2]
    if not (_is_float(a) and _is_float(b)) or a is b:
        return False
    node.args = (*node.args[:first], b, a, *node.args[first + 2 :])
    return True


def _other_dim(gm: GraphModule, node: Node, rng: random.Random) -> bool:
    """A dimension off by one, or a transposition left out."""
    value = _value(node.args[0]) if node.args else None
    if value is None or value.dim() < 2:
        return False
    if op_name(node) in ("t", "transpose"):
        if value.shape[-1] != value.shape[-2]:
            return False
        node.replace_all_uses_with(node.args[0])
        return True
    if op_name(node) not in ("sum", "mean", "_softmax", "_softmax_backward_data", "cumsum", "flip", "amax"):
        return False
    position = 2 if op_name(node).endswith("_backward_data") else 1
    if len(node.args) <= position:
        return False
    dims = node.args[position]
    if isinstance(dims, list | tuple) and len(set(dims)) == value.dim():
        return False
    moved = [(d + 1) % value.dim() for d in dims] if isinstance(dims, list | tuple) else (dims + 1) % value.dim()
    node.args = (*node.args[:position], moved, *node.args[position + 1 :])
    return True


def _other_constant(gm: GraphModule, node: Node, rng: random.Random) -> bool:
    """A number a little off, where a number is an operand."""
    if op_name(node) not in ("add", "sub", "rsub", "mul", "div", "pow"):
        return False
    positions = [i for i, a in enumerate(node.args) if isinstance(a, int | float) and not isinstance(a, bool)]
    if not positions or not _is_float(node):
        return False
    position = rng.choice(positions)
    number = node.args[position]
    changed = number + 1 if op_name(node) == "pow" else number * 1.001 + (number == 0)
    node.args = tuple(changed if i == position else a for i, a in enumerate(node.args))
    return True


def _zeroed_branch(gm: GraphModule, node: Node, rng: random.Random) -> bool:
    if op_name(node) != "where":
        return False
    positions = [
        i for i in (1, 2) if _is_float(node.args[i]) and op_name(node.args[i]) not in ("scalar_tensor", "zeros")
    ]
    if not positions:
        return False
    position = rng.choice(positions)
    with gm.graph.inserting_before(node):
        zero = gm.graph.call_function(aten.zeros_like.default, (node.args[position],))
    zero.meta = dict(node.args[position].meta)
    node.args = tuple(zero if i == position else a for i, a in enumerate(node.args))
    return True


def _detached(gm: GraphModule, node: Node, rng: random.Random) -> bool:
    """The derivative along one operand lost: as by a misplaced `detach`."""
    positions = [i for i, a in enumerate(node.args) if _is_float(a)]
    if op_name(node) not in ("add", "mul", "mm", "bmm") or not positions:
        return False
    position = rng.choice(positions)
    with gm.graph.inserting_before(node):
        zero = gm.graph.call_function(aten.zeros_like.default, (node.args[position],))
    zero.meta = dict(node.args[position].meta)
    node.args = tuple(zero if i == position else a for i, a in enumerate(node.args))
    return True


MUTATIONS: dict[str, Mutation] = {
    "sign": _scaled(-1.0),
    "factor 1+1e-7": _scaled(1 + 1e-7),
    "factor 1+1e-3": _scaled(1 + 1e-3),
    "wrong operand": _wrong_operand,
    "dropped term": _dropped_term,
    "swapped operands": _swapped,
    "other dim": _other_dim,
    "other constant": _other_constant,
    "zeroed branch": _zeroed_branch,
    "detached": _detached,
}


# What a kind can be done to at all; the others take any node.
_SUBJECTS = {
    "dropped term": {"add", "sub"},
    "swapped operands": {"sub", "div", "mm", "bmm", "where"},
    "other dim": {"t", "transpose", "sum", "mean", "_softmax", "_softmax_backward_data", "cumsum", "flip", "amax"},
    "other constant": {"add", "sub", "rsub", "mul", "div", "pow"},
    "zeroed branch": {"where"},
    "detached": {"add", "mul", "mm", "bmm"},
}


def mutants_of(gm: GraphModule, name: str, each: int = 1) -> Iterator[Mutant]:
    """Up to `each` mutants of every kind, the same for the same name."""
    nodes = list(gm.graph.nodes)
    count = len(nodes)
    for kind, mutate in MUTATIONS.items():
        rng = random.Random(f"{name} {kind}")
        made = 0
        for position in rng.sample(range(count), count):
            if made == each:
                break
            if nodes[position].op != "call_function" or op_name(nodes[position]) not in _SUBJECTS.get(
                kind, {op_name(nodes[position])}
            ):
                continue
            changed = GraphModule(gm, copy.deepcopy(gm.graph))
            node = list(changed.graph.nodes)[position]
            if mutate(changed, node, rng):
                changed.graph.eliminate_dead_code()
                changed.recompile()
                made += 1
                yield Mutant(kind, node.name, changed)
