"""Ops that a device does not support."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import fx

from torchguard._torch import aot, ops
from torchguard.device._graph import Graph, op_name
from torchguard.device._op_patterns import first_match
from torchguard.device._rules.base import Constraint
from torchguard.device._violations import DeviceViolation

if TYPE_CHECKING:
    from torchguard.device._device import Device


class Denied(Constraint):
    """An op matches the device's `deny`."""

    code = "TGD501"

    def check(self, graph: Graph, device: "Device") -> Iterable[DeviceViolation]:
        for node in graph.calls if device.deny else ():
            pattern = first_match(op_name(node), device.deny)
            if pattern is not None:
                message = f"{device.name} does not support {pattern}"
                yield self.violation(graph, message, node=node, remedy=_remedy(node, device))


class NotAllowed(Constraint):
    """An op does not match the device's `allow`. Views compute nothing and are always allowed."""

    code = "TGD502"

    def check(self, graph: Graph, device: "Device") -> Iterable[DeviceViolation]:
        allowed: tuple[str, ...] | None = device.allow
        for node in graph.ops if allowed is not None else ():
            if first_match(op_name(node), allowed or ()) is None:
                message = f"is not among the ops that {device.name} allows"
                yield self.violation(graph, message, node=node, remedy=_remedy(node, device))


def _remedy(node: fx.Node, device: "Device") -> str:
    """Suggest to decompose an op, if the device supports all ops it decomposes to. No device has the ops of `prims`."""
    made = aot.ops_in_decomposition(node) if device.decompositions == "none" else ()
    if not made or any(str(op).startswith("prims.") or _is_refused(op, device) for op in made):
        return ""
    return f"torch can decompose it: decompositions={[op_name(node)]}"


def _is_refused(op: object, device: "Device") -> bool:
    is_missing = device.allow is not None and first_match(str(op), device.allow) is None
    return first_match(str(op), device.deny) is not None or (is_missing and not ops.is_view(op))


RULES = (Denied(), NotAllowed())
