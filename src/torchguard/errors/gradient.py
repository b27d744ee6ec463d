"""Keeping a bad row out of everybody else's gradient.

`torch.where` alone is not enough. It sends a zero back into the row it did not choose, but that zero then meets
the NaN the row left in saved activations, and 0 * NaN is NaN: in a matmul it reaches every weight.
"""

from typing import Any

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor


def over_rows(mask: Bool[Tensor, " batch"], z: Tensor) -> Tensor:
    """`mask` with as many trailing dimensions of size 1 as `z` needs to be selected by it."""
    return mask.reshape(-1, *(1,) * (z.ndim - 1))


def stand_in(keep: Bool[Tensor, " batch"], z: Shaped[Tensor, "batch *rest"]) -> Shaped[Tensor, "batch *rest"]:
    """`z` with every other row replaced by a kept one, so that a function over all rows meets only good values.

    A constant would not do: normalising a row of zeros makes a NaN of its own. Without any kept row, zeros.
    """
    if z.shape[0] == 0:
        return z
    chosen = z.detach().index_select(0, keep.to(torch.uint8).argmax(0, keepdim=True))
    chosen = torch.where(over_rows(keep.any().reshape(1), z), chosen, torch.zeros_like(chosen))
    return torch.where(over_rows(keep, z), z, chosen)


class _Seal(torch.autograd.Function):
    """Identity, whose backward zeroes a row's gradient if any of it is not finite."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor) -> Tensor:
        return z.view_as(z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        finite = torch.isfinite(grad)
        return torch.where(over_rows(finite.flatten(1).all(-1) if grad.ndim > 1 else finite, grad), grad, 0)


def seal(z: Tensor) -> Tensor:
    """`z`, through which no row sends a NaN or Inf gradient back."""
    return _Seal.apply(z) if z.requires_grad else z
