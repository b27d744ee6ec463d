"""Sections of a report."""

import dataclasses
import re
from dataclasses import dataclass

from torchguard.report._blocks import Answer, Block, Status, worst


@dataclass(frozen=True)
class Section:
    """A part of a report.

    Attributes:
        blocks: what it shows, the answer first.
        sections: its parts. `collapsed` ones are opened by the reader, or by a link to them.
        id: that a link names; made of the title if empty.
    """

    title: str
    blocks: tuple[Block, ...] = ()
    sections: tuple["Section", ...] = ()
    id: str = ""
    collapsed: bool = False

    @property
    def status(self) -> Status:
        """The worst answer in it."""
        own: list[Status] = [one.status for one in self.blocks if isinstance(one, Answer)]
        return worst([*own, *(one.status for one in self.sections)])


def with_ids(sections: tuple[Section, ...], used: set[str] | None = None, below: str = "") -> tuple[Section, ...]:
    """The sections, each with an id of its own, safe in HTML and in links."""
    used = set() if used is None else used
    found = []
    for section in sections:
        words = (
            re.sub(r"[^a-z0-9]+", "-", (section.id or f"{below}{section.title}").lower()).strip("-")[:60] or "section"
        )
        id, number = words, 2
        while id in used:
            id, number = f"{words}-{number}", number + 1
        used.add(id)
        found.append(dataclasses.replace(section, id=id, sections=with_ids(section.sections, used, f"{id}-")))
    return tuple(found)
