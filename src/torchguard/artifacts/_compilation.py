"""The recording of one compilation: its graphs, guards and environment, written for every open capture as they arise.

A recording never raises into the program that compiles. What cannot be written is noted in the manifest and reported to
the session, which logs the first failure as a warning.
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

from torchguard._graphs.codec import encode_graph
from torchguard._torch import settings
from torchguard._torch.compilations import CompilationStart
from torchguard._torch.process import module_state
from torchguard.artifacts._formats import copy_graph, to_dot
from torchguard.artifacts._safe_io import single_line
from torchguard.artifacts._schema import SCHEMA_VERSION
from torchguard.artifacts._write import Writer
from torchguard.guards._guard_tree import Guard
from torchguard.guards._inspect import CompiledFrame, GraphBreak

if TYPE_CHECKING:
    from torchguard.artifacts._open_capture import CaptureSession


class GraphFiles(NamedTuple):
    """A graph as files: for each extension its content, or the error that making it raised."""

    nodes: int
    files: dict[str, bytes | Exception]


def graph_files(graph: fx.GraphModule, name: str, kind: str) -> GraphFiles:
    """A graph as code, as data and as a drawing in DOT."""
    files: dict[str, bytes | Exception] = {}
    data: dict[str, Any] = {"schema": SCHEMA_VERSION, "name": name, "kind": kind}

    def as_json() -> str:
        data.update(encode_graph(graph))
        return json.dumps(data, separators=(",", ":"))

    for extension, make in (
        ("py", lambda: graph.print_readable(print_output=False, include_stride=True, include_device=True)),
        ("json", as_json),
        ("dot", lambda: to_dot(data)),
    ):
        try:
            files[extension] = to_bytes(make())
        except Exception as error:  # a graph may hold anything that a user's code can make
            files[extension] = error
    return GraphFiles(len(data.get("nodes", graph.graph.nodes)), files)


def to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def to_json(data: dict[str, Any], indent: int | None = 1) -> str:
    return json.dumps(data, indent=indent, default=str)


def guards_to_data(frame: CompiledFrame) -> dict[str, Any]:
    guards = [_guard(guard) for guard in frame.guards.all_guards()]
    return {"schema": SCHEMA_VERSION, "count": len(guards), "guards": guards}


def _guard(guard: Guard) -> dict[str, str]:
    return {"source": guard.source, "type": guard.type, "code": guard.code, "line": guard.line}


def recompiles_to_data(frame: CompiledFrame | None, breaks: Sequence[GraphBreak]) -> dict[str, Any]:
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
                "stack": [vars(line) for line in one.stack],
            }
            for one in breaks
        ],
    }


_PACKAGES = ("torch", "torchguard", "triton", "numpy", "transformers", "jaxtyping")
_VARIABLES = re.compile(
    r"(TORCH|PYTORCH|AOT|TRITON|CUDA|CUBLAS|NCCL|NVIDIA|OMP|KMP|MKL|MOCK)\w*|CXX?|(LOCAL_)?RANK|WORLD_SIZE"
)
# Names of variables whose values are secret.
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
    # Only if CUDA is in use: asking for the name of a GPU would initialise it.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found |= {"autocast_cuda": torch.is_autocast_enabled("cuda"), "gpu": torch.cuda.get_device_name()}
    return {name: str(value) for name, value in found.items()}


P = ParamSpec("P")
# Graphs are compiled in one thread at a time, except backward graphs, so one lock for all delays nobody.
WRITE_LOCK = module_state(globals(), "WRITE_LOCK", threading.RLock)


def _never_raising(method: Callable[Concatenate["Recording", P], None]) -> Callable[Concatenate["Recording", P], None]:
    """A method that reports every exception to the sessions: a bug in it must not fail the program that compiles."""

    @functools.wraps(method)
    def call(self: "Recording", *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            for session in self.sessions:
                session.report(_failure(method.__name__, error))

    return call


@dataclass(frozen=True)
class Graphs:
    """The graphs of a compilation, when they are compiled: once with the forward, and once more with the backward.

    `forward` is None for a backend without AOTAutograd, and the inference graph if `is_inference`. `attach` adds a file
    to the artifact of these graphs, as `artifacts.attach` does, as long as the capture is open.
    """

    compile_id: str
    dynamo: fx.GraphModule | None
    forward: fx.GraphModule | None
    backward: fx.GraphModule | None
    is_inference: bool
    attach: Callable[[str, str | dict[str, Any]], None] = field(default=lambda *_: None, repr=False, compare=False)


class Recording:
    """One compilation, written to an artifact for each session."""

    def __init__(self, compilation: CompilationStart, sessions: "Sequence[CaptureSession]") -> None:
        self.compilation, self.is_compiling, self.is_published = compilation, False, False
        self.sessions = tuple(sessions)
        self._writers: list[tuple[CaptureSession, Writer]] = []
        self._graphs: dict[str, fx.GraphModule] = {}
        self._lowered = 0
        about = {name: getattr(compilation, name) for name in ("function", "file", "line", "backend")}
        for session in sessions:
            with _reporting_errors(session, "an artifact"):
                writer = Writer(session.root, compilation.compile_id, about)
                writer.manifest["notes"] += session.standing_notes
                self._writers.append((session, writer))
        self._add("environment.json", lambda: to_json(environment_to_data()))

    def next_suffix(self) -> str:
        """The suffix of the names of graphs: AOTAutograd may run several times in one compilation."""
        self._lowered += 1
        return "" if self._lowered == 1 else f"_{self._lowered}"

    def has_graph(self, kind: str) -> bool:
        return any(graph["kind"] == kind for _, writer in self._writers for graph in writer.manifest["graphs"])

    @_never_raising
    def add_graph(self, kind: str, graph: fx.GraphModule, suffix: str = "") -> None:
        name = f"{kind}{suffix}"
        if not self._open_writers():  # a backward that is compiled after all captures ended
            return
        with WRITE_LOCK:
            made = graph_files(graph, name, kind)
            for session, writer in self._open_writers():
                files = {}
                for extension, content in made.files.items():
                    if isinstance(content, Exception):
                        self._note(session, writer, f"{name}.{extension}", content)
                        continue
                    with self._reporting_errors(session, writer, f"{name}.{extension}"):
                        files[extension] = writer.add(f"{name}.{extension}", content)
                writer.manifest["graphs"].append({"name": name, "kind": kind, "nodes": made.nodes, "files": files})
                session.queue_export(writer, name, graph)
                waiting = {*writer.manifest["waiting_for"]} - {name}
                writer.manifest["waiting_for"] = sorted(
                    waiting | ({f"backward{suffix}"} if kind == "forward" else set())
                )
        self._report_graph(kind, graph, suffix)  # without the lock: a callback may take any time

    def _report_graph(self, kind: str, graph: fx.GraphModule, suffix: str) -> None:
        if all(session.on_graphs is None for session, _ in self._open_writers()):
            return
        self._graphs[f"{kind}{suffix}"] = copy_graph(graph)  # backends change graphs, and the backward comes later
        if kind != "dynamo":
            self._call_on_graphs(suffix, is_inference=kind == "inference")

    @_never_raising
    def report_dynamo_only(self) -> None:
        """Call `on_graphs` for a backend without AOTAutograd, when it has compiled Dynamo's graph."""
        if not self._lowered:
            self._call_on_graphs("", is_inference=False)

    def _call_on_graphs(self, suffix: str, is_inference: bool) -> None:
        forward = self._graphs.get(f"{'inference' if is_inference else 'forward'}{suffix}")
        backward = self._graphs.get(f"backward{suffix}")
        graphs = Graphs(
            self.compilation.compile_id, self._graphs.get("dynamo"), forward, backward, is_inference, self.attach_later
        )
        for session, writer in self._open_writers():
            if session.on_graphs is not None:
                with self._reporting_errors(session, writer, "on_graphs"):
                    session.on_graphs(graphs)

    @_never_raising
    def add_code(self, graph: str, code: str) -> None:
        self._add(f"output_code.{graph}.py" if graph else "output_code.py", lambda: code)

    @_never_raising
    def attach(self, name: str, content: str | dict[str, Any]) -> None:
        self._add(name, lambda: content if isinstance(content, str) else to_json(content), name)

    def attach_later(self, name: str, content: str | dict[str, Any]) -> None:
        """Attach a file to an artifact that may be published already, unless it was removed since."""
        with WRITE_LOCK:
            self._writers = [one for one in self._writers if one[1].path.exists()]
            self.attach(name, content)
            if self.is_published:
                self.publish()

    @_never_raising
    def add_frame(self, frame: CompiledFrame | None, breaks: Sequence[GraphBreak]) -> None:
        """Add the guards of the frame, why it was recompiled, and its graph breaks."""
        if frame is not None:
            self._add("guards.json", lambda: to_json(guards_to_data(frame), indent=None))
            self._add("guards.txt", lambda: "\n".join([str(frame), frame.tree(), ""]))
        if (frame is not None and frame.recompiled_for) or breaks:
            self._add("recompiles.json", lambda: to_json(recompiles_to_data(frame, breaks)))

    @_never_raising
    def note(self, text: str) -> None:
        with WRITE_LOCK:
            for _, writer in self._open_writers():
                writer.manifest["notes"].append(single_line(text, 1000))

    @_never_raising
    def publish(self) -> None:
        with WRITE_LOCK:
            self.is_published = True
            for session, writer in self._open_writers():
                with self._reporting_errors(session, writer, "the manifest"):
                    writer.publish()
                    session.published(writer)

    @_never_raising
    def close_for(self, session: "CaptureSession") -> None:
        """Publish the artifact of a session that ends, although its guards were not built."""
        with WRITE_LOCK:
            for _, writer in [one for one in self._writers if one[0] is session]:
                with self._reporting_errors(session, writer, "the manifest"):
                    writer.manifest["notes"].append("its guards were not built while this was captured")
                    writer.publish()
                    session.published(writer)
                writer.close()
            self._writers = [one for one in self._writers if one[0] is not session]

    @_never_raising
    def discard(self) -> None:
        """Remove its artifacts: Dynamo restarts the analysis of this frame."""
        with WRITE_LOCK:
            for session, writer in self._writers:
                with _reporting_errors(session, writer.id):
                    writer.remove()
            self._writers = []

    def _add(self, name: str, make: Callable[[], str], attached_as: str = "") -> None:
        with WRITE_LOCK:
            content: bytes | Exception
            try:
                content = to_bytes(make())
            except Exception as error:
                content = error
            for session, writer in self._open_writers():
                with self._reporting_errors(session, writer, name):
                    if isinstance(content, Exception):
                        raise content
                    writer.add(name, content, attached_as)

    def _open_writers(self) -> "list[tuple[CaptureSession, Writer]]":
        return [(session, writer) for session, writer in self._writers if session.is_open]

    @contextlib.contextmanager
    def _reporting_errors(self, session: "CaptureSession", writer: Writer, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._note(session, writer, what, error)

    def _note(self, session: "CaptureSession", writer: Writer, what: str, error: Exception) -> None:
        text = _failure(what, error)
        writer.manifest["notes"].append(text)
        session.report(text)


@contextlib.contextmanager
def _reporting_errors(session: "CaptureSession", what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        session.report(_failure(what, error))


def _failure(what: str, error: Exception) -> str:
    return single_line(f"{what} could not be captured: {type(error).__name__}: {error}")
