"""Gradient masks: zeros in the gradient of every sample that has a non-finite entry in it.

A mask mostly finds nothing. It is an operator that is not compiled: on a GPU one kernel that only reads, on the CPU a
check that ends early; as traced operations it would write the gradient in every case. What it finds is recorded by the
gradient probes (`gradient_probes.py`).

There are two operators. `mask_gradient_` changes its argument, and Inductor calls it. `mask_gradient` returns a masked
copy; in its place Inductor's code launches the kernel, on a buffer that Inductor's own kernels write. What uses the
gradient after that, such as a residual connection, reads the masked one: it is masked before its next use anyway.
"""

import functools

import torch
from torch import Tensor

from torchguard._channel.detect import floats_of
from torchguard._operators import define_opaque
from torchguard._torch.inductor import compile_in_place
from torchguard._torch.tracing import can_read, is_surely, is_traced
from torchguard._watch.batch import Batch, row_code
from torchguard._watch.detect import PROBE_INF, PROBE_NAN, all_finite, is_finite, is_nan, row_status
from torchguard._watch.gradient_probes import ProbeTable, new_table
from torchguard._watch.magnitudes import REVISION
from torchguard._watch.zeros import has_kernel, zero_vectors

# Samples with this many numbers or more would overflow the kernel's int32 offsets.
MAX_SAMPLE_SIZE = 2**31 - 2**20


def masked_gradient(
    grad: Tensor, batch: Batch, rows: int | None, table: ProbeTable | None, location: int
) -> tuple[Tensor, Tensor | None]:
    """A gradient with zeros in every sample that is not finite, and the probe's gradient, `(batch,)`.

    The latter is None if it was written into the table.

    A float16 gradient is masked only for samples that were bad going forward. It may have overflowed because of the
    loss scale, and a `GradScaler` has to see that to lower the scale.

    Args:
        rows: the row code of the tensor, if it is known.
        table: where to write the probe's gradient, if the table is on the device of `grad`.
    """
    if table is not None and table.cell.is_running:
        return grad, None  # a fault in it is found where the model uses it
    if is_surely(grad.numel() == 0):
        return grad, None
    if grad.dtype == torch.float16:
        return _masked_float16(grad, batch, rows, None if table is None else table.cell.origins)
    if is_traced(grad) and batch.is_sample_major(grad.shape, rows) and not _needs_traced_mask(grad):
        in_region = table is None or table.cell.is_of_region
        if table is not None and table.device == grad.device:
            return _call_mask_gradient(grad, table.open(), location, batch.size, in_region), None
        own = new_table(1, batch.size, grad.device)
        return _call_mask_gradient(grad, own, 0, batch.size, in_region), own[0, 0]
    return _masked_gradient(grad, batch, rows)


def _needs_traced_mask(grad: Tensor) -> bool:
    """Whether the operator cannot be used: it has no derivative, and Inductor refuses complex tensors in it."""
    return grad.is_complex() or torch.is_grad_enabled()


