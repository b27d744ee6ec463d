"""Reports: a data model, and its forms for a terminal, for programs and for a browser.

The parts of torchguard describe their results as a `Section` of blocks, which are plain data. `Report` shows sections
as text, as JSON and as one HTML page. Nothing here knows the parts.
"""

from torchguard.exceptions import ReportError
from torchguard.report._blocks import (
    Answer,
    Block,
    Cell,
    Code,
    Facts,
    FlameGraph,
    Frame,
    HeatMap,
    LineChart,
    Pane,
    Point,
    Roofline,
    Series,
    Span,
    Status,
    Table,
    Text,
    Timeline,
    format_cell,
)
from torchguard.report._json import SCHEMA
from torchguard.report._report import Report, Shown
from torchguard.report._section import Section

__all__ = [
    "SCHEMA",
    "Answer",
    "Block",
    "Cell",
    "Code",
    "Facts",
    "FlameGraph",
    "Frame",
    "HeatMap",
    "LineChart",
    "Pane",
    "Point",
    "Report",
    "ReportError",
    "Roofline",
    "Section",
    "Series",
    "Shown",
    "Span",
    "Status",
    "Table",
    "Text",
    "Timeline",
    "format_cell",
]
