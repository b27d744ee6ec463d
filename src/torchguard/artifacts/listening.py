"""Hears what is compiled, in any thread, and has it recorded for every open capture."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from torchguard.artifacts import _torch
from torchguard.artifacts._torch import Begun
from torchguard.artifacts.inside import in_a_line
from torchguard.artifacts.recording import WRITING, Recording
from torchguard.artifacts.session import Session
from torchguard.guards import inspect
from torchguard.guards.events import _torch as events
from torchguard.guards.events._torch import Built

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
                _torch.listen(self)

    def remove(self, session: Session) -> None:
        with WRITING:
            self._sessions = tuple(one for one in self._sessions if one is not session)
            for recording in [one for recordings in self._open.values() for one in recordings]:
                recording.leave(session)
            session.is_open = False
            if not self._sessions:
                _torch.listen(None)
                self._inspecting.close()
                events.forget(self._on_built)
                self._open.clear()

    def _inspect(self) -> None:
        """Look at guards anew, so that those of long ago are not kept."""
        try:
            self._inspecting.close()
            events.forget(self._on_built)
            self._why_no_guards = ""
            self._seen = self._inspecting.enter_context(inspect())
            events.on_built(self._on_built)  # after the inspection, which has the frame by then
        except Exception as error:
            self._why_no_guards = in_a_line(f"guards could not be captured: {error}")

    @contextlib.contextmanager
    def compiling(self, begun: Begun, graph: fx.GraphModule) -> Iterator[None]:
        recording = self._begin(begun)
        recording.is_compiling = True
        stack().append((recording, ""))
        try:
            recording.add_graph("dynamo", graph)
            yield
        except BaseException as error:
            self._ended(recording)
            if _torch.is_restart(error):
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

    def _begin(self, begun: Begun) -> Recording:
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

    def _on_built(self, built: Built) -> None:
        try:
            self._add_guards(built)
        except Exception as error:  # a fault of ours, and no reason to fail what is compiled
            for session in self._sessions:
                session.report(in_a_line(f"guards could not be captured: {type(error).__name__}: {error}"))

    def _add_guards(self, built: Built) -> None:
        mine = self._open.get(threading.get_ident(), [])
        fitting = (one for one in mine if one.begun.compile_id == built.compile_id and not one.is_compiling)
        recording = next(fitting, None)
        if recording is None:  # a frame without a graph
            code = built.code
            where = (code.co_qualname, code.co_filename, code.co_firstlineno)
            recording = self._begin(Begun(built.compile_id, *where, backend=""))
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
