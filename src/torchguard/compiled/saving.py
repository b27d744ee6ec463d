"""Compiled functions written to JSON files: leaves, ATen operations by name, and how things are nested."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torchguard.compiled import probe
from torchguard.compiled.encoding import FORMAT, VERSION, encoded_graph, encoded_leaf, encoded_nest, operation
from torchguard.compiled.executables import Executables, Graphs
from torchguard.compiled.listing import op_name
from torchguard.compiled.tracing import program_of
from torchguard.exceptions import CompileError, SavedGraphError

if TYPE_CHECKING:
    from torchguard.compiled.functions import CompiledOut


def save(made: "CompiledOut", path: str | os.PathLike[str]) -> None:
    """Write a compiled function to a file. One whose derivatives are not those of its graph is refused."""
    nest = made._signature.arguments
    if made._program.lifted or any(leaf.dynamic for leaf in made.leaves):
        raise SavedGraphError(f"save: {made.name} has lifted or dynamic leaves, and a graph is of one size.")
    for node in made.graph.nodes:
        if node.op == "call_function":
            operation(op_name(node.target))
    _check_rules(made)
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
        "results": encoded_nest(made._results),
    }
    Path(path).write_text(json.dumps(written, indent=1, allow_nan=False) + "\n")


def _check_rules(made: "CompiledOut") -> None:
    """Refuse a function whose rules are its own: a file holds the operations, and the rules would be torch's."""
    own = made.graphs
    if not any(leaf.differentiable for leaf in made.leaves) or made.examples is None:
        return
    try:
        plain = Graphs(program_of(own.forward, made.name, made.leaves))
        w = probe.random_like(made._seeds.types, 1)
        ran = [Executables(graphs, "eager")["vjp"]([*made.examples, *w]) for graphs in (own, plain)]
    except CompileError:
        return
    if not all(torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True) for a, b in zip(*ran, strict=True)):
        raise SavedGraphError(
            f"save: the gradients of {made.name} are not those of its operations: an autograd.Function has rules of "
            "its own, which a file cannot hold."
        )
