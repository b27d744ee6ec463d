"""Replacing what is bad, so that nothing beside it is touched: not a value, not a gradient."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchguard._operators import are_kept_whole, define
from torchguard._torch.tensors import mutation_count
from torchguard._torch.tracing import in_transform, is_shape_only, is_traced
from torchguard._watch.backward import Table, marked, stopped
from torchguard._watch.batch import Batch, as_numbers
from torchguard._watch.detect import REVISION, evidence, is_fine, nothing_like, raised, shape_of_evidence
from torchguard._watch.replace import can_be_mended, mended, only

# The largest square that does not overflow; of half it never does.
_LARGEST = {
    torch.bfloat16: torch.finfo(torch.float32).max,
    torch.float32: torch.finfo(torch.float32).max,
    torch.float64: torch.finfo(torch.float64).max,
}
# What is remembered on a tensor: how it was just repaired.
_CLEAN = "_torchguard_clean"


class _Repair(torch.autograd.Function):
    """Zeros in the place of every vector that the evidence speaks against.

    The gradient passes, since that of a sample that went bad is zero already. If it `stops`, the gradient of a sample
    that is not finite becomes zeros: it comes from a step behind this one, such as the square root of 0, or from
    0 * Inf in a sample that was replaced further on. `mark` has an entry for each sample and no influence: its gradient
    tells which samples that happened to. Where the batch is not known, only the vectors that are bad become zeros.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        z: Tensor,
        found: Tensor,
        mark: Tensor | None,
        stops: bool,
        batch: Batch | None,
        dim: int | None,
        table: Table | None,
        place: int,
    ) -> Tensor:
        return only(is_fine(found), z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, found, _, *ctx.about = inputs
        ctx.save_for_forward(found)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (found,) = ctx.saved_tensors
        return only(is_fine(found), tangent)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad, mark = _sent_back(grad, *ctx.about)
        return grad, None, mark, None, None, None, None, None


class _Mend(torch.autograd.Function):
    """The same in place, which looks as well: the evidence is the second result. For graphs alone."""

    @staticmethod
    def forward(z: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return mended(z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, _, *ctx.about = inputs
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad, mark = _sent_back(grad, *ctx.about)
        return grad, mark, None, None, None, None, None


def _sent_back(
    grad: Tensor, stops: bool, batch: Batch | None, dim: int | None, table: Table | None, place: int
) -> tuple[Tensor, Tensor | None]:
    """The gradient of what was repaired, and that of its mark, if it has one: those have a table."""
    if not stops:
        return grad, None
    if batch is None:
        return only(is_fine(evidence(grad)), grad), None
    grad, born = stopped(grad, batch, dim, table, place)
    return grad, None if born is None or table is None else born.to(table.device)


def repaired(
    z: Tensor,
    batch: Batch | None,
    marks: Tensor | None,
    place: int,
    dim: int | None,
    stops: bool,
    squares: int = 0,
    in_place: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`z` with zeros in the place of every bad vector, and the evidence; None if `z` was repaired just before.

    Args:
        batch: None where the batch is not known: a checkpoint runs its part again.
        marks: `(places, many)`, leaves whose gradient tells of faults born in the backward pass.
        stops: whether to have a look at the gradient too.
        squares: of how many numbers the squares will be summed: one whose squares overflow counts as bad.
        in_place: whether to mend it so where that can be: no kernel that could replace something as well reads `z`.
    """
    if are_kept_whole():
        # Dynamo takes long over an autograd.Function, and a large model has hundreds.
        samples, about = as_numbers(batch), (dim, stops, squares, False, in_place, REVISION)
        return REPAIR(z, marks, place, *samples, *about)
    if torch.compiler.is_compiling():  # for an export or a transform, where marks and clearing have no place
        found = _found(z, _limit(z.dtype, squares))
        if in_transform():  # where Dynamo traces no autograd.Function; what is replaced has no gradient all the same
            return only(is_fine(found), z), found
        return _Repair.apply(z, found, None, stops, None, None, None, place), found  # pyright: ignore[reportReturnType]
    return _repair(z, batch, marks, place, dim, stops, squares, in_place)


def _repair(
    z: Tensor,
    batch: Batch | None,
    marks: Tensor | None,
    place: int,
    dim: int | None,
    stops: bool,
    squares: int,
    in_place: bool,
) -> tuple[Tensor, Tensor | None]:
    if not stops or not z.requires_grad:
        batch = None
    limit = _limit(z.dtype, squares)
    before = _evidence_before(z, stops)
    if before is not None and limit == math.inf:
        return z, None
    mark = table = None
    if marks is not None and batch is not None:
        call = marked(marks, batch.size)
        mark, table = call.each[place], call.table
    about = (mark, stops, batch, dim, table, place)
    if in_place and before is None and limit == math.inf and is_traced(z) and can_be_mended(z):
        fine, found = _Mend.apply(z, *about)  # pyright: ignore[reportGeneralTypeIssues]
    else:
        found = _found(z, limit) if before is None else raised(torch.where(is_fine(before), before, 0), limit, z.dtype)
        fine: Tensor = _Repair.apply(z, found, *about)  # pyright: ignore[reportAssignmentType]
    _note_clean(fine, stops, found)
    return fine, found


def _found(z: Tensor, limit: float) -> Tensor:
    found = evidence(z)
    return found if limit == math.inf else raised(found, limit, z.dtype)


def _limit(dtype: torch.dtype, squares: int) -> float:
    """The largest number of which so many squares can be summed; they are summed in single precision at least."""
    if not squares or dtype not in _LARGEST:
        return math.inf
    return math.sqrt(_LARGEST[dtype] / squares)


def _note_clean(z: Tensor, stops: bool, found: Tensor) -> None:
    # On the tensor: a checkpoint hands it in again, much later. Of inference tensors nobody counts the changes.
    if not z.is_inference():
        setattr(z, _CLEAN, (mutation_count(z), stops, found))


def _evidence_before(z: Tensor, stops: bool) -> Tensor | None:
    """The evidence by which a tensor was repaired, if it was and did not change since."""
    changes, stopped, found = getattr(z, _CLEAN, (None, False, None))
    return found if changes is not None and changes == mutation_count(z) and (stopped or not stops) else None


def _repair_op(
    z: Tensor,
    marks: Tensor | None,
    place: int,
    size: int,
    lengths: Sequence[int],
    along: int | None,
    dim: int | None,
    stops: bool,
    squares: int,
    is_argument: bool,
    in_place: bool,
    revision: int,
) -> tuple[Tensor, Tensor]:
    """As `repaired`; what was repaired just before has evidence, too. An argument without samples is left as it is."""
    if is_shape_only(z):
        return z.clone(), shape_of_evidence(z)  # a clone needs a gradient where `z` does
    batch = None if along is None else Batch(size, tuple(lengths), along, z.device)
    if is_argument and batch is not None and not batch.has_rows(z.shape, dim):
        return z.view_as(z), nothing_like(shape_of_evidence(z))  # an operator may not return what it was given
    fine, found = _repair(z, batch, marks, place, dim, stops, squares, in_place)
    if found is not None:
        return fine, found
    same = z.view_as(z)
    before = _evidence_before(z, stops)
    assert before is not None
    _note_clean(same, stops, before)
    return same, nothing_like(before)


REPAIR = define(
    "repair(Tensor z, Tensor? marks, int place, SymInt size, SymInt[] lengths, int? along, int? dim, bool stops, "
    "int squares, bool is_argument, bool in_place, int revision) -> (Tensor, Tensor)",
    _repair_op,
)
