"""Stopping a gradient that is not finite: zeros in all of a sample of which a part is bad."""

import functools

import torch
from torch import Tensor

from torchguard._torch import can_read, is_traced
from torchguard.checks import floats_of
from torchguard.operators import define_whole
from torchguard.watching.blanking import only
from torchguard.watching.earliest import rows_of
from torchguard.watching.kinds import are_finite, evidence, is_fine, is_nan
from torchguard.watching.marking import INF_MARK, NAN_MARK, Table, new_rows
from torchguard.watching.rows import Batch

# So many numbers of a sample the kernel cannot count.
LONGEST = 2**31 - 2**20


def stopped(
    grad: Tensor, batch: Batch, dim: int | None, table: Table | None, place: int
) -> tuple[Tensor, Tensor | None]:
    """A gradient with zeros in every sample that has something bad.

    And a mark for each sample, 0 for one that is fine; None if they were left in the table.

    Args:
        dim: along which the samples lie, if that is known.
        table: where to leave the marks, if the gradient is where the table is.
    """
    along = batch.dim if dim is None else dim
    if is_traced(grad) and along == 0 and batch.has_rows(grad.shape, 0) and not _is_beyond_operators(grad):
        finite = grad.clone()  # which Inductor leaves out where nobody else reads it
        if table is not None and table.device == grad.device:
            _STOP_(finite, table.open(), place, batch.size)
            return finite, None
        rows = new_rows(1, batch.size, grad.device)
        _STOP_(finite, rows, 0, batch.size)
        return finite, rows[0, 0]
    return _stopped(grad, batch, along)


def _is_beyond_operators(grad: Tensor) -> bool:
    """If there is to be a derivative of this; and what is complex, Inductor refuses."""
    return grad.is_complex() or torch.is_grad_enabled()


def _stopped(grad: Tensor, batch: Batch, along: int) -> tuple[Tensor, Tensor]:
    if can_read(grad) and are_finite(floats_of(grad)):
        return grad, torch.zeros(batch.size, device=batch.device)
    born = evidence(grad)
    rows = rows_of(born, along, batch)
    if rows is None:  # about no sample in particular: about all
        worst = born.amax().expand(batch.size)
        return only(is_fine(born), grad), _mark(worst).to(batch.device)
    worst = rows.amax(tuple(range(1, rows.ndim)))
    over = batch.over(is_fine(worst).to(grad.device), grad, along)
    assert over is not None
    return torch.where(over, grad, 0).to(grad.dtype), _mark(worst)


def _mark(worst: Tensor) -> Tensor:
    return torch.where(is_nan(worst), NAN_MARK, torch.where(is_fine(worst), 0.0, INF_MARK))


def _stop_(grad: Tensor, table: Tensor, place: int, rows: int) -> None:
    """In place, in so many equal parts. Mostly nothing is bad, and to see that takes one pass that writes nothing."""
    if has_kernel(grad) and grad.numel() // rows < LONGEST:
        from torchguard.watching.kernels import stop

        stop(grad, table, place, rows)
        return
    batch = Batch(rows, (grad.shape[0] // rows,) if rows else (), 0, grad.device)
    finite, mark = _stopped(grad, batch, 0)
    if finite is not grad:
        grad.copy_(finite)
        table[0, place] = torch.maximum(table[0, place], mark)


def has_kernel(z: Tensor) -> bool:
    """Whether there is a kernel for a tensor, whose sizes are numbers."""
    return (
        z.is_cuda
        and z.is_contiguous()
        and z.numel() > 0
        and z.element_size() > 1
        and z.get_device() == torch.cuda.current_device()
        and _has_triton()
    )


@functools.cache
def _has_triton() -> bool:
    """Not every machine with a GPU has it."""
    try:
        import triton  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        return False
    return True


_STOP_ = define_whole("stop_(Tensor(a!) grad, Tensor(b!) table, int place, SymInt rows) -> ()", _stop_, lambda *_: None)
