"""Writing a file as a whole, or not at all."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def write_whole(path: str | os.PathLike[str], text: str) -> Path:
    """Write a text file so that it has the new content or, if writing is interrupted, what it had before."""
    path = Path(path)
    if not path.is_file() and path.exists():  # a device or a pipe, which cannot be replaced
        path.write_text(text, encoding="utf-8")
        return path
    with replaced_whole(path) as new:
        new.write_text(text, encoding="utf-8")
    return path


@contextlib.contextmanager
def replaced_whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path for the new content of a file, which gets it when the block ends. If that fails, the file stays as it is.

    The path has the file's name, in a folder of its own: what the block writes beside it (the weights of a large ONNX
    model) takes its place beside the file.
    """
    path = Path(path)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.", suffix=".partial") as folder:
        new = Path(folder, path.name)
        yield new
        for one in sorted(Path(folder).iterdir(), key=lambda one: one == new):  # the file itself last
            one.replace(path.with_name(one.name))
