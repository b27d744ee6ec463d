"""Graphs as text: one operation a line, with its type and where it comes from; and where they are not smooth."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchguard._graphs.op_facts import facts_of
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
    facts = facts_of(name)
    if not facts.nonsmooth:
        return None
    if name == "elu":
        given: tuple[Any, ...] = (*node.args, 1, 1, 1)
        _, alpha, _, input_scale = given[:4]
        return facts.nonsmooth if alpha * input_scale != 1 else None
    if not facts.is_switch:
        return facts.nonsmooth
    is_moving = (node if facts.condition is None else node.args[facts.condition]) in moving
    if name == "_to_copy":
        before, after = node.all_input_nodes[0].meta["val"], node.meta["val"]
        is_moving = is_moving and before.is_floating_point() and not after.is_floating_point()
    return facts.nonsmooth if is_moving else None
