"""The parts of a graph that a device can run, and what moves between them and the host."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from torchguard._graphs.source_lines import SourceLine, source_line_of
from torchguard.device._graph import Graph
from torchguard.device._values import bytes_of, bytes_touched, storage_keys, tensors_of

TO_HOST, TO_DEVICE = "to the host", "to the device"


@dataclass(frozen=True)
class Partition:
    """Nodes that a device can run in one go."""

    graph: str
    nodes: tuple[str, ...]
    ops: int


@dataclass(frozen=True)
class Transfer:
    """A tensor that has to move because the next to use it runs elsewhere."""

    graph: str
    tensor: str
    bytes: int
    direction: str
    source_line: SourceLine | None


@dataclass(frozen=True)
class Split:
    """The ops of a graph that are left to the host, and what moves for them."""

    fallbacks: tuple[str, ...]
    transfers: tuple[Transfer, ...]


class _Supported(OperatorSupportBase):
    """Ops without a violation; views, and what takes results apart, go where what they look at is made."""

    def __init__(self, on_device: Mapping[fx.Node, bool]) -> None:
        self._on_device = on_device

    def is_node_supported(self, submodules: Mapping[str, torch.nn.Module], node: fx.Node) -> bool:
        return node.op == "call_function" and self._on_device[node]


def split_of(graph: Graph, unsupported: frozenset[str]) -> Split:
    return Split(
        tuple(node.name for node in graph.calls if node.name in unsupported),
        tuple(_transfers(graph, _on_device(graph, unsupported))),
    )


def partitions_of(graph: Graph, unsupported: frozenset[str]) -> tuple[Partition, ...]:
    ops = {node.name for node in graph.ops}
    proposed = CapabilityBasedPartitioner(
        graph.module, _Supported(_on_device(graph, unsupported)), allows_single_node_partition=True
    ).propose_partitions()
    partitions = (tuple(node.name for node in sorted(part.nodes)) for part in proposed)
    return tuple(
        Partition(graph.name, names, count) for names in partitions if (count := sum(name in ops for name in names))
    )


def _on_device(graph: Graph, unsupported: frozenset[str]) -> dict[fx.Node, bool]:
    """Where each node runs. What a graph is given is on the device, and what it returns has to be."""
    ops = set(graph.ops)
    found: dict[fx.Node, bool] = {}
    for node in graph.module.graph.nodes:
        if node in ops or node.name in unsupported or not node.all_input_nodes or node.op == "output":
            found[node] = node.name not in unsupported or node.op == "output"
        else:
            found[node] = found[node.all_input_nodes[0]]
    return found


def _transfers(graph: Graph, on_device: Mapping[fx.Node, bool]) -> list[Transfer]:
    """Of each storage what is used elsewhere, once in each direction: what was moved is there for the next."""
    keys = storage_keys(graph.module)
    moved: dict[tuple[object, bool], list[tuple[Tensor, fx.Node, fx.Node]]] = {}
    for by in graph.module.graph.nodes:
        for node in by.all_input_nodes:
            if on_device[node] == on_device[by]:
                continue
            for key, tensor in zip(keys[node], tensors_of(node.meta.get("val")), strict=True):
                moved.setdefault((key or tensor, on_device[by]), []).append((tensor, node, by))
    found = []
    for (_, is_on_device), uses in moved.items():
        _, node, by = max(uses, key=lambda use: bytes_of(use[0]))
        amount = bytes_touched([tensor for tensor, _, _ in uses])
        direction = TO_DEVICE if is_on_device else TO_HOST
        found.append(Transfer(graph.name, graph.name_of(node), amount, direction, source_line_of(node, by)))
    return found
