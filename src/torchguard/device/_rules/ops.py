"""Ops that a device does not support."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import fx

from torchguard._torch import aot, nodes, ops
from torchguard.device._graph import Graph, op_name
from torchguard.device._op_patterns import first_match, is_call_of
from torchguard.device._rules.base import Constraint
from torchguard.device._violations import DeviceViolation

if TYPE_CHECKING:
    from torchguard.device._device import Device


class Denied(Constraint):
    """An op matches the device's `deny`."""

    code = "TGD501"

    def check(self, graph: Graph, device: "Device") -> Iterable[DeviceViolation]:
        for node, pattern in _denied(graph, device.deny) if device.deny else ():
            message = f"{device.name} does not support {pattern}"
            yield self.violation(graph, message, node=node, remedy=_remedy(node, device))
        for node, before, pattern in _denied_before(graph, device) if device.deny else ():
            message = f"the compiler made it of {before}, and {device.name} does not support {pattern}"
            yield self.violation(graph, message, node=node)


def _denied(graph: Graph, deny: tuple[str, ...]) -> Iterator[tuple[fx.Node, str]]:
    """Nodes, each with the pattern that denies it: by its op, or by the call in the program that it comes from."""
    calls: dict[nodes.ProgramCall, list[fx.Node]] = {}
    for node in graph.calls:
        if (pattern := first_match(op_name(node), deny)) is not None:
            yield node, pattern
        # The calls of a backward graph are those of the forward graph.
        if graph.name != "backward" and (call := nodes.call_of(node)) is not None:
            calls.setdefault(call, []).append(node)
    for call, made in calls.items():
        names = {nodes.op_before_decomposition(node) for node in made} - {"aten.detach.default"}
        if names == {"aten.clone.default"}:  # Dropout in evaluation mode
            continue
        pattern = next((one for one in deny if is_call_of(call.called, one)), None)
        is_found = pattern is None or any(first_match(name, (_without_overload(pattern),)) for name in names)
        if pattern is not None and not is_found:
            yield next((node for node in made if not ops.is_view(node.target)), made[0]), pattern


def _denied_before(graph: Graph, device: "Device") -> Iterator[tuple[fx.Node, str, str]]:
    """Nodes that a compiler such as Inductor made of a denied op, one of each op and call, with op and pattern.

    Ops that the device's own `decompositions` decompose are none of these.
    """
    seen: set[tuple[str, nodes.ProgramCall | None, str]] = set()
    for node in graph.calls:
        before = nodes.op_before_decomposition(node)
        if before == op_name(node) or first_match(op_name(node), device.deny) is not None:
            continue
        pattern = first_match(before, device.deny)
        key = (before, nodes.call_of(node), node.meta.get("stack_trace") or "")
        if pattern is not None and key not in seen and not _is_decomposed_for(device, before):
            seen.add(key)
            yield node, before, pattern


def _is_decomposed_for(device: "Device", name: str) -> bool:
    selected = device.decompositions
    if not isinstance(selected, str):
        return first_match(name, tuple(selected)) is not None
    return selected != "none" and any(str(op) == name for op in aot.decompositions(selected))


def _without_overload(pattern: str) -> str:
    return ".".join(pattern.split(".")[:2])


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
