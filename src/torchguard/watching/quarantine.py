"""Replacing what is bad, so that nothing beside it is touched: not a value, not a gradient."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchguard.operators import are_kept_whole, define, revision_of
from torchguard.watching.kinds import evidence, is_bad, is_nan

# Marks are summed over the vectors of a sample: one NaN outweighs any number of Infs.
NAN_MARK = 2.0**20
_REVISION = revision_of(Path(__file__).parent)


class _Repair(torch.autograd.Function):
    """Vectors that the evidence speaks against become zeros, and nothing flows back through them.

    A gradient that is not finite is zeroed too: it comes from a step behind this one, such as the square root of 0, or
    from 0 * Inf in a row that was replaced further on. `mark` has an entry for each vector and no influence: its
    gradient tells which vectors that happened to.
    """

    @staticmethod
    def forward(z: Tensor, found: Tensor, mark: Tensor | None) -> Tensor:
        return torch.where(_over(is_bad(found), z), 0, z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.is_marked = inputs[2] is not None

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (found,) = ctx.saved_tensors
        born = evidence(grad)
        clean = torch.where(_over(is_bad(born) | is_bad(found), grad), 0, grad)
        return clean, None, _marks(born) if ctx.is_marked else None


def repaired(z: Tensor, found: Tensor, mark: Tensor | None) -> Tensor:
    """`z` with zeros in the place of every vector that its evidence speaks against."""
    # Dynamo takes long over an autograd.Function, and a large model has hundreds.
    if are_kept_whole():
        return torch.ops.torchguard.repair(z, found, mark, _REVISION)
    return _repair(z, found, mark, _REVISION)


def _repair(z: Tensor, found: Tensor, mark: Tensor | None, revision: int) -> Tensor:
    return _Repair.apply(z, found, mark)  # pyright: ignore[reportReturnType]


define("repair(Tensor z, Tensor found, Tensor? mark, int revision) -> Tensor", _repair)


def _marks(born: Tensor) -> Tensor:
    return torch.where(is_nan(born), NAN_MARK, is_bad(born).to(torch.float32))


def _over(bad: Tensor, z: Tensor) -> Tensor:
    return bad.unsqueeze(-1) if z.ndim > bad.ndim else bad
