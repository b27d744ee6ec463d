"""Capture everything that is compiled in a block, or in a whole process.

One listener receives the events of all compilations, in every thread, and records each for every open capture.
"""

import atexit
import contextlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import fx

from torchguard._sizes import parse_size
from torchguard._torch import dynamo
from torchguard._torch.compilations import CompilationStart, missing_for_capture, set_compilation_listener
from torchguard._torch.events import GuardsBuiltEvent, add_listener, remove_listener
from torchguard._torch.process import module_state, process_state
from torchguard._torch.support import warn_of_missing
from torchguard.artifacts._artifact import Artifact
from torchguard.artifacts._compilation import WRITE_LOCK, Graphs, Recording
from torchguard.artifacts._open_capture import CaptureSession
from torchguard.artifacts._safe_io import single_line
from torchguard.artifacts._store import Store
from torchguard.exceptions import ArtifactError
from torchguard.guards import inspect

Content = str | dict[str, Any]
_current = threading.local()  # .stack: the recordings of this thread, innermost last, and the graph being compiled


def _stack() -> list[tuple[Recording, str]]:
    if not hasattr(_current, "stack"):
        _current.stack = []
    return _current.stack


def attach(name: str, content: Content | Callable[[], Content]) -> None:
    """Add a file to the artifact of the compilation that runs in this thread. Without a capture it does nothing.

    Where the name is taken, a number is appended: `Artifact.attached(name)` returns all of them.

    Args:
        content: text, a dict that JSON can hold, or a function that returns either, called only during a capture.
    """
    if _stack():
        _stack()[-1][0].attach(name, content() if callable(content) else content)


def add_graphs(graphs: Mapping[str, fx.GraphModule | None]) -> None:
    """Add graphs by kind to the artifact of the compilation that runs in this thread: those of one that is rejected.

    The graphs of any other compilation are captured when AOTAutograd compiles them.
    """
    if _stack():
        recording, _ = _stack()[-1]
        for kind, graph in graphs.items():
            if graph is not None and not recording.has_graph(kind):
                recording.add_graph(kind, graph)


class CaptureListener:
    """Records compilations for all open captures. It is registered with torch while there is one."""

    def __init__(self) -> None:
        self._sessions: tuple[CaptureSession, ...] = ()
        self._open: dict[int, list[Recording]] = {}  # by thread: those whose guards are not built yet
        self._inspecting = contextlib.ExitStack()
        self._guards_problem = ""

    def add(self, session: CaptureSession) -> None:
        with WRITE_LOCK:
            self._sessions = (*self._sessions, session)
            if len(self._sessions) == 1:
                self._inspect()
                set_compilation_listener(self)

    def remove(self, session: CaptureSession) -> None:
        with WRITE_LOCK:
            self._sessions = tuple(one for one in self._sessions if one is not session)
            for recording in [one for recordings in self._open.values() for one in recordings]:
                recording.close_for(session)
            session.is_open = False
            if not self._sessions:
                set_compilation_listener(None)
                self._inspecting.close()
                remove_listener(self._on_built)
                self._open.clear()

    def _inspect(self) -> None:
        """Start a new inspection of guards: the old one holds on to every frame it has seen."""
        try:
            self._inspecting.close()
            remove_listener(self._on_built)
            self._guards_problem = ""
            self._seen = self._inspecting.enter_context(inspect())
            add_listener(GuardsBuiltEvent, self._on_built)  # registered after the inspection, so that it has the frame
        except Exception as error:
            self._guards_problem = single_line(f"guards could not be captured: {error}")

    @contextlib.contextmanager
    def compiling(self, compilation: CompilationStart, graph: fx.GraphModule) -> Iterator[None]:
        recording = self._start(compilation)
        recording.is_compiling = True
        _stack().append((recording, ""))
        try:
            recording.add_graph("dynamo", graph)
            yield
        except BaseException as error:
            self._remove(recording)
            if dynamo.is_restart(error):
                recording.discard()
            else:
                recording.note(f"the backend failed: {type(error).__name__}: {error}")
                recording.publish()
            raise
        finally:
            recording.is_compiling = False
            _stack().pop()
        recording.report_dynamo_only()
        if self._guards_problem:
            self._remove(recording)
            recording.note(self._guards_problem)
            recording.publish()

    def lowering(self) -> Callable[[str, fx.GraphModule], contextlib.AbstractContextManager[None]] | None:
        if not _stack():
            return None
        recording, _ = _stack()[-1]
        suffix = recording.next_suffix()
        return lambda kind, graph: _lowered(recording, kind, graph, suffix)

    def wrote_code(self, code: str) -> None:
        if _stack():
            recording, graph = _stack()[-1]
            recording.add_code(graph, code)

    def _start(self, compilation: CompilationStart) -> Recording:
        recordings = self._open.setdefault(threading.get_ident(), [])
        for old in [one for one in recordings if not one.is_compiling]:
            recordings.remove(old)
            if old.compilation.compile_id == compilation.compile_id:  # Dynamo restarted the analysis of this frame
                old.discard()
            else:
                old.note("its guards were not built")
                old.publish()
        recording = Recording(compilation, self._sessions)
        recordings.append(recording)
        return recording

    def _remove(self, recording: Recording) -> None:
        recordings = self._open.get(threading.get_ident(), [])
        if recording in recordings:
            recordings.remove(recording)

    def _on_built(self, built: GuardsBuiltEvent) -> None:
        try:
            self._add_guards(built)
        except Exception as error:  # a bug here must not fail the program that compiles
            for session in self._sessions:
                session.report(single_line(f"guards could not be captured: {type(error).__name__}: {error}"))

    def _add_guards(self, built: GuardsBuiltEvent) -> None:
        recordings = self._open.get(threading.get_ident(), [])
        matching = (
            one for one in recordings if one.compilation.compile_id == built.compile_id and not one.is_compiling
        )
        recording = next(matching, None)
        if recording is None:  # a frame without a graph
            recording = self._start(CompilationStart(built.compile_id, *built.where, backend=""))
        self._remove(recording)
        frame = next((one for one in reversed(self._seen.frames) if one.compile_id == built.compile_id), None)
        recording.add_frame(frame, [one for one in self._seen.graph_breaks if built.compile_id in one.compile_ids])
        recording.publish()
        with WRITE_LOCK:
            # Not during another compilation: a new inspection would lose why that one was recompiled.
            if self._sessions and not any(self._open.values()):
                self._inspect()


