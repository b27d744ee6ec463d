"""Replacing what is bad, so that nothing beside it is touched: not a value, not a gradient."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchguard._torch import is_shape_only, mutation_count, surely_equal
from torchguard.operators import are_kept_whole, define, revision_of
from torchguard.watching.kinds import evidence, is_bad, is_nan, nothing_like
from torchguard.watching.rows import Batch

# Marks are summed over the vectors of a sample: one NaN outweighs any number of Infs.
NAN_MARK = 2.0**20
_REVISION = revision_of(Path(__file__).parent)
# What is remembered on a tensor: that it was just repaired; slices of its expansion.
_CLEAN, _SLICES = "_torchguard_clean", "_torchguard_slices"


class _Repair(torch.autograd.Function):
    """Zeros in the place of every vector that the evidence speaks against.

    The gradient passes, since that of a sample that went bad is zero already. If it `stops`, a vector of the gradient
    that is not finite becomes zeros: it comes from a step behind this one, such as the square root of 0, or from
    0 * Inf in a sample that was replaced further on. `mark` has an entry for each vector and no influence: its gradient
    tells which vectors that happened to.
    """

    @staticmethod
    def forward(z: Tensor, found: Tensor, mark: Tensor | None, stops: bool) -> Tensor:
        return _without(is_bad(found), z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.is_marked, ctx.stops = inputs[2] is not None, inputs[3]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not ctx.stops:
            return grad, None, None, None
        born = evidence(grad)
        bad = is_bad(born)
        mark = torch.where(is_nan(born), NAN_MARK, bad.to(torch.float32)) if ctx.is_marked else None
        return _without(bad, grad), None, mark, None


def repaired(
    z: Tensor, batch: Batch | None, marks: Tensor | None, place: int, dim: int | None, stops: bool
) -> tuple[Tensor, Tensor | None]:
    """`z` with zeros in the place of every bad vector, and the evidence; None if `z` was repaired just before.

    Args:
        batch: None where the batch is not known: a checkpoint runs its part again.
        marks: `(places, batch)`, leaves whose gradient tells of faults born in the backward pass.
        stops: whether to have a look at the gradient too.
    """
    if batch is None or not stops or not z.requires_grad:
        marks = None
    if are_kept_whole():
        # Dynamo takes long over an autograd.Function, and a large model has hundreds.
        size, lengths, along = (0, (), 0) if marks is None or batch is None else (batch.size, batch.lengths, batch.dim)
        return torch.ops.torchguard.repair(z, marks, place, size, lengths, along, dim, stops, _REVISION)
    if torch.compiler.is_compiling():
        found = evidence(z)
        return _Repair.apply(z, found, None, stops), found  # pyright: ignore[reportReturnType]
    return _repair(z, batch, marks, place, dim, stops)


def _repair(
    z: Tensor, batch: Batch | None, marks: Tensor | None, place: int, dim: int | None, stops: bool
) -> tuple[Tensor, Tensor | None]:
    if _is_clean(z, stops):
        return z, None
    found = evidence(z)
    mark = _slices(marks, batch, found, dim)[place] if marks is not None and batch is not None else None
    z = _Repair.apply(z, found, mark, stops)  # pyright: ignore[reportAssignmentType]
    _note_clean(z, stops)
    return z, found


def _note_clean(z: Tensor, stops: bool) -> None:
    if not z.is_inference():  # of these nobody counts the changes
        setattr(z, _CLEAN, (mutation_count(z), stops))  # on the tensor: a checkpoint hands it in again, much later


def _is_clean(z: Tensor, stops: bool) -> bool:
    changes, stopped = getattr(z, _CLEAN, (None, False))
    return changes is not None and changes == mutation_count(z) and (stopped or not stops)


def _slices(marks: Tensor, batch: Batch, found: Tensor, dim: int | None) -> tuple[Tensor, ...]:
    """The mark of each place, shaped as the evidence. Places share one expansion, so that one sum takes all back."""
    known = getattr(marks, _SLICES, [])
    for shape, other_dim, slices in known:
        if other_dim == dim and surely_equal(shape, found.shape):
            return slices
    slices = batch.spread(marks, found.shape, dim).unbind(0)
    setattr(marks, _SLICES, [*known, (found.shape, dim, slices)])
    return slices


def _repair_op(
    z: Tensor,
    marks: Tensor | None,
    place: int,
    size: int,
    lengths: Sequence[int],
    along: int,
    dim: int | None,
    stops: bool,
    revision: int,
) -> tuple[Tensor, Tensor]:
    if is_shape_only(z):
        return z.clone(), evidence(z)
    batch = Batch(size, tuple(lengths), along, z.device)
    mended, found = _repair(z, batch, marks, place, dim, stops)
    if found is not None:
        return mended, found
    same = z.view_as(z)  # an operator may not return what it was given
    _note_clean(same, stops=True)
    return same, nothing_like(evidence(z))


define(
    "repair(Tensor z, Tensor? marks, int place, SymInt size, SymInt[] lengths, int along, int? dim, bool stops, "
    "int revision) -> (Tensor, Tensor)",
    _repair_op,
)


def _without(bad: Tensor, z: Tensor) -> Tensor:
    """`z` with zeros in the place of bad vectors."""
    return blanked(bad.unsqueeze(-1) if z.ndim > bad.ndim else bad, z)


def blanked(bad: Tensor, z: Tensor) -> Tensor:
    """`z` with zeros where a mask says so; it keeps its strides, by which kernels are chosen."""
    return torch.where(bad, 0, z).to(z.dtype) if z.ndim < 4 else z.clone().masked_fill_(bad, 0)
