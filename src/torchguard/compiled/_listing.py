"""Graphs as text: one operation a line, with its type and where it comes from; and where they are not smooth."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchguard.compiled._leaves import short_name
from torchguard.compiled._nodes import full_name, op_name


@dataclass(frozen=True)
class Line:
    """One operation of a graph: `name = op(arguments) : type`, and the line of the source it comes from."""

    name: str
    op: str
    arguments: str
    type: str
    source: str

    def __str__(self) -> str:
        return f"%{self.name} = {self.op}({self.arguments}) : {self.type}"


@dataclass(frozen=True)
class Kink:
    """An operation that is not smooth everywhere, and the derivative that is returned where it is not."""

    op: str
    convention: str
    source: str

    def __str__(self) -> str:
        return f"{self.op}: {self.convention}" + (f" ({self.source})" if self.source else "")


_STEPS = "0 everywhere, also at the steps"
_MEET = "smooth, and the second derivative jumps where the parts meet"
_TIES = "at ties the derivative is shared evenly"
_FIRST = "at ties one of the largest is taken, by index"
# By operation, without overload, as torch's rules have it. The tests hold most of them to what is returned.
CONVENTIONS = {
    "relu": "relu'(0) = 0",
    "abs": "abs'(0) = 0",
    "leaky_relu": "leaky_relu'(0) = negative_slope",
    "threshold": "0 at the threshold",
    "hardtanh": "0 at both ends",
    "hardsigmoid": "0 at both ends",
    "hardshrink": "0 at both ends",
    "softshrink": "0 at both ends",
    "hardswish": "0 at the lower end, 1 at the upper",
    "elu": "elu'(0) = the slope from the left",
    "huber_loss": _MEET,
    "smooth_l1_loss": _MEET,
    "frac": "1, also at the steps",
    "clamp": "1 at both ends",
    "clamp_min": "1 at the end",
    "clamp_max": "1 at the end",
    "sign": _STEPS,
    "sgn": _STEPS,
    "floor": _STEPS,
    "ceil": _STEPS,
    "round": _STEPS,
    "trunc": _STEPS,
    "heaviside": _STEPS,
    "remainder": "1 in the first argument, also at the steps",
    "fmod": "1 in the first argument, also at the steps",
    "amax": _TIES,
    "amin": _TIES,
    "maximum": _TIES,
    "minimum": _TIES,
    "max": "over a dim: " + _FIRST + "; over all: " + _TIES,
    "min": "over a dim: " + _FIRST + "; over all: " + _TIES,
    "max_pool2d_with_indices": _FIRST,
    "max_pool3d_with_indices": _FIRST,
    "adaptive_max_pool2d": _FIRST,
    "sort": _FIRST,
    "topk": _FIRST,
    "kthvalue": _FIRST,
    "median": _FIRST,
    "cummax": _FIRST,
    "cummin": _FIRST,
    "linalg_vector_norm": "0 at the zero vector",
    "sqrt": "inf at 0",
    "prelu": "prelu'(0) = weight",
    "_prelu_kernel": "prelu'(0) = weight",
    "copysign": "0 at 0",
}
# What is not smooth only if it depends on a leaf that holds floating point numbers: masks may be given.
SWITCHES = {
    **dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne", "signbit", "argmax", "argmin", "argsort"), _STEPS),
    **dict.fromkeys(("bucketize", "searchsorted", "_to_copy"), _STEPS),
    "where": "the derivative of the branch that is taken",
    "masked_fill": "the derivative of what is taken",
}
_MASK = {"where": 0, "masked_fill": 1}  # which argument it is


def type_text(value: Any) -> str:
    """`f32[4, 8]`, or what stands in a tuple."""
    if isinstance(value, Tensor):
        return f"{short_name(value.dtype)}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(type_text, value))})"
    return type(value).__name__


def lines_of(graph: GraphModule) -> tuple[Line, ...]:
    """The operations of a graph in order."""
    return tuple(_line(node) for node in graph.graph.nodes if node.op == "call_function")


def _line(node: Node) -> Line:
    named = [f"{key}={_text(value)}" for key, value in node.kwargs.items()]
    arguments = ", ".join([*map(_text, node.args), *named])
    return Line(node.name, full_name(node), arguments, type_text(node.meta["val"]), node.stack_trace or "")


def _text(value: Any) -> str:
    if isinstance(value, Node):
        return f"%{value.name}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_text, value))}]"
    return short_name(value) if isinstance(value, torch.dtype) else str(value)


def listing_of(graph: GraphModule, name: str) -> str:
    """A graph as text."""
    nodes = list(graph.graph.nodes)
    leaves = [f"%{node.name}: {type_text(node.meta['val'])}" for node in nodes if node.op == "placeholder"]
    lines = [(str(line), line.source) for line in lines_of(graph)]
    width = min(max((len(text) for text, _ in lines), default=0), 88)
    body = [f"  {text:<{width}}  # {source}" if source else f"  {text}" for text, source in lines]
    results = ", ".join(f"%{node.name}: {type_text(node.meta['val'])}" for node in nodes[-1].args[0])
    return "\n".join([f"{name}({', '.join(leaves)}):", *body, f"  return {results}"])


def kinks_of(graph: GraphModule) -> tuple[Kink, ...]:
    """The operations of a graph whose derivative is a convention somewhere, once for each line of the source."""
    found: dict[tuple[str, str | None], Kink] = {}
    moving: set[Node] = set()
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        is_leaf = node.op == "placeholder" and value.is_floating_point()
        if is_leaf or any(source in moving for source in node.all_input_nodes):
            moving.add(node)
        convention = _convention(node, moving) if node.op == "call_function" else None
        if convention is not None:
            name = op_name(node)
            found[name, node.stack_trace] = Kink(f"aten.{name}", convention, node.stack_trace or "")
    return tuple(found.values())


def _convention(node: Node, moving: set[Node]) -> str | None:
    """What the derivative of an operation is taken to be where it has none; None if it is smooth."""
    name = op_name(node)
    if name == "elu":
        given: tuple[Any, ...] = (*node.args, 1, 1, 1)
        _, alpha, _, input_scale = given[:4]
        return CONVENTIONS[name] if alpha * input_scale != 1 else None
    if name not in SWITCHES:
        return CONVENTIONS.get(name)
    is_moving = (node.args[_MASK[name]] if name in _MASK else node) in moving
    if name == "_to_copy":
        before, after = node.all_input_nodes[0].meta["val"], node.meta["val"]
        is_moving = is_moving and before.is_floating_point() and not after.is_floating_point()
    return SWITCHES[name] if is_moving else None
