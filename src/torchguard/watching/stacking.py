"""Many small tensors, put side by side."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchguard._torch import is_traced
from torchguard.operators import define_whole


def side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    """`torch.stack`, in a graph for a GPU as a call that is not compiled.

    Inductor would have every kernel that makes one of them write into the whole, and not fuse it with what else reads a
    tensor; or make a kernel for each few of them.
    """
    if is_traced(tensors[0]) and not tensors[0].is_cpu:
        return torch.ops.torchguard.side_by_side(tensors)
    return torch.stack([*tensors])


def _shape(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].new_empty(len(tensors), *tensors[0].shape)


define_whole("side_by_side(Tensor[] tensors) -> Tensor", torch.stack, _shape)
