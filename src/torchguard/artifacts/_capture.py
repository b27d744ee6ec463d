"""Capture what is compiled in a block, or in a whole process.

Hears what is compiled, in any thread, and has it recorded for every open capture.
"""

import atexit
import contextlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import fx

from torchguard._sizes import bytes_of
from torchguard._torch.dynamo import is_restart
from torchguard._torch.events import (
    CompilationStart,
    GuardsBuiltEvent,
    add_listener,
    missing_for_capture,
    remove_listener,
    set_compilation_listener,
)
from torchguard._torch.process import module_state, process_state
from torchguard.artifacts._artifact import Artifact
from torchguard.artifacts._record import WRITING, Graphs, Recording
from torchguard.artifacts._safe_io import in_a_line
from torchguard.artifacts._session import Session
from torchguard.artifacts._store import Store
from torchguard.exceptions import ArtifactError
from torchguard.guards import inspect

Content = str | dict[str, Any]
_current = threading.local()  # .stack: what is compiled in this thread, innermost last, each with the name of its graph


def stack() -> list[tuple[Recording, str]]:
    if not hasattr(_current, "stack"):
        _current.stack = []
    return _current.stack


def attach(name: str, content: Content | Callable[[], Content]) -> None:
    """Add a file to the artifact of what is being compiled in this thread; does nothing where nothing is captured.

    Where the name is taken it gets a number: `Artifact.attached(name)` finds all of them.

    Args:
        content: text, what JSON can hold, or a function that makes it, called only if it is wanted.
    """
    if stack():
        stack()[-1][0].attach(name, content() if callable(content) else content)


class Listening:
    """Listens while anyone captures."""

    def __init__(self) -> None:
        self._sessions: tuple[Session, ...] = ()
        self._open: dict[int, list[Recording]] = {}  # by thread: those whose guards are not built yet
        self._inspecting = contextlib.ExitStack()
        self._why_no_guards = ""

    def add(self, session: Session) -> None:
        with WRITING:
            self._sessions = (*self._sessions, session)
            if len(self._sessions) == 1:
                self._inspect()
                set_compilation_listener(self)

    def remove(self, session: Session) -> None:
        with WRITING:
            self._sessions = tuple(one for one in self._sessions if one is not session)
            for recording in [one for recordings in self._open.values() for one in recordings]:
                recording.leave(session)
            session.is_open = False
            if not self._sessions:
                set_compilation_listener(None)
                self._inspecting.close()
                remove_listener(self._on_built)
                self._open.clear()

    def _inspect(self) -> None:
        """Look at guards anew, so that those of long ago are not kept."""
        try:
            self._inspecting.close()
            remove_listener(self._on_built)
            self._why_no_guards = ""
            self._seen = self._inspecting.enter_context(inspect())
            add_listener(GuardsBuiltEvent, self._on_built)  # after the inspection, which has the frame by then
        except Exception as error:
            self._why_no_guards = in_a_line(f"guards could not be captured: {error}")

    @contextlib.contextmanager
    def compiling(self, begun: CompilationStart, graph: fx.GraphModule) -> Iterator[None]:
        recording = self._begin(begun)
        recording.is_compiling = True
        stack().append((recording, ""))
        try:
            recording.add_graph("dynamo", graph)
            yield
        except BaseException as error:
            self._ended(recording)
            if is_restart(error):
                recording.drop()
            else:
                recording.note(f"the backend failed: {type(error).__name__}: {error}")
                recording.publish()
            raise
        finally:
            recording.is_compiling = False
            stack().pop()
        recording.tell_of_dynamo_alone()
        if self._why_no_guards:
            self._ended(recording)
            recording.note(self._why_no_guards)
            recording.publish()

    def lowering(self) -> Callable[[str, fx.GraphModule], contextlib.AbstractContextManager[None]] | None:
        if not stack():
            return None
        recording, _ = stack()[-1]
        suffix = recording.next_suffix()
        return lambda kind, graph: _lowered(recording, kind, graph, suffix)

    def wrote_code(self, code: str) -> None:
        if stack():
            recording, graph = stack()[-1]
            recording.add_code(graph, code)

    def _begin(self, begun: CompilationStart) -> Recording:
        mine = self._open.setdefault(threading.get_ident(), [])
        for left in [one for one in mine if not one.is_compiling]:
            mine.remove(left)
            if left.begun.compile_id == begun.compile_id:  # the analysis of this frame starts over
                left.drop()
            else:
                left.note("its guards were not built")
                left.publish()
        recording = Recording(begun, self._sessions)
        mine.append(recording)
        return recording

    def _ended(self, recording: Recording) -> None:
        mine = self._open.get(threading.get_ident(), [])
        if recording in mine:
            mine.remove(recording)

    def _on_built(self, built: GuardsBuiltEvent) -> None:
        try:
            self._add_guards(built)
        except Exception as error:  # a fault of ours, and no reason to fail what is compiled
            for session in self._sessions:
                session.report(in_a_line(f"guards could not be captured: {type(error).__name__}: {error}"))

    def _add_guards(self, built: GuardsBuiltEvent) -> None:
        mine = self._open.get(threading.get_ident(), [])
        fitting = (one for one in mine if one.begun.compile_id == built.compile_id and not one.is_compiling)
        recording = next(fitting, None)
        if recording is None:  # a frame without a graph
            code = built.code
            where = (code.co_qualname, code.co_filename, code.co_firstlineno)
            recording = self._begin(CompilationStart(built.compile_id, *where, backend=""))
        self._ended(recording)
        frame = next((one for one in reversed(self._seen.frames) if one.compile_id == built.compile_id), None)
        recording.add_frame(frame, [one for one in self._seen.graph_breaks if built.compile_id in one.compile_ids])
        recording.publish()
        with WRITING:
            # Not while something else is half compiled: why it was compiled again would be forgotten with the rest.
            if self._sessions and not any(self._open.values()):
                self._inspect()


@contextlib.contextmanager
def _lowered(recording: Recording, kind: str, graph: fx.GraphModule, suffix: str) -> Iterator[None]:
    stack().append((recording, f"{kind}{suffix}"))
    try:
        recording.add_graph(kind, graph, suffix)
        yield
    except BaseException as error:
        recording.note(f"{kind}{suffix} could not be compiled: {type(error).__name__}: {error}")
        raise
    finally:
        stack().pop()
        if recording.is_published:
            recording.publish()


CAPTURE_VARIABLE, LIMIT_VARIABLE = "TORCHGUARD_CAPTURE", "TORCHGUARD_ARTIFACTS_LIMIT"
DEFAULT_LIMIT = "2GiB"
_OFF = ("", "0", "false", "no", "off")
_ON = ("1", "true", "yes", "on")
_log = logging.getLogger("torchguard.artifacts")
_listening = module_state(globals(), "_listening", Listening)  # for a capture that is open then
# The capture of the process, and who listens for it. Where this package is imported twice, that is the later copy: with
# both, each compilation would be captured twice.
_of_process = process_state("capture", lambda: SimpleNamespace(open=contextlib.ExitStack(), by=None))


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
    session = Session(
        store.root, None if limit is None else bytes_of(limit), on_graphs, exported, missing_for_capture()
    )
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
