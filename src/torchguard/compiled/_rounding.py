"""How coarsely a graph rounds: by the dtypes in it, and by what torch may do inside a product."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchguard.compiled._nodes import op_name

# Formats with the exponents of float32 and fewer digits, which torch.backends may allow inside products.
_EPS = {"tf32": 2.0**-10, "bf16": 2.0**-7}
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "linear", "matmul", "attention")


def coarsest_eps(graph: GraphModule, *, in_products: bool = True) -> float:
    """The largest distance from 1 to the next number, among all formats floats of a graph go through; 0 without any.

    Args:
        in_products: whether those count that torch may use inside products, as its settings are now.
    """
    return max((_eps_of(node, in_products) for node in graph.graph.nodes if node.op != "output"), default=0.0)


def _eps_of(node: Node, in_products: bool) -> float:
    values = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else [node.meta["val"]]
    floats = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    own = max((torch.finfo(value.dtype).eps for value in floats), default=0.0)
    if not in_products or node.op != "call_function" or not any(value.dtype == torch.float32 for value in floats):
        return own
    return max(own, _EPS.get(precision(op_name(node), floats[0].device), 0.0))


def precision(name: str, device: torch.device) -> str:
    """What products of float32 may be computed in: "ieee" or "none" say that it is float32."""
    backends: Any = torch.backends
    words = name.removesuffix("_backward")
    if words.endswith("convolution"):
        return (backends.cudnn if device.type == "cuda" else backends.mkldnn).conv.fp32_precision
    if words.endswith(_PRODUCTS):
        return (backends.cuda if device.type == "cuda" else backends.mkldnn).matmul.fp32_precision
    return "ieee"
