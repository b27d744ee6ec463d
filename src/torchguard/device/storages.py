"""Which nodes of a graph share a storage."""

import operator
from collections.abc import Mapping, Sequence

from torch import fx

from torchguard.device import _torch
from torchguard.device.values import tensors_of

# What tells a storage from others, for each tensor in the value of a node; None for a tensor that has no storage.
Keys = Sequence[int | None]


def storage_keys(module: fx.GraphModule, known: Mapping[fx.Node, Keys] | None = None) -> dict[fx.Node, Keys]:
    """The storages of every node, which is that of its input for a view.

    Fake tensors alone do not tell: where two nodes were found to be the same and one of them was taken out, its views
    look at the other one, and still have the storage of the one that is gone.

    Args:
        known: the storages of some placeholders, which are those of another graph.
    """
    same: dict[int, int] = {}  # by what a fake tensor says
    found: dict[fx.Node, Keys] = {}
    for node in module.graph.nodes:
        raw = [_torch.storage_of(tensor) for tensor in tensors_of(value_of(node))]
        given = known[node] if known is not None and node in known else _of_input(node, found, len(raw))
        pairs = [(key, given[i] if i < len(given) else None) for i, key in enumerate(raw)]
        same |= {key: other for key, other in pairs if key is not None and other is not None}
        found[node] = [None if key is None else same.get(key, key) for key in raw]
    return found


def value_of(node: fx.Node | None) -> object:
    """What a node returns, as a fake tensor; the attribute itself where a graph made by hand has no other."""
    if node is None or node.op == "output":
        return None
    value = node.meta.get("val")
    if value is None and node.op == "get_attr" and node.graph.owning_module is not None:
        return getattr(node.graph.owning_module, str(node.target), None)
    return value


def _of_input(node: fx.Node, found: Mapping[fx.Node, Keys], count: int) -> Keys:
    """The storages that a node has from its first input; none if it makes its own."""
    if node.op != "call_function" or not node.all_input_nodes:
        return ()
    source = node.all_input_nodes[0]
    if node.target is operator.getitem:
        parts, index = value_of(source), node.args[1]
        if not isinstance(parts, (tuple, list)) or not isinstance(index, int):
            return ()
        start = sum(1 for _ in tensors_of(list(parts[: index % len(parts)])))
        return found[source][start : start + count]
    # All that an op such as `split` returns are views of one.
    return [*found[source][:1]] * count if _torch.shares_input(node.target) else ()
