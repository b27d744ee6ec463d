"""Stopping a gradient that is not finite: zeros in all of a sample of which a part is bad."""

import functools
from typing import Any

import torch
from torch import Tensor

from torchguard._torch import can_read, is_traced
from torchguard.checks import floats_of
from torchguard.operators import define_whole
from torchguard.watching.blanking import only
from torchguard.watching.earliest import rows_of
from torchguard.watching.kinds import are_finite, evidence, is_fine, is_nan
from torchguard.watching.rows import Batch

# How a sample is marked: one NaN outweighs any number of Infs.
INF_MARK, NAN_MARK = 1.0, 2.0**20


def stopped(grad: Tensor, batch: Batch, dim: int | None, room: Tensor | None, place: int) -> tuple[Tensor, Tensor]:
    """A gradient with zeros in every sample that has something bad, and a mark for each sample: 0 for one that is fine.

    Args:
        dim: along which the samples lie, if that is known.
        room: `(places, many)` zeros of 4 bytes, to count in: those of a place nobody else uses at the same time. They
            are zeros again afterwards.
    """
    along = batch.dim if dim is None else dim
    if is_traced(grad) and along == 0 and batch.has_rows(grad.shape, 0) and not _is_beyond_operators(grad):
        finite = grad.clone()  # which Inductor leaves out where nobody else reads it
        return finite, torch.ops.torchguard.stop_(finite, room, place, batch.size)
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


def _stop_(grad: Tensor, room: Tensor | None, place: int, rows: int) -> Tensor:
    """In place, in so many equal parts. Mostly nothing is bad, and to see that takes one pass that writes nothing."""
    if grad.is_cuda and grad.is_contiguous() and grad.numel() and grad.element_size() > 1:
        stop = _kernel()
        if stop is not None and grad.get_device() == torch.cuda.current_device():
            if room is None or room.get_device() != grad.get_device():
                room, place = torch.zeros(1, rows, device=grad.device), 0
            return stop(grad, room, place, rows, INF_MARK, NAN_MARK)
    batch = Batch(rows, (grad.shape[0] // rows,) if rows else (), 0, grad.device)
    finite, mark = _stopped(grad, batch, 0)
    if finite is not grad:
        grad.copy_(finite)
    return mark


@functools.cache
def _kernel() -> Any:
    """None where there is no Triton: not every machine with a GPU has it."""
    try:
        from torchguard.watching.stopping_kernel import stop
    except ImportError:
        return None
    return stop


def _shape_of_mark(grad: Tensor, room: Tensor | None, place: int, rows: int) -> Tensor:
    return grad.new_empty(rows, dtype=torch.float32)


# `room` is not said to be written to: whoever comes next finds it as it was.
define_whole("stop_(Tensor(a!) grad, Tensor? room, int place, SymInt rows) -> Tensor", _stop_, _shape_of_mark)
