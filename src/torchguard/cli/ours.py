"""What in a run is torchguard's own: `--watch` adds to the graphs of a script."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchguard.device import DeviceReport, Violation

_PACKAGE = str(Path(__file__).parent.parent / "_")[:-1]


def is_in_package(file: str) -> bool:
    return file.startswith(_PACKAGE)


def is_ours(file: str, function: str) -> bool:
    """Whether a line is in torchguard itself, and not where a watched model calls its own `forward`."""
    return is_in_package(file) and not function.startswith("forward_of_")


def without_ours(report: "DeviceReport") -> "DeviceReport":
    """A report in which what watching adds counts as running anywhere."""
    graphs = [replace(graph, violations=(*_theirs(graph.violations),)) for graph in report.graphs]
    return replace(report, graphs=tuple(graphs))


def _theirs(violations: Iterable["Violation"]) -> Iterator["Violation"]:
    for one in violations:
        if one.place is None or not is_in_package(one.place.file):
            yield one
        elif not is_ours(one.place.file, one.place.function):
            # An op of torch's own modules, as in a bare Sequential: no line of the user's leads to it.
            yield replace(one, place=None)
