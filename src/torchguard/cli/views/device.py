"""What of a model a device can run, and what breaks its rules."""

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.padding import Padding

from torchguard.cli.terminal import bytes_shown, count_shown, plain, table
from torchguard.cli.views.places import place

if TYPE_CHECKING:
    from torchguard.device import DeviceReport, Violation

_SHOWN, _COUNTED = 30, 10


def facts(found: "DeviceReport") -> dict[str, Any]:
    """The report as JSON can hold it."""
    told = found.to_json()
    return json.loads(told) if isinstance(told, str) else told


def sizes(at_hand: Mapping[str, int]) -> Iterator[RenderableType]:
    """The numbers that stand for symbols."""
    if at_hand:
        yield plain(f"at sizes {', '.join(f'{name}={size}' for name, size in at_hand.items())}", "bold")


def report(found: "DeviceReport", limit: int = _SHOWN) -> Iterator[RenderableType]:
    """Coverage, then violations by rule, op and line, each with what to do about it."""
    style = "bold red" if found.violations else "bold green"
    names = ", ".join(dict.fromkeys(one.device.name for one in found.graphs))
    head = f"{count_shown(len(found.graphs), 'graph')} on {names}: {found.coverage}"
    yield plain(f"{head}; {count_shown(len(found.violations), 'violation')}", style)
    yield plain(
        f"peak memory {bytes_shown(found.peak_memory)}, {bytes_shown(found.transfer_bytes)} to move for fallbacks"
    )
    for title, counted in (("RULE", found.by_rule()), ("OP", found.by_op()), ("LINE", found.by_line())):
        if counted:
            yield table((title, "NODES"), list(counted.items())[:_COUNTED], right=("NODES",))
    for one in found.violations[:limit]:
        yield from violation(one)
    if len(found.violations) > limit:
        yield plain(f"... and {len(found.violations) - limit} more", "dim")


def violation(one: "Violation") -> Iterator[RenderableType]:
    from torchguard.device.violations import some

    times = f" [{len(one.nodes)} times]" if len(one.nodes) > 1 else ""
    what = f" ({some(one.tensors)})" if one.tensors else ""
    line = plain(f"{one.graph}: {one.op}: {one.message}{what}{times}", "default")
    yield plain(f"{one.code} ", "red").append_text(line)
    if one.condition:
        yield _under(f"needs {one.condition}")
    if one.place:
        yield _under(f"{place(one.place.file, one.place.line)}  {one.place.text}", "dim")
    elif one.modules:
        yield _under(f"in module {some(one.modules)}", "dim")
    if one.remedy:
        yield _under(one.remedy, "green")


def _under(text: str, style: str = "") -> RenderableType:
    return Padding(plain(text, style), (0, 0, 0, 2), expand=False)
