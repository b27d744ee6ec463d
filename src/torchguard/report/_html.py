"""Reports as one HTML page that needs nothing else: styles, scripts and data are in it.

Names of modules, source lines and messages come from programs and files, and must never run or load anything:

- Jinja escapes all text, and data for the charts stands in blocks of JSON, whose `<`, `>` and `&` are escaped.
- The page forbids itself the network and all scripts but its two, which it names by their hashes (its content-security
  policy). So even a hole in the first rule would run nothing.
- The script builds elements with `textContent`, also in tooltips.

In a notebook a page of scripts has no place: there, `fragment` shows the tables behind the charts instead.
"""

import base64
import dataclasses
import functools
import hashlib
from array import array
from collections.abc import Iterable
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from torchguard.report._blocks import Block, HeatMap, LineChart, Series, Table, format_cell
from torchguard.report._json import to_data
from torchguard.report._section import Section, with_ids
from torchguard.report._tables import table_of

if TYPE_CHECKING:
    from torchguard.report._report import Report

_CHARTS = ("line", "heatmap", "timeline", "flame", "roofline")
# A table with more rows than this gets a filter, sorting and pages, and its rows as data.
LONG_TABLE = 15
_SHORT_CELL = 24  # characters that are not broken over lines; the script has the same number
_STATIC_ROWS = 50  # rows that stand in the page itself; the script shows the others
_MOST_CELLS = 250_000  # of a heat map; with more, columns are joined
_MOST_POINTS = 20_000  # of a curve
_MOST_LINES = 3_000  # of a listing
_WIDTHS = ((8, "B"), (16, "H"), (32, "I"))


def page(report: "Report") -> str:
    """A report as an HTML page."""
    report = dataclasses.replace(report, sections=with_ids(report.sections))
    script = _asset("page.js")
    has_charts = any(block.kind in _CHARTS for section in report.sections for block in _blocks(section))
    library = _asset("echarts.min.js") if has_charts else ""
    hashes = " ".join(f"'sha256-{_hash(one)}'" for one in (library, script) if one)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return _template("page.html").render(
        report=report, policy=policy, style=_asset("page.css"), library=library, script=script
    )


def fragment(title: str, sections: tuple[Section, ...]) -> str:
    """Sections for a notebook: no script, and tables in place of charts."""
    shown = {"title": title, "sections": with_ids(sections), "style": _asset("page.css")}
    return _template("fragment.html").render(**shown)


def _blocks(section: Section) -> Iterable[Block]:
    yield from section.blocks
    for one in section.sections:
        yield from _blocks(one)


@functools.cache
def _asset(name: str) -> str:
    return (files("torchguard.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


@functools.cache
def _template(name: str) -> Any:
    from jinja2 import DictLoader, Environment, StrictUndefined

    names = ("page.html", "fragment.html", "blocks.html")
    loader = DictLoader({one: _asset(f"{one}.jinja") for one in names})
    made = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=loader)
    made.filters["cell"] = format_cell
    made.globals.update(
        charts=_CHARTS, chart_data=_chart_data, table_of=table_of, table_data=_table_data, numbers=_numbers,
        static_rows=_STATIC_ROWS, short_cell=_SHORT_CELL, long_table=LONG_TABLE, most_lines=_MOST_LINES,
    )  # fmt: skip
    return made.get_template(name)


def _numbers(table: Table) -> list[bool]:
    """Whether each column has numbers, which are aligned to the right."""
    cells = ((row[i] for row in table.rows) for i in range(len(table.columns)))
    return [any(isinstance(one, (int, float)) and not isinstance(one, bool) for one in column) for column in cells]


def _table_data(table: Table) -> dict[str, Any]:
    """A table as the script needs it: for each column with numbers also the raw cells, to sort by."""
    text = [[format_cell(cell) for cell in row] for row in table.rows]
    raw = [
        [to_data(row[i]) for row in table.rows] if is_number else None for i, is_number in enumerate(_numbers(table))
    ]
    return {"rows": text, "raw": raw, "links": table.links, "total": table.total or len(table.rows)}


def _chart_data(block: Block) -> dict[str, Any]:
    """A chart as the script needs it."""
    if isinstance(block, HeatMap):
        return _heat_map_data(block)
    if isinstance(block, LineChart) and len(block.x) > _MOST_POINTS:
        block = _thinned(block)
    return to_data(block)


def _thinned(block: LineChart) -> LineChart:
    """A curve of fewer points: the largest of each part, at its place."""
    step = -(-len(block.x) // _MOST_POINTS)
    first = block.series[0].values
    starts = range(0, len(block.x), step)
    kept = [max(range(i, min(i + step, len(first))), key=lambda at: first[at] or 0) for i in starts]
    return dataclasses.replace(
        block,
        x=tuple(block.x[at] for at in kept),
        names=tuple(block.names[at] for at in kept) if block.names else (),
        series=tuple(Series(one.name, tuple(one.values[at] for at in kept)) for one in block.series),
    )


def _heat_map_data(block: HeatMap) -> dict[str, Any]:
    """The cells sorted by row, as three arrays of numbers; columns are joined where there are too many cells."""
    join = 1
    if len(block.cells) > _MOST_CELLS:
        join = -(-block.columns // max(1, _MOST_CELLS // max(1, len(block.rows))))
    counts: dict[int, int] = {}
    width = -(-block.columns // join) or 1
    for row, column, count in block.cells:
        at = row * width + column // join
        counts[at] = counts.get(at, 0) + count
    starts, columns, values = array("I", [0] * (len(block.rows) + 1)), array("I"), array("I")
    for at in sorted(counts):
        starts[at // width + 1] += 1
        columns.append(at % width)
        values.append(min(counts[at], 2**32 - 1))
    for row in range(len(block.rows)):
        starts[row + 1] += starts[row]
    return {
        "kind": block.kind,
        "title": block.title,
        "noun": block.noun or "count",
        "column_label": block.column_label,
        "rows": block.rows,
        "columns": block.columns,
        "first": block.first,
        "join": join,
        "starts": _encoded(starts),
        "at": _encoded(columns),
        "values": _encoded(values),
    }


def _encoded(numbers: "array[int]") -> dict[str, Any]:
    """Numbers in the fewest bits that hold them all: the size of the data is most of the time a page takes to open."""
    bits, code = next((bits, code) for bits, code in _WIDTHS if max(numbers, default=0) < 2**bits)
    return {"bits": bits, "data": base64.b64encode(array(code, numbers).tobytes()).decode()}
