"""Dtypes by role: parameters, activations, indices, and the accumulators of reductions."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import fx

from torchguard.device._graph import Graph, Use
from torchguard.device._rules.base import Constraint
from torchguard.device._storages import tensors_of
from torchguard.device._violations import DeviceViolation

if TYPE_CHECKING:
    from torchguard.device._device import Device

_aten = torch.ops.aten
# Reductions that select an element and accumulate nothing.
_SELECTING = frozenset({_aten.amax, _aten.amin, _aten.aminmax, _aten.max, _aten.min})
# Ops that accumulate although torch does not tag them as reductions.
_UNTAGGED = frozenset(
    {
        *(_aten.cumsum, _aten.cumprod, _aten.logcumsumexp, _aten.trace, _aten.dist, _aten.renorm),
        *(_aten._softmax, _aten._log_softmax, _aten._safe_softmax),
        *(_aten._softmax_backward_data, _aten._log_softmax_backward_data),
        *(_aten.native_layer_norm, _aten.native_layer_norm_backward, _aten._fused_rms_norm),
        *(_aten.native_group_norm, _aten.native_group_norm_backward),
        *(_aten._native_batch_norm_legit, _aten._native_batch_norm_legit_functional),
        *(_aten._native_batch_norm_legit_no_training, _aten.native_batch_norm_backward),
        *(_aten._batch_norm_with_update_functional, _aten.batch_norm_backward),
        *(_aten.cudnn_batch_norm, _aten.cudnn_batch_norm_backward),
        *(_aten.nll_loss_forward, _aten.nll_loss2d_forward),
        *(_aten.scatter_add, _aten.scatter_reduce, _aten.index_add, _aten.index_reduce, _aten.segment_reduce),
        *(_aten.embedding_dense_backward, _aten._embedding_bag, _aten._embedding_bag_forward_only),
        *(_aten._cdist_forward, _aten._euclidean_dist, _aten._pdist_forward),
        *(_aten.avg_pool2d, _aten.avg_pool3d, _aten._adaptive_avg_pool2d, _aten._adaptive_avg_pool3d),
    }
)
# Losses, which accumulate unless their reduction is "none".
_LOSSES = frozenset(
    {
        *(_aten.mse_loss, _aten.smooth_l1_loss, _aten.huber_loss, _aten.soft_margin_loss, _aten.multi_margin_loss),
        *(_aten.binary_cross_entropy, _aten.binary_cross_entropy_with_logits, _aten.multilabel_margin_loss_forward),
    }
)


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
    packet = getattr(node.target, "overloadpacket", None)
    if packet in _LOSSES:
        return all(tensor.dim() == 0 for tensor in tensors_of(node.meta.get("val")))
    return packet in _UNTAGGED or (torch.Tag.reduction in getattr(node.target, "tags", ()) and packet not in _SELECTING)


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
