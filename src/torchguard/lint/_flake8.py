"""The plugin of flake8: `flake8 --select TG`. flake8 itself applies `# noqa`, `--select` and `--ignore`."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchguard.lint._check import check_source
from torchguard.lint._config import settings_for
from torchguard.lint._finding import UNREADABLE


class Plugin:
    """Reports the rules that pyproject.toml switches on for a file."""

    name = "torchguard"
    version = "2.0.0a1"

    def __init__(self, tree: ast.AST, filename: str, lines: Sequence[str]) -> None:
        self.source = "".join(lines)
        self.filename = filename

    def run(self) -> Iterator[tuple[int, int, str, type]]:
        settings = settings_for(Path(self.filename).absolute().parent)
        for finding in check_source(self.source, self.filename, settings):
            if finding.code != UNREADABLE:  # which flake8 reports itself
                yield finding.line, finding.column - 1, f"{finding.code} {finding.message}", type(self)
