"""The report of graphs on a device: violations, coverage, partitions, transfers and memory."""

import itertools
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from torchguard.device._device import Device
from torchguard.device._graph import Graph
from torchguard.device._memory import MemoryPlan, TrainingMemory, gradient_bytes
from torchguard.device._partitions import (
    Coverage,
    Partition,
    Transfer,
    Work,
    coverage_of,
    partitions_of,
    transfers_of,
    work_of,
)
from torchguard.device._section import device_section
from torchguard.device._violations import DeviceViolation, counted, distinct
from torchguard.report import Section, Shown

# The version of what `to_dict` returns. It is raised when a key changes its meaning or is removed.
SCHEMA = 1
# Rules about a graph as a whole: the op at which they are violated can run on the device.
_WHOLE_GRAPH_RULES = frozenset({"TGD401"})


@dataclass(frozen=True)
class GraphReport:
    """One graph on one device. Coverage, partitions and transfers are computed when they are first read.

    `failures` has a line for each rule that raised: what it would have found is not known.
    """

    graph: Graph
    device: Device
    violations: tuple[DeviceViolation, ...]
    failures: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.graph.name

    @property
    def memory(self) -> MemoryPlan:
        return self.graph.memory

    @cached_property
    def unsupported(self) -> frozenset[str]:
        """The nodes that cannot run on the device at the concrete sizes."""
        violated = (one for one in self.violations if one.code not in _WHOLE_GRAPH_RULES and not one.holds_now)
        return frozenset(node for one in violated for node in one.nodes if node != "output")

    @cached_property
    def coverage(self) -> Coverage:
        return coverage_of(self.graph, self.unsupported)

    @cached_property
    def work(self) -> tuple[Work, ...]:
        """The floating point operations and the memory traffic of each op."""
        return work_of(self.graph)

    @cached_property
    def fallbacks(self) -> tuple[str, ...]:
        """The calls that the host has to run."""
        return tuple(node.name for node in self.graph.calls if node.name in self.unsupported)

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """What the fallbacks transfer between host and device."""
        return transfers_of(self.graph, self.unsupported)

    @cached_property
    def partitions(self) -> tuple[Partition, ...]:
        """The most expensive part of a report, where there are many fallbacks."""
        return partitions_of(self.graph, self.unsupported)

    def to_dict(self, *, partitions: bool = True) -> dict[str, Any]:
        return {
            "graph": self.name,
            "device": self.device.to_dict(),
            "violations": [one.to_dict() for one in self.violations],
            "failures": self.failures,
            "coverage": self.coverage.to_dict(),
            "memory": self.memory.to_dict(),
            **({"partitions": [asdict(one) for one in self.partitions]} if partitions else {}),
            "fallbacks": self.fallbacks,
            "transfers": [asdict(one) for one in self.transfers],
        }

    def __str__(self) -> str:
        transferred = sum(one.bytes for one in self.transfers)
        return "\n".join(
            [
                f"{self.name}: {self.coverage}",
                f"  {counted(len(self.partitions), 'partition')}, "
                f"{counted(len(self.fallbacks), 'host fallback')}, {counted(transferred, 'byte')} to transfer",
                *(f"  {line}" for line in str(self.memory).splitlines()),
            ]
        )


