"""Reports in a terminal.

Text from files and programs may hold escape sequences. Everything is printed through `plain`, which replaces control
characters, so that no artifact and no script can move the cursor or recolour the terminal.
"""

import functools
import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text as RichText

from torchguard.report._blocks import (
    Answer,
    Block,
    Code,
    Facts,
    HeatMap,
    LineChart,
    Status,
    Table,
    Text,
    Timeline,
    format_cell,
)
from torchguard.report._section import Section
from torchguard.report._tables import table_of

if TYPE_CHECKING:
    from torchguard.report._report import Report

# Control characters, and characters that change the direction of text. Tab and newline are allowed.
_UNSAFE = [*range(0x20), *range(0x7F, 0xA0), *range(0x200E, 0x2010), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_ESCAPES = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _UNSAFE if code not in (9, 10)}
_STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "unknown": "yellow", "bad": "bold red"}
_ROWS = 12  # of a table
_SPARK = 40  # columns of a row of a heat map
_EIGHTHS = " ▁▂▃▄▅▆▇█"


def safe(text: object) -> str:
    """Text from a file or a program, with control characters escaped, as in `\\x1b`."""
    return str(text).translate(_ESCAPES)


def plain(text: object, style: str = "") -> RichText:
    """Safe text without markup: brackets stay brackets."""
    return RichText(safe(text), style=style)


def to_text(report: "Report", width: int | None = None) -> str:
    """The report without colours, for a terminal of `width` columns; 100 by default."""
    file = io.StringIO()
    console = Console(file=file, width=width or 100, highlight=False, markup=False, emoji=False, color_system=None)
    console.print(*views(report), sep="\n")
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def views(report: "Report") -> Iterator[RenderableType]:
    """The report as rich shows it."""
    yield plain(report.title, "bold reverse")
    if report.facts:
        yield _view(Facts(report.facts))
    for section in report.sections:
        yield from section_views(section)


def section_views(section: Section, depth: int = 0) -> Iterator[RenderableType]:
    """A section as rich shows it. Collapsed parts are named only: the page has them."""
    if not depth:
        yield plain("")
    yield plain(section.title, "bold" if depth else "bold underline")
    yield from map(_view, section.blocks)
    hidden = [one for one in section.sections if one.collapsed]
    for one in section.sections:
        if not one.collapsed:
            yield from section_views(one, depth + 1)
    if hidden:
        more = f" and {len(hidden) - 3} more" if len(hidden) > 3 else ""
        yield plain(f"In the HTML page: {', '.join(one.title for one in hidden[:3])}{more}", "dim")


@functools.singledispatch
def _view(block: Block) -> RenderableType:
    """A block as rich shows it: by default, the table behind it."""
    table = table_of(block)
    return plain("") if table is None else _table(table)


@_view.register
def _(block: Answer) -> RenderableType:
    return plain(block.text, _STYLES[block.status])


@_view.register
def _(block: Text) -> RenderableType:
    return plain(block.text)


@_view.register
def _(block: Facts) -> RenderableType:
    return plain("\n".join(f"{name}: {format_cell(value)}" for name, value in block.items))


@_view.register
def _(block: Code) -> RenderableType:
    names = ", ".join(pane.title for pane in block.panes)
    return plain(f"{block.title}: {names}, side by side in the HTML page", "dim")


@_view.register(Table)
def _table(block: Table) -> RenderableType:
    made = RichTable(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0), title_justify="left")
    made.title = plain(block.title, "italic") if block.title else None
    for i, name in enumerate(block.columns):
        is_number = any(isinstance(row[i], (int, float)) for row in block.rows)
        made.add_column(plain(name), justify="right" if is_number else "left", overflow="fold")
    for row in block.rows[:_ROWS]:
        made.add_row(*(plain(format_cell(cell)) for cell in row))
    left_out = (block.total or len(block.rows)) - min(_ROWS, len(block.rows))
    if left_out > 0:
        made.caption, made.caption_justify = plain(f"... and {left_out} more", "dim"), "left"
    return made


@_view.register
def _(block: LineChart) -> RenderableType:
    parts = [plain(block.title, "italic")]
    for series in block.series:
        values = [one or 0 for one in series.values]
        rows = "\n".join(bars(values, label=lambda one: format_cell(one, block.unit)))
        parts.append(plain(f"{series.name}\n{rows}" if len(block.series) > 1 else rows))
    return RichText("\n").join(parts)


@_view.register
def _(block: HeatMap) -> RenderableType:
    table = table_of(block)
    assert table is not None
    if not block.columns:
        return _table(table)
    width = min(_SPARK, block.columns)
    binned = [[0] * width for _ in block.rows]
    for row, column, count in block.cells:
        binned[row][column * width // block.columns] += count
    most = max(map(max, binned), default=0) or 1
    rows = tuple(
        (*row, "".join(_EIGHTHS[-(-8 * count // most)] for count in counts))
        for row, counts in zip(table.rows, binned, strict=True)
    )
    over = f"{block.column_label}s {block.first} to {block.columns - 1}"
    return _table(Table((*table.columns, over), rows, block.title))


@_view.register
def _(block: Timeline) -> RenderableType:
    table = table_of(block)
    assert table is not None
    return _table(Table(table.columns[:-1], tuple(row[:-1] for row in table.rows), table.title))  # without details


def bars(
    values: Sequence[int] | Sequence[float],
    width: int = 60,
    height: int = 8,
    ascii_only: bool = False,
    label: Callable[[Any], str] = format_cell,
) -> list[str]:
    """The rows of a bar chart, highest first. Each column is the maximum over its part of the values."""
    if not values or max(values) <= 0:
        return ["(nothing)"]
    columns = min(width, len(values))
    ends = [len(values) * i // columns for i in range(columns + 1)]
    heights = [max(values[a:b]) / max(values) * height for a, b in itertools.pairwise(ends)]
    rows = []
    for row in range(height - 1, -1, -1):
        eighths = (round(min(max(tall - row, 0.0), 1.0) * 8) for tall in heights)
        cells = "".join(("#" if part >= 4 else " ") if ascii_only else _EIGHTHS[part] for part in eighths)
        at = label(max(values)) if row == height - 1 else label(0) if row == 0 else ""
        rows.append(f"{at:>10} |{cells}".rstrip())
    return rows


def indent(text: str | RichText, style: str = "", by: int = 2) -> RenderableType:
    """Text indented by some columns, also where it wraps."""
    return Padding(text if isinstance(text, RichText) else plain(text, style), (0, 0, 0, by), expand=False)
