"""Memory of a graph over its nodes, as a chart."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding

from torchguard.cli.terminal import bytes_shown, plain, table
from torchguard.cli.views.places import place

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_HEIGHT, _WIDTH = 8, 60
_LARGEST = 10


def memory(plan: Mapping[str, Any], graph: str, encoding: str = "utf-8") -> Iterator[RenderableType]:
    """The peak, the curve, and what is alive at the peak. `plan` is what `MemoryPlan.to_dict` gives."""
    saved = f", {bytes_shown(plan['saved'])} saved for backward" if plan["saved"] else ""
    yield plain(f"{graph}: peak {bytes_shown(plan['peak'])} at {plan['peak_node']}{saved}", "bold")
    lines = chart(list(plan["curve"].values()), ascii_only="utf" not in encoding.lower())
    yield Padding(plain("\n".join(lines)), (0, 0, 0, 2), expand=False)
    alive = plan["at_peak"][:_LARGEST]
    rows = [(bytes_shown(one["bytes"]), one["name"], _where(one["place"])) for one in alive]
    yield table(("ALIVE", "TENSOR", "WHERE"), rows, right=("ALIVE",))
    if rest := plan["at_peak"][_LARGEST:]:
        yield plain(f"... and {len(rest)} more, {bytes_shown(sum(one['bytes'] for one in rest))}", "dim")
    if plan["unknown"]:
        yield plain(f"Not counted, of unknown size: {', '.join(plan['unknown'])}", "yellow")


def chart(curve: Sequence[int], width: int = _WIDTH, height: int = _HEIGHT, ascii_only: bool = False) -> list[str]:
    """Rows of a bar chart, the highest first; each column is the most that is alive in its share of the curve."""
    if not curve or max(curve) <= 0:
        return ["(nothing)"]
    columns = min(width, len(curve))
    ends = [len(curve) * i // columns for i in range(columns + 1)]
    heights = [max(curve[a:b]) / max(curve) * height for a, b in itertools.pairwise(ends)]
    rows = []
    for row in range(height - 1, -1, -1):
        eighths = (round(min(max(tall - row, 0.0), 1.0) * 8) for tall in heights)
        cells = "".join(("#" if part >= 4 else " ") if ascii_only else _EIGHTHS[part] for part in eighths)
        label = bytes_shown(max(curve)) if row == height - 1 else "0 B" if row == 0 else ""
        rows.append(f"{label:>10} |{cells}".rstrip())
    return rows


def _where(found: Mapping[str, Any] | None) -> str:
    return place(found["file"], found["line"]) if found else ""
