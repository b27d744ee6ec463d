"""What in a run is torchguard's own: `--watch` adds to the graphs of a script."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchguard.device import DeviceReport

_PACKAGE = str(Path(__file__).parent.parent / "_")[:-1]


def is_ours(file: str) -> bool:
    """Whether a line is in torchguard itself."""
    return file.startswith(_PACKAGE)


def without_ours(report: "DeviceReport") -> "DeviceReport":
    """A report in which what watching adds counts as running anywhere."""
    graphs = []
    for graph in report.graphs:
        theirs = tuple(one for one in graph.violations if one.place is None or not is_ours(one.place.file))
        graphs.append(replace(graph, violations=theirs))
    return replace(report, graphs=tuple(graphs))
