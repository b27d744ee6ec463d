"""Much evidence, put side by side."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchguard._torch import is_traced
from torchguard.operators import define_whole


def side_by_side(evidence: Sequence[Tensor]) -> Tensor:
    """`torch.stack`, so that every kernel that makes one of them stays as it is.

    In a graph for the CPU, where vectors have one piece, each is written to where it belongs, and no memory is asked
    for between two layers: that would have the next layer write to where nothing is cached. For a GPU, Inductor would
    not fuse such kernels with what else reads a tensor, so it is a call that is not compiled.
    """
    if not is_traced(evidence[0]):
        return torch.stack([*evidence])
    if evidence[0].is_cpu:
        return torch.cat([*evidence], -1).movedim(-1, 0).unsqueeze(-1)
    return _SIDE_BY_SIDE(evidence)


def _shape(evidence: Sequence[Tensor]) -> Tensor:
    return evidence[0].new_empty(len(evidence), *evidence[0].shape)


_SIDE_BY_SIDE = define_whole("side_by_side(Tensor[] evidence) -> Tensor", torch.stack, _shape)
