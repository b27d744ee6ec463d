"""The Triton kernels of `gradient_mask` and `zeros`. Importing this loads Triton, which comes with torch for a GPU."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.library import wrap_triton

from torchguard._watch.detect import PROBE_INF, PROBE_NAN

# The number of programs to aim at, the most that share a sample, and for each the numbers in a block, which it reads at
# a time, and its warps. (Measured on an H200: more programs of fewer blocks read at two thirds of the speed.)
_PROGRAMS, _PROGRAMS_A_SAMPLE, _BLOCK, _WARPS = 1_024, 128, tl.constexpr(4_096), 8
# The number of vector pieces that one program of `_zero_nonfinite_kernel` handles.
_PIECES = tl.constexpr(2)
_INF, _NAN = tl.constexpr(PROBE_INF), tl.constexpr(PROBE_NAN)
# `_mask_gradient_kernel` as compiled for lengths and addresses that are multiples of 16, by dtype and device: Triton's
# own lookup takes three times as long. (Not used on ROCm, where Triton specialises on more than that.)
_KERNELS: dict[tuple[Any, ...], Any] = {}


@triton.jit
def _magnitude_bits(x):
    """Bits as integers: without the sign bit they are ordered as the magnitudes are, and NaN comes after Inf."""
    width: tl.constexpr = x.dtype.primitive_bitwidth
    bits: tl.constexpr = tl.int16 if width == 16 else (tl.int32 if width == 32 else tl.int64)
    most: tl.constexpr = (1 << (width - 1)) - 1
    return x.to(bits, bitcast=True) & most


@triton.jit(do_not_specialize=["first", "counts_offset", "programs"])
def _mask_gradient_kernel(grad, table, first, counts_offset, length, programs):
    sample, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    within = tl.arange(0, _BLOCK)
    largest = _magnitude_bits(tl.zeros([_BLOCK], dtype=grad.dtype.element_ty))
    for start in range(program * _BLOCK, length, programs * _BLOCK):
        at = start + within
        numbers = tl.load(grad + sample * length + at, mask=at < length, other=0.0)
        largest = tl.maximum(largest, _magnitude_bits(numbers))
    most = tl.max(largest, 0)
    inf = tl.max(_magnitude_bits(tl.full([1], float("inf"), dtype=grad.dtype.element_ty)), 0)
    worst = tl.where(most > inf, 2, tl.where(most == inf, 1, 0))
    # The counter holds how many programs are done, how many saw Inf, and how many saw NaN (10 bits each). The program
    # that is done last therefore knows what all of them saw, and writes.
    probe = table + first + sample
    counter = (probe + counts_offset).to(tl.pointer_type(tl.int32))
    count = 1 + tl.where(worst == 1, 1 << 10, 0) + tl.where(worst == 2, 1 << 20, 0)
    total = tl.atomic_add(counter, count) + count
    if (total & 1023) == programs:
        tl.store(counter, 0)
        if total >= 1 << 10:
            tl.store(probe, tl.maximum(tl.load(probe), tl.where(total >= 1 << 20, _NAN, _INF)))
            for start in range(0, length, _BLOCK):
                at = start + within
                tl.store(grad + sample * length + at, tl.zeros([_BLOCK], dtype=grad.dtype.element_ty), mask=at < length)


def mask_gradient(grad: Tensor, table: Tensor, location: int, samples: int) -> None:
    """Write zeros into each non-finite sample of `grad`, and record it in the table of probe gradients.

    The samples of `grad` have the same size, lie one behind another in memory, and have fewer than
    `gradient_mask.MAX_SAMPLE_SIZE` numbers each.

    Args:
        table: `(2, locations, samples)`: the gradients of the probes, and counters, which are zero before and after.
    """
    length, counts_offset = grad.numel() // samples, table.shape[1] * table.shape[2]
    programs = min(max(_PROGRAMS // samples, 1), _PROGRAMS_A_SAMPLE)
    grid = (samples, min(programs, -(-length // _BLOCK.value)), 1)
    arguments = (grad, table, location * table.shape[2], counts_offset, length, grid[1])
    if length % 16 or grad.data_ptr() % 16 or table.data_ptr() % 16 or torch.version.cuda is None:
        _mask_gradient_kernel[grid](*arguments, num_warps=_WARPS)  # pyright: ignore[reportIndexIssue]
        return
    key = (grad.dtype, grad.get_device())
    kernel = _KERNELS.get(key)
    if kernel is None:
        _KERNELS[key] = _mask_gradient_kernel[grid](*arguments, num_warps=_WARPS)  # pyright: ignore[reportIndexIssue]
    else:
        kernel[grid](*arguments)


@triton.jit(do_not_specialize=["rows", "length", "stride", "programs"])
def _zero_bad_samples_kernel(z, origin, rows, length, stride, programs):
    sample, program = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if tl.load(origin + sample) >= 0:
        for row in range(program, rows, programs):
            for start in range(0, length, _BLOCK):
                at = start + tl.arange(0, _BLOCK)
                to = z + (sample * rows + row) * stride + at
                tl.store(to, tl.zeros([_BLOCK], dtype=z.dtype.element_ty), mask=at < length)


def zero_bad_samples(z: Tensor, origin: Tensor, samples: int) -> None:
    """Write zeros into each sample of `z` that has an origin (-1: none). A sample is one row of the first dim, or
    several."""
    rows = _as_rows(z)
    if rows is None:
        z.unflatten(0, (samples, -1)).masked_fill_((origin >= 0).view(-1, *[1] * z.ndim), 0)
        return
    count, length, stride = rows
    programs = min(max(_PROGRAMS // samples, 1), count // samples)
    kernel = _zero_bad_samples_kernel[(samples, programs, 1)]  # pyright: ignore[reportIndexIssue]
    with on_device_of(z):
        kernel(z, origin, count // samples, length, stride, programs, num_warps=_WARPS)


def on_device_of(z: Tensor) -> AbstractContextManager[Any]:
    """Within it, kernels are launched on the device of a tensor. Inductor's code is in it already."""
    return nullcontext() if z.get_device() == torch.cuda.current_device() else torch.cuda.device(z.device)