def _masked_float16(
    grad: Tensor, batch: Batch, rows: int | None, origins: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    if origins is None:
        return grad, None
    _, probe = _masked_gradient(grad, batch, rows)
    is_bad = (origins[0] >= 0).to(grad.device)
    keep = batch.broadcast(~is_bad, grad, rows)
    if keep is None:
        status = row_status(grad)
        return torch.where(is_bad.any(), zero_vectors(is_finite(status), grad), grad), probe
    return torch.where(keep, grad, 0).to(grad.dtype), probe


def _masked_gradient(grad: Tensor, batch: Batch, rows: int | None) -> tuple[Tensor, Tensor]:
    if can_read(grad) and all_finite(floats_of(grad)):
        return grad, torch.zeros(batch.size, device=batch.device)
    status = row_status(grad)
    by_sample = batch.status_by_sample(status, rows)
    if by_sample is None:  # an unbatched gradient counts for all samples
        worst = status.amax().expand(batch.size)
        return zero_vectors(is_finite(status), grad), _probe_gradient(worst).to(batch.device)
    worst = by_sample.amax(tuple(range(1, by_sample.ndim)))
    keep = batch.broadcast(is_finite(worst).to(grad.device), grad, rows)
    assert keep is not None
    return torch.where(keep, grad, 0).to(grad.dtype), _probe_gradient(worst)


def _probe_gradient(worst: Tensor) -> Tensor:
    return torch.where(is_nan(worst), PROBE_NAN, torch.where(is_finite(worst), 0.0, PROBE_INF))


def _call_mask_gradient(grad: Tensor, table: Tensor, location: int, samples: int, in_region: bool) -> Tensor:
    """Call the operator `mask_gradient` if Inductor can launch its kernel, else `mask_gradient_` on a copy.

    On the CPU it is called for images, too: where a gradient of four dims in channels-last order is changed in place,
    Inductor fails to order its operations (KeyError in its scheduler, torch 2.13).

    Args:
        in_region: whether this may be a block that is compiled once, where Inductor is not given its own code.
    """
    launches = not in_region and _can_launch(grad, samples)
    if launches:
        _compile_mask_gradient()
    if launches or (grad.is_cpu and grad.ndim > 3):
        return _MASK_GRADIENT(grad, table, location, samples, REVISION)
    finite = grad.clone(memory_format=_format_for_kernel(grad))  # left out if nothing else reads `grad`
    _MASK_GRADIENT_(finite, table, location, samples)
    return finite


def _can_launch(grad: Tensor, samples: int) -> bool:
    """Whether the kernel takes a copy of a gradient, whatever the gradient's own strides are."""
    if not grad.is_cuda or not all(isinstance(size, int) for size in grad.shape):
        return False
    return _has_kernel(torch.empty_like(grad, memory_format=_format_for_kernel(grad)), samples)


def _has_kernel(grad: Tensor, samples: int) -> bool:
    return has_kernel(_in_memory_order(grad)) and grad.numel() // samples < MAX_SAMPLE_SIZE


def _format_for_kernel(grad: Tensor) -> torch.memory_format:
    """The layout in which a copy of a gradient is masked. Matrix products mostly read it next, or convolutions."""
    return torch.contiguous_format if grad.is_cuda and grad.ndim < 4 else torch.preserve_format


def _in_memory_order(grad: Tensor) -> Tensor:
    """A view with the dims in the order in which they lie in memory, if samples do not overlap; else `grad`."""
    if grad.is_contiguous() or grad.stride(0) * grad.shape[0] != grad.numel():
        return grad
    return grad.permute(sorted(range(grad.ndim), key=grad.stride, reverse=True))


def _mask_gradient_in_place(grad: Tensor, table: Tensor, location: int, samples: int) -> None:
    """For samples of equal size. If all is finite, as usual, one pass reads it and nothing is written."""
    if _has_kernel(grad, samples):
        from torchguard._watch.kernels import mask_gradient

        mask_gradient(grad, table, location, samples)
        return
    batch = Batch(samples, (grad.shape[0] // samples,) if samples else (), 0, grad.device)
    finite, probe = _masked_gradient(grad, batch, row_code(0))
    if finite is not grad:
        grad.copy_(finite)
        table[0, location] = torch.maximum(table[0, location], probe)


_MASK_GRADIENT_ = define_opaque(
    "mask_gradient_(Tensor(a!) grad, Tensor(b!) table, int location, SymInt samples) -> ()",
    _mask_gradient_in_place,
    lambda *_: None,
)


def _mask_gradient_op(grad: Tensor, table: Tensor, location: int, samples: int, revision: int) -> Tensor:
    finite = grad.clone(memory_format=_format_for_kernel(grad))
    _mask_gradient_in_place(finite, table, location, samples)
    return finite


_MASK_GRADIENT = define_opaque(
    "mask_gradient(Tensor grad, Tensor(b!) table, int location, SymInt samples, int revision) -> Tensor",
    _mask_gradient_op,
    lambda grad, *_: torch.empty_like(grad, memory_format=_format_for_kernel(grad)),
)


@functools.cache
def _compile_mask_gradient() -> None:
    """Have Inductor launch the kernel itself. Only when it is first needed, since this loads all of Inductor."""
    function = "torchguard._watch.kernels:mask_gradient"
    compile_in_place(_MASK_GRADIENT, _MASK_GRADIENT_, function, for_all_uses=True)
