"""Traced graphs made plain: literals written out, what does nothing left out, and outputs that are nobody else's."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from torchguard._torch import fakes, nodes, ops, tensors
from torchguard.exceptions import ImpureFunctionError

aten = torch.ops.aten
_MOST_IN_A_LITERAL = 64
_ZEROS = ("aten::_efficientzerotensor", "aten::_new_zeros_with_same_feature_meta")
_SAME_VALUE = {"aten::alias", "aten::lift_fresh_copy", "aten::lift_fresh", "aten::detach"}


def tidied(traced: GraphModule, names: Sequence[str], *, keep_detach: bool = True) -> GraphModule:
    """A graph of functional ATen operations alone, whose placeholders have the given names.

    Args:
        keep_detach: whether `detach` stays, where it is applied to what depends on a leaf.
    """
    graph = traced.graph
    from_leaves: set[Node] = set()
    for node in list(graph.nodes):
        if node.op == "placeholder" or any(source in from_leaves for source in node.all_input_nodes):
            from_leaves.add(node)
        if node.op == "get_attr":
            _write_out(graph, node, getattr(traced, str(node.target)))
        elif _name(node) in _ZEROS:
            sizes = node.args[0] if _name(node) == _ZEROS[0] else node.meta["val"].shape
            _replace(graph, node, _full(graph, node, sizes, 0, node.meta["val"]))
        elif _changes_nothing(node) and not (keep_detach and _name(node) == "aten::detach" and node in from_leaves):
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
    _own_outputs(graph)
    graph.eliminate_dead_code()
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not isinstance(node.meta.get("val"), Tensor):
            graph.erase_node(node)  # it only checks: `_linalg_check_errors`, say
    for node, name in zip(graph.find_nodes(op="placeholder"), names, strict=True):
        _rename(node, name)
    graph.lint()
    return GraphModule(torch.nn.Module(), graph)


def _name(node: Node) -> str:
    schema = ops.schema_of(node.target)
    return "" if schema is None else schema.name


def _changes_nothing(node: Node) -> bool:
    name = _name(node)
    if name in _SAME_VALUE:
        return True
    if name not in ("aten::_to_copy", "aten::expand"):
        return False
    before, after = node.all_input_nodes[0].meta["val"], node.meta["val"]
    if name == "aten::expand":
        return after.shape == before.shape
    return set(node.kwargs) <= {"dtype"} and after.dtype == before.dtype


def _write_out(graph: Graph, node: Node, value: Tensor) -> None:
    """Replace a literal such as `torch.tensor([1.0, 2.0])` by operations that make it."""
    if value.numel() > _MOST_IN_A_LITERAL or value.is_complex():
        raise ImpureFunctionError(
            f"at {node.stack_trace}: a tensor of {value.numel()} numbers is written out in the function. "
            "Make it an argument."
        )
    numbers = value.reshape(-1).tolist()
    with graph.inserting_before(node):
        if len(set(map(repr, numbers))) == 1 or value.dim() == 0:
            new = _full(graph, node, value.shape, numbers[0], value)
        elif not numbers:
            new = _full(graph, node, value.shape, 0, value)
        else:
            parts = [_full(graph, node, (1,), number, value) for number in numbers]
            row = _call(graph, node, aten.cat.default, (parts,))
            new = _call(graph, node, aten.view.default, (row, list(value.shape)))
    _replace(graph, node, new)


def _full(graph: Graph, node: Node, shape: Any, number: Any, like: Tensor) -> Node:
    with graph.inserting_before(node):
        kwargs = {"dtype": like.dtype, "device": like.device, "pin_memory": False}
        return _call(graph, node, aten.full.default, (list(shape), number), kwargs)


def _call(graph: Graph, node: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Node:
    """A new operation with a value and the line of an old one."""
    new = graph.call_function(target, args, kwargs or {})
    value = lambda part: part.meta["val"] if isinstance(part, Node) else part  # noqa: E731
    with fakes.fake_mode(), torch.no_grad():
        new.meta["val"] = target(*torch.fx.map_arg(args, value), **torch.fx.map_arg(kwargs or {}, value))
    new.stack_trace = node.stack_trace
    return new


def _replace(graph: Graph, node: Node, new: Node) -> None:
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _rename(node: Node, name: str) -> None:
    plain = "".join(letter if letter.isalnum() else "_" for letter in name).strip("_")
    nodes.rename(node, plain if plain and not plain[0].isdigit() else f"leaf_{plain}")


def _own_outputs(graph: Graph) -> None:
    """Copy each output that shares memory with a leaf, with another output, or with itself."""
    (output,) = graph.find_nodes(op="output")
    taken = {tensors.storage_of(node.meta["val"]) for node in graph.find_nodes(op="placeholder")}
    owned = []
    for node in output.args[0]:
        value = node.meta["val"]
        overlaps = any(step == 0 and size > 1 for step, size in zip(value.stride(), value.shape, strict=True))
        if overlaps or tensors.storage_of(value) in taken:
            with graph.inserting_before(output):
                order = {"memory_format": torch.contiguous_format} if overlaps else {}
                node = _call(graph, node, aten.clone.default, (node,), order)
        taken.add(tensors.storage_of(node.meta["val"]))
        owned.append(node)
    output.args = (owned,)


def shares_input_storage(node: Node) -> bool:
    """Whether a node gives its input in another shape, without computing anything."""
    if (
        node.target is operator.getitem
        or not isinstance(node.meta.get("val"), Tensor)
        or len(node.all_input_nodes) != 1
    ):
        return False
    source = node.all_input_nodes[0].meta.get("val")
    return isinstance(source, Tensor) and tensors.storage_of(source) == tensors.storage_of(node.meta["val"])
