"""What the linter reports."""

from dataclasses import dataclass
from typing import Any

UNREADABLE = "TG001"  # a file that cannot be checked; not a rule, and always on


@dataclass(frozen=True, order=True, slots=True)
class Finding:
    """One finding: where, which rule, and what to do.

    Lines and columns count from 1.

    >>> from torchguard import lint
    >>> finding, = lint.check_source("import torch\\nact = torch.nn.ReLU(inplace=True)\\n")
    >>> finding.code, finding.line, finding.column
    ('TG122', 2, 7)
    """

    file: str
    line: int
    column: int
    code: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.code} {self.message}"

    def to_data(self) -> dict[str, Any]:
        """The finding as JSON data."""
        return {
            "file": self.file,
            "line": self.line,
            "column": self.column,
            "code": self.code,
            "message": self.message,
        }
