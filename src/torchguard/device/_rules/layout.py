"""How tensors lie in memory when an op takes them."""

from collections.abc import Iterable

import torch

from torchguard.device._device import Device
from torchguard.device._graph import Graph
from torchguard.device._rules.base import Constraint
from torchguard.device._values import layout_of, shape_text
from torchguard.device._violations import Violation

_aten = torch.ops.aten
# A matrix product takes a transposed operand as it is: that is a flag of every routine for it.
_PRODUCTS = frozenset({_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm, _aten.mv, _aten.dot})
# What copies is the remedy.
_COPIES = frozenset({_aten.clone, _aten._to_copy, _aten.copy_, _aten.copy})


class Layout(Constraint):
    """An op takes a tensor in a layout that the device does not have."""

    code = "TGD201"

    def check(self, graph: Graph, device: Device) -> Iterable[Violation]:
        if device.layouts is None:
            return
        for use in graph.uses:
            packet = getattr(use.by.target, "overloadpacket", None)
            if use.by.op == "output" or packet in _COPIES:
                continue
            found = layout_of(use.tensor)
            if found in device.layouts or (found == "transposed" and packet in _PRODUCTS):
                continue
            strides = ", ".join(map(str, use.tensor.stride())) if use.tensor.layout is torch.strided else found
            message = f"takes {shape_text(use.tensor.shape)} with strides ({strides}), which is {found}; "
            message += f"{device.name} takes {', '.join(device.layouts)}"
            yield self.violation(graph, message, by=use.by, remedy=".contiguous() before it")


RULES = (Layout(),)