@contextlib.contextmanager
def _lowered(recording: Recording, kind: str, graph: fx.GraphModule, suffix: str) -> Iterator[None]:
    _stack().append((recording, f"{kind}{suffix}"))
    try:
        recording.add_graph(kind, graph, suffix)
        yield
    except BaseException as error:
        recording.note(f"{kind}{suffix} could not be compiled: {type(error).__name__}: {error}")
        raise
    finally:
        _stack().pop()
        if recording.is_published:
            recording.publish()


CAPTURE_VARIABLE, LIMIT_VARIABLE = "TORCHGUARD_CAPTURE", "TORCHGUARD_ARTIFACTS_LIMIT"
DEFAULT_LIMIT = "2GiB"
_OFF = ("", "0", "false", "no", "off")
_ON = ("1", "true", "yes", "on")
_log = logging.getLogger("torchguard.artifacts")
_listener = module_state(globals(), "_listener", CaptureListener)  # a capture may be open during a reload
# The capture of the process, and the listener it belongs to. If this package is imported twice, the later copy takes
# over: with two, each compilation would be captured twice.
_process_capture = process_state("capture", lambda: SimpleNamespace(open=contextlib.ExitStack(), by=None))


class Captured:
    """The artifacts that a block captured."""

    def __init__(self, session: CaptureSession) -> None:
        self._session = session

    @property
    def root(self) -> Path:
        return self._session.root

    @property
    def artifacts(self) -> list[Artifact]:
        """The artifacts that are published and still exist, oldest first."""
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
    """Write an `Artifact` for everything that is compiled in a block, in any thread and with any backend.

    Args:
        dir: the directory to write to; by default that of TORCHGUARD_ARTIFACTS, else `debug_artifacts`.
        limit: the largest size of the directory, such as "2GiB"; beyond it, the oldest artifacts are removed. None: no
            limit. TORCHGUARD_ARTIFACTS_LIMIT replaces the default.
        exported: also save the graphs of AOTAutograd with `torch.export`, so that a later torch can load them.
        on_graphs: called with the graphs when they are compiled.
    """
    warn_of_missing("artifacts")
    if limit == DEFAULT_LIMIT:
        limit = os.environ.get(LIMIT_VARIABLE) or limit
    store = Store(dir)
    _require_writable(store.root)
    session = CaptureSession(store.root, _bytes(limit), on_graphs, exported, missing_for_capture())
    store.clean()
    _listener.add(session)
    try:
        yield Captured(session)
    finally:
        _listener.remove(session)
        session.finish()


def _bytes(limit: int | str | None) -> int | None:
    try:
        return None if limit is None else parse_size(limit)
    except ValueError as error:
        raise ArtifactError(f"capture: limit: {error}") from None


def _require_writable(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return
    except OSError as error:
        raise ArtifactError(f"Cannot capture into {root}: {error.strerror}. Name a directory to write to.") from None


def start_from_environment() -> bool:
    """Capture until the process ends if TORCHGUARD_CAPTURE is 1 or a directory. Returns whether it captures.

    A directory that cannot be written to is a warning in the log.
    """
    wanted = os.environ.get(CAPTURE_VARIABLE, "")
    if _process_capture.by is _listener or wanted.lower() in _OFF:
        return _process_capture.by is _listener
    _process_capture.open.close()
    _process_capture.by = None
    try:
        _process_capture.open.enter_context(capture(None if wanted.lower() in _ON else wanted))
    except ArtifactError as error:
        _log.warning("%s=%s: %s", CAPTURE_VARIABLE, wanted, error)
        return False
    _process_capture.by = _listener
    atexit.register(_process_capture.open.close)
    return True
