"""Capture what is compiled in a block, or in a whole process."""

import atexit
import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

from torchguard._torch import kept_through_reloads, of_this_process
from torchguard.artifacts import _torch
from torchguard.artifacts.artifact import Artifact
from torchguard.artifacts.listening import Listening
from torchguard.artifacts.recording import Graphs
from torchguard.artifacts.session import Session
from torchguard.artifacts.sizes import bytes_of
from torchguard.artifacts.store import Store
from torchguard.exceptions import ArtifactError

CAPTURE_VARIABLE, LIMIT_VARIABLE = "TORCHGUARD_CAPTURE", "TORCHGUARD_ARTIFACTS_LIMIT"
DEFAULT_LIMIT = "2GiB"
_OFF = ("", "0", "false", "no", "off")
_ON = ("1", "true", "yes", "on")
_log = logging.getLogger("torchguard.artifacts")
_listening = kept_through_reloads(globals(), "_listening", Listening)  # for a capture that is open then
# The capture of the process, and who listens for it. Where this package is imported twice, that is the later copy: with
# both, each compilation would be captured twice.
_of_process = of_this_process("capture", lambda: SimpleNamespace(open=contextlib.ExitStack(), by=None))


class Captured:
    """What a block captured."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def root(self) -> Path:
        return self._session.root

    @property
    def artifacts(self) -> list[Artifact]:
        """The artifacts that are finished and still there, oldest first."""
        return list(self._session.artifacts())

    @property
    def problems(self) -> tuple[str, ...]:
        """What could not be captured, in words."""
        return tuple(self._session.problems)


@contextlib.contextmanager
def capture(
    dir: str | os.PathLike[str] | None = None,
    *,
    limit: int | str | None = DEFAULT_LIMIT,
    exported: bool = False,
    on_graphs: Callable[[Graphs], object] | None = None,
) -> Iterator[Captured]:
    """Keep everything that is compiled in a block, in any thread and with any backend, each as an `Artifact`.

    Args:
        dir: where to; else what TORCHGUARD_ARTIFACTS says, else `debug_artifacts`.
        limit: how large the directory may become, as a size such as "2GiB"; then the oldest go. None: any size. What
            TORCHGUARD_ARTIFACTS_LIMIT says stands in for the default.
        exported: also save the graphs of AOTAutograd with `torch.export`, so that a later torch can load them.
        on_graphs: called with the graphs when they are compiled.
    """
    if limit == DEFAULT_LIMIT:
        limit = os.environ.get(LIMIT_VARIABLE) or limit
    store = Store(dir)
    _require_writable(store.root)
    session = Session(store.root, None if limit is None else bytes_of(limit), on_graphs, exported, _torch.missing())
    store.clean()
    _listening.add(session)
    try:
        yield Captured(session)
    finally:
        _listening.remove(session)
        session.finish()


def _require_writable(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return
    except OSError as error:
        raise ArtifactError(f"Cannot capture into {root}: {error.strerror}. Name a directory to write to.") from None


def start_from_environment() -> bool:
    """Capture until the process ends if TORCHGUARD_CAPTURE says so: 1, or the directory to write to.

    A directory that cannot be written to is a line in the log. Whether anything is captured is returned.
    """
    wanted = os.environ.get(CAPTURE_VARIABLE, "")
    if _of_process.by is _listening or wanted.lower() in _OFF:
        return _of_process.by is _listening
    _of_process.open.close()
    _of_process.by = None
    try:
        _of_process.open.enter_context(capture(None if wanted.lower() in _ON else wanted))
    except ArtifactError as error:
        _log.warning("%s=%s: %s", CAPTURE_VARIABLE, wanted, error)
        return False
    _of_process.by = _listening
    atexit.register(_of_process.open.close)
    return True
