"""Graphs, leaves and nests as what JSON can hold, and the operations a file may name."""

import hashlib
import json
import math
import operator
import re
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchguard._torch import ops
from torchguard._torch.tensors import unflatten
from torchguard.compiled._leaves import LeafType
from torchguard.compiled._listing import type_text
from torchguard.compiled._nesting import Nest
from torchguard.compiled._nodes import full_name
from torchguard.exceptions import SavedGraphError

FORMAT, VERSION = "torchguard.compiled", 1
TORCH_VALUES = {"dtype": torch.dtype, "memory_format": torch.memory_format, "layout": torch.layout}
# Operations of these namespaces alone are looked up, by a name of this form, and none of the refused ones.
_NAMESPACES = {"aten": torch.ops.aten, "prims": torch.ops.prims}
_OP = re.compile(r"(aten|prims)\.([a-z0-9_]+)\.([A-Za-z0-9_]+)")
# What reads and makes files; views of memory at will; what others left in memory; indices that nobody checks.
_REFUSED = re.compile(
    r"from_file|as_strided|reshape_alias|^_?set(_|$)|^data$|empty|resize|nested|sparse|buffer|quant|_test|segment_reduce"
    r"|unsafe_(?!view)|(pool|embedding|nll_loss|ctc_loss|margin_loss).*backward|cudnn|mkldnn|miopen"
)


def graph_hash(graph: GraphModule) -> str:
    """What tells a graph from every other one: names do not count, and lines of the source neither."""
    numbers = {node: str(i) for i, node in enumerate(graph.graph.nodes)}
    text = json.dumps(encoded_graph(graph, numbers), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def encoded_leaf(leaf: LeafType) -> dict[str, Any]:
    return {
        "name": leaf.name,
        "shape": list(leaf.shape),
        "stride": list(leaf.stride),
        "dtype": str(leaf.dtype).removeprefix("torch."),
        "device": str(leaf.device),
        "differentiable": leaf.differentiable,
    }


def encoded_graph(graph: GraphModule, names: dict[Node, str]) -> dict[str, Any]:
    nodes, outputs = [], []
    for node in graph.graph.nodes:
        if node.op == "call_function":
            encoded: dict[str, Any] = {
                "name": names[node],
                "op": full_name(node),
                "type": type_text(node.meta["val"]),
            }
            encoded["args"] = _encoded(node.args, names)
            if node.kwargs:
                encoded["kwargs"] = {key: _encoded(value, names) for key, value in node.kwargs.items()}
            nodes.append(encoded)
        elif node.op == "output":
            outputs = [names[result] for result in node.args[0]]
    inputs = [(names[node], type_text(node.meta["val"])) for node in graph.graph.find_nodes(op="placeholder")]
    return {"inputs": [list(pair) for pair in inputs], "nodes": nodes, "outputs": outputs}


def _encoded(value: Any, names: dict[Node, str]) -> Any:
    if isinstance(value, Node):
        return {"node": names[value]}
    if isinstance(value, (tuple, list)):
        return [_encoded(part, names) for part in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for key, kind in TORCH_VALUES.items():
        if isinstance(value, kind):
            return {key: str(value).removeprefix("torch.")}
    raise SavedGraphError(f"save: an argument of type {type(value).__name__} cannot be written.")


def encoded_nest(nest: Nest) -> Any:
    """Tuples, lists and dicts by name, and places of tensors by number."""
    leaves: list[Any] = [None] * nest.count
    for number, place in enumerate(nest.places):
        leaves[place] = number
    return _encoded_part(unflatten(leaves, nest.structure))


def _encoded_part(value: Any) -> Any:
    if value is None or isinstance(value, int):
        return value
    if type(value) in (tuple, list):
        return {type(value).__name__: [_encoded_part(part) for part in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _encoded_part(part) for key, part in value.items()}}
    raise SavedGraphError(f"save: a {type(value).__name__} cannot be written: tuples, lists and dicts with names can.")


def operation(name: Any) -> Any:
    if name == "getitem":
        return operator.getitem
    match = _OP.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise SavedGraphError(
            f"load: {name!r} is no operation of {' or '.join(_NAMESPACES)}, and nothing else is looked up."
        )
    namespace, packet, overload = match.groups()
    found: Any = getattr(getattr(_NAMESPACES[namespace], packet, None), overload, None)
    schema = ops.schema_of(found)
    if schema is None:
        raise SavedGraphError(f"load: torch {torch.__version__} has no operation {name!r}.")
    returns_tensors = any("Tensor" in str(result.type) for result in schema.returns)
    if (
        not returns_tensors
        or schema.is_mutable
        or _REFUSED.search(packet)
        or torch.Tag.nondeterministic_seeded in found.tags
    ):
        raise SavedGraphError(
            f"{name!r} is refused in saved graphs: it is not pure, or reads memory that is not its own."
        )
    return found
