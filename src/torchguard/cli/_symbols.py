"""The rule on symbolic sizes, for graphs that were rebuilt from an artifact.

In such a graph every symbol is replaced by the number it stood for, so the rule of `device` finds none. This one reads
the names of the symbols that the codec noted on the nodes.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from torchguard._graphs.codec import symbols_of
from torchguard.device._rules.base import Constraint
from torchguard.device._violations import merge_violations

if TYPE_CHECKING:
    from torchguard.device import Device, DeviceReport, DeviceViolation
    from torchguard.device._graph import Graph


def with_symbols(report: "DeviceReport") -> "DeviceReport":
    """The report with violations for ops that had symbolic sizes, where the device needs static ones."""
    graphs = []
    for one in report.graphs:
        found = _Symbols().check(one.graph, one.device)
        graphs.append(replace(one, violations=merge_violations([*one.violations, *found])))
    return replace(report, graphs=tuple(graphs))


class _Symbols(Constraint):
    """TGD304 of `device`, over the symbols that the codec noted."""

    code = "TGD304"

    def check(self, graph: "Graph", device: "Device") -> Iterable["DeviceViolation"]:
        for node in () if device.dynamic_shapes else graph.ops:
            symbols = sorted({name for near in (node, *node.all_input_nodes) for name in symbols_of(near)})
            if symbols:
                message = f"sizes {', '.join(symbols)} are symbolic, {device.name} needs static shapes"
                yield self.violation(graph, message, node=node, remedy="compile with dynamic=False")
