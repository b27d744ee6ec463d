"""Compiled functions written to JSON files: leaves, ATen operations by name, and how things are nested."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from torchguard.compiled._encode import FORMAT, VERSION, encoded_graph, encoded_leaf, encoded_nest, operation
from torchguard.compiled._nodes import full_name
from torchguard.exceptions import SavedGraphError

if TYPE_CHECKING:
    from torchguard.compiled._functions import CompiledOut


def save(made: "CompiledOut", path: str | os.PathLike[str]) -> None:
    """Write a compiled function to a file. One with rules of its own is refused."""
    nest = made.signature.arguments
    if made.program.random_leaves or any(leaf.dynamic for leaf in made.leaves):
        raise SavedGraphError(f"save: {made.name} has lifted or dynamic leaves, and a graph is of one size.")
    for node in made.graph.nodes:
        if node.op == "call_function":
            operation(full_name(node))
    if made.graphs.has_autograd_function:
        raise SavedGraphError(
            f"save: {made.name} uses an autograd.Function, which has rules of its own, and a file cannot hold them."
        )
    names = {node: node.name for node in made.graph.nodes}
    written = {
        "format": FORMAT,
        "version": VERSION,
        "kind": made.kind,
        "name": made.name,
        "leaves": [encoded_leaf(leaf) for leaf in made.leaves],
        "graph": encoded_graph(made.graphs.forward, names),
        "sources": {node.name: node.stack_trace for node in made.graph.nodes if node.stack_trace},
        "arguments": None if nest is None else encoded_nest(nest),
        "results": encoded_nest(made.results),
    }
    Path(path).write_text(json.dumps(written, indent=1, allow_nan=False) + "\n")
