"""Shapes: alignment, rank, largest size, and symbolic sizes."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from torchguard._torch import nodes
from torchguard._torch.tracing import is_surely
from torchguard.device._graph import Graph
from torchguard.device._rules.base import Constraint
from torchguard.device._rules.layout import layout_of, shape_text
from torchguard.device._storages import Size, tensors_of
from torchguard.device._violations import DeviceViolation

if TYPE_CHECKING:
    from torchguard.device._device import Device


class Alignment(Constraint):
    """A dim of a floating point tensor is not a multiple of the device's alignment."""

    code = "TGD301"

    def check(self, graph: Graph, device: "Device") -> Iterable[DeviceViolation]:
        multiples: tuple[tuple[int, int], ...] = device.alignment or ()
        for use in graph.uses if multiples else ():
            if use.role not in ("parameters", "activations"):
                continue
            shape = _shape_in_memory(use.tensor)
            for dim, size, multiple in _limits(shape, multiples):
                if is_surely(size == 1) or is_surely(size % multiple == 0):
                    continue
                is_fixed = isinstance(size, int)
                needs = f"{size} % {multiple} == 0" if str(size).isalnum() else f"({size}) % {multiple} == 0"
                yield self.violation(
                    graph,
                    f"dim {dim} of {shape_text(shape)} {'is not' if is_fixed else 'may not be'} "
                    f"a multiple of {multiple}",
                    node=use.consumer,
                    tensor=use.producer,
                    remedy=f"pad dim {dim} from {size} to {-(-size // multiple) * multiple}"
                    if is_fixed
                    else _assertion(size, f"% {multiple} == 0"),
                    condition="" if is_fixed else needs,
                    holds_now=(nodes.hint(size) or 1) % multiple == 0,
                )


def _assertion(size: torch.SymInt, condition: str) -> str:
    """How the program can assert a condition of a size, as code that can be pasted."""
    name = nodes.size_in_user_code(size)
    call = (
        f"in the model: {nodes.CHECK_SIZE}({name} {condition})"
        if name
        else f"where the size is computed, with {nodes.CHECK_SIZE}"
    )
    return f"assert it {call}, or compile with dynamic=False"


class Rank(Constraint):
    """A tensor has more dims than the device supports."""

    code = "TGD302"

    def check(self, graph: Graph, device: "Device") -> Iterable[DeviceViolation]:
        most: int | None = device.max_rank
        for use in graph.uses if most is not None else ():
            if use.tensor.dim() > (most or 0):
                message = f"{shape_text(use.tensor.shape)} has {use.tensor.dim()} dims, {device.name} supports {most}"
                yield self.violation(
                    graph, message, node=use.consumer, tensor=use.producer, remedy="merge dims: .flatten()"
                )


class LargestSize(Constraint):
    """A dim is larger than the device supports."""

    code = "TGD303"

    def check(self, graph: Graph, device: "Device") -> Iterable[DeviceViolation]:
        largest: int | tuple[tuple[int, int], ...] = device.max_dim or ()
        for use in graph.uses if largest else ():
            shape = _shape_in_memory(use.tensor)
            for dim, size, most in _limits(shape, largest):
                if is_surely(size <= most):
                    continue
                is_fixed = isinstance(size, int)
                yield self.violation(
                    graph,
                    f"dim {dim} of {shape_text(shape)} {'is' if is_fixed else 'may be'} larger than {most}",
                    node=use.consumer,
                    tensor=use.producer,
                    remedy=f"split it into parts of {most} at most",
                    condition="" if is_fixed else f"{size} <= {most}",
                    holds_now=(nodes.hint(size) or most + 1) <= most,
                )


class DynamicShapes(Constraint):
    """Sizes are symbols, and the device needs static shapes."""

    code = "TGD304"

    def check(self, graph: Graph, device: "Device") -> Iterable[DeviceViolation]:
        if device.dynamic_shapes:
            return
        for node in graph.ops:
            symbols = sorted({str(size) for near in (node, *node.all_input_nodes) for size in _symbols(near)})
            if symbols:
                message = f"sizes {', '.join(symbols)} are symbolic, {device.name} needs static shapes"
                yield self.violation(graph, message, node=node, remedy="compile with dynamic=False")


def _symbols(node: fx.Node) -> Iterator[torch.SymInt]:
    for tensor in tensors_of(node.meta.get("val")):
        yield from (size for size in tensor.shape if isinstance(size, torch.SymInt))


def _shape_in_memory(tensor: Tensor) -> Sequence[Size]:
    """The shape in the order of memory: transposing a matrix does not change which elements are adjacent."""
    shape = tuple(tensor.shape)
    return (*shape[:-2], shape[-1], shape[-2]) if layout_of(tensor) == "transposed" else shape


def _limits(shape: Sequence[Size], by_dim: int | tuple[tuple[int, int], ...]) -> Iterator[tuple[int, Size, int]]:
    """The dims that a device restricts, counted from the front, each with its size and the device's number for it."""
    rank = len(shape)
    pairs = tuple((dim, by_dim) for dim in range(rank)) if isinstance(by_dim, int) else by_dim
    for dim, number in pairs:
        if -rank <= dim < rank:
            yield dim % rank, shape[dim], number


RULES = (Alignment(), Rank(), LargestSize(), DynamicShapes())
