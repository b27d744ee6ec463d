"""The memory that a graph needs."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torchguard._torch import nodes
from torchguard._torch.tracing import is_surely
from torchguard.device._graph import Graph
from torchguard.device._memory import MemoryPlan
from torchguard.device._rules.base import Constraint
from torchguard.device._violations import DeviceViolation

if TYPE_CHECKING:
    from torchguard.device._device import Device


class Memory(Constraint):
    """More bytes are live than the device has, at the concrete sizes or at others that later calls may bring."""

    code = "TGD401"

    def check(self, graph: Graph, device: "Device") -> Iterable[DeviceViolation]:
        plan, most = graph.memory, device.max_memory
        if most is None:
            return
        # At other sizes the peak may be at another node, so every node counts. Of bounds, only the largest are named.
        unbounded = [size for size in plan.symbolic if not is_surely(size <= most)]
        bounds = [one for one in unbounded if not any(one is not two and is_surely(one <= two) for two in unbounded)]
        if plan.peak <= most and not unbounded:
            return
        node = next(node for node in graph.module.graph.nodes if node.name == plan.peak_node)
        largest = plan.at_peak[0]
        line = f", {largest.source_line}" if largest.source_line else ""
        yield self.violation(
            graph,
            _message(plan, most, device.name),
            node=node,
            remedy=f"the largest live tensor is {largest.name}, {largest.bytes:,} bytes{line}"
            + (
                f"; bound the sizes with {nodes.CHECK_SIZE}(size <= ...), or compile with dynamic=False"
                if bounds
                else ""
            ),
            condition=" and ".join(f"{size} <= {most}" for size in bounds or unbounded[:1]),
            holds_now=bool(unbounded) and plan.peak <= most and not plan.unknown,
        )


def _message(plan: MemoryPlan, most: int, name: str) -> str:
    unknown = f", not counting {', '.join(plan.unknown)}" if plan.unknown else ""
    now = f"{plan.peak:,} bytes are live{' at the sizes of this call' if plan.symbolic else ''}{unknown}"
    return f"{now}, {name} has {most:,}" if plan.peak > most else f"{name} has {most:,} bytes, more may be live: {now}"


RULES = (Memory(),)
