"""Writing to the terminal: results go to stdout, messages to stderr; and the exit codes and errors of the command.

Everything is printed through `plain`, as text from files and programs may hold escape sequences.
"""

import io
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchguard.exceptions import TorchGuardError
from torchguard.report._text import indent, plain, safe

__all__ = ["indent", "plain", "safe"]  # for the verbs; the other names are defined here


class ExitCode(IntEnum):
    """The command's exit codes. `run` exits with the script's, or with STRICT if `--strict` asks for it."""

    OK = 0
    FAILURE = 1  # artifacts differ, a rule is broken, something needed is missing, or the verb failed
    USAGE = 2
    NOT_FOUND = 3  # no artifact, or none with this id
    STRICT = 4
    INTERRUPTED = 130  # by Ctrl-C, as shells have it


class CommandError(TorchGuardError, ValueError):
    """The command cannot do what was asked. The message is one sentence for the user."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.FAILURE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


# Without a terminal a program reads the output: this width never cuts or wraps a line.
_UNBOUNDED = 10_000
WATCHED_FORWARD = "forward_of_"
_NARROW = 70  # an id of an artifact has some 35 characters


def one_line(text: object, longest: int = 300) -> str:
    """Safe text in one line, cut after `longest` characters."""
    line = " ".join(safe(text).split())
    return line if len(line) <= longest else f"{line[:longest]}..."


def truncation(number: int, limit: int) -> list[Text]:
    """The line that says how many of `number` items are left out beyond `limit`, if any are."""
    return [plain(f"... and {number - limit} more", "dim")] if number > limit else []


def table(
    columns: Iterable[str], rows: Iterable[Iterable[object]], right: Iterable[str] = (), whole: Iterable[str] = ()
) -> Table:
    """A table of plain text. Columns in `right` are aligned to the right, columns in `whole` are never wrapped."""
    numbers, unbroken = set(right), set(whole)
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in columns:
        justify = "right" if name in numbers else "left"
        made.add_column(name, justify=justify, overflow="fold", no_wrap=name in unbroken)
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else plain(cell) for cell in row))
    return made


def console(file: IO[str] | None = None, width: int | None = None) -> Console:
    """A console for `file`, or for stdout; in colour on a terminal, unless NO_COLOR is set.

    A table that is wider than a terminal is cut there; without one, nothing is. Text is wrapped at `width`, if given.
    """
    stream = file or sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # the terminal's encoding may lack a character of a name
    width = width if width is not None or stream.isatty() else _UNBOUNDED
    return Console(file=stream, highlight=False, markup=False, emoji=False, width=width)


def narrow_width() -> int | None:
    """The columns of the output, of a terminal or as COLUMNS says, if they are too few for a table of artifacts."""
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() or "COLUMNS" in os.environ else _NARROW
    return columns if columns < _NARROW else None


def stderr() -> Console:
    return console(sys.stderr)


def print_message(text: object, style: str = "") -> None:
    """Print to stderr, unwrapped: a message beside the result."""
    stderr().print(plain(text, style), soft_wrap=True)


def print_json(value: Any) -> None:
    """Print the result to stdout as JSON."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


def model_name(function: str) -> str:
    """`GPT` for `forward_of_GPT`, as the compiled function of a watched model is called."""
    return function.removeprefix(WATCHED_FORWARD)


def plural(number: int, noun: str) -> str:
    """`1 graph`, `2 graphs`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


_START = os.getcwd()  # where the command was started: the script of `run` may change the directory


_INSTALLED = re.compile(r"^.*[/\\\\](?:site|dist)-packages[/\\\\]")


def source_line(file: str, line: int) -> str:
    """`src/model.py:12`, relative to the current directory or, of an installed package, to where it is installed."""
    if _INSTALLED.match(file):
        return f"{_INSTALLED.sub('', file)}:{line}"
    below = os.path.relpath(file, _START) if os.path.isabs(file) else file
    return f"{file if below.startswith('..') else below}:{line}"


_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_OLDEST = timedelta(days=36_500)  # older than any file, and small enough to subtract from a date


def parse_age(text: str) -> timedelta:
    """Parse `30m`, `12h`, `7d` or `2w`."""
    found = _AGE.fullmatch(text.strip().lower())
    if found is None:
        raise CommandError(f"{text!r} is not an age. Write one such as 30m, 12h, 7d or 2w.", ExitCode.USAGE)
    seconds = float(found[1]) * _SECONDS[found[2]]
    return timedelta(seconds=seconds) if seconds < _OLDEST.total_seconds() else _OLDEST


def format_age(created: datetime) -> str:
    """The time since `created`, in the largest unit of which it has at least two."""
    seconds = max(0.0, (datetime.now(UTC) - created).total_seconds())
    unit = next((u for u in ("w", "d", "h", "m") if seconds >= 2 * _SECONDS[u]), "s")
    return f"{seconds // _SECONDS[unit]:.0f} {unit}"
