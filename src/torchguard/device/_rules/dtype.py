"""Dtypes by role: parameters, activations, indices, and the accumulators of reductions."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import fx

from torchguard._graphs.op_facts import facts_of
from torchguard.device._graph import Graph, Use
from torchguard.device._rules.base import Constraint
from torchguard.device._storages import tensors_of
from torchguard.device._violations import DeviceViolation

if TYPE_CHECKING:
    from torchguard.device._device import Device


class RoleDtype(Constraint):
    """A tensor has a dtype that the device does not support for its role."""

    def __init__(self, code: str, role: str) -> None:
        self.code, self.role = code, role

    def check(self, graph: Graph, device: "Device") -> Iterable[DeviceViolation]:
        allowed: tuple[torch.dtype, ...] | None = getattr(device, self.role)
        if allowed is None:
            return
        for use in (*graph.uses, *graph.bitcast_uses):
            if use.role == self.role and use.tensor.dtype not in allowed and not _is_counter(use):
                message = f"{_name(use.tensor.dtype)} {self.role}, {device.name} supports {_names(allowed)}"
                remedy = f"convert to {_name(allowed[0])}: .to(torch.{_name(allowed[0])})" if allowed else ""
                yield self.violation(graph, message, node=use.consumer, tensor=use.producer, remedy=remedy)


class AccumulatorDtype(Constraint):
    """A floating point reduction accumulates in a dtype that the device does not accumulate in."""

    code = "TGD104"

    def check(self, graph: Graph, device: "Device") -> Iterable[DeviceViolation]:
        allowed: tuple[torch.dtype, ...] | None = device.accumulators
        if allowed is None:
            return
        for node in graph.ops:
            if not _accumulates(node):
                continue
            for dtype in {tensor.dtype for tensor in tensors_of(node.meta.get("val"))}:
                if dtype.is_floating_point and dtype not in allowed:
                    message = f"accumulates in {_name(dtype)}, {device.name} supports {_names(allowed)}"
                    remedy = f"pass dtype=torch.{_name(allowed[0])}, or convert before" if allowed else ""
                    yield self.violation(graph, message, node=node, remedy=remedy)


def _accumulates(node: fx.Node) -> bool:
    accumulates = facts_of(str(getattr(node.target, "overloadpacket", ""))).accumulates
    if accumulates == "if reduced":
        return all(tensor.dim() == 0 for tensor in tensors_of(node.meta.get("val")))
    return accumulates == "always" or (
        accumulates != "never" and torch.Tag.reduction in getattr(node.target, "tags", ())
    )


def _is_counter(use: Use) -> bool:
    """Whether this is a single integer, such as a step counter, which indexes nothing."""
    return use.role == "indices" and use.tensor.dim() == 0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(map(_name, dtypes)) or "none"


RULES = (
    RoleDtype("TGD101", "parameters"),
    RoleDtype("TGD102", "activations"),
    RoleDtype("TGD103", "indices"),
    AccumulatorDtype(),
)
