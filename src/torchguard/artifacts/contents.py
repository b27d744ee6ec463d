"""What goes into the files of an artifact."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import fx

from torchguard.artifacts.drawing import data_to_dot
from torchguard.artifacts.nodes import graph_to_data
from torchguard.artifacts.schema import SCHEMA_VERSION
from torchguard.guards.inspecting import Frame, GraphBreak
from torchguard.guards.tree import Guard


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
