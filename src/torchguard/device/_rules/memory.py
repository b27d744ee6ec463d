"""The memory that a graph needs."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torchguard.device._graph import Graph
from torchguard.device._rules.base import Constraint
from torchguard.device._violations import DeviceViolation

if TYPE_CHECKING:
    from torchguard.device._device import Device


class Memory(Constraint):
    """The peak of the memory plan, at concrete sizes, is larger than the device's memory."""

    code = "TGD401"

    def check(self, graph: Graph, device: "Device") -> Iterable[DeviceViolation]:
        plan = graph.memory
        if device.max_memory is None or plan.peak <= device.max_memory:
            return
        node = next(node for node in graph.module.graph.nodes if node.name == plan.peak_node)
        largest = plan.at_peak[0]
        line = f", {largest.source_line}" if largest.source_line else ""
        yield self.violation(
            graph,
            f"{plan.peak:,} bytes are live, {device.name} has {device.max_memory:,}",
            node=node,
            remedy=f"the largest live tensor is {largest.name}, {largest.bytes:,} bytes{line}",
            condition="" if plan.expression == str(plan.peak) else f"{plan.expression} <= {device.max_memory}",
        )


RULES = (Memory(),)