@dataclass(frozen=True)
class DeviceReport(Shown):
    """The reports of several graphs. The sum of two reports covers the graphs of both.

    `save("device.html")` writes a page of it.
    """

    graphs: tuple[GraphReport, ...] = ()

    def __add__(self, other: "DeviceReport") -> "DeviceReport":
        return DeviceReport(self.graphs + other.graphs)

    @property
    def violations(self) -> tuple[DeviceViolation, ...]:
        return tuple(one for graph in self.graphs for one in graph.violations)

    @property
    def failures(self) -> tuple[str, ...]:
        """A line for each rule that raised on a graph: what it would have found is not known."""
        return tuple(one for graph in self.graphs for one in graph.failures)

    @property
    def coverage(self) -> Coverage:
        return sum((graph.coverage for graph in self.graphs), Coverage(0, 0, 0, 0))

    @property
    def partitions(self) -> tuple[Partition, ...]:
        return tuple(one for graph in self.graphs for one in graph.partitions)

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """What host fallbacks for unsupported ops would transfer."""
        return tuple(one for graph in self.graphs for one in graph.transfers)

    @property
    def transfer_bytes(self) -> int:
        return sum(one.bytes for one in self.transfers)

    @property
    def memory(self) -> tuple[MemoryPlan, ...]:
        """The memory plan of each graph."""
        return tuple(graph.memory for graph in self.graphs)

    @property
    def peak_memory(self) -> int:
        """The largest peak of any graph, in bytes."""
        return max((plan.peak for plan in self.memory), default=0)

    @property
    def training(self) -> tuple[TrainingMemory, ...]:
        """The memory of a training step, for each forward graph with a backward graph."""
        found = []
        for one, two in itertools.pairwise(self.graphs):
            if (one.name, two.name) == ("forward", "backward"):
                gradients = gradient_bytes(one.graph.module, two.graph.module, one.graph.state)
                found.append(TrainingMemory(max(one.memory.peak, two.memory.peak), gradients, 2 * gradients))
        return tuple(found)

    @property
    def verdict(self) -> str:
        """Whether the graphs fit the device, and why not, in one line."""
        if not self.graphs:
            return "nothing was compiled"
        device = self.graphs[0].device
        names = ", ".join(dict.fromkeys(graph.device.name for graph in self.graphs))
        refused = [one for one in self.violations if not one.holds_now]
        if refused:
            more = f", and {counted(len(refused) - 1, 'more violation')}" if len(refused) > 1 else ""
            return f"Does not fit {names}, because {refused[0].op}: {refused[0].message} ({refused[0].code}){more}"
        if failures := [*self.failures]:
            more = f", and {len(failures) - 1} more" if len(failures) > 1 else ""
            return f"Not known whether it fits {names}, because {failures[0]}{more}"
        if conditions := dict.fromkeys(one.condition for one in self.violations):
            return f"Fits {names} at the sizes of this call, but not at all sizes: it needs {' and '.join(conditions)}"
        most = max((one.with_adam for one in self.training), default=0)
        if device.max_memory is not None and most > device.max_memory:
            return (
                f"Fits {names}, but not with the state of Adam: a training step then needs {most:,} bytes of "
                f"{device.max_memory:,}"
            )
        return f"Fits {names}"

    def by_rule(self) -> dict[str, int]:
        """The number of nodes that violate each rule, by its code."""
        return _totals((one.code, len(one.nodes)) for one in self.violations)

    def by_op(self) -> dict[str, int]:
        """The number of nodes with violations, by op."""
        return _totals((one.op, len(one.nodes)) for one in self.violations)

    def by_line(self) -> dict[str, int]:
        """The number of nodes with violations, by the line in your code; violations without a line are left out."""
        lines = ((one.source_line, len(one.nodes)) for one in self.violations if one.source_line)
        return _totals((f"{line.file}:{line.line}", count) for line, count in lines)

    def to_dict(self, *, partitions: bool = True) -> dict[str, Any]:
        """The whole report as values for JSON; `partitions=False` leaves out what is expensive to compute."""
        return {
            "schema": SCHEMA,
            "coverage": self.coverage.to_dict(),
            "transfer_bytes": self.transfer_bytes,
            "verdict": self.verdict,
            "peak_memory": self.peak_memory,
            "training": [asdict(one) for one in self.training],
            "by_rule": self.by_rule(),
            "by_op": self.by_op(),
            "by_line": self.by_line(),
            "graphs": [graph.to_dict(partitions=partitions) for graph in self.graphs],
        }

    def to_json(self, indent: int | None = None, *, partitions: bool = True) -> str:
        return json.dumps(self.to_dict(partitions=partitions), indent=indent)

    def section(self) -> Section:
        """Whether the graphs fit first, then coverage, violations by line, memory and the roofline."""
        return device_section(self)

    def __str__(self) -> str:
        if not self.graphs:
            return self.verdict
        names = ", ".join(dict.fromkeys(graph.device.name for graph in self.graphs))
        head = f"{counted(len(self.graphs), 'graph')} on {names}: {self.coverage}"
        head += f"; {counted(len(self.violations), 'violation')}"
        lines = [self.verdict, head, *map(str, self.graphs), *map(str, self.training)]
        for one, graphs in distinct(self.violations):
            first, *rest = str(one).splitlines()
            lines += [first + (f" [in {graphs} graphs]" if graphs > 1 else ""), *rest]
        return "\n".join(lines)


def _totals(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The sum of the counts of each name, the largest first."""
    counter: Counter[str] = Counter()
    for name, count in pairs:
        counter[name] += count
    return dict(counter.most_common())
