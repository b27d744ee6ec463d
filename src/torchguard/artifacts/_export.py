"""Graphs drawn: as DOT always, as SVG where Graphviz is installed.

Graphs that a later torch can load again, by way of `torch.export`: no weights, which are inputs of these graphs.
"""

import io
import shutil
import subprocess
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx

from torchguard._torch import fakes
from torchguard.artifacts._nodes import copy_of, values_of
from torchguard.artifacts._safe_io import in_a_line
from torchguard.exceptions import ArtifactError, NoSuchArtifactError

if TYPE_CHECKING:
    from torchguard.artifacts._artifact import Artifact


_MOST_NODES = 20_000


class Kept(NamedTuple):
    """A copy of a graph, and what its inputs are like, until there is time to export it."""

    name: str
    graph: fx.GraphModule
    inputs: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device], ...]

    @classmethod
    def of(cls, name: str, graph: fx.GraphModule) -> "Kept":
        """Raises ArtifactError if it cannot be exported: a size or an input is a symbol."""
        inputs = [_like(node) for node in graph.graph.nodes if node.op == "placeholder"]
        if len(graph.graph.nodes) > _MOST_NODES:
            raise ArtifactError(f"{len(graph.graph.nodes)} nodes are too many.")
        return cls(name, copy_of(graph), tuple(inputs))


def _like(node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]:
    (value,) = values_of(node) or (None,)
    if not isinstance(value, Tensor):
        raise ArtifactError(f"its input {node.name} is {type(value).__name__}, not a tensor.")
    sizes = (*value.shape, *value.stride())
    if not all(type(size) is int for size in sizes):
        raise ArtifactError(f"its input {node.name} has sizes that are symbols: {tuple(value.shape)}.")
    return tuple(value.shape), tuple(value.stride()), value.dtype, value.device


def exported(kept: Kept) -> bytes:
    """A graph as `torch.export.save` writes it. Raises whatever torch.export does."""
    with fakes.fake_tensors():
        inputs = tuple(
            torch.empty_strided(shape, stride, dtype=dtype, device=device)
            for shape, stride, dtype, device in kept.inputs
        )
        program = torch.export.export(kept.graph, inputs, strict=False)
    program.example_inputs = None  # which have no values
    file = io.BytesIO()
    torch.export.save(program, file)
    return file.getvalue()


def load(artifact: "Artifact", name: str) -> torch.export.ExportedProgram:
    manifest = artifact.manifest()
    graph = next((one for one in manifest["graphs"] if one["name"] == name), None)
    if graph is None:
        some = ", ".join(one["name"] for one in manifest["graphs"]) or "none"
        raise NoSuchArtifactError(f"{artifact.id} has no graph {in_a_line(repr(name))}. It has: {some}.")
    if "pt2" not in graph["files"]:
        why = [note for note in manifest["notes"] if note.startswith(f"{name}.pt2")]
        hint = in_a_line(why[0]) if why else "Capture it with exported=True."
        raise NoSuchArtifactError(f"{artifact.id}: the graph {name} cannot be loaded. {hint}")
    return torch.export.load(io.BytesIO(artifact.read_bytes(graph["files"]["pt2"])))


_COLOURS = {"placeholder": "lightblue", "get_attr": "lightyellow", "output": "lightgrey"}
_LONGEST_LINE = 80


def data_to_dot(graph: dict[str, Any]) -> str:
    """A graph, as `graph_to_data` gives it, in the language of Graphviz."""
    lines = [
        f"digraph {_quoted(graph['name'])} {{",
        '  node [shape=box, style=filled, fillcolor=white, fontname="monospace", fontsize=10];',
    ]
    for node in graph["nodes"]:
        lines_of_label = [node["name"], node["target"], *map(value_to_text, node["values"][:4])]
        label = "\n".join(line[:_LONGEST_LINE] for line in lines_of_label)
        colour = _COLOURS.get(node["op"])
        lines.append(f"  {_quoted(node['name'])} [label={_quoted(label)}{f', fillcolor={colour}' if colour else ''}];")
    lines += [f"  {_quoted(one)} -> {_quoted(node['name'])};" for node in graph["nodes"] for one in node["inputs"]]
    return "\n".join([*lines, "}", ""])


def value_to_text(value: dict[str, Any]) -> str:
    """A value of a node in a few characters: `float32[2, s0]`."""
    if (tensor := value.get("tensor")) is not None:
        return f"{tensor['dtype']}[{', '.join(map(str, tensor['shape']))}]"
    return str(value.get("symbol", value.get("value", "")))


def why_no_svg() -> str:
    return "" if shutil.which("dot") else "dot of Graphviz is not on PATH"


def dot_to_svg(dot: bytes, seconds: float) -> bytes:
    """Draw it with Graphviz. Raises subprocess.SubprocessError or OSError if that fails or takes too long."""
    command = [shutil.which("dot") or "dot", "-Tsvg"]
    return subprocess.run(command, input=dot, capture_output=True, check=True, timeout=seconds).stdout


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
