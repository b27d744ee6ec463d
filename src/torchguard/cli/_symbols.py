"""Symbols in the sizes of a graph that was made again from an artifact, in which numbers stand for them."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import fx

from torchguard.device._rules.base import Constraint
from torchguard.device._violations import merge_violations

if TYPE_CHECKING:
    from torchguard.device import Device, DeviceReport, DeviceViolation
    from torchguard.device._graph import Graph

# What tracing keeps of a node's meta, when an op of it is taken apart, is called so.
_META, _SYMBOLS = "custom", "symbols"


def note_symbols(node: fx.Node, values: Iterable[Mapping[str, Any]]) -> None:
    """Note which symbols the values of a node had, as an artifact tells them."""
    sizes = [size for value in values for size in value.get("tensor", {}).get("shape", ()) if isinstance(size, str)]
    symbols = [*sizes, *(value["symbol"] for value in values if "symbol" in value)]
    if symbols:
        node.meta[_META] = {_SYMBOLS: symbols}


def with_symbols(report: "DeviceReport") -> "DeviceReport":
    """A report that also says which ops had sizes that were not known, where the device needs numbers."""
    graphs = []
    for one in report.graphs:
        found = _Symbols().check(one.graph, one.device)
        graphs.append(replace(one, violations=merge_violations([*one.violations, *found])))
    return replace(report, graphs=tuple(graphs))


class _Symbols(Constraint):
    """The rule that a device with sizes that are numbers has, over what was noted."""

    code = "TGD304"

    def check(self, graph: "Graph", device: "Device") -> Iterable["DeviceViolation"]:
        for node in () if device.dynamic_shapes else graph.ops:
            symbols = sorted({name for near in (node, *node.all_input_nodes) for name in _noted(near)})
            if symbols:
                message = f"sizes {', '.join(symbols)} are symbolic, {device.name} needs static shapes"
                yield self.violation(graph, message, node=node, remedy="compile with dynamic=False")


def _noted(node: fx.Node) -> Iterable[str]:
    return node.meta.get(_META, {}).get(_SYMBOLS, ())
