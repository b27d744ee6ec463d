"""A report: sections of blocks, and the three forms it is saved in."""

import json
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torchguard._files import write_whole
from torchguard.exceptions import ReportError
from torchguard.report._blocks import BLOCKS, Cell, Status, worst
from torchguard.report._json import MARKER, SCHEMA, Reader, to_data
from torchguard.report._section import Section


@dataclass(frozen=True)
class Report:
    """Sections under a title, as text, JSON or one HTML page.

    Attributes:
        facts: what the report is about: the script, the versions.
        created: when it was made, in ISO 8601; now if empty.

    >>> from torchguard.report import Report, Section, Answer
    >>> print(Report("A run", (Section("Values", (Answer("ok", "No sample went bad."),)),)).to_text().strip())
    A run
    <BLANKLINE>
    Values
    No sample went bad.
    """

    title: str
    sections: tuple[Section, ...] = ()
    facts: tuple[tuple[str, Cell], ...] = ()
    created: str = ""

    def __post_init__(self) -> None:
        if not self.created:
            object.__setattr__(self, "created", datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def status(self) -> Status:
        return worst([one.status for one in self.sections])

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON data, of the schema that docs/report.md describes."""
        return {"marker": MARKER, "schema": SCHEMA, **to_data(self)}

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> "Report":
        """Read what `to_json` returned. Raises ReportError, with the path of the first value that is wrong."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ReportError(f"Report: the text is not JSON: {error}.") from None
        return Report.from_dict(data)

    @staticmethod
    def from_dict(data: Any) -> "Report":
        """Read what `to_dict` returned."""
        if not isinstance(data, dict) or data.get("marker") != MARKER:
            raise ReportError(f"Report: expected an object with marker {MARKER!r}. Pass what to_json returned.")
        if data.get("schema") != SCHEMA:
            raise ReportError(f"Report: schema {data.get('schema')!r:.20}, expected {SCHEMA}. Use that torchguard.")
        kinds = {cls.kind: cls for cls in BLOCKS}  # pyright: ignore[reportAttributeAccessIssue]
        return Reader(kinds).read(data, Report, "report")

    def to_text(self, width: int | None = None) -> str:
        """The report for a terminal of `width` columns, without colours."""
        from torchguard.report._text import to_text

        return to_text(self, width)

    def to_html(self) -> str:
        """The report as one HTML page, which needs nothing else."""
        from torchguard.report._html import page

        return page(self)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the report to a file: HTML, JSON or text, by its suffix. Returns the path.

        The file is replaced as a whole: an interrupted `save` leaves what was there before.
        """
        path = Path(path)
        forms = {".html": self.to_html, ".htm": self.to_html, ".json": self.to_json, ".txt": self.to_text}
        form = forms.get(path.suffix.lower())
        if form is None:
            raise ReportError(f"save: {path.name!r} has to end in one of {', '.join(forms)}.")
        return write_whole(path, form())

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from torchguard.report._text import views

        return iter(views(self))

    def _repr_html_(self) -> str:
        from torchguard.report._html import fragment

        return fragment(self.title, self.sections)


class Shown(ABC):
    """A base class for results: `section` puts one into words, and they show themselves in notebooks and files."""

    @abstractmethod
    def section(self) -> Section:
        """The result as a section of a report."""

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it to a file: HTML, JSON or text, by its suffix."""
        section = self.section()
        return Report(section.title, (section,)).save(path)

    def _repr_html_(self) -> str:
        from torchguard.report._html import fragment

        return fragment("", (self.section(),))
