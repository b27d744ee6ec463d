"""A graph as data: what each node does, what it gives, and which line of whose module it comes from."""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from torchguard._torch.nodes import copy_source, position_of, source_of
from torchguard._torch.nodes import hint as hint_of
from torchguard.artifacts._schema import SCHEMA_VERSION

_LONGEST = 500
# Of all arguments of a node: what is cut short cannot be read back, and a node may take thousands of others.
_LONGEST_ARGS = 1 << 16
_PLACE = re.compile(r'File "(.*)", line (\d+), in (.*)\n\s*(.*)')


def graph_to_data(graph: fx.GraphModule, name: str, kind: str) -> dict[str, Any]:
    nodes = [_node(node, prefix) for prefix, node in nodes_of(graph)]
    return {"schema": SCHEMA_VERSION, "name": name, "kind": kind, "nodes": nodes, "sizes": _sizes_at_hand(graph)}


def _sizes_at_hand(graph: fx.GraphModule) -> dict[str, int]:
    """What symbols, and sums and products of them, were while this was compiled, as far as that is known."""
    found: dict[str, int] = {}
    for _, node in nodes_of(graph):
        for value in values_of(node):
            sizes = [*value.shape, *(_strides(value) or ())] if isinstance(value, Tensor) else [value]
            for size in sizes:
                if isinstance(size, torch.SymInt) and (hint := hint_of(size)) is not None:
                    found[str(size)] = hint
    return found


def nodes_of(graph: fx.GraphModule) -> Iterator[tuple[str, fx.Node]]:
    """All nodes, those of graphs within the graph too, each with the way to its graph."""
    for path, module in graph.named_modules():
        if isinstance(module, fx.GraphModule):
            yield from ((f"{path}." if path else "", node) for node in module.graph.nodes)


def copy_of(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy with nodes of its own: what compiles a graph may change it."""
    copy = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    copy.output(copy.graph_copy(graph.graph, copies))
    for node in graph.graph.find_nodes(op="placeholder"):
        copy_source(node, copies[node])
    return fx.GraphModule(graph, copy)


def _node(node: fx.Node, prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": prefix + node.name,
        "op": node.op,
        "target": target_of(node),
        "inputs": [prefix + one.name for one in node.all_input_nodes],
        "values": [_value(one) for one in values_of(node)],
    }
    if node.op == "placeholder":
        if source := source_of(node):
            found["origin"] = source
        if (position := position_of(node)) is not None:
            found["position"] = position
    elif node.op != "output":
        found["args"] = f"{node.args} {node.kwargs or ''}".strip()[:_LONGEST_ARGS]
    if place := _PLACE.findall(node.meta.get("stack_trace") or ""):
        file, line, function, text = place[-1]
        found["source"] = {"file": file, "line": int(line), "function": function, "text": text.strip()}
    modules = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if modules:
        found["modules"] = [{"path": str(path), "type": _type_name(kind)} for path, kind in modules.values()]
    if isinstance(sequence := node.meta.get("seq_nr"), int):
        found["sequence"] = sequence
    return found


def target_of(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    name = getattr(node.target, "__qualname__", None)
    if name is None or hasattr(node.target, "namespace"):  # an operator of torch, which prints as people write it
        return str(node.target)
    return f"{getattr(node.target, '__module__', None) or 'builtins'}.{name}"


def values_of(node: fx.Node) -> list[Any]:
    """What a node gives while tracing: AOTAutograd and Dynamo keep it under two names."""
    value = node.meta.get("val", node.meta.get("example_value"))
    if value is None:
        return []
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, Tensor):
        return {"tensor": _tensor(value)}
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return {"symbol": str(value)}
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return {"value": (repr(value) if is_plain else type(value).__name__)[:_LONGEST]}


def _tensor(tensor: Tensor) -> dict[str, Any]:
    found = {
        "shape": [_size(one) for one in tensor.shape],
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": str(tensor.device),
        "requires_grad": tensor.requires_grad,
    }
    if (strides := _strides(tensor)) is not None:
        found["stride"] = [_size(one) for one in strides]
    return found


def _strides(tensor: Tensor) -> tuple[int | torch.SymInt, ...] | None:
    return tensor.stride() if tensor.layout == torch.strided and not tensor.is_nested else None


def _size(size: int | torch.SymInt) -> int | str:
    # The text of a symbol: to compare it with anything would add a guard.
    return size if type(size) is int else str(size)


def _type_name(kind: Any) -> str:
    return kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
