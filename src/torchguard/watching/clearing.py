"""Zeros in all of a sample of which a part is bad."""

from typing import Any

import torch
from torch import Tensor

from torchguard.operators import define_whole
from torchguard.watching.rows import Batch


def cleared(z: Tensor, bad: Tensor, batch: Batch, dim: int | None) -> Tensor:
    """`z`, which is nobody else's and may be changed, with zeros in every sample that has something bad.

    Args:
        bad: for each vector of `z`, or piece of one. These are zeros already.
        dim: along which the samples lie, if that is known.
    """
    rows = batch.rows_first(bad, dim)
    if rows is None or rows.ndim == 1:
        return z
    rows = rows.to(z.device)  # a model may be on several
    along = batch.dim if dim is None else dim
    # In place, unless there is to be a derivative of this. Inductor refuses what is complex.
    if along == 0 and z.is_contiguous() and not (z.is_complex() or torch.is_grad_enabled()):
        torch.ops.torchguard.clear_rows_(z, rows, batch.size)
        return z
    over = batch.over(rows.flatten(1).any(1), z, dim)
    return z if over is None else torch.where(over, 0, z).to(z.dtype)


def _clear_rows_(z: Tensor, bad: Tensor, rows: int) -> None:
    """Mostly nothing is bad. To see that is all it takes then, where `where` would pass over all of `z`."""
    if z.numel() == 0:
        return
    bad = bad.reshape(rows, -1)
    if z.is_cpu:
        if bad.any():
            z.view(rows, -1)[bad.any(1)] = 0
    elif not _clear_by_triton(z, bad):
        z.view(rows, -1).masked_fill_(bad.any(1, keepdim=True), 0)


def _clear_by_triton(z: Tensor, bad: Tensor) -> bool:
    """Whether it could: not every machine with a GPU has Triton."""
    if not z.is_cuda:
        return False
    try:
        from torchguard.watching.clearing_kernel import clear
    except ImportError:
        return False
    clear(z, bad)
    return True


def _no_shapes(*_: Any) -> None:
    """It returns nothing."""


define_whole("clear_rows_(Tensor(a!) z, Tensor bad, SymInt rows) -> ()", _clear_rows_, _no_shapes)
