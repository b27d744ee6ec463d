"""One compilation while it is captured: its graphs, guards and the rest, written as they come for whoever captures.

Nothing here raises: what cannot be written is logged once a capture, and noted in the manifest.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from torch import fx

from torchguard._torch import kept_through_reloads
from torchguard.artifacts._torch import Begun
from torchguard.artifacts.contents import encoded, guards_to_data, parts_of, recompiles_to_data, to_json
from torchguard.artifacts.environment import environment_to_data
from torchguard.artifacts.inside import in_a_line
from torchguard.artifacts.nodes import copy_of
from torchguard.artifacts.writing import Writer
from torchguard.guards.inspecting import Frame, GraphBreak

if TYPE_CHECKING:
    from torchguard.artifacts.session import Session

P = ParamSpec("P")
# Graphs are compiled in one thread at a time, but for backward graphs: one lock for all of them holds up nobody.
WRITING = kept_through_reloads(globals(), "WRITING", threading.RLock)


def _never_raising(method: Callable[Concatenate["Recording", P], None]) -> Callable[Concatenate["Recording", P], None]:
    """The last resort: a fault of ours is a line in the log as well, and no fault of the program that compiles."""

    @functools.wraps(method)
    def call(self: "Recording", *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            for session in self.sessions:
                session.report(_in_words(method.__name__, error))

    return call


@dataclass(frozen=True)
class Graphs:
    """The graphs of a compilation as they are compiled: first with the forward graph, again when the backward comes.

    `forward` is None where a backend does without AOTAutograd, and the inference graph where `is_inference`.
    `attach` adds a file to the artifact they are in, as `artifacts.attach` does, at any time while it is captured.
    """

    compile_id: str
    dynamo: fx.GraphModule | None
    forward: fx.GraphModule | None
    backward: fx.GraphModule | None
    is_inference: bool
    attach: Callable[[str, str | dict[str, Any]], None] = field(default=lambda *_: None, repr=False, compare=False)


class Recording:
    """One compilation, for all that capture it."""

    def __init__(self, begun: Begun, sessions: "Sequence[Session]") -> None:
        self.begun, self.is_compiling, self.is_published = begun, False, False
        self.sessions = tuple(sessions)
        self._writers: list[tuple[Session, Writer]] = []
        self._graphs: dict[str, fx.GraphModule] = {}
        self._lowered = 0
        about = {name: getattr(begun, name) for name in ("function", "file", "line", "backend")}
        for session in sessions:
            with _harmless(session, "an artifact"):
                writer = Writer(session.root, begun.compile_id, about)
                writer.manifest["notes"] += session.standing_notes
                self._writers.append((session, writer))
        self._add("environment.json", lambda: to_json(environment_to_data()))

    def next_suffix(self) -> str:
        """What sets the graphs of one run of AOTAutograd apart from those of others in the same compilation."""
        self._lowered += 1
        return "" if self._lowered == 1 else f"_{self._lowered}"

    @_never_raising
    def add_graph(self, kind: str, graph: fx.GraphModule, suffix: str = "") -> None:
        name = f"{kind}{suffix}"
        if not self._open_writers():  # a backward that comes when nobody captures any more
            return
        with WRITING:
            parts = parts_of(graph, name, kind)
            for session, writer in self._open_writers():
                files = {}
                for extension, content in parts.files.items():
                    if isinstance(content, Exception):
                        self._note(session, writer, f"{name}.{extension}", content)
                        continue
                    with self._harmless(session, writer, f"{name}.{extension}"):
                        files[extension] = writer.add(f"{name}.{extension}", content)
                writer.manifest["graphs"].append({"name": name, "kind": kind, "nodes": parts.nodes, "files": files})
                session.keep_for_export(writer, name, graph)
                waiting = {*writer.manifest["waiting_for"]} - {name}
                writer.manifest["waiting_for"] = sorted(
                    waiting | ({f"backward{suffix}"} if kind == "forward" else set())
                )
        self._tell(kind, graph, suffix)  # without the lock: what a callback does is its own affair

    def _tell(self, kind: str, graph: fx.GraphModule, suffix: str) -> None:
        if all(session.on_graphs is None for session, _ in self._open_writers()):
            return
        self._graphs[f"{kind}{suffix}"] = copy_of(graph)  # what compiles it may change it, and the backward comes later
        if kind != "dynamo":
            self._call(suffix, is_inference=kind == "inference")

    @_never_raising
    def tell_of_dynamo_alone(self) -> None:
        """For a backend that does without AOTAutograd: there is no more to come."""
        if not self._lowered:
            self._call("", is_inference=False)

    def _call(self, suffix: str, is_inference: bool) -> None:
        forward = self._graphs.get(f"{'inference' if is_inference else 'forward'}{suffix}")
        backward = self._graphs.get(f"backward{suffix}")
        graphs = Graphs(
            self.begun.compile_id, self._graphs.get("dynamo"), forward, backward, is_inference, self.attach_later
        )
        for session, writer in self._open_writers():
            if session.on_graphs is not None:
                with self._harmless(session, writer, "on_graphs"):
                    session.on_graphs(graphs)

    @_never_raising
    def add_code(self, graph: str, code: str) -> None:
        self._add(f"output_code.{graph}.py" if graph else "output_code.py", lambda: code)

    @_never_raising
    def attach(self, name: str, content: str | dict[str, Any]) -> None:
        self._add(name, lambda: content if isinstance(content, str) else to_json(content), name)

    def attach_later(self, name: str, content: str | dict[str, Any]) -> None:
        """Add a file to what may be published already; not where it was removed since."""
        with WRITING:
            self._writers = [one for one in self._writers if one[1].path.exists()]
            self.attach(name, content)
            if self.is_published:
                self.publish()

    @_never_raising
    def add_frame(self, frame: Frame | None, breaks: Sequence[GraphBreak]) -> None:
        """The guards that were built for it, why it was compiled again, and where its graph breaks."""
        if frame is not None:
            self._add("guards.json", lambda: to_json(guards_to_data(frame), indent=None))
            self._add("guards.txt", lambda: "\n".join([str(frame), frame.tree(), ""]))
        if (frame is not None and frame.recompiled_for) or breaks:
            self._add("recompiles.json", lambda: to_json(recompiles_to_data(frame, breaks)))

    @_never_raising
    def note(self, text: str) -> None:
        with WRITING:
            for _, writer in self._open_writers():
                writer.manifest["notes"].append(in_a_line(text, 1000))

    @_never_raising
    def publish(self) -> None:
        with WRITING:
            self.is_published = True
            for session, writer in self._open_writers():
                with self._harmless(session, writer, "the manifest"):
                    writer.publish()
                    session.published(writer)

    @_never_raising
    def leave(self, session: "Session") -> None:
        """End it as it is for a capture that ends."""
        with WRITING:
            for _, writer in [one for one in self._writers if one[0] is session]:
                with self._harmless(session, writer, "the manifest"):
                    writer.manifest["notes"].append("its guards were not built while this was captured")
                    writer.publish()
                    session.published(writer)
                writer.close()
            self._writers = [one for one in self._writers if one[0] is not session]

    @_never_raising
    def drop(self) -> None:
        """Forget it: Dynamo starts over with this frame."""
        with WRITING:
            for session, writer in self._writers:
                with _harmless(session, writer.id):
                    writer.remove()
            self._writers = []

    def _add(self, name: str, make: Callable[[], str], attached_as: str = "") -> None:
        with WRITING:
            content: bytes | Exception
            try:
                content = encoded(make())
            except Exception as error:
                content = error
            for session, writer in self._open_writers():
                with self._harmless(session, writer, name):
                    if isinstance(content, Exception):
                        raise content
                    writer.add(name, content, attached_as)

    def _open_writers(self) -> "list[tuple[Session, Writer]]":
        return [(session, writer) for session, writer in self._writers if session.is_open]

    @contextlib.contextmanager
    def _harmless(self, session: "Session", writer: Writer, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._note(session, writer, what, error)

    def _note(self, session: "Session", writer: Writer, what: str, error: Exception) -> None:
        text = _in_words(what, error)
        writer.manifest["notes"].append(text)
        session.report(text)


@contextlib.contextmanager
def _harmless(session: "Session", what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        session.report(_in_words(what, error))


def _in_words(what: str, error: Exception) -> str:
    return in_a_line(f"{what} could not be captured: {type(error).__name__}: {error}")
