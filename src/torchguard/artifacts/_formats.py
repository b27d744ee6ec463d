"""Graphs in other formats: DOT always, SVG where Graphviz is installed, and what `torch.export.load` reads.

Exported graphs hold no weights: those are inputs of the graphs that AOTAutograd makes.
"""

import io
import shutil
import subprocess
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx

from torchguard._graphs.codec import values_of
from torchguard._graphs.listing import value_text
from torchguard._torch import fakes
from torchguard._torch.nodes import copy_source
from torchguard.artifacts._safe_io import single_line
from torchguard.exceptions import ArtifactError, NoSuchArtifactError

if TYPE_CHECKING:
    from torchguard.artifacts._artifact import Artifact


_MOST_NODES = 20_000  # of a graph that is exported


def copy_graph(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy with its own nodes: a backend may change those it compiles."""
    copy = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    copy.output(copy.graph_copy(graph.graph, copies))
    for node in graph.graph.find_nodes(op="placeholder"):
        copy_source(node, copies[node])
    return fx.GraphModule(graph, copy)


class PendingExport(NamedTuple):
    """A copy of a graph and the metadata of its inputs, to be exported when the capture ends."""

    name: str
    graph: fx.GraphModule
    inputs: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device], ...]

    @classmethod
    def of(cls, name: str, graph: fx.GraphModule) -> "PendingExport":
        """Raises ArtifactError if the graph cannot be exported: an input or a size is a symbol."""
        inputs = [_input_metadata(node) for node in graph.graph.nodes if node.op == "placeholder"]
        if len(graph.graph.nodes) > _MOST_NODES:
            raise ArtifactError(f"it has {len(graph.graph.nodes)} nodes, more than the limit of {_MOST_NODES}.")
        return cls(name, copy_graph(graph), tuple(inputs))

    def export(self) -> bytes:
        """The graph as `torch.export.save` writes it. Raises whatever `torch.export` does."""
        with fakes.fake_tensors():
            inputs = tuple(
                torch.empty_strided(shape, stride, dtype=dtype, device=device)
                for shape, stride, dtype, device in self.inputs
            )
            program = torch.export.export(self.graph, inputs, strict=False)
        program.example_inputs = None  # they are fake and have no values
        file = io.BytesIO()
        torch.export.save(program, file)
        return file.getvalue()


def _input_metadata(node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]:
    (value,) = values_of(node) or (None,)
    if not isinstance(value, Tensor):
        raise ArtifactError(f"its input {node.name} is {type(value).__name__}, expected a tensor.")
    sizes = (*value.shape, *value.stride())
    if not all(type(size) is int for size in sizes):
        raise ArtifactError(f"its input {node.name} has symbolic sizes: {tuple(value.shape)}.")
    return tuple(value.shape), tuple(value.stride()), value.dtype, value.device


def load(artifact: "Artifact", name: str) -> torch.export.ExportedProgram:
    manifest = artifact.manifest()
    graph = next((one for one in manifest["graphs"] if one["name"] == name), None)
    if graph is None:
        some = ", ".join(one["name"] for one in manifest["graphs"]) or "none"
        raise NoSuchArtifactError(f"{artifact.id} has no graph {single_line(repr(name))}. It has: {some}.")
    if "pt2" not in graph["files"]:
        why = [note for note in manifest["notes"] if note.startswith(f"{name}.pt2")]
        hint = single_line(why[0]) if why else "Capture it with exported=True."
        raise NoSuchArtifactError(f"{artifact.id}: the graph {name} cannot be loaded. {hint}")
    return torch.export.load(io.BytesIO(artifact.read_bytes(graph["files"]["pt2"])))


_COLOURS = {"placeholder": "lightblue", "get_attr": "lightyellow", "output": "lightgrey"}
_LONGEST_LINE = 80


def to_dot(graph: dict[str, Any]) -> str:
    """An encoded graph in the language of Graphviz."""
    lines = [
        f"digraph {_quoted(graph['name'])} {{",
        '  node [shape=box, style=filled, fillcolor=white, fontname="monospace", fontsize=10];',
    ]
    for node in graph["nodes"]:
        texts = [node["name"], node["target"], *map(value_text, node["values"][:4])]
        label = "\n".join(text[:_LONGEST_LINE] for text in texts)
        colour = _COLOURS.get(node["op"])
        lines.append(f"  {_quoted(node['name'])} [label={_quoted(label)}{f', fillcolor={colour}' if colour else ''}];")
    lines += [f"  {_quoted(one)} -> {_quoted(node['name'])};" for node in graph["nodes"] for one in node["inputs"]]
    return "\n".join([*lines, "}", ""])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def svg_problem() -> str:
    """Why graphs cannot be drawn as SVG; empty if they can."""
    return "" if shutil.which("dot") else "dot of Graphviz is not on PATH"


def to_svg(dot: bytes, seconds: float) -> bytes:
    """A drawing by Graphviz. Raises subprocess.SubprocessError or OSError if that fails or takes too long."""
    command = [shutil.which("dot") or "dot", "-Tsvg"]
    return subprocess.run(command, input=dot, capture_output=True, check=True, timeout=seconds).stdout
