"""What was found out about graphs and a device."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property, reduce
from typing import Any

from torchguard.device._coverage import Coverage, coverage_of
from torchguard.device._device import Device
from torchguard.device._graph import Graph
from torchguard.device._memory import MemoryPlan
from torchguard.device._partitions import Partition, Split, Transfer, partitions_of, split_of
from torchguard.device._values import counted
from torchguard.device._violations import Violation

# Of what `to_dict` returns: it grows when a key changes its meaning or goes.
SCHEMA = 1
# Rules that are about a graph as a whole, and say nothing of the op at which they are broken.
_OF_THE_WHOLE = frozenset({"TGD401"})


@dataclass(frozen=True)
class GraphReport:
    """One graph on one device. Coverage and partitions are worked out when they are asked for."""

    graph: Graph
    device: Device
    violations: tuple[Violation, ...]

    @property
    def name(self) -> str:
        return self.graph.name

    @property
    def memory(self) -> MemoryPlan:
        return self.graph.memory

    @cached_property
    def unsupported(self) -> frozenset[str]:
        """The nodes that cannot run on the device, at the sizes at hand."""
        broken = (one for one in self.violations if one.code not in _OF_THE_WHOLE and not one.holds_now)
        return frozenset(node for one in broken for node in one.nodes if node != "output")

    @cached_property
    def coverage(self) -> Coverage:
        return coverage_of(self.graph, self.unsupported)

    @cached_property
    def split(self) -> Split:
        return split_of(self.graph, self.unsupported)

    @cached_property
    def partitions(self) -> tuple[Partition, ...]:
        """Most of the work of a report, where much falls back to the host."""
        return partitions_of(self.graph, self.unsupported)

    def to_dict(self, *, partitions: bool = True) -> dict[str, Any]:
        return {
            "graph": self.name,
            "device": self.device.to_dict(),
            "violations": [one.to_dict() for one in self.violations],
            "coverage": self.coverage.to_dict(),
            "memory": self.memory.to_dict(),
            **({"partitions": [asdict(one) for one in self.partitions]} if partitions else {}),
            **asdict(self.split),
        }

    def __str__(self) -> str:
        transfers = sum(one.bytes for one in self.split.transfers)
        return "\n".join(
            [
                f"{self.name}: {self.coverage}",
                f"  {counted(len(self.partitions), 'partition')}, "
                f"{counted(len(self.split.fallbacks), 'op')} left to the host, {counted(transfers, 'byte')} to move",
                *(f"  {line}" for line in str(self.memory).splitlines()),
            ]
        )


@dataclass(frozen=True)
class DeviceReport:
    """Everything about some graphs; the sum of two is about the graphs of both."""

    graphs: tuple[GraphReport, ...] = ()

    def __add__(self, other: "DeviceReport") -> "DeviceReport":
        return DeviceReport(self.graphs + other.graphs)

    @property
    def violations(self) -> tuple[Violation, ...]:
        return tuple(one for graph in self.graphs for one in graph.violations)

    @property
    def coverage(self) -> Coverage:
        return reduce(lambda one, other: one + other, (graph.coverage for graph in self.graphs), Coverage(0, 0, 0, 0))

    @property
    def partitions(self) -> tuple[Partition, ...]:
        return tuple(one for graph in self.graphs for one in graph.partitions)

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """What falling back to the host for unsupported ops would move."""
        return tuple(one for graph in self.graphs for one in graph.split.transfers)

    @property
    def transfer_bytes(self) -> int:
        return sum(one.bytes for one in self.transfers)

    @property
    def memory(self) -> tuple[MemoryPlan, ...]:
        """The plan of each graph."""
        return tuple(graph.memory for graph in self.graphs)

    @property
    def peak_memory(self) -> int:
        """The most that any of the graphs takes."""
        return max((plan.peak for plan in self.memory), default=0)

    def by_rule(self) -> dict[str, int]:
        """Nodes that break a rule, by its code."""
        return _sums((one.code, len(one.nodes)) for one in self.violations)

    def by_op(self) -> dict[str, int]:
        return _sums((one.op, len(one.nodes)) for one in self.violations)

    def by_line(self) -> dict[str, int]:
        """By the line in your code; those that have none are left out."""
        places = ((one.source_line, len(one.nodes)) for one in self.violations if one.source_line)
        return _sums((f"{place.file}:{place.line}", count) for place, count in places)

    def to_dict(self, *, partitions: bool = True) -> dict[str, Any]:
        """Everything, as JSON can hold it; `partitions=False` leaves out what takes long."""
        return {
            "schema": SCHEMA,
            "coverage": self.coverage.to_dict(),
            "transfer_bytes": self.transfer_bytes,
            "peak_memory": self.peak_memory,
            "by_rule": self.by_rule(),
            "by_op": self.by_op(),
            "by_line": self.by_line(),
            "graphs": [graph.to_dict(partitions=partitions) for graph in self.graphs],
        }

    def to_json(self, indent: int | None = None, *, partitions: bool = True) -> str:
        return json.dumps(self.to_dict(partitions=partitions), indent=indent)

    def __str__(self) -> str:
        if not self.graphs:
            return "nothing was compiled"
        names = ", ".join(dict.fromkeys(graph.device.name for graph in self.graphs))
        head = f"{counted(len(self.graphs), 'graph')} on {names}: {self.coverage}"
        head += f"; {counted(len(self.violations), 'violation')}"
        return "\n".join([head, *map(str, self.graphs), *map(str, self.violations)])


def _sums(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Sums by name, the largest first."""
    counter: Counter[str] = Counter()
    for name, count in pairs:
        counter[name] += count
    return dict(counter.most_common())
