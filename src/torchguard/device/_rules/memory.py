"""The memory that a graph takes."""

from collections.abc import Iterable

from torchguard.device._device import Device
from torchguard.device._graph import Graph
from torchguard.device._rules.base import Constraint
from torchguard.device._violations import Violation


class Memory(Constraint):
    """At some time more is alive than the device has room for, at the sizes at hand."""

    code = "TGD401"

    def check(self, graph: Graph, device: Device) -> Iterable[Violation]:
        plan = graph.memory
        if device.max_memory is None or plan.peak <= device.max_memory:
            return
        node = next(node for node in graph.module.graph.nodes if node.name == plan.peak_node)
        largest = plan.at_peak[0]
        line = f", {largest.source_line}" if largest.source_line else ""
        yield self.violation(
            graph,
            f"{plan.peak:,} bytes are alive, {device.name} has {device.max_memory:,}",
            by=node,
            remedy=f"the largest is {largest.name}, {largest.bytes:,} bytes{line}",
            condition="" if plan.expression == str(plan.peak) else f"{plan.expression} <= {device.max_memory}",
        )


RULES = (Memory(),)
