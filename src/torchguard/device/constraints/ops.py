"""Ops that a device does not have."""

from collections.abc import Iterable

from torch import fx

from torchguard.device import _torch
from torchguard.device.constraints.base import Constraint
from torchguard.device.description import Device
from torchguard.device.graphs import Graph, op_name
from torchguard.device.violations import Violation


class Denied(Constraint):
    """An op is on the list of those the device does not have."""

    code = "TGD501"

    def check(self, graph: Graph, device: Device) -> Iterable[Violation]:
        for node in graph.calls if device.deny else ():
            pattern = next((pattern for pattern in device.deny if _torch.fits(op_name(node), pattern)), None)
            if pattern is not None:
                message = f"{device.name} does not have {pattern}"
                yield self.violation(graph, message, by=node, remedy=_remedy(node, device))


class NotAllowed(Constraint):
    """An op is not on the list of those the device has. Views are no work, and always allowed."""

    code = "TGD502"

    def check(self, graph: Graph, device: Device) -> Iterable[Violation]:
        allowed: tuple[str, ...] | None = device.allow
        for node in graph.ops if allowed is not None else ():
            if not any(_torch.fits(op_name(node), pattern) for pattern in allowed or ()):
                message = f"is not among what {device.name} has"
                yield self.violation(graph, message, by=node, remedy=_remedy(node, device))


def _remedy(node: fx.Node, device: Device) -> str:
    if device.decompositions == "none" and node.target in _torch.decompositions("all"):
        return f"torch can take it apart: decompositions={[op_name(node)]}"
    return ""


RULES = (Denied(), NotAllowed())
