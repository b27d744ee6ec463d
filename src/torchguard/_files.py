"""Writing a file as a whole, or not at all."""

import contextlib
import os
from collections.abc import Iterator
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


@contextlib.contextmanager
def removed_on_failure(path: str | os.PathLike[str]) -> Iterator[None]:
    """Remove the file if the block that writes it raises or is interrupted: half a file looks like one."""
    try:
        yield
    except BaseException:
        Path(path).unlink(missing_ok=True)
        raise
