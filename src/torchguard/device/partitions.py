"""The parts of a graph that a device can run, and what moves between them and the host."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from torchguard.device import _torch
from torchguard.device.graphs import Graph
from torchguard.device.values import bytes_of, tensors_of
from torchguard.device.violations import place_of
from torchguard.guards.places import Place

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
    place: Place | None


@dataclass(frozen=True)
class Split:
    """The partitions of a graph, the ops left to the host, and what moves between."""

    partitions: tuple[Partition, ...]
    fallbacks: tuple[str, ...]
    transfers: tuple[Transfer, ...]


class _Supported(OperatorSupportBase):
    """Ops without a violation; views, and what takes results apart, go where what they look at is made."""

    def __init__(self, on_device: Mapping[fx.Node, bool]) -> None:
        self._on_device = on_device

    def is_node_supported(self, submodules: Mapping[str, torch.nn.Module], node: fx.Node) -> bool:
        return node.op == "call_function" and self._on_device[node]


def split_of(graph: Graph, unsupported: frozenset[str]) -> Split:
    on_device = _on_device(graph, unsupported)
    ops = {node.name for node in graph.ops}
    proposed = CapabilityBasedPartitioner(
        graph.module, _Supported(on_device), allows_single_node_partition=True
    ).propose_partitions()
    partitions = (tuple(node.name for node in sorted(part.nodes)) for part in proposed)
    return Split(
        tuple(
            Partition(graph.name, names, count) for names in partitions if (count := sum(name in ops for name in names))
        ),
        tuple(node.name for node in graph.ops if node.name in unsupported),
        tuple(_transfers(graph, on_device)),
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
    """Each storage once in each direction: what was moved is there for the next."""
    found: dict[tuple[int | None, bool], Transfer] = {}
    for by in graph.module.graph.nodes:
        for node in by.all_input_nodes:
            if on_device[node] == on_device[by]:
                continue
            for tensor in tensors_of(node.meta.get("val")):
                key = (_torch.storage_of(tensor), on_device[by])
                moved = Transfer(
                    graph.name,
                    graph.name_of(node),
                    bytes_of(tensor),
                    TO_DEVICE if on_device[by] else TO_HOST,
                    place_of(node, by),
                )
                if key not in found or found[key].bytes < moved.bytes:
                    found[key] = moved
    return list(found.values())
