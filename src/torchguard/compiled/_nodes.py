"""Nodes of ATen graphs: operation names and constants."""

import contextlib
import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node


def op_name(node: Node) -> str:
    """An operator without namespace and overload: `add` of `aten.add.Tensor`, `view` of `aten.view_copy.default`."""
    if node.target is operator.getitem:
        return "getitem"
    parts = str(node.target).split(".")
    name = parts[1] if parts[0] == "aten" and len(parts) > 1 else str(node.target)
    return name if name == "_to_copy" else name.removesuffix("_copy")


def attribute(gm: GraphModule, path: object) -> Tensor:
    """The constant that a `get_attr` node refers to, moved to the CPU, where graphs are checked."""
    owner: Any = gm
    for part in str(path).split("."):
        owner = getattr(owner, part)
    return owner.cpu()


def on_the_cpu() -> contextlib.AbstractContextManager[Any]:
    """New tensors are created on the CPU, whatever `torch.set_default_device` says."""
    is_default = torch.get_default_device().type == "cpu"
    return contextlib.nullcontext() if is_default else torch.device("cpu")
