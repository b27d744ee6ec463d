"""Compiled functions written to JSON files, the hash of a graph, and the operations that a file may name.

A file holds the leaves, the forward graph in the terms of `_graphs.codec`, and the structure of arguments and results.
Derivatives are not in it: they are traced again when the file is loaded.
"""

import hashlib
import json
import operator
import os
import re
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from torchguard._files import write_whole
from torchguard._graphs.codec import encode_argument, target_name
from torchguard._graphs.listing import type_text
from torchguard._pytrees import PytreeSpec
from torchguard._torch import ops, tensors
from torchguard.compiled._allowed import is_allowed
from torchguard.compiled._leaves import LeafType
from torchguard.exceptions import SavedGraphError

if TYPE_CHECKING:
    from torchguard.compiled._functions import CompiledOut

FORMAT, VERSION = "torchguard.compiled", 1
# Only operations of these namespaces are looked up, by names of this form.
_NAMESPACES = {"aten": torch.ops.aten, "prims": torch.ops.prims}
_OPERATION = re.compile(r"(aten|prims)\.([a-z0-9_]+)\.([A-Za-z0-9_]+)")


def save(made: "CompiledOut", path: str | os.PathLike[str]) -> None:
    """Write a compiled function to a file. Raises SavedGraphError for one that uses an `autograd.Function`."""
    arguments = made.signature.arguments
    if made.program.random_leaves or any(leaf.dynamic for leaf in made.leaves):
        raise SavedGraphError(
            f"save: {made.name} has lifted or dynamic leaves, but a file holds a graph of fixed sizes. "
            "Compile it without `dynamic` and `lift_rng` to save it."
        )
    for node in made.graph.nodes:
        if node.op == "call_function":
            find_operation(target_name(node.target))
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
        "leaves": [_encode_leaf(leaf) for leaf in made.leaves],
        "graph": _encode_graph(made.graphs.forward, names),
        "sources": {node.name: node.stack_trace for node in made.graph.nodes if node.stack_trace},
        "arguments": None if arguments is None else _encode_nest(arguments),
        "results": _encode_nest(made.results),
    }
    write_whole(path, json.dumps(written, indent=1, allow_nan=False) + "\n")


def graph_hash(graph: GraphModule) -> str:
    """The SHA-256 of a graph. The names of its nodes and its source lines do not count."""
    numbers = {node: str(i) for i, node in enumerate(graph.graph.nodes)}
    text = json.dumps(_encode_graph(graph, numbers), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def find_operation(name: Any) -> Any:
    """The operation of ATen or prims that a file names. Raises SavedGraphError unless it is pure and safe to run."""
    if name == "getitem":
        return operator.getitem
    match = _OPERATION.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise SavedGraphError(f"{name!r:.200} is not an operation of {' or '.join(_NAMESPACES)}: no other is accepted.")
    namespace, packet, overload = match.groups()
    found: Any = getattr(getattr(_NAMESPACES[namespace], packet, None), overload, None)
    schema = ops.schema_of(found)
    if schema is None:
        raise SavedGraphError(f"torch {torch.__version__} has no operation {name!r}.")
    if not is_allowed(found):
        raise SavedGraphError(
            f"{name!r} is refused in saved graphs: it is not on the list of operations that are pure and safe to run "
            "with any arguments."
        )
    return found


def _encode_leaf(leaf: LeafType) -> dict[str, Any]:
    return {
        "name": leaf.name,
        "shape": list(leaf.shape),
        "stride": list(leaf.stride),
        "dtype": str(leaf.dtype).removeprefix("torch."),
        "device": str(leaf.device),
        "differentiable": leaf.differentiable,
    }


def _encode_graph(graph: GraphModule, names: dict[Node, str]) -> dict[str, Any]:
    def encode(value: Any) -> Any:
        return encode_argument(value, names.__getitem__)

    inputs = [[names[node], type_text(node.meta["val"])] for node in graph.graph.find_nodes(op="placeholder")]
    nodes, outputs = [], []
    for node in graph.graph.nodes:
        if node.op == "call_function":
            encoded: dict[str, Any] = {
                "name": names[node],
                "op": target_name(node.target),
                "type": type_text(node.meta["val"]),
                "args": encode(node.args),
            }
            if node.kwargs:
                encoded["kwargs"] = {key: encode(value) for key, value in node.kwargs.items()}
            nodes.append(encoded)
        elif node.op == "output":
            outputs = [names[result] for result in node.args[0]]
    return {"inputs": inputs, "nodes": nodes, "outputs": outputs}


def _encode_nest(nest: PytreeSpec) -> Any:
    """Tuples, lists and dicts by name, and the positions of tensors by number."""
    leaves: list[Any] = [None] * nest.count
    for number, place in enumerate(nest.positions):
        leaves[place] = number
    return _encode_part(tensors.unflatten(leaves, nest.structure))


def _encode_part(value: Any) -> Any:
    if value is None or isinstance(value, int):
        return value
    if type(value) in (tuple, list):
        return {type(value).__name__: [_encode_part(part) for part in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _encode_part(part) for key, part in value.items()}}
    raise SavedGraphError(
        f"save: a {type(value).__name__} cannot be written to a file: expected tuples, lists and dicts with str keys."
    )
