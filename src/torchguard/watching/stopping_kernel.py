"""The kernel of `stopping`. Loads Triton, which comes with torch for a GPU."""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

# Up to so many programs share a sample, and look at so many of its numbers at a time, by so many warps.
_PARTS, _BLOCK, _WARPS = 128, tl.constexpr(4_096), 8
# For lengths and addresses that are multiples of 16, by dtype and device: Triton takes three times as long to find it.
_KERNELS: dict[tuple[Any, ...], Any] = {}


@triton.jit(do_not_specialize=["first", "parts"])
def _stop(z, room, first, mark, length, parts, inf_mark, nan_mark):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    within = tl.arange(0, _BLOCK)
    # Without the sign, bits as a whole number are in the order of the magnitudes; behind Inf comes NaN.
    width: tl.constexpr = z.dtype.element_ty.primitive_bitwidth
    bits: tl.constexpr = tl.int16 if width == 16 else (tl.int32 if width == 32 else tl.int64)
    most: tl.constexpr = (1 << (width - 1)) - 1
    largest = tl.zeros([_BLOCK], dtype=bits)
    for start in range(part * _BLOCK, length, parts * _BLOCK):
        there = start + within
        x = tl.load(z + row * length + there, mask=there < length, other=0.0)
        largest = tl.maximum(largest, x.to(bits, bitcast=True) & most)
    inf = tl.full([_BLOCK], float("inf"), dtype=z.dtype.element_ty).to(bits, bitcast=True)
    worst = tl.max(tl.where(largest > inf, 2, tl.where(largest == inf, 1, 0)), 0)
    # What is counted: the programs that are done, that saw Inf, that saw NaN. The last to be done knows of all.
    counts = (room + first + row).to(tl.pointer_type(tl.int32))
    count = 1 + tl.where(worst == 1, 1 << 10, 0) + tl.where(worst == 2, 1 << 20, 0)
    total = tl.atomic_add(counts, count) + count
    if (total & 1023) == parts:
        tl.store(counts, 0)
        tl.store(mark + row, tl.where(total >= 1 << 20, nan_mark, tl.where(total >= 1 << 10, inf_mark, 0.0)))
        if total >= 1 << 10:
            for start in range(0, length, _BLOCK):
                there = start + within
                tl.store(z + row * length + there, tl.zeros([_BLOCK], dtype=z.dtype.element_ty), mask=there < length)


def stop(z: Tensor, room: Tensor, place: int, rows: int, inf_mark: float, nan_mark: float) -> Tensor:
    """Zeros in each of the equal parts of `z`, one behind another in memory, that is not finite; and their marks.

    Args:
        room: zeros of 4 bytes, of which those in row `place` are counted in, one for each part; zeros again afterwards.
    """
    mark = torch.empty(rows, dtype=torch.float32, device=z.device)
    length = z.numel() // rows
    grid = (rows, min(_PARTS, -(-length // _BLOCK.value)), 1)
    given = (z, room, place * room.stride(0), mark, length, grid[1], inf_mark, nan_mark)
    if length % 16 or length >= 1 << 31 or z.data_ptr() % 16 or room.data_ptr() % 16:
        _stop[grid](*given, num_warps=_WARPS)  # pyright: ignore[reportIndexIssue]
        return mark
    known = (z.dtype, z.get_device())
    kernel = _KERNELS.get(known)
    if kernel is None:
        _KERNELS[known] = _stop[grid](*given, num_warps=_WARPS)  # pyright: ignore[reportIndexIssue]
    else:
        kernel[grid](*given)
    return mark
