"""Which nodes of a graph share a storage.

Tensors in the values of nodes, and their sizes, none of which may add a guard.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, fx

from torchguard._torch import nodes, ops
from torchguard._torch.tensors import storage_bytes, storage_of
from torchguard._torch.tracing import is_surely

Size = int | torch.SymInt
_MOST_RUNS = 65536


def tensors_of(value: object) -> Iterator[Tensor]:
    """The tensors in what a node returns."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_of(part)


def bytes_of(tensor: Tensor) -> int:
    """What a tensor's own elements take, at the sizes at hand; sizes nobody knows count as nothing."""
    count = 1
    for size in tensor.shape:
        count *= nodes.hint(size) or 0
    return count * tensor.element_size()


def bytes_touched(tensors: Sequence[Tensor]) -> int:
    """What tensors of one storage take of it together: each byte once, at the sizes at hand."""
    ranges: set[tuple[int, int]] = set()
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return sum(map(bytes_of, tensors))
    for tensor in tensors:
        runs = _runs(tensor)
        if runs is None:  # too many to tell which are shared
            return min(sum(map(bytes_of, tensors)), nodes.hint(storage_bytes(tensor)) or 0)
        ranges.update(runs)
    total = end = 0
    for start, stop in sorted(ranges):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def _runs(tensor: Tensor) -> list[tuple[int, int]] | None:
    """The ranges of bytes in its storage that a tensor is made of. None if they are more than anyone should list."""
    width = tensor.element_size()
    sizes = [nodes.hint(size) or 0 for size in tensor.shape]
    if 0 in sizes:
        return []
    strides = [nodes.hint(stride) or 0 for stride in tensor.stride()]
    run, starts = 1, [nodes.hint(tensor.storage_offset()) or 0]
    for stride, size in sorted((stride, size) for stride, size in zip(strides, sizes, strict=True) if size > 1):
        if stride <= run:
            run += stride * (size - 1)
        elif len(starts) * size > _MOST_RUNS:
            return None
        else:
            starts = [start + stride * i for start in starts for i in range(size)]
    return [(start * width, (start + run) * width) for start in starts]


def counted(count: int, what: str) -> str:
    """`1 graph`, `2 graphs`."""
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def shape_text(shape: Sequence[Size]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def layout_of(tensor: Tensor) -> str:
    """How a tensor lies in memory. What depends on symbols counts as `strided`."""
    if tensor.layout is not torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    dims = range(tensor.dim())
    if _is_dense(tensor, dims):
        return "contiguous"
    if tensor.dim() in (4, 5) and _is_dense(tensor, (0, *dims[2:], 1)):
        return "channels_last"
    if tensor.dim() >= 2 and _is_dense(tensor, (*dims[:-2], dims[-1], dims[-2])):
        return "transposed"
    return "broadcast" if any(is_surely(stride == 0) for stride in tensor.stride()) else "strided"


def _is_dense(tensor: Tensor, order: "range | tuple[int, ...]") -> bool:
    """Whether elements follow each other with the dims in this order, outermost first."""
    expected: Size = 1
    for dim in reversed(order):
        size, stride = tensor.shape[dim], tensor.stride()[dim]
        if is_surely(size == 0):
            return True
        if is_surely(size == 1):
            continue
        if not is_surely(stride == expected):
            return False
        expected = expected * size
    return True


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
        raw = [storage_of(tensor) for tensor in tensors_of(value_of(node))]
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
    return [*found[source][:1]] * count if ops.shares_input(node.target) else ()
