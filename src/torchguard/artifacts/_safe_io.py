"""Reading the files of one directory, and nothing outside it, also where its content is hostile.

A path that is checked and then opened can be replaced by a symbolic link in between. So a directory is opened once,
without following links, and its files are opened by plain names relative to that descriptor, again without following
links.
"""

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchguard.artifacts._schema import NAME
from torchguard.exceptions import ArtifactError, NoSuchArtifactError

JSON_LIMIT = 64 << 20
TEXT_LIMIT = 256 << 20


def printable(text: str) -> str:
    """Text with its control characters escaped, which could drive a terminal; newlines and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def single_line(text: str, longest: int = 300) -> str:
    """Text for a message: printable, on one line, and cut to a length."""
    line = " ".join(printable(text).split())
    return line if len(line) <= longest else f"{line[:longest]}..."


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of a directory that is not a symbolic link; directories above it may be links."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise NoSuchArtifactError(f"{single_line(str(path))} cannot be opened: {error.strerror}.") from None
    try:
        yield fd
    finally:
        os.close(fd)


def open_file(directory: int, name: str, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file in a directory. A link, a pipe or a device is an error."""
    # O_NONBLOCK, since opening a pipe would wait for a writer.
    fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644, dir_fd=directory)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ArtifactError(f"{single_line(name)} is not a regular file.")
    return fd


def read_file(directory: int, name: str, limit: int) -> bytes:
    """The content of a regular file in a directory, if it is not larger than `limit` bytes."""
    if not re.fullmatch(NAME, name.removeprefix(".")):
        raise ArtifactError(f"{single_line(repr(name))} is not a name that a file of an artifact can have.")
    try:
        fd = open_file(directory, name)
    except FileNotFoundError:
        raise NoSuchArtifactError(f"{single_line(name)} is missing.") from None
    except OSError as error:
        raise ArtifactError(f"{single_line(name)} cannot be read: {error.strerror}.") from None
    with os.fdopen(fd, "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ArtifactError(f"{single_line(name)} is larger than the limit of {limit} bytes.")
    return content


def parse_json(content: bytes, name: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{single_line(name)} is not valid JSON: {single_line(str(error), 100)}.") from None


def size_of(directory: int) -> int:
    """The total bytes of the regular files in a directory, without subdirectories."""
    total = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # removed in the meantime
                info = entry.stat(follow_symlinks=False)
                total += info.st_size if stat.S_ISREG(info.st_mode) else 0
    return total
