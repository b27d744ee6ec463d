"""A derivative split in two graphs: the first depends on the point alone, the second is linear in the tangents.

The first part runs once for a point and returns the outputs and the residuals, the values that the second part needs.
The second part then runs once for each tangent or cotangent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from torchguard._graphs.op_facts import SHAPE_ONLY
from torchguard._torch import tensors
from torchguard.compiled._cleanup import shares_input_storage
from torchguard.compiled._nodes import op_name

# Where to find a residual: among the leaves, the outputs, or the private results of the first part.
Source = tuple[Literal["leaf", "output", "private"], int]


@dataclass(frozen=True)
class Split:
    """The two parts of a derivative.

    Args:
        first: maps leaves to outputs and private residuals.
        second: maps all residuals, and tangents or cotangents, to the other results.
        residuals: where to find each residual.
        shared: the leaves and outputs whose memory a residual shares, so that the caller may change it.
    """

    first: GraphModule
    second: GraphModule
    residuals: tuple[Source, ...]
    shared: tuple[Source, ...]

    def collect(self, leaves: Sequence[Tensor], outputs: Sequence[Tensor], private: Sequence[Tensor]) -> list[Tensor]:
        """The residuals, from what the first part took and returned."""
        sources = {"leaf": leaves, "output": outputs, "private": private}
        return [sources[where][i] for where, i in self.residuals]


def split(graph: GraphModule, leaves: int, outputs: int) -> Split:
    """Split a derivative graph.

    Args:
        leaves: the number of placeholders that are leaves; those after them are tangents or cotangents.
        outputs: the number of results that are outputs; those after them are linear.
    """
    nodes = list(graph.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    results: Sequence[Node] = nodes[-1].args[0]
    linear = _reachable(nodes, placeholders[leaves:])
    second, needed = _second_part(results[outputs:], linear)
    sources: dict[Node, Source] = {node: ("leaf", i) for i, node in enumerate(placeholders[:leaves])}
    sources |= {node: ("output", i) for i, node in enumerate(results[:outputs]) if node not in sources}
    private = [node for node in needed if node not in sources]
    memory = {tensors.storage_of(node.meta["val"]) for node in needed if isinstance(node.meta["val"], Tensor)}
    shared = tuple(source for node, source in sources.items() if tensors.storage_of(node.meta["val"]) in memory)
    sources |= {node: ("private", i) for i, node in enumerate(private)}
    first = _subgraph(placeholders[:leaves], nodes, set(nodes) - linear, [*results[:outputs], *private])
    rest = _subgraph([*needed, *placeholders[leaves:]], nodes, second, results[outputs:])
    return Split(first, rest, tuple(sources[node] for node in needed), shared)


def depends_on_tangents(graph: GraphModule, leaves: int, outputs: int) -> bool:
    """Whether a result after the first `outputs` depends on a placeholder after the first `leaves`."""
    nodes = list(graph.graph.nodes)
    computing = [node for node in nodes if op_name(node) not in SHAPE_ONLY]
    linear = _reachable(computing, graph.graph.find_nodes(op="placeholder")[leaves:])
    return any(node in linear for node in nodes[-1].args[0][outputs:])


def _reachable(nodes: Sequence[Node], starts: Sequence[Node]) -> set[Node]:
    reached = set(starts)
    for node in nodes:
        if node.op == "call_function" and any(source in reached for source in node.all_input_nodes):
            reached.add(node)
    return reached


def _second_part(results: Sequence[Node], linear: set[Node]) -> tuple[set[Node], list[Node]]:
    """The nodes that the second part runs, and the residuals it takes.

    It runs views and constants again: they cost nothing, and saving them would take memory.
    """
    run: set[Node] = set()
    residuals: dict[Node, None] = {}
    todo = list(results)
    while todo:
        node = todo.pop()
        is_free = node.op == "call_function" and (not node.all_input_nodes or shares_input_storage(node))
        if node in run or node in residuals:
            continue
        if (node in linear or is_free) and node.op != "placeholder":
            run.add(node)
            todo.extend(node.all_input_nodes)
        elif node not in linear:
            residuals[node] = None
    return run, list(residuals)


def _subgraph(inputs: Sequence[Node], nodes: Sequence[Node], chosen: set[Node], results: Sequence[Node]) -> GraphModule:
    graph, copies = Graph(), {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        if node in chosen and node not in copies and node.op == "call_function":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] for node in results])
    graph.eliminate_dead_code()
    return GraphModule(torch.nn.Module(), graph)
