"""Ops that a device does not have."""

from collections.abc import Iterable

from torch import fx

from torchguard._torch import aot, ops
from torchguard.device._device import Device
from torchguard.device._graph import Graph, op_name
from torchguard.device._op_patterns import matched_by
from torchguard.device._rules.base import Constraint
from torchguard.device._violations import Violation


class Denied(Constraint):
    """An op is on the list of those the device does not have."""

    code = "TGD501"

    def check(self, graph: Graph, device: Device) -> Iterable[Violation]:
        for node in graph.calls if device.deny else ():
            pattern = matched_by(op_name(node), device.deny)
            if pattern is not None:
                message = f"{device.name} does not have {pattern}"
                yield self.violation(graph, message, by=node, remedy=_remedy(node, device))


class NotAllowed(Constraint):
    """An op is not on the list of those the device has. Views are no work, and always allowed."""

    code = "TGD502"

    def check(self, graph: Graph, device: Device) -> Iterable[Violation]:
        allowed: tuple[str, ...] | None = device.allow
        for node in graph.ops if allowed is not None else ():
            if matched_by(op_name(node), allowed or ()) is None:
                message = f"is not among what {device.name} has"
                yield self.violation(graph, message, by=node, remedy=_remedy(node, device))


def _remedy(node: fx.Node, device: Device) -> str:
    """To take it apart, where nothing that the device does not have comes of it. No device has the ops of `prims`."""
    made = aot.ops_in_decomposition(node) if device.decompositions == "none" else ()
    if not made or any(str(op).startswith("prims.") or _is_refused(op, device) for op in made):
        return ""
    return f"torch can take it apart: decompositions={[op_name(node)]}"


def _is_refused(op: object, device: Device) -> bool:
    is_missing = device.allow is not None and matched_by(str(op), device.allow) is None
    return matched_by(str(op), device.deny) is not None or (is_missing and not ops.is_view(op))


RULES = (Denied(), NotAllowed())
