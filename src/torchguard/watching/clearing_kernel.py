"""The kernel of `clearing`. Loads Triton, which comes with torch for a GPU."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

# So many programs share a sample, and look at so many of its numbers at a time.
_PARTS, _BLOCK = 16, 4_096


@triton.jit
def _clear(z, bad, length, several, parts: tl.constexpr, block: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    within = tl.arange(0, block)
    found = tl.zeros([block], dtype=tl.int32)
    for start in range(0, several, block):
        there = start + within
        found = tl.maximum(found, tl.load(bad + row * several + there, mask=there < several, other=0).to(tl.int32))
    if tl.max(found, 0) > 0:
        for start in range(part * block, length, parts * block):
            there = start + within
            tl.store(z + row * length + there, tl.zeros([block], dtype=z.dtype.element_ty), mask=there < length)


def clear(z: Tensor, bad: Tensor) -> None:
    """Zeros in each of the equal parts of `z`, one behind another in memory, whose row in `bad` is not all false."""
    rows, several = bad.shape
    _clear[rows, _PARTS](z, bad.contiguous(), z.numel() // rows, several, _PARTS, _BLOCK)  # pyright: ignore[reportIndexIssue]
