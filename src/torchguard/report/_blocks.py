"""What a section of a report can show: plain data, of which each form of a report shows what it can.

A block has numbers and text alone. It knows no tensor, no module and no graph: the parts of torchguard put these into
words before.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from torchguard._sizes import format_size

Cell: TypeAlias = str | int | float | bool | None
Status: TypeAlias = Literal["ok", "warning", "bad", "unknown"]
STATUSES: tuple[Status, ...] = ("ok", "warning", "unknown", "bad")  # from best to worst


@dataclass(frozen=True)
class Answer:
    """The answer, in one sentence, before everything that explains it."""

    kind: ClassVar[str] = "answer"
    status: Status
    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph, or with `preformatted` lines whose blanks count."""

    kind: ClassVar[str] = "text"
    text: str
    preformatted: bool = False


@dataclass(frozen=True)
class Facts:
    """Names with values."""

    kind: ClassVar[str] = "facts"
    items: tuple[tuple[str, Cell], ...]


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        title: what the rows are; empty if the section says it.
        links: for each row the id of a section that has more about it, or ""; empty if no row has one.
        total: of how many rows these are the first; None if these are all.
    """

    kind: ClassVar[str] = "table"
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""
    links: tuple[str, ...] = ()
    total: int | None = None


@dataclass(frozen=True)
class Series:
    """One curve: a number for each x; None where there is none, or where it is not finite."""

    name: str
    values: tuple[float | None, ...]

    def __post_init__(self) -> None:
        finite = (one if one is not None and math.isfinite(one) else None for one in self.values)
        object.__setattr__(self, "values", tuple(finite))


@dataclass(frozen=True)
class LineChart:
    """Curves over x.

    Attributes:
        names: what to call each x, such as the op that ran there; empty if its number is enough.
        unit: of the values: "", "bytes", "us".
        limits: horizontal lines, such as the memory of a device.
    """

    kind: ClassVar[str] = "line"
    title: str
    x_label: str
    y_label: str
    x: tuple[float, ...]
    series: tuple[Series, ...]
    names: tuple[str, ...] = ()
    unit: str = ""
    limits: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class HeatMap:
    """A count for some pairs of a row and a column; 0 for all others.

    Attributes:
        rows: the names of the rows, in the order in which they are shown.
        columns: how many columns there are, counted from 0.
        cells: (row, column, count) of each pair that has one.
        noun: what is counted, in the plural.
        first: the column that is shown first: 1 where there is none of number 0.
    """

    kind: ClassVar[str] = "heatmap"
    title: str
    row_label: str
    column_label: str
    rows: tuple[str, ...]
    columns: int
    cells: tuple[tuple[int, int, int], ...]
    noun: str = ""
    first: int = 0


@dataclass(frozen=True)
class Span:
    """Something that took time, or an event, of no duration. `lane` says in which row of the timeline it stands."""

    lane: str
    start: float
    seconds: float
    label: str
    status: Status = "ok"
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Timeline:
    """What happened when, in seconds from the first."""

    kind: ClassVar[str] = "timeline"
    title: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Frame:
    """A name, a value that includes those of its children, and the children."""

    name: str
    value: float
    children: tuple["Frame", ...] = ()


@dataclass(frozen=True)
class FlameGraph:
    """A tree whose frames are as wide as their values."""

    kind: ClassVar[str] = "flame"
    title: str
    unit: str
    root: Frame


@dataclass(frozen=True)
class Point:
    """The work of an op on a device: floating point operations, and bytes moved."""

    name: str
    flops: float
    bytes: float
    where: str = ""


@dataclass(frozen=True)
class Roofline:
    """Ops by arithmetic intensity, under the limits of a device: FLOP/s, and bytes/s."""

    kind: ClassVar[str] = "roofline"
    title: str
    peak_flops: float
    bandwidth: float
    points: tuple[Point, ...]

    def seconds(self, point: Point) -> float:
        """The least time of an op: that of its arithmetic, or of its memory traffic."""
        return max(point.flops / self.peak_flops, point.bytes / self.bandwidth)

    def bound(self, point: Point) -> str:
        """What limits an op."""
        return "compute" if point.flops / self.peak_flops > point.bytes / self.bandwidth else "bandwidth"


@dataclass(frozen=True)
class Pane:
    """One listing. The keys name where each line comes from, or are ""; lines with the same key belong together."""

    title: str
    lines: tuple[str, ...]
    keys: tuple[str, ...] = ()
    first_line: int = 1


@dataclass(frozen=True)
class Code:
    """Listings side by side: the user's source, and what became of it."""

    kind: ClassVar[str] = "code"
    title: str
    panes: tuple[Pane, ...]


Block: TypeAlias = Answer | Text | Facts | Table | LineChart | HeatMap | Timeline | FlameGraph | Roofline | Code
BLOCKS: tuple[type, ...] = (Answer, Text, Facts, Table, LineChart, HeatMap, Timeline, FlameGraph, Roofline, Code)


def format_cell(cell: Cell, unit: str = "") -> str:
    """A cell as text: few digits, "NaN" and "Inf" for what is not finite, nothing for None."""
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, str):
        return cell
    if not math.isfinite(cell):
        return "NaN" if math.isnan(cell) else "Inf" if cell > 0 else "-Inf"
    if unit == "bytes":
        return format_size(int(cell))
    number = f"{cell:,}" if isinstance(cell, int) else f"{cell:,.4g}" if abs(cell) < 1e4 else f"{cell:,.0f}"
    return f"{number} {unit}" if unit else number


def worst(statuses: list[Status]) -> Status:
    """The worst of some statuses; "ok" if there are none."""
    return max(["ok", *statuses], key=STATUSES.index)
