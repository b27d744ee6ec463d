"""Sizes: multiples, ranks, largest ones, and symbols."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, fx

from torchguard._torch import nodes
from torchguard._torch.tracing import is_surely
from torchguard.device._device import Device
from torchguard.device._graph import Graph
from torchguard.device._rules.base import Constraint
from torchguard.device._values import Size, layout_of, shape_text, tensors_of
from torchguard.device._violations import Violation


class Alignment(Constraint):
    """A dim of a floating point tensor is no multiple of what the device works in."""

    code = "TGD301"

    def check(self, graph: Graph, device: Device) -> Iterable[Violation]:
        multiples: tuple[tuple[int, int], ...] = device.alignment or ()
        for use in graph.uses if multiples else ():
            if use.role not in ("parameters", "activations"):
                continue
            shape = _in_memory(use.tensor)
            for dim, size, multiple in _sizes(shape, multiples):
                if is_surely(size == 1) or is_surely(size % multiple == 0):
                    continue
                is_fixed = isinstance(size, int)
                needs = f"{size} % {multiple} == 0" if str(size).isalnum() else f"({size}) % {multiple} == 0"
                yield self.violation(
                    graph,
                    f"dim {dim} of {shape_text(shape)} {'is' if is_fixed else 'may be'} no multiple of {multiple}",
                    by=use.by,
                    tensor=use.source,
                    remedy=f"pad dim {dim} from {size} to {-(-size // multiple) * multiple}"
                    if is_fixed
                    else _say(size, f"% {multiple} == 0"),
                    condition="" if is_fixed else needs,
                    holds_now=(nodes.hint(size) or 1) % multiple == 0,
                )


def _say(size: torch.SymInt, rest: str) -> str:
    """How the program can say something of a size, in words that can be pasted."""
    name = nodes.size_in_user_code(size)
    told = (
        f"say so in the model: {nodes.CHECK_SIZE}({name} {rest})"
        if name
        else f"say so where it is made, with {nodes.CHECK_SIZE}"
    )
    return f"{told}, or compile with dynamic=False"


class Rank(Constraint):
    """A tensor has more dims than the device knows."""

    code = "TGD302"

    def check(self, graph: Graph, device: Device) -> Iterable[Violation]:
        most: int | None = device.max_rank
        for use in graph.uses if most is not None else ():
            if use.tensor.dim() > (most or 0):
                message = f"{shape_text(use.tensor.shape)} has {use.tensor.dim()} dims, {device.name} knows {most}"
                yield self.violation(graph, message, by=use.by, tensor=use.source, remedy="merge dims: .flatten()")


class LargestSize(Constraint):
    """A dim is larger than the device can address."""

    code = "TGD303"

    def check(self, graph: Graph, device: Device) -> Iterable[Violation]:
        largest: int | tuple[tuple[int, int], ...] = device.max_dim or ()
        for use in graph.uses if largest else ():
            shape = _in_memory(use.tensor)
            for dim, size, most in _sizes(shape, largest):
                if is_surely(size <= most):
                    continue
                is_fixed = isinstance(size, int)
                yield self.violation(
                    graph,
                    f"dim {dim} of {shape_text(shape)} {'is' if is_fixed else 'may be'} larger than {most}",
                    by=use.by,
                    tensor=use.source,
                    remedy=f"split it into parts of {most} at most",
                    condition="" if is_fixed else f"{size} <= {most}",
                    holds_now=(nodes.hint(size) or most + 1) <= most,
                )


class DynamicShapes(Constraint):
    """Sizes are symbols, and the device needs numbers."""

    code = "TGD304"

    def check(self, graph: Graph, device: Device) -> Iterable[Violation]:
        if device.dynamic_shapes:
            return
        for node in graph.ops:
            symbols = sorted({str(size) for near in (node, *node.all_input_nodes) for size in _symbols(near)})
            if symbols:
                message = f"sizes {', '.join(symbols)} are not known, {device.name} needs numbers"
                yield self.violation(graph, message, by=node, remedy="compile with dynamic=False")


def _symbols(node: fx.Node) -> Iterator[torch.SymInt]:
    for tensor in tensors_of(node.meta.get("val")):
        yield from (size for size in tensor.shape if isinstance(size, torch.SymInt))


def _in_memory(tensor: Tensor) -> Sequence[Size]:
    """The shape as it lies in memory: that a matrix is transposed does not change what is next to what."""
    shape = tuple(tensor.shape)
    return (*shape[:-2], shape[-1], shape[-2]) if layout_of(tensor) == "transposed" else shape


def _sizes(shape: Sequence[Size], by_dim: int | tuple[tuple[int, int], ...]) -> Iterator[tuple[int, Size, int]]:
    """Dims, counted from the front, with their sizes and the numbers that are said of them."""
    rank = len(shape)
    pairs = tuple((dim, by_dim) for dim in range(rank)) if isinstance(by_dim, int) else by_dim
    for dim, number in pairs:
        if -rank <= dim < rank:
            yield dim % rank, shape[dim], number


RULES = (Alignment(), Rank(), LargestSize(), DynamicShapes())
