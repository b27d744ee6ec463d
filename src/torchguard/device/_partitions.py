"""Which part of a graph a device can run: coverage, partitions, host fallbacks, and the transfers they cause."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase
from torch.utils.flop_counter import flop_registry

from torchguard._graphs.source_lines import SourceLine, source_line_of
from torchguard._torch import nodes
from torchguard.device._graph import Graph, op_name
from torchguard.device._storages import bytes_covered, bytes_of, storage_keys, tensors_of, value_of
from torchguard.device._violations import counted

TO_HOST, TO_DEVICE = "to the host", "to the device"


@dataclass(frozen=True)
class Coverage:
    """The ops and floating point operations of a graph, and how many of them the device supports.

    Views compute nothing; they count only where the device does not support them.
    """

    ops: int
    supported_ops: int
    flops: int
    supported_flops: int

    @property
    def by_count(self) -> float:
        """Supported ops, in per cent."""
        return _per_cent(self.supported_ops, self.ops)

    @property
    def by_flops(self) -> float:
        """Floating point operations of supported ops, in per cent."""
        return _per_cent(self.supported_flops, self.flops)

    def __add__(self, other: "Coverage") -> "Coverage":
        return Coverage(
            self.ops + other.ops,
            self.supported_ops + other.supported_ops,
            self.flops + other.flops,
            self.supported_flops + other.supported_flops,
        )

    def __str__(self) -> str:
        flops = f"{self.by_flops:.1f} % of {counted(self.flops, 'FLOP')}" if self.flops else "no FLOPs counted"
        return f"{self.by_count:.1f} % of {counted(self.ops, 'op')}, {flops}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "by_count": self.by_count, "by_flops": self.by_flops}


@dataclass(frozen=True)
class Partition:
    """Nodes that the device can run without returning to the host."""

    graph: str
    nodes: tuple[str, ...]
    ops: int


@dataclass(frozen=True)
class Transfer:
    """A tensor that is copied between host and device, because it is produced on one and used on the other."""

    graph: str
    tensor: str
    bytes: int
    direction: str
    source_line: SourceLine | None


def coverage_of(graph: Graph, unsupported: frozenset[str]) -> Coverage:
    ops = set(graph.ops)
    flops = {node.name: _flops(node) for node in graph.calls if node in ops or node.name in unsupported}
    supported = [name for name in flops if name not in unsupported]
    return Coverage(len(flops), len(supported), sum(flops.values()), sum(flops[name] for name in supported))


@dataclass(frozen=True)
class Work:
    """What an op computes and moves at concrete sizes: floating point operations, and bytes read and written."""

    op: str
    flops: int
    bytes: int
    source_line: SourceLine | None


def work_of(graph: Graph) -> tuple[Work, ...]:
    """The work of each op. Inputs are read and outputs written once; a view moves nothing."""
    found = []
    for node in graph.ops:
        used = [tensor for one in (node, *node.all_input_nodes) for tensor in tensors_of(value_of(one))]
        moved = sum(bytes_of(tensor) for tensor in used)
        found.append(Work(op_name(node), _flops(node), moved, source_line_of(node)))
    return tuple(found)


def _flops(node: fx.Node) -> int:
    """What torch's FLOP counter counts at concrete sizes: matrix products, convolutions and attention; 0 for others."""
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0
    args, kwargs, out = fx.map_arg((node.args, dict(node.kwargs), node), lambda one: _concrete(one.meta.get("val")))
    return int(count(*args, **kwargs, out_val=out))


def _concrete(value: Any) -> Any:
    """A value with numbers in place of symbols: the FLOP formulas compare sizes, which would add guards."""
    if isinstance(value, Tensor):
        return torch.empty([nodes.hint(size) or 0 for size in value.shape], dtype=value.dtype, device="meta")
    if isinstance(value, torch.SymInt):
        return nodes.hint(value) or 0
    if isinstance(value, (tuple, list)):
        return type(value)(map(_concrete, value))
    return value


def _per_cent(part: int, whole: int) -> float:
    return 100.0 * part / whole if whole else 100.0


class _Supported(OperatorSupportBase):
    """Tells torch's partitioner which nodes run on the device."""

    def __init__(self, on_device: Mapping[fx.Node, bool]) -> None:
        self._on_device = on_device

    def is_node_supported(self, submodules: Mapping[str, torch.nn.Module], node: fx.Node) -> bool:
        return node.op == "call_function" and self._on_device[node]


def partitions_of(graph: Graph, unsupported: frozenset[str]) -> tuple[Partition, ...]:
    ops = {node.name for node in graph.ops}
    proposed = CapabilityBasedPartitioner(
        graph.module, _Supported(_on_device(graph, unsupported)), allows_single_node_partition=True
    ).propose_partitions()
    partitions = (tuple(node.name for node in sorted(part.nodes)) for part in proposed)
    return tuple(
        Partition(graph.name, names, count) for names in partitions if (count := sum(name in ops for name in names))
    )


def transfers_of(graph: Graph, unsupported: frozenset[str]) -> tuple[Transfer, ...]:
    """The transfers that host fallbacks cause.

    The bytes of a storage that the other side uses are transferred once in each direction: later uses find them there.
    """
    on_device = _on_device(graph, unsupported)
    keys = storage_keys(graph.module)
    crossing: dict[tuple[object, bool], list[tuple[Tensor, fx.Node, fx.Node]]] = {}
    for consumer in graph.module.graph.nodes:
        for producer in consumer.all_input_nodes:
            if on_device[producer] == on_device[consumer]:
                continue
            for key, tensor in zip(keys[producer], tensors_of(producer.meta.get("val")), strict=True):
                crossing.setdefault((key or tensor, on_device[consumer]), []).append((tensor, producer, consumer))
    transfers = []
    for (_, is_to_device), uses in crossing.items():
        _, producer, consumer = max(uses, key=lambda use: bytes_of(use[0]))
        transfers.append(
            Transfer(
                graph.name,
                graph.name_of(producer),
                bytes_covered([tensor for tensor, _, _ in uses]),
                TO_DEVICE if is_to_device else TO_HOST,
                source_line_of(producer, consumer),
            )
        )
    return tuple(transfers)


def _on_device(graph: Graph, unsupported: frozenset[str]) -> dict[fx.Node, bool]:
    """Whether each node runs on the device.

    Inputs are on the device, and outputs have to be. Views, and nodes that unpack a tuple, run where their input is.
    """
    ops = set(graph.ops)
    on_device: dict[fx.Node, bool] = {}
    for node in graph.module.graph.nodes:
        if node in ops or node.name in unsupported or not node.all_input_nodes or node.op == "output":
            on_device[node] = node.name not in unsupported or node.op == "output"
        else:
            on_device[node] = on_device[node.all_input_nodes[0]]
    return on_device
