"""Tables to look numbers up in."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from torchguard._torch import in_transform, is_traced


def at(index: Tensor, values: Sequence[int]) -> Tensor:
    """The value at each index."""
    return constant(values, index)[index]


def constant(values: Sequence[int], like: Tensor) -> Tensor:
    """Whole numbers where a tensor is, put there once: copying them from the host would wait for the device.

    In a graph, Inductor does so by itself. Under a `torch.func` transform, what is made is of no use outside of it.
    """
    if torch.compiler.is_compiling() or is_traced(like) or in_transform():
        return torch.tensor(values, device=like.device)
    return _placed(tuple(values), like.device)


@functools.lru_cache(256)
def _placed(values: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(values, device=device)
