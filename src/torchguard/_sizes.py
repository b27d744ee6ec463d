"""Sizes in bytes, as people write them."""

import re

from torchguard.exceptions import ArtifactError

_UNITS = {unit: 1000**i for i, unit in enumerate(("b", "kb", "mb", "gb", "tb"))} | {
    unit: 1024**i for i, unit in enumerate(("", "kib", "mib", "gib", "tib"))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.ASCII)


def bytes_of(size: int | str) -> int:
    """The bytes that `2GiB`, `500 MB` or a number stand for.

    >>> bytes_of("2 KiB")
    2048
    """
    found = _SIZE.fullmatch(str(size).lower())
    if isinstance(size, bool) or found is None or found[2] not in _UNITS:
        raise ArtifactError(f"{size!r} is no size. Write one such as 500MB, 2GiB, or a number of bytes.")
    return int(float(found[1]) * _UNITS[found[2]]) if "." in found[1] else int(found[1]) * _UNITS[found[2]]


def shown_size(size: int) -> str:
    """A size for people, in units of 1024."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
