"""Many small tensors, put side by side."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchguard._torch import is_surely, is_traced
from torchguard.operators import define_whole


def side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    """`torch.stack`, of evidence or marks, so that every kernel that makes one of them stays as it is.

    In a graph for the CPU, each is written to where it belongs, and no memory is asked for between two layers: that
    would have the next layer write to where nothing is cached. For a GPU, Inductor would not fuse such kernels with
    what else reads a tensor, so it is a call that is not compiled.
    """
    if not is_traced(tensors[0]):
        return torch.stack([*tensors])
    if tensors[0].is_cpu and tensors[0].ndim > 1 and is_surely(tensors[0].shape[-1] == 1):
        return torch.cat([*tensors], -1).movedim(-1, 0).unsqueeze(-1)
    return torch.stack([*tensors]) if tensors[0].is_cpu else torch.ops.torchguard.side_by_side(tensors)


def _shape(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].new_empty(len(tensors), *tensors[0].shape)


define_whole("side_by_side(Tensor[] tensors) -> Tensor", torch.stack, _shape)
