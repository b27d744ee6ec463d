"""The hidden file by which a directory is known to be torchguard's: who writes there, and every name it wrote.

Its writer holds a lock on it, which ends with the process. The names are there before the files are, so what a killed
process left behind can be removed, and nothing else with it.
"""

import contextlib
import errno
import fcntl
import os
import re
import time
from collections.abc import Iterator

from torchguard.artifacts._safe_io import open_file, read
from torchguard.artifacts._schema import MARKER, NAME
from torchguard.exceptions import ArtifactError

JOURNAL = ".torchguard"
_LIMIT = 4 << 20
_TRIES, _PAUSE = 50, 0.01  # who merely looks whether a lock is held holds it for an instant


def create(directory: int) -> int:
    """Start the journal of a new directory. Whoever holds the descriptor holds the lock."""
    fd = open_file(directory, JOURNAL, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND)
    try:
        _lock(fd)
        _write(fd, f"{MARKER}\n{os.getpid()}")
    except BaseException:
        os.close(fd)
        raise
    return fd


def note(journal: int, name: str) -> None:
    """Write down a name that is about to be written."""
    _write(journal, f"\n{name}")  # a name that a full disk cut short does not run into the next


def _write(fd: int, text: str) -> None:
    if os.write(fd, text.encode()) < len(text.encode()):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def names_in(directory: int) -> tuple[str, ...] | None:
    """Every name that torchguard wrote into a directory; None if the directory is not torchguard's."""
    try:
        text = read(directory, JOURNAL, _LIMIT).decode("utf-8", "replace")
    except ArtifactError:
        return None
    if MARKER.startswith(text):  # cut short: nothing was written after it
        return ()
    marker, *names = text.split("\n")
    return tuple(name for name in names if re.fullmatch(NAME, name)) if marker == MARKER else None


def is_held(directory: int, if_unknown: bool) -> bool:
    """Whether a process that is alive writes into a directory; `if_unknown` where files cannot be locked."""
    try:
        fd = open_file(directory, JOURNAL)
    except (OSError, ArtifactError):
        return False
    try:
        is_free = _try_lock(fd, fcntl.LOCK_SH)
        return if_unknown if is_free is None else not is_free
    finally:
        os.close(fd)


@contextlib.contextmanager
def held(directory: int) -> Iterator[int | None]:
    """Hold the lock of a directory; None is given where someone else does."""
    fd = open_file(directory, JOURNAL, os.O_RDWR | os.O_APPEND)
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
    """Whether the lock is ours now; None on a file system without locks."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
