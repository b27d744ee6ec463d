"""What is written, and where: results on stdout, all else on stderr, and nothing that a terminal would obey.

How the command ends: codes that scripts can rely on, and errors that are one sentence.

Ages as people write them.
"""

import io
import json
import os
import re
import sys
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchguard.exceptions import TorchGuardError


class ExitCode(IntEnum):
    """What the command ends with. `run` ends as the script did, and with FLAGGED where `--strict` asks for it."""

    FINE = 0
    FOUND = 1  # something differs, breaks a rule, is broken, or failed
    USAGE = 2
    NOTHING = 3  # no such artifact, or none at all
    FLAGGED = 4


class CommandError(TorchGuardError, ValueError):
    """Something was asked for that cannot be done; the message says it in a sentence."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.FOUND) -> None:
        super().__init__(message)
        self.exit_code = exit_code


_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_OLDEST = timedelta(days=36_500)  # more than any file can be, and what a date can still be


def age_of(text: str) -> timedelta:
    """`30m`, `12h`, `7d` or `2w`."""
    found = _AGE.fullmatch(text.strip().lower())
    if found is None:
        raise CommandError(f"{text!r} is no age. Give one such as 30m, 12h, 7d or 2w.", ExitCode.USAGE)
    seconds = float(found[1]) * _SECONDS[found[2]]
    return timedelta(seconds=seconds) if seconds < _OLDEST.total_seconds() else _OLDEST


def ago(created: datetime) -> str:
    """How long ago that was, in the largest unit that fits."""
    seconds = max(0.0, (datetime.now(UTC) - created).total_seconds())
    unit = next((u for u in ("w", "d", "h", "m") if seconds >= 2 * _SECONDS[u]), "s")
    return f"{seconds // _SECONDS[unit]:.0f} {unit}"


# Wide enough that nothing is cut or wrapped where a program reads it.
_UNBOUNDED = 10_000
# Control characters, and marks that turn the direction of text around. A tab and a newline are kept.
_OBEYED = [*range(0x20), *range(0x7F, 0xA0), *range(0x200E, 0x2010), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_SHOWN = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _OBEYED if code not in (9, 10)}


def safe(text: object) -> str:
    """Text from a file or a program, with control characters as `\\x1b`."""
    return str(text).translate(_SHOWN)


def plain(text: object, style: str = "") -> Text:
    """Text as it is: brackets are no markup."""
    return Text(safe(text), style=style)


def bytes_shown(size: int) -> str:
    from torchguard._sizes import format_size  # not at import: its package loads torch

    return format_size(size)


def count_shown(number: int, what: str) -> str:
    """`1 graph`, `2 graphs`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def console(file: IO[str] | None = None) -> Console:
    """Where results go; in colour on a terminal, unless NO_COLOR says otherwise."""
    stream = file or sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # a name may hold what the terminal has no letters for
    is_bounded = stream.isatty() or "COLUMNS" in os.environ
    return Console(file=stream, highlight=False, markup=False, emoji=False, width=None if is_bounded else _UNBOUNDED)


def stderr() -> Console:
    return console(sys.stderr)


def say(text: object, style: str = "") -> None:
    """A word to the user, beside the result."""
    stderr().print(plain(text, style), soft_wrap=True)


def emit_json(value: Any) -> None:
    """The result, as JSON, alone on stdout."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


def table(
    columns: Iterable[str], rows: Iterable[Iterable[object]], right: Iterable[str] = (), whole: Iterable[str] = ()
) -> Table:
    """A table of plain text. Columns named in `right` are numbers, those in `whole` are never broken."""
    numbers, unbroken = set(right), set(whole)
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in columns:
        justify = "right" if name in numbers else "left"
        made.add_column(name, justify=justify, overflow="fold", no_wrap=name in unbroken)
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else plain(cell) for cell in row))
    return made


def in_a_line(text: object, longest: int = 300) -> str:
    """Words in one line, and not too many."""
    line = " ".join(safe(text).split())
    return line if len(line) <= longest else f"{line[:longest]}..."
