"""Dtypes by role: parameters, activations, indices, and what reductions add up in."""

from collections.abc import Iterable

import torch
from torch import fx

from torchguard._graphs.op_facts import facts_of
from torchguard.device._device import Device
from torchguard.device._graph import Graph, Use
from torchguard.device._rules.base import Constraint
from torchguard.device._values import tensors_of
from torchguard.device._violations import Violation


class RoleDtype(Constraint):
    """A tensor in this role has a dtype that the device does not have for it."""

    def __init__(self, code: str, role: str) -> None:
        self.code, self.role = code, role

    def check(self, graph: Graph, device: Device) -> Iterable[Violation]:
        allowed: tuple[torch.dtype, ...] | None = getattr(device, self.role)
        if allowed is None:
            return
        for use in (*graph.uses, *graph.seen_otherwise):
            if use.role == self.role and use.tensor.dtype not in allowed and not _is_counter(use):
                message = f"{_name(use.tensor.dtype)} {self.role}, {device.name} has {_names(allowed)}"
                remedy = f"convert to {_name(allowed[0])}: .to(torch.{_name(allowed[0])})" if allowed else ""
                yield self.violation(graph, message, by=use.by, tensor=use.source, remedy=remedy)


class AccumulatorDtype(Constraint):
    """A reduction over floating point numbers adds up in a dtype that the device does not add up in."""

    code = "TGD104"

    def check(self, graph: Graph, device: Device) -> Iterable[Violation]:
        allowed: tuple[torch.dtype, ...] | None = device.accumulators
        if allowed is None:
            return
        for node in graph.ops:
            if not _adds_up(node):
                continue
            for dtype in {tensor.dtype for tensor in tensors_of(node.meta.get("val"))}:
                if dtype.is_floating_point and dtype not in allowed:
                    message = f"adds up in {_name(dtype)}, {device.name} does in {_names(allowed)}"
                    remedy = f"pass dtype=torch.{_name(allowed[0])}, or convert before" if allowed else ""
                    yield self.violation(graph, message, by=node, remedy=remedy)


def _adds_up(node: fx.Node) -> bool:
    accumulates = facts_of(str(getattr(node.target, "overloadpacket", ""))).accumulates
    if accumulates == "if reduced":
        return all(tensor.dim() == 0 for tensor in tensors_of(node.meta.get("val")))
    return accumulates == "always" or (
        accumulates != "never" and torch.Tag.reduction in getattr(node.target, "tags", ())
    )


def _is_counter(use: Use) -> bool:
    """Whether this is a single integer: a number of steps is no index into anything."""
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
