"""A derivative cut in two: what depends on the point alone, run once, and what is linear in tangents or seeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from torchguard._torch import tensors
from torchguard.compiled._cleanup import shares_input_storage
from torchguard.compiled._nodes import OF_SHAPES, op_name

# Where a residual is found: among the leaves, among the outputs, or among what the first part returns besides.
Source = tuple[Literal["leaf", "output", "private"], int]


@dataclass(frozen=True)
class Split:
    """`first` maps leaves to outputs and private residuals; `second` maps all residuals and tangents to the rest.

    `shared` are the leaves and outputs whose memory a residual lies in: the caller can change it.
    """

    first: GraphModule
    second: GraphModule
    residuals: tuple[Source, ...]
    shared: tuple[Source, ...]

    def found(self, leaves: Sequence[Tensor], outputs: Sequence[Tensor], private: Sequence[Tensor]) -> list[Tensor]:
        """The residuals, from what the first part was given and returned."""
        places = {"leaf": leaves, "output": outputs, "private": private}
        return [places[where][i] for where, i in self.residuals]


def split(graph: GraphModule, leaves: int, outputs: int) -> Split:
    """Cut a graph at what its first `outputs` outputs and the rest share. Placeholders past `leaves` are linear."""
    nodes = list(graph.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    results: Sequence[Node] = nodes[-1].args[0]
    linear = _reached_from(nodes, placeholders[leaves:])
    second, needed = _closure(results[outputs:], linear)
    places: dict[Node, Source] = {node: ("leaf", i) for i, node in enumerate(placeholders[:leaves])}
    places |= {node: ("output", i) for i, node in enumerate(results[:outputs]) if node not in places}
    private = [node for node in needed if node not in places]
    memory = {tensors.storage_of(node.meta["val"]) for node in needed if isinstance(node.meta["val"], Tensor)}
    shared = tuple(place for node, place in places.items() if tensors.storage_of(node.meta["val"]) in memory)
    places |= {node: ("private", i) for i, node in enumerate(private)}
    first = _part(placeholders[:leaves], nodes, set(nodes) - linear, [*results[:outputs], *private])
    rest = _part([*needed, *placeholders[leaves:]], nodes, second, results[outputs:])
    return Split(first, rest, tuple(places[node] for node in needed), shared)


def depends_on_directions(graph: GraphModule, leaves: int, outputs: int) -> bool:
    """Whether what follows the first `outputs` outputs depends on a placeholder past `leaves`."""
    nodes = list(graph.graph.nodes)
    computing = [node for node in nodes if op_name(node) not in OF_SHAPES]
    linear = _reached_from(computing, graph.graph.find_nodes(op="placeholder")[leaves:])
    return any(node in linear for node in nodes[-1].args[0][outputs:])


def _reached_from(nodes: Sequence[Node], starts: Sequence[Node]) -> set[Node]:
    reached = set(starts)
    for node in nodes:
        if node.op == "call_function" and any(source in reached for source in node.all_input_nodes):
            reached.add(node)
    return reached


def _closure(results: Sequence[Node], linear: set[Node]) -> tuple[set[Node], list[Node]]:
    """The nodes the second part runs, and those it is given.

    Views and constants are run again: they cost nothing, and would only be more to keep.
    """
    run: set[Node] = set()
    given: dict[Node, None] = {}
    todo = list(results)
    while todo:
        node = todo.pop()
        again = node.op == "call_function" and (not node.all_input_nodes or shares_input_storage(node))
        if node in run or node in given:
            continue
        if (node in linear or again) and node.op != "placeholder":
            run.add(node)
            todo.extend(node.all_input_nodes)
        elif node not in linear:
            given[node] = None
    return run, list(given)


def _part(inputs: Sequence[Node], nodes: Sequence[Node], chosen: set[Node], results: Sequence[Node]) -> GraphModule:
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
