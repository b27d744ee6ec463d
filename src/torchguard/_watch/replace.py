"""Quarantine of one tensor: zeros in place of its non-finite vectors, and a mask on the gradient that comes back.

`torch.where(finite, z, 0)` alone is not enough. Its derivative is zero where a value was replaced, but it passes on a
gradient that is itself non-finite: from a later step such as `sqrt` at 0, or from 0 * Inf in a sample that was replaced
further on. One such gradient makes the gradient of every weight before it NaN. So the replacement is an
`autograd.Function` (`_Replace`) whose backward masks the gradient by sample (`gradient_mask.py`) and returns, as the
gradient of the probe of its location, which samples it masked.

What is surprising about it:

- **It is an operator.** Dynamo is slow to trace an `autograd.Function`, and a large model has hundreds. So Dynamo sees
  one call of `replace_nonfinite`; AOTAutograd runs the body, and traces the `autograd.Function` as it traces any other.
  Where Dynamo traces an export or a `torch.func` transform, there are only standard operations, without probes and
  without the memory below.
- **It remembers on the tensor.** Most tensors leave one module and enter the next, unchanged. The replaced tensor
  carries its status and its number of in-place changes as `_torchguard_clean`; the next check that meets it does
  nothing. The note is on the tensor because `torch.utils.checkpoint` passes the tensor in again much later, when the
  call is over.
- **An operator may not return its input**, so a tensor that is left alone is returned as a view of itself, and the
  status of a check that was not needed has no entries (`detect.skipped_status`).
- **In place on a GPU.** `where` fuses with the kernel that reads the tensor next, unless that is attention, with which
  Inductor fuses nothing. There `_ReplaceInPlace` uses a kernel that writes only where something is non-finite.

The operator can be removed when Dynamo traces an `autograd.Function` as quickly as a call, and lets it attach
attributes.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchguard._operators import define, use_operators
from torchguard._torch.tensors import mutation_count
from torchguard._torch.tracing import in_transform, is_exporting, is_shape_only, is_traced
from torchguard._watch.batch import Batch
from torchguard._watch.detect import (
    deferrable_status,
    deferred_scan,
    empty_status,
    is_finite,
    row_status,
    scan,
    skipped_status,
    without_neg_inf,
)
from torchguard._watch.finite_derivatives import finite_derivative
from torchguard._watch.gradient_mask import masked_gradient
from torchguard._watch.gradient_probes import ProbeTable, call_probes
from torchguard._watch.magnitudes import REVISION, from_limit
from torchguard._watch.zeros import can_zero_in_place, zero_in_place, zero_vectors

# The largest square that does not overflow in the dtype that squares are summed in. A square of a float16 never does.
_LARGEST_SQUARE = {
    torch.bfloat16: torch.finfo(torch.float32).max,
    torch.float32: torch.finfo(torch.float32).max,
    torch.float64: torch.finfo(torch.float64).max,
}
# Attribute of a replaced tensor: its number of in-place changes, whether its gradient is masked, and its status.
_CLEAN = "_torchguard_clean"


class _Replace(torch.autograd.Function):
    """Zeros in every vector whose status is not finite.

    `probe` has an entry for each sample and takes no part in the value: its gradient records the samples that
    `mask_gradient` found non-finite. Without a batch, only the non-finite vectors of the gradient become zeros.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        z: Tensor,
        status: Tensor,
        probe: Tensor | None,
        mask_gradient: bool,
        batch: Batch | None,
        rows: int | None,
        table: ProbeTable | None,
        location: int,
    ) -> Tensor:
        return zero_vectors(is_finite(status), z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, status, _, *ctx.how = inputs
        ctx.save_for_forward(status)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (status,) = ctx.saved_tensors
        return zero_vectors(is_finite(status) & is_finite(row_status(tangent)), tangent)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Where a value was replaced the gradient is zero already: that sample's output was replaced, too.
        grad, probe = _backward(grad, *ctx.how)
        return grad, None, probe, None, None, None, None, None


class _ReplaceInPlace(torch.autograd.Function):
    """The same by a kernel that checks as well: the status is the second result. For graphs alone."""

    @staticmethod
    def forward(z: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return zero_in_place(z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, _, *ctx.how = inputs
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad, probe = _backward(grad, *ctx.how)
        return grad, probe, None, None, None, None, None


def _backward(
    grad: Tensor, mask_gradient: bool, batch: Batch | None, rows: int | None, table: ProbeTable | None, location: int
) -> tuple[Tensor, Tensor | None]:
    """The masked gradient, and that of the probe, if there is one: then there is a table."""
    if not mask_gradient:
        return grad, None
    if batch is None:
        return zero_vectors(is_finite(row_status(grad)), grad), None
    return masked_by_sample(grad, batch, rows, table, location)


def masked_by_sample(
    grad: Tensor, batch: Batch, rows: int | None, table: ProbeTable | None, location: int
) -> tuple[Tensor, Tensor | None]:
    """The masked gradient, and that of the probe, on the device of the probes."""
    grad, probe = masked_gradient(grad, batch, rows, table, location)
    return grad, None if probe is None or table is None else probe.to(table.device)


def replaced_with_status(z: Tensor, keep_neg_inf: bool) -> tuple[Tensor, Tensor]:
    """`z` with zeros in non-finite vectors, and its row status. The gradient is not masked, and nothing is noted."""
    status = _status(z, math.inf, keep_neg_inf)
    return _Replace.apply(z, status, None, False, None, None, None, 0), status  # pyright: ignore[reportReturnType]


def replace_nonfinite(
    z: Tensor,
    batch: Batch | None,
    probes: Tensor | None,
    location: int,
    rows: int | None,
    mask_gradient: bool,
    num_squares: int = 0,
    in_place: bool = False,
    keep_neg_inf: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`z` with zeros in non-finite vectors, and its row status; None if `z` was replaced just before.

    Args:
        batch: None where it is not known: when a checkpoint recomputes a part of the model.
        probes: `(locations, MAX_PROBED_BATCH)`, the gradient probes of the call, if it has any.
        rows: the row code of `z`, if it is known.
        mask_gradient: whether to mask the gradient as well.
        num_squares: how many squares the module will sum. A number counts as Inf if that sum would overflow for it.
        in_place: whether to use the in-place kernel, where there is one: no kernel that could fuse a `where` reads `z`.
        keep_neg_inf: whether -Inf is legitimate, and stays.
    """
    if use_operators():
        return call_replace_nonfinite(
            z, batch, probes, location, rows, mask_gradient, num_squares, False, in_place, keep_neg_inf
        )
    if torch.compiler.is_compiling():  # an export or a transform, where there are no probes and no notes on tensors
        status = _status(z, _limit(z.dtype, num_squares), keep_neg_inf)
        if (
            is_exporting()
        ):  # an exported program has no autograd.Function; what is replaced has no gradient all the same
            return zero_vectors(is_finite(status), z), status
        if in_transform():
            finite = zero_vectors(is_finite(status), z)
            return finite_derivative(finite, False) if mask_gradient else finite, status
        return _Replace.apply(z, status, None, mask_gradient, None, None, None, location), status  # pyright: ignore[reportReturnType]
    return _replace(z, batch, probes, location, rows, mask_gradient, num_squares, in_place, keep_neg_inf)


def _replace(
    z: Tensor,
    batch: Batch | None,
    probes: Tensor | None,
    location: int,
    rows: int | None,
    mask_gradient: bool,
    num_squares: int,
    in_place: bool,
    keep_neg_inf: bool,
    norm_widths: Sequence[int] = (),
) -> tuple[Tensor, Tensor | None]:
    if not mask_gradient or not z.requires_grad:
        batch = None
    limit = _limit(z.dtype, num_squares)
    before = _status_before(z, mask_gradient)
    if before is not None and limit == math.inf:
        return z, None
    probe = table = None
    if probes is not None and batch is not None:
        split = call_probes(probes, batch.size)
        probe, table = split.each[location], split.table
    how = (probe, mask_gradient, batch, rows, table, location)
    if keep_neg_inf and before is None:  # not remembered: the next check may have to replace -Inf
        status = _status(z, limit, keep_neg_inf, norm_widths)
        return _Replace.apply(z, status, *how), status  # pyright: ignore[reportReturnType]
    if in_place and before is None and limit == math.inf and is_traced(z) and can_zero_in_place(z):
        replaced, status = _ReplaceInPlace.apply(z, *how)  # pyright: ignore[reportGeneralTypeIssues]
    else:
        if before is None:
            status = _status(z, limit, norm_widths=norm_widths)
        else:
            status = from_limit(torch.where(is_finite(before), before, 0), limit, z.dtype)
        replaced: Tensor = _Replace.apply(z, status, *how)  # pyright: ignore[reportAssignmentType]
    _remember(replaced, mask_gradient, status)
    return replaced, status


def _status(z: Tensor, limit: float, keep_neg_inf: bool = False, norm_widths: Sequence[int] = ()) -> Tensor:
    return scan(without_neg_inf(z) if keep_neg_inf else z, norm_widths, limit)


def _limit(dtype: torch.dtype, num_squares: int) -> float:
    """The largest number whose square can be added up that many times. Squares are summed in float32 at least."""
    if not num_squares or dtype not in _LARGEST_SQUARE:
        return math.inf
    return math.sqrt(_LARGEST_SQUARE[dtype] / num_squares)


def _remember(z: Tensor, mask_gradient: bool, status: Tensor) -> None:
    if not z.is_inference():  # inference tensors do not count their changes
        setattr(z, _CLEAN, (mutation_count(z), mask_gradient, status))


def _status_before(z: Tensor, mask_gradient: bool) -> Tensor | None:
    """The status by which `z` was replaced, if it was and did not change since."""
    changes, is_masked, status = getattr(z, _CLEAN, (None, False, None))
    return status if changes is not None and changes == mutation_count(z) and (is_masked or not mask_gradient) else None


def call_replace_nonfinite(
    z: Tensor,
    batch: Batch | None,
    probes: Tensor | None,
    location: int,
    rows: int | None,
    mask_gradient: bool,
    num_squares: int,
    is_argument: bool,
    in_place: bool,
    keep_neg_inf: bool,
) -> tuple[Tensor, Tensor]:
    """Call the operator `replace_nonfinite`, which does what the function of that name does.

    `graph_plan.py` may set its argument `only_checks`, where nothing has to be replaced.

    There is one difference: where the function returns no status, for a tensor that was replaced just before or an
    unbatched argument (`is_argument`), the operator returns a skipped one (`detect.skipped_status`).
    """
    size, lengths, along = (0, (), None) if batch is None else (batch.size, batch.lengths, batch.dim)
    how = (mask_gradient, num_squares, is_argument, in_place, keep_neg_inf)
    return REPLACE_NONFINITE(z, probes, location, size, lengths, along, rows, *how, False, (), REVISION)


def _replace_nonfinite_op(
    z: Tensor,
    probes: Tensor | None,
    location: int,
    size: int,
    lengths: Sequence[int],
    along: int | None,
    rows: int | None,
    mask_gradient: bool,
    num_squares: int,
    is_argument: bool,
    in_place: bool,
    keep_neg_inf: bool,
    only_checks: bool,
    norm_widths: Sequence[int],
    revision: int,
) -> tuple[Tensor, Tensor]:
    if is_shape_only(z):
        return z.clone(), empty_status(z)  # a clone requires a gradient where `z` does
    batch = None if along is None else Batch(size, tuple(lengths), along, z.device)
    if is_argument and batch is not None and batch.is_unbatched(z.shape, rows):
        return z.view_as(z), skipped_status(empty_status(z))
    if only_checks:
        return _checked(z, num_squares, keep_neg_inf, norm_widths)
    how = (mask_gradient, num_squares, in_place, keep_neg_inf, norm_widths)
    replaced, status = _replace(z, batch, probes, location, rows, *how)
    if status is not None:
        return replaced, status
    same = z.view_as(z)
    before = _status_before(z, mask_gradient)
    assert before is not None
    _remember(same, mask_gradient, before)
    return same, skipped_status(before)


def _checked(z: Tensor, num_squares: int, keep_neg_inf: bool, norm_widths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """`z` itself, and its status; a skipped one if it was checked just before."""
    limit, same = _limit(z.dtype, num_squares), z.view_as(z)
    before = _status_before(z, mask_gradient=False)
    if before is not None and limit == math.inf:
        _remember(same, False, before)
        return same, skipped_status(before)
    if before is not None and deferred_scan(before) is None:
        status = from_limit(before, limit, z.dtype)
    else:
        status = deferrable_status(z, False, keep_neg_inf, norm_widths, limit)
    if not keep_neg_inf:
        _remember(same, False, status)
    return same, status


REPLACE_NONFINITE = define(
    "replace_nonfinite(Tensor z, Tensor? probes, int location, SymInt size, SymInt[] lengths, int? along, int? rows, "
    "bool mask_gradient, int num_squares, bool is_argument, bool in_place, bool keep_neg_inf, bool only_checks, "
    "int[] norm_widths, int revision) -> (Tensor, Tensor)",
    _replace_nonfinite_op,
)
