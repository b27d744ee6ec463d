"""Reading and removing files of one directory, and nothing outside of it, whoever wrote what is there.

A directory is opened once, without following a link, and its files by plain names relative to that: what is replaced
by a link between a look and a use leads nowhere.
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
    """A text with what could drive a terminal written out; lines and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def in_a_line(text: str, longest: int = 300) -> str:
    line = " ".join(printable(text).split())
    return line if len(line) <= longest else f"{line[:longest]}..."


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of a directory that is no link; what is above it may be."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise NoSuchArtifactError(f"{in_a_line(str(path))} cannot be opened: {error.strerror}.") from None
    try:
        yield fd
    finally:
        os.close(fd)


def open_file(directory: int, name: str, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a plain file in a directory; a link, a pipe or a device is none."""
    # Without blocking, since opening a pipe would wait for a writer.
    fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644, dir_fd=directory)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ArtifactError(f"{in_a_line(name)} is no plain file.")
    return fd


def read(directory: int, name: str, limit: int) -> bytes:
    """The content of a plain file in a directory, if it is not larger than `limit`."""
    if not re.fullmatch(NAME, name.removeprefix(".")):
        raise ArtifactError(f"{in_a_line(repr(name))} is no name of a file in an artifact.")
    try:
        fd = open_file(directory, name)
    except FileNotFoundError:
        raise NoSuchArtifactError(f"{in_a_line(name)} is missing.") from None
    except OSError as error:
        raise ArtifactError(f"{in_a_line(name)} cannot be read: {error.strerror}.") from None
    with os.fdopen(fd, "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ArtifactError(f"{in_a_line(name)} is larger than {limit} bytes, more than is read.")
    return content


def parsed(content: bytes, name: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{in_a_line(name)} is no JSON that can be read: {in_a_line(str(error), 100)}.") from None


def size_of(directory: int) -> int:
    """The bytes of the files in a directory; links and what lies in further directories do not count."""
    total = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                info = entry.stat(follow_symlinks=False)
                total += info.st_size if stat.S_ISREG(info.st_mode) else 0
    return total
