"""The tensors of a graph's nodes: their bytes, and which nodes share a storage.

A node's result is a fake tensor in `meta["val"]`, and its sizes may be symbols. Nothing here compares symbols, which
would add a guard: `nodes.hint` reads the concrete size that a symbol stands for in the current compilation.

The storages of fake tensors are not enough. AOTAutograd's partitioner removes duplicate computations (CSE). A view of a
removed node becomes a view of the remaining one, but keeps its `meta["val"]`, with the storage of the removed node.
By the fake tensors alone, such a graph has two storages where one exists at run time, and a memory plan would count it
twice. So `storage_keys` follows views to their inputs: a view has the storage of its input, whatever its fake tensor
says. This can be removed once the partitioner computes fake tensors again after CSE.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, fx

from torchguard._torch import nodes, ops
from torchguard._torch.tensors import storage_bytes, storage_of

Size = int | torch.SymInt
# For each tensor in the result of a node the identity of its storage; None for a tensor without one (sparse).
Keys = Sequence[int | None]

_MAX_RANGES = 65536


def tensors_of(value: object) -> Iterator[Tensor]:
    """The tensors in the result of a node, which may be a tuple or list."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_of(part)


def value_of(node: fx.Node | None) -> object:
    """The fake result of a node; the attribute itself where a hand-written graph has no other."""
    if node is None or node.op == "output":
        return None
    value = node.meta.get("val")
    if value is None and node.op == "get_attr" and node.graph.owning_module is not None:
        return getattr(node.graph.owning_module, str(node.target), None)
    return value


def bytes_of(tensor: Tensor) -> int:
    """The bytes of a tensor's own elements at concrete sizes; a size that is unknown counts as 0."""
    count = 1
    for size in tensor.shape:
        count *= nodes.hint(size) or 0
    return count * tensor.element_size()


def bytes_covered(tensors: Sequence[Tensor]) -> int:
    """The bytes of one storage that these tensors cover together, each byte counted once, at concrete sizes."""
    ranges: set[tuple[int, int]] = set()
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return sum(map(bytes_of, tensors))
    for tensor in tensors:
        covered = _byte_ranges(tensor)
        if covered is None:  # too many ranges to find overlaps: an upper bound
            return min(sum(map(bytes_of, tensors)), nodes.hint(storage_bytes(tensor)) or 0)
        ranges.update(covered)
    total = end = 0
    for start, stop in sorted(ranges):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def _byte_ranges(tensor: Tensor) -> list[tuple[int, int]] | None:
    """The contiguous byte ranges of its storage that a tensor covers. None if there are more than `_MAX_RANGES`."""
    width = tensor.element_size()
    sizes = [nodes.hint(size) or 0 for size in tensor.shape]
    if 0 in sizes:
        return []
    strides = [nodes.hint(stride) or 0 for stride in tensor.stride()]
    length, starts = 1, [nodes.hint(tensor.storage_offset()) or 0]
    for stride, size in sorted((stride, size) for stride, size in zip(strides, sizes, strict=True) if size > 1):
        if stride <= length:
            length += stride * (size - 1)
        elif len(starts) * size > _MAX_RANGES:
            return None
        else:
            starts = [start + stride * i for start in starts for i in range(size)]
    return [(start * width, (start + length) * width) for start in starts]


def storage_keys(module: fx.GraphModule, known: Mapping[fx.Node, Keys] | None = None) -> dict[fx.Node, Keys]:
    """The storages of every node's tensors; a view has the storage of its input.

    Args:
        known: the storages of placeholders that another graph computes.
    """
    replaced: dict[int, int] = {}  # the storage of a fake tensor: the storage that exists at run time
    keys: dict[fx.Node, Keys] = {}
    for node in module.graph.nodes:
        fake = [storage_of(tensor) for tensor in tensors_of(value_of(node))]
        actual = known[node] if known is not None and node in known else _input_keys(node, keys, len(fake))
        pairs = [(key, actual[i] if i < len(actual) else None) for i, key in enumerate(fake)]
        replaced |= {key: other for key, other in pairs if key is not None and other is not None}
        keys[node] = [None if key is None else replaced.get(key, key) for key in fake]
    return keys


def _input_keys(node: fx.Node, keys: Mapping[fx.Node, Keys], count: int) -> Keys:
    """The storages that a node shares with its first input; empty if it allocates its own."""
    if node.op != "call_function" or not node.all_input_nodes:
        return ()
    source = node.all_input_nodes[0]
    if node.target is operator.getitem:
        parts, index = value_of(source), node.args[1]
        if not isinstance(parts, (tuple, list)) or not isinstance(index, int):
            return ()
        start = sum(1 for _ in tensors_of(list(parts[: index % len(parts)])))
        return keys[source][start : start + count]
    # All results of an op such as `split` are views of one input.
    return [*keys[source][:1]] * count if ops.shares_input(node.target) else ()
