"""Tables to look numbers up in."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def constant(values: Sequence[int], device: torch.device) -> Tensor:
    """Whole numbers where they are needed, put there once: copying them from the host would wait for the device.

    In a graph, Inductor does so by itself.
    """
    return torch.tensor(values, device=device) if torch.compiler.is_compiling() else _placed(tuple(values), device)


@functools.lru_cache(256)
def _placed(values: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(values, device=device)
