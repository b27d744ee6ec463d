"""Ages as people write them."""

import re
from datetime import UTC, datetime, timedelta

from torchguard.cli.exits import CommandError, ExitCode

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
