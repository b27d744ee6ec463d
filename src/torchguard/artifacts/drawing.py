"""Graphs drawn: as DOT always, as SVG where Graphviz is installed."""

import shutil
import subprocess
from typing import Any

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
