"""Nonsmooth points of a graph: operations whose derivative is a convention somewhere, and which one torch uses."""

from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from torchguard._graphs.op_facts import facts_of
from torchguard.compiled._nodes import op_name


@dataclass(frozen=True)
class NonsmoothPoint:
    """An operation that is not differentiable everywhere, and the derivative that torch returns where it is not."""

    op: str
    convention: str
    source: str

    def __str__(self) -> str:
        return f"{self.op}: {self.convention}" + (f" ({self.source})" if self.source else "")


def nonsmooth_points_of(graph: GraphModule) -> tuple[NonsmoothPoint, ...]:
    """The operations of a graph whose derivative is a convention somewhere, once for each source line."""
    found: dict[tuple[str, str | None], NonsmoothPoint] = {}
    varying: set[Node] = set()
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        is_leaf = node.op == "placeholder" and value.is_floating_point()
        if is_leaf or any(source in varying for source in node.all_input_nodes):
            varying.add(node)
        convention = _convention(node, varying) if node.op == "call_function" else None
        if convention is not None:
            name = op_name(node)
            found[name, node.stack_trace] = NonsmoothPoint(f"aten.{name}", convention, node.stack_trace or "")
    return tuple(found.values())


def _convention(node: Node, varying: set[Node]) -> str | None:
    """The derivative that torch returns for an operation where it has none; None if the operation is smooth."""
    name = op_name(node)
    facts = facts_of(name)
    if name == "div" and node.kwargs.get("rounding_mode") is not None:
        return facts_of("floor").nonsmooth
    if not facts.nonsmooth:
        return None
    if name == "elu":
        given: tuple[Any, ...] = (*node.args, 1, 1, 1)
        _, alpha, _, input_scale = given[:4]
        return facts.nonsmooth if alpha * input_scale != 1 else None
    if not facts.is_switch:
        return facts.nonsmooth
    is_varying = (node if facts.condition is None else node.args[facts.condition]) in varying
    if name == "_to_copy":
        before, after = node.all_input_nodes[0].meta["val"], node.meta["val"]
        is_varying = is_varying and before.is_floating_point() and not after.is_floating_point()
    return facts.nonsmooth if is_varying else None
