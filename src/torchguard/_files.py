"""Writing a file as a whole."""

import os
from pathlib import Path


def write_whole(path: str | os.PathLike[str], text: str) -> Path:
    """Write a text file so that it has the new content or, if writing is interrupted, what it had before."""
    path = Path(path)
    if not path.is_file() and path.exists():  # a device or a pipe, which cannot be replaced
        path.write_text(text, encoding="utf-8")
        return path
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return path
