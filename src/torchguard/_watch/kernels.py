"""The kernels of `stopping` and `mending`. Loads Triton, which comes with torch for a GPU."""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.library import wrap_triton

from torchguard._watch.detect import INF_MARK, NAN_MARK

# Up to so many programs share a sample, and look at so many of its numbers at a time, by so many warps.
_PARTS, _BLOCK, _WARPS = 128, tl.constexpr(4_096), 8
# So many pieces of vectors a program mends at once.
_AT_ONCE = tl.constexpr(2)
_INF, _NAN = tl.constexpr(INF_MARK), tl.constexpr(NAN_MARK)
# As compiled for lengths and addresses that are multiples of 16, by dtype and device: Triton takes three times as long
# to find it. (ROCm compiles for more than that.)
_KERNELS: dict[tuple[Any, ...], Any] = {}


@triton.jit
def _magnitudes(x):
    """Bits as whole numbers: without the sign they are in the order of the magnitudes; behind Inf comes NaN."""
    width: tl.constexpr = x.dtype.primitive_bitwidth
    bits: tl.constexpr = tl.int16 if width == 16 else (tl.int32 if width == 32 else tl.int64)
    most: tl.constexpr = (1 << (width - 1)) - 1
    return x.to(bits, bitcast=True) & most


@triton.jit(do_not_specialize=["first", "behind", "parts"])
def _stop(z, table, first, behind, length, parts):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    within = tl.arange(0, _BLOCK)
    largest = _magnitudes(tl.zeros([_BLOCK], dtype=z.dtype.element_ty))
    for start in range(part * _BLOCK, length, parts * _BLOCK):
        there = start + within
        largest = tl.maximum(largest, _magnitudes(tl.load(z + row * length + there, mask=there < length, other=0.0)))
    inf = _magnitudes(tl.full([_BLOCK], float("inf"), dtype=z.dtype.element_ty))
    worst = tl.max(tl.where(largest > inf, 2, tl.where(largest == inf, 1, 0)), 0)
    # What is counted: the programs that are done, that saw Inf, that saw NaN. The last to be done knows of all.
    mark = table + first + row
    counts = (mark + behind).to(tl.pointer_type(tl.int32))
    count = 1 + tl.where(worst == 1, 1 << 10, 0) + tl.where(worst == 2, 1 << 20, 0)
    total = tl.atomic_add(counts, count) + count
    if (total & 1023) == parts:
        tl.store(counts, 0)
        if total >= 1 << 10:
            tl.store(mark, tl.maximum(tl.load(mark), tl.where(total >= 1 << 20, _NAN, _INF)))
            for start in range(0, length, _BLOCK):
                there = start + within
                tl.store(z + row * length + there, tl.zeros([_BLOCK], dtype=z.dtype.element_ty), mask=there < length)


def stop(z: Tensor, table: Tensor, place: int, rows: int) -> None:
    """Zeros in each of the equal parts of `z`, one behind another in memory, that is not finite; and their marks.

    A part has fewer than `stopping.LONGEST` numbers.

    Args:
        table: `(2, places, rows)`, the marks of places, and zeros to count in, which are zeros again afterwards.
    """
    length, behind = z.numel() // rows, table.shape[1] * table.shape[2]
    grid = (rows, min(_PARTS, -(-length // _BLOCK.value)), 1)
    given = (z, table, place * table.shape[2], behind, length, grid[1])
    if length % 16 or z.data_ptr() % 16 or table.data_ptr() % 16 or torch.version.cuda is None:
        _stop[grid](*given, num_warps=_WARPS)  # pyright: ignore[reportIndexIssue]
        return
    known = (z.dtype, z.get_device())
    kernel = _KERNELS.get(known)
    if kernel is None:
        _KERNELS[known] = _stop[grid](*given, num_warps=_WARPS)  # pyright: ignore[reportIndexIssue]
    else:
        kernel[grid](*given)


@triton.jit(do_not_specialize=["many"])
def _mend(z, found, length, many, block: tl.constexpr):
    piece, there = tl.program_id(0).to(tl.int64) * _AT_ONCE + tl.arange(0, _AT_ONCE), tl.arange(0, block)
    numbers = z + piece[:, None] * length + there[None, :]
    is_there = (piece[:, None] < many) & (there[None, :] < length)
    largest = tl.max(_magnitudes(tl.load(numbers, mask=is_there, other=0.0)), 1)
    tl.store(found + piece, largest, mask=piece < many)
    is_bad = largest >= tl.max(_magnitudes(tl.full([1], float("inf"), dtype=z.dtype.element_ty)), 0)
    if tl.max(is_bad.to(tl.int32), 0) > 0:
        zeros = tl.zeros([_AT_ONCE, block], dtype=z.dtype.element_ty)
        tl.store(numbers, zeros, mask=is_there & is_bad[:, None])


def mend(z: Tensor, found: Tensor) -> None:
    """Zeros in each of the equal pieces of `z`, one behind another in memory, that is not finite.

    Args:
        found: is given the bits of the largest magnitude of each piece.
    """
    many = found.numel()
    length = z.numel() // many
    grid = (-(-many // _AT_ONCE.value), 1, 1)
    wrap_triton(_mend)[grid](z, found, length, many, triton.next_power_of_2(length), num_warps=4)
