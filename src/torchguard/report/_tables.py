"""The table behind each chart: what a terminal, a screen reader and a page without scripts show."""

import functools
from collections.abc import Iterator

from torchguard.report._blocks import (
    Block,
    FlameGraph,
    Frame,
    HeatMap,
    LineChart,
    Roofline,
    Table,
    Timeline,
    format_cell,
)

_MOST = 2_000  # rows of the table of a curve


@functools.singledispatch
def table_of(block: Block) -> Table | None:
    """The data of a chart as a table; None for blocks that are no charts."""
    return None


@table_of.register
def _(block: LineChart) -> Table:
    names = ("at",) if block.names else ()
    rows = (
        (
            x,
            *(block.names[i : i + 1] if names else ()),
            *(format_cell(one.values[i], block.unit) for one in block.series),
        )
        for i, x in enumerate(block.x[:_MOST])
    )
    columns = (block.x_label, *names, *(one.name for one in block.series))
    total = len(block.x) if len(block.x) > _MOST else None
    return Table(columns, tuple(rows), block.title, total=total)


@table_of.register
def _(block: HeatMap) -> Table:
    counts = [[0, 0, block.columns, -1] for _ in block.rows]
    for row, column, count in block.cells:
        found = counts[row]
        found[0] += count
        found[1] += 1
        found[2], found[3] = min(found[2], column), max(found[3], column)
    rows = (
        (name, total, columns, first if total else None, last if total else None)
        for name, (total, columns, first, last) in zip(block.rows, counts, strict=True)
    )
    label = block.column_label
    columns = (block.row_label, block.noun or "count", f"{label}s with any", f"first {label}", f"last {label}")
    return Table(columns, tuple(rows), block.title)


@table_of.register
def _(block: Timeline) -> Table:
    spans = sorted(block.spans, key=lambda span: span.start)
    rows = (
        (f"{one.start:.2f} s", _duration(one.seconds), one.lane, one.label, "\n".join(one.details)) for one in spans
    )
    return Table(("start", "took", "what", "name", "details"), tuple(rows), block.title)


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds else ""


@table_of.register
def _(block: FlameGraph) -> Table:
    rows = ((f"{'  ' * depth}{one.name}", one.value, own) for depth, one, own in _frames(block.root, 0))
    return Table(("source", f"{block.unit} with all below", f"{block.unit} alone"), tuple(rows), block.title)


def _frames(frame: Frame, depth: int) -> Iterator[tuple[int, Frame, float]]:
    yield depth, frame, max(0.0, frame.value - sum(child.value for child in frame.children))
    for child in sorted(frame.children, key=lambda one: -one.value):
        yield from _frames(child, depth + 1)


@table_of.register
def _(block: Roofline) -> Table:
    points = sorted(block.points, key=lambda point: -block.seconds(point))
    rows = (
        (
            one.name,
            one.flops,
            format_cell(one.bytes, "bytes"),
            one.flops / one.bytes if one.bytes else None,
            1e6 * block.seconds(one),
            block.bound(one),
            one.where,
        )
        for one in points
    )
    columns = ("op", "FLOP", "moved", "FLOP/byte", "least us", "limited by", "where")
    return Table(columns, tuple(rows), block.title)
