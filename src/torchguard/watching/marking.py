"""Marks: leaves without influence, whose gradient tells where a backward pass went bad."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchguard._torch import surely_equal
from torchguard.watching.constants import constant
from torchguard.watching.kinds import is_bad, is_nan
from torchguard.watching.rows import Batch
from torchguard.watching.stacking import side_by_side

# Marks are summed over the vectors of a sample: one NaN outweighs any number of Infs.
NAN_MARK = 2.0**20
# What is remembered on the marks: those of a shape.
_SHAPED = "_torchguard_shaped"


def marked(born: Tensor) -> Tensor:
    """The gradient of a mark, by evidence about the gradient of what it stands beside."""
    return torch.where(is_nan(born), NAN_MARK, is_bad(born).to(torch.float32))


def marks_like(found: Tensor, marks: Tensor, batch: Batch, dim: int | None) -> tuple[Tensor, ...]:
    """The mark of each place, shaped as evidence there. Those of a shape are made together: one sum takes all back.

    Args:
        marks: `(places, batch)`.
    """
    known = getattr(marks, _SHAPED, [])
    for shape, other_dim, shaped in known:
        if other_dim == dim and surely_equal(shape, found.shape):
            return shaped
    shaped: tuple[Tensor, ...] = _Shaped.apply(marks, batch, found.shape, dim)  # pyright: ignore[reportAssignmentType]
    setattr(marks, _SHAPED, [*known, (found.shape, dim, shaped)])
    return shaped


class _Shaped(torch.autograd.Function):
    @staticmethod
    def forward(marks: Tensor, batch: Batch, shape: Sequence[int], dim: int | None) -> tuple[Tensor, ...]:
        zero = marks.new_zeros(())
        return tuple(zero.expand(shape) for _ in range(marks.shape[0]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.batch, _, ctx.dim = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        told = {i: grad for i, grad in enumerate(grads) if grad is not None}
        if not told:
            return None, None, None, None
        rows = [ctx.batch.rows_first(grad, ctx.dim) for grad in told.values()]
        if rows[0] is None:  # about no sample in particular: about all
            sums = side_by_side([*told.values()]).reshape(len(told), -1).sum(1, keepdim=True)
            sums = sums.expand(-1, ctx.batch.size)
        else:
            sums = side_by_side(rows)
            sums = sums.flatten(2).sum(-1) if sums.ndim > 2 else sums
        at = {place: i for i, place in enumerate(told)}
        order = [at.get(place, len(told)) for place in range(len(grads))]
        return F.pad(sums, (0, 0, 0, 1))[constant(order, sums)], None, None, None
