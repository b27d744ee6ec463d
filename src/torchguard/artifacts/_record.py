"""One compilation while it is captured: its graphs, guards and the rest, written as they come for whoever captures.

Nothing here raises: what cannot be written is logged once a capture, and noted in the manifest.

What goes into the files of an artifact.

Where something was compiled: versions, the machine, and the settings that shape what is compiled.
"""

import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec

import torch
from torch import fx

from torchguard._torch import settings
from torchguard._torch.events import CompilationStart
from torchguard._torch.process import module_state
from torchguard.artifacts._export import data_to_dot
from torchguard.artifacts._nodes import copy_of, graph_to_data
from torchguard.artifacts._safe_io import in_a_line
from torchguard.artifacts._schema import SCHEMA_VERSION
from torchguard.artifacts._write import Writer
from torchguard.guards._inspect import Frame, GraphBreak
from torchguard.guards._tree import Guard

if TYPE_CHECKING:
    from torchguard.artifacts._session import Session


class Parts(NamedTuple):
    """A graph as files: for each extension its content, or what kept it from being made."""

    kind: str
    nodes: int
    files: dict[str, bytes | Exception]


def parts_of(graph: fx.GraphModule, name: str, kind: str) -> Parts:
    files: dict[str, bytes | Exception] = {}
    made: dict[str, Any] = {}

    def data() -> str:
        made.update(graph_to_data(graph, name, kind))
        return json.dumps(made, separators=(",", ":"))

    for extension, make in (
        ("py", lambda: graph.print_readable(print_output=False, include_stride=True, include_device=True)),
        ("json", data),
        ("dot", lambda: data_to_dot(made)),
    ):
        try:
            files[extension] = encoded(make())
        except Exception as error:  # a graph may hold anything that a user's code can make
            files[extension] = error
    return Parts(kind, len(made.get("nodes", graph.graph.nodes)), files)


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def to_json(data: dict[str, Any], indent: int | None = 1) -> str:
    return json.dumps(data, indent=indent, default=str)


def guards_to_data(frame: Frame) -> dict[str, Any]:
    guards = [_guard(guard) for guard in frame.guards.all_guards()]
    return {"schema": SCHEMA_VERSION, "count": len(guards), "guards": guards}


def _guard(guard: Guard) -> dict[str, str]:
    return {"source": guard.source, "type": guard.type, "code": guard.code, "line": guard.line}


def recompiles_to_data(frame: Frame | None, breaks: Sequence[GraphBreak]) -> dict[str, Any]:
    return {
        "schema": SCHEMA_VERSION,
        "recompiled_for": [
            {
                "compile_id": miss.compile_id,
                "failures": [{"guard": _guard(one.guard), "now": one.now, "why": one.why} for one in miss.failures],
            }
            for miss in (frame.recompiled_for if frame is not None else ())
        ],
        "graph_breaks": [
            {
                "file": one.file,
                "line": one.line,
                "reason": one.reason,
                "hints": list(one.hints),
                "stack": [vars(place) for place in one.stack],
            }
            for one in breaks
        ],
    }


_PACKAGES = ("torch", "torchguard", "triton", "numpy", "transformers", "jaxtyping")
_VARIABLES = re.compile(
    r"(TORCH|PYTORCH|AOT|TRITON|CUDA|CUBLAS|NCCL|NVIDIA|OMP|KMP|MKL|MOCK)\w*|CXX?|(LOCAL_)?RANK|WORLD_SIZE"
)
# What people put into variables and would not put into a report.
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|_KEY|AUTH", re.IGNORECASE)


def environment_to_data() -> dict[str, Any]:
    return {
        "schema": SCHEMA_VERSION,
        "versions": _versions(),
        "platform": _platform(),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if _VARIABLES.fullmatch(name) and not _SECRET.search(name)
        },
        "torch": {**_public_settings(), **settings.settings()},
    }


@functools.cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | {"torch": torch.__version__, "cuda": str(torch.version.cuda), "git": str(torch.version.git_version)}


@functools.cache
def _platform() -> dict[str, str]:
    return {"system": platform.platform(), "machine": platform.machine(), "cpus": str(os.cpu_count())}


def _public_settings() -> dict[str, str]:
    found = {
        "default_dtype": torch.get_default_dtype(),
        "default_device": torch.get_default_device(),
        "grad_enabled": torch.is_grad_enabled(),
        "inference_mode": torch.is_inference_mode_enabled(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "num_threads": torch.get_num_threads(),
        "autocast_cpu": torch.is_autocast_enabled("cpu"),
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    # A machine may have a GPU that nobody uses: asking its name would start CUDA.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found |= {"autocast_cuda": torch.is_autocast_enabled("cuda"), "gpu": torch.cuda.get_device_name()}
    return {name: str(value) for name, value in found.items()}


P = ParamSpec("P")
# Graphs are compiled in one thread at a time, but for backward graphs: one lock for all of them holds up nobody.
WRITING = module_state(globals(), "WRITING", threading.RLock)


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

    def __init__(self, begun: CompilationStart, sessions: "Sequence[Session]") -> None:
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
