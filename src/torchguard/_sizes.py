"""Sizes in bytes as people write them: `2GiB`, `500 MB`, `4096`."""

import re

_UNITS = {unit: 1000**i for i, unit in enumerate(("b", "kb", "mb", "gb", "tb"))}
_UNITS |= {unit: 1024**i for i, unit in enumerate(("", "kib", "mib", "gib", "tib"))}
_UNITS |= {"k": 1024, "m": 1024**2, "g": 1024**3}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.ASCII)


def parse_size(size: int | str) -> int:
    """The number of bytes that `2GiB`, `500 MB` or a number stands for. Raises ValueError for anything else.

    Units are those of 1000 (`kB`, `MB`, ...) and of 1024 (`KiB`, `MiB`, ..., or `K`, `M`, `G`), in any case.

    >>> parse_size("2 KiB")
    2048
    """
    found = _SIZE.fullmatch(str(size).lower())
    if isinstance(size, bool) or found is None or found[2] not in _UNITS:
        raise ValueError(f"{size!r} is not a size. Write one such as 500MB, 2GiB, or a number of bytes.")
    return int(float(found[1]) * _UNITS[found[2]]) if "." in found[1] else int(found[1]) * _UNITS[found[2]]


def format_size(size: int) -> str:
    """A size in the largest fitting unit of 1024: `1.5 MiB`."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
