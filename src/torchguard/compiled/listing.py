"""Graphs as text: one operation a line, with its type and where it comes from; and where they are not smooth."""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchguard.compiled.leaves import short_name


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
    "where": "the derivative of the branch that is taken",
    "prelu": "prelu'(0) = weight",
    "_prelu_kernel": "prelu'(0) = weight",
}


def op_name(target: Any) -> str:
    """An operation as it is saved and shown: `aten.mm.default`, `getitem`."""
    return "getitem" if target is operator.getitem else str(target)


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
    return Line(node.name, op_name(node.target), arguments, type_text(node.meta["val"]), node.stack_trace or "")


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
    found = {}
    for node in graph.graph.nodes:
        name = (
            op_name(node.target).split(".")[1]
            if node.op == "call_function" and node.target is not operator.getitem
            else ""
        )
        if name in CONVENTIONS:
            found[name, node.stack_trace] = Kink(f"aten.{name}", CONVENTIONS[name], node.stack_trace or "")
    return tuple(found.values())
