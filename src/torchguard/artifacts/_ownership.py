"""The ownership file: a hidden file that marks a directory as torchguard's and lists every file written there.

The process that writes the directory holds a lock on this file, which the system releases when the process ends. A name
is listed before its file is created, so everything that a killed process left behind can be removed, and nothing else.
"""

import contextlib
import errno
import fcntl
import os
import re
import time
from collections.abc import Iterator

from torchguard.artifacts._safe_io import open_file, read_file
from torchguard.artifacts._schema import MARKER, NAME
from torchguard.exceptions import ArtifactError

FILE = ".torchguard"
_LIMIT = 4 << 20
_TRIES, _PAUSE = 50, 0.01  # `is_held` holds the lock for an instant, so a failed attempt is repeated


def create(directory: int) -> int:
    """Create the ownership file of a new directory. The lock is held until the returned descriptor is closed."""
    fd = open_file(directory, FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND)
    try:
        _lock(fd)
        _write(fd, f"{MARKER}\n{os.getpid()}")
    except BaseException:
        os.close(fd)
        raise
    return fd


def add_name(fd: int, name: str) -> None:
    """List a file that is about to be created."""
    _write(fd, f"\n{name}")  # the newline first: a name that a full disk cut short does not run into the next one


def _write(fd: int, text: str) -> None:
    if os.write(fd, text.encode()) < len(text.encode()):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def names_in(directory: int) -> tuple[str, ...] | None:
    """The names of all files that torchguard wrote into a directory; None if the directory is not torchguard's."""
    try:
        text = read_file(directory, FILE, _LIMIT).decode("utf-8", "replace")
    except ArtifactError:
        return None
    if MARKER.startswith(text):  # cut short: no file was created after it
        return ()
    marker, *names = text.split("\n")
    return tuple(name for name in names if re.fullmatch(NAME, name)) if marker == MARKER else None


def is_held(directory: int, if_unknown: bool) -> bool:
    """Whether a live process writes into a directory; `if_unknown` on a file system without locks."""
    try:
        fd = open_file(directory, FILE)
    except (OSError, ArtifactError):
        return False
    try:
        is_free = _try_lock(fd, fcntl.LOCK_SH)
        return if_unknown if is_free is None else not is_free
    finally:
        os.close(fd)


@contextlib.contextmanager
def held(directory: int) -> Iterator[int | None]:
    """Hold the lock of a directory. Yields the locked descriptor, or None where another process holds the lock."""
    fd = open_file(directory, FILE, os.O_RDWR | os.O_APPEND)
    try:
        yield fd if _lock(fd) else None
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    for _ in range(_TRIES):
        if _try_lock(fd, fcntl.LOCK_EX) is not False:
            return True
        time.sleep(_PAUSE)
    return False


def _try_lock(fd: int, kind: int) -> bool | None:
    """Whether the lock was acquired; None on a file system without locks."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
