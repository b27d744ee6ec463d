"""What the doctor found."""

from rich.console import RenderableType
from rich.padding import Padding

from torchguard.cli.examination import Finding
from torchguard.cli.terminal import plain

_WIDTH = 20


def finding(one: Finding) -> list[RenderableType]:
    mark, style = ("ok", "green") if one.is_fine else ("broken", "bold red") if one.needed else ("missing", "yellow")
    line = plain(f"{mark:8}", style).append_text(plain(f"{one.name:{_WIDTH}} {one.found}", "not bold default"))
    remedy = [] if one.is_fine or not one.remedy else [Padding(plain(one.remedy, "dim"), (0, 0, 0, 8), expand=False)]
    return [line, *remedy]
