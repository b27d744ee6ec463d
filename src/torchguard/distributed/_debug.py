"""`debug_distributed_rank`: what a tensor looks like on every rank."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def debug_distributed_rank(tensor: Tensor, name: str = "tensor", file: Any = None) -> Tensor:
    """Print one line about a tensor on every rank, and return the tensor.

    No rank waits for another, so it may stand where only some ranks come by. In a graph it prints nothing. Reading the
    values waits for the device.

    Args:
        file: where to print; stderr by default.
    """
    if torch.compiler.is_compiling():
        return tensor
    is_initialized = dist.is_available() and dist.is_initialized()
    rank, size = (dist.get_rank(), dist.get_world_size()) if is_initialized else (0, 1)
    line = f"rank {rank} of {size}: {name}: {_described(tensor.detach())}\n"
    out = sys.stderr if file is None else file
    out.write(line)  # one call, so that the lines of several ranks do not mix
    out.flush()
    return tensor


def _described(x: Tensor) -> str:
    local: Tensor = getattr(x, "to_local", lambda: x)()  # of a DTensor, what this rank has
    text = f"shape={tuple(x.shape)}, dtype={x.dtype}, device={x.device}"
    if local is not x:
        text += f", of which this rank has {tuple(local.shape)}"
    if not local.numel() or local.is_complex() or local.dtype == torch.bool:
        return text
    values = local.to(torch.float64)
    finite = values[values.isfinite()]
    span = f", {finite.min():.6g} to {finite.max():.6g}" if finite.numel() else ""
    return f"{text}{span}, {int(values.isnan().sum())} NaN, {int(values.isinf().sum())} Inf"