def _as_rows(z: Tensor) -> tuple[int, int, int] | None:
    """The number of rows of a tensor, their length and the distance between two, which may be longer: Inductor pads
    rows. None if it does not consist of such rows."""
    if z.is_contiguous():
        return z.shape[0], z.numel() // z.shape[0], z.numel() // z.shape[0]
    *outer, length = z.shape
    strides = [z.stride(-2) * math.prod(outer[i + 1 :]) for i in range(len(outer))]
    is_regular = z.stride(-1) == 1 and z.stride(-2) >= length and [*z.stride()[:-1]] == strides
    return (math.prod(outer), length, z.stride(-2)) if is_regular else None


@triton.jit(do_not_specialize=["count"])
def _zero_nonfinite_kernel(z, status, length, count, block: tl.constexpr):
    piece, at = tl.program_id(0).to(tl.int64) * _PIECES + tl.arange(0, _PIECES), tl.arange(0, block)
    numbers = z + piece[:, None] * length + at[None, :]
    is_inside = (piece[:, None] < count) & (at[None, :] < length)
    largest = tl.max(_magnitude_bits(tl.load(numbers, mask=is_inside, other=0.0)), 1)
    tl.store(status + piece, largest, mask=piece < count)
    is_bad = largest >= tl.max(_magnitude_bits(tl.full([1], float("inf"), dtype=z.dtype.element_ty)), 0)
    if tl.max(is_bad.to(tl.int32), 0) > 0:
        zeros = tl.zeros([_PIECES, block], dtype=z.dtype.element_ty)
        tl.store(numbers, zeros, mask=is_inside & is_bad[:, None])


def zero_nonfinite(z: Tensor, status: Tensor) -> None:
    """Write zeros into each non-finite piece of `z`. The pieces have the same size and lie one behind another.

    Args:
        status: receives the bits of the largest magnitude of each piece.
    """
    count = status.numel()
    length = z.numel() // count
    grid = (-(-count // _PIECES.value), 1, 1)
    wrap_triton(_zero_nonfinite_kernel)[grid](z, status, length, count, triton.next_power_of_2(length), num_warps=4)
