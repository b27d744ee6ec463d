"""Memory layouts of the tensors that ops take and that graphs return."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchguard._graphs.op_facts import PRODUCTS
from torchguard._torch.tracing import is_surely
from torchguard.device._graph import Graph, producer_of
from torchguard.device._rules.base import Constraint
from torchguard.device._storages import Size, tensors_of
from torchguard.device._violations import DeviceViolation

if TYPE_CHECKING:
    from torchguard.device._device import Device

_aten = torch.ops.aten
# Matrix products accept transposed operands: every BLAS routine has a flag for them.
_PRODUCTS = frozenset(getattr(_aten, name) for name in PRODUCTS)
# A copy is the remedy, so it accepts every layout.
_COPIES = frozenset({_aten.clone, _aten._to_copy, _aten.copy_, _aten.copy})


class Layout(Constraint):
    """An op takes a tensor, or the graph returns one, in a layout that the device does not support."""

    code = "TGD201"

    def check(self, graph: Graph, device: "Device") -> Iterable[DeviceViolation]:
        if device.layouts is None:
            return
        refused: set[tuple[object, str]] = set()
        for use in graph.uses:
            packet = getattr(use.consumer.target, "overloadpacket", None)
            if use.consumer.op == "output" or packet in _COPIES:
                continue
            layout = layout_of(use.tensor)
            if layout in device.layouts or (layout == "transposed" and packet in _PRODUCTS):
                continue
            message = f"input {shape_text(use.tensor.shape)}{_strides(use.tensor)} is {layout}, "
            message += f"{device.name} supports {', '.join(device.layouts)}"
            refused.add((use.consumer, layout))
            yield self.violation(graph, message, node=use.consumer, remedy="call .contiguous() before it")
        for node in graph.returned:
            # The gradient of a weight is a transposed product, which can write its result transposed: no line of the
            # user's asks for it.
            producer = producer_of(node)
            packet = getattr(producer.target, "overloadpacket", None)
            for tensor in tensors_of(node.meta.get("val")):
                layout = layout_of(tensor)
                is_gradient = graph.name.startswith("backward") and layout == "transposed" and packet in _PRODUCTS
                is_supported = layout in device.layouts or is_gradient
                if not is_supported and (producer, layout) not in refused:  # it has the layout of its op's input
                    message = f"output {shape_text(tensor.shape)}{_strides(tensor)} is {layout}, "
                    message += f"{device.name} supports {', '.join(device.layouts)}"
                    # Its op can run on the device, so the violation is at the output.
                    yield self.violation(
                        graph, message, node=graph.output, tensor=node, remedy="return a copy: .contiguous()"
                    )


def _strides(tensor: Tensor) -> str:
    return f" with strides ({', '.join(map(str, tensor.stride()))})" if tensor.layout is torch.strided else ""


def layout_of(tensor: Tensor) -> str:
    """The layout of a tensor, as `Device.layouts` names it. One that depends on symbols counts as `strided`."""
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
    """Whether elements follow each other without gaps with the dims in this order, outermost first."""
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


def shape_text(shape: Sequence[Size]) -> str:
    """`(4, s77)`."""
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


RULES = (Layout(),)
