"""Detection of NaN and Inf: a status for each row of a tensor.

Rows are reduced over their last dimension only: the kernel that packs reduces the rest for all checks. In an export no
reduction relies on NaN: onnxruntime's `ReduceMax` drops it.

Where Inductor compiles for the CPU, a check is one operator, `row_maxima`, with a lowering of its own
(`_torch/inductor.py`). It has the kernel of a layer write what is checked to memory before it is reduced, which makes
the kernels of equal layers equal, so that they are compiled once.
"""

import functools
import math
from pathlib import Path

import torch
from torch import Tensor

from torchguard._channel.codes import DEFAULT_SEVERITY, ErrorCode
from torchguard._channel.policy import RowStatus
from torchguard._channel.slot_bits import pack_slot
from torchguard._operators import define_opaque, source_checksum
from torchguard._torch.tracing import can_read, is_compiled_by_inductor, is_exporting, is_traced

# Of what the operators of this package trace into or are compiled to.
REVISION = source_checksum(Path(__file__).parent) ^ source_checksum(Path(__file__).parents[1] / "_torch", "inductor.py")


def row_statuses(z: Tensor, nan: bool, inf: bool) -> list[RowStatus]:
    """The status of each row, for NaN, for Inf, or for both. Empty if one sum shows that no value of `z` is bad."""
    values = floats_of(z)
    if _is_finite(values) if inf else _is_free_of_nan(values):
        return []
    if _is_compiled_as_maxima(values):
        return _ROW_MAXIMA(values, nan, inf, REVISION)
    if nan and inf:
        return _nan_and_inf(values)
    return [_nan(values) if nan else _inf(values)]


def fault_slots(nan: bool, inf: bool, location: int) -> list[int]:
    """The slots that go with `row_statuses`."""
    found = ([ErrorCode.NAN] if nan else []) + ([ErrorCode.INF] if inf else [])
    return [pack_slot(code, location, DEFAULT_SEVERITY[code]) for code in found]


def can_be_bad(z: Tensor) -> bool:
    """Whether the dtype of a tensor has NaN and Inf."""
    return z.is_floating_point() or z.is_complex()


def can_be_checked(z: Tensor) -> bool:
    """Whether a tensor can hold NaN or Inf and has a batch dimension."""
    return can_be_bad(z) and z.layout == torch.strided and not z.is_nested


def floats_of(z: Tensor) -> Tensor:
    """`z` detached, as real floats of 16 bits or more."""
    z = z.detach() if z.requires_grad else z
    if z.is_complex():
        parts = torch.view_as_real(z.resolve_conj())
        return parts.flatten(-2) if z.ndim > 1 else parts
    return z.to(torch.float32) if z.element_size() == 1 else z


def _is_free_of_nan(z: Tensor) -> bool:
    # Any NaN makes the sum NaN. So does Inf - Inf; then the exact check decides.
    return can_read(z) and not math.isnan(z.sum().item())


def _is_finite(z: Tensor) -> bool:
    # A finite sum proves every element finite. Any other may be overflow; then the exact check decides.
    return can_read(z) and math.isfinite(z.sum().item())


def _nan(z: Tensor) -> RowStatus:
    """NaN where a row holds one: the maximum propagates NaN, in one pass and without a mask of the size of `z`."""
    if z.ndim > 1 and z.shape[-1] and not is_exporting():
        return z.amax(-1)
    return _rows_where(torch.isnan(z))


def _inf(z: Tensor) -> RowStatus:
    """True, or NaN, where a row holds Inf."""
    found = z.abs() == math.inf  # not isinf, which Inductor does not vectorise
    if z.is_cpu and z.ndim > 1 and z.shape[-1] and not is_exporting():
        # Nor does Inductor vectorise `any` on the CPU. On a GPU `any` is faster.
        return torch.where(found, math.nan, torch.zeros((), dtype=z.dtype)).amax(-1)
    return _rows_where(found)


def _nan_and_inf(z: Tensor) -> list[RowStatus]:
    """Both in one pass: Inductor fuses reductions of the same kind over the same values."""
    return [_nan(z) if z.is_cpu else _rows_where(z != z), _inf(z)]


def _rows_where(found: Tensor) -> Tensor:
    return found.any(-1) if found.ndim > 1 else found


# In graphs for Inductor on the CPU.


def _is_compiled_as_maxima(z: Tensor) -> bool:
    if not (z.is_cpu and z.ndim > 1 and is_traced(z) and is_compiled_by_inductor()):
        return False
    return bool(z.shape[-1]) and _compile_row_maxima()


@functools.cache
def _compile_row_maxima() -> bool:
    """Only when it is first needed, since this loads all of Inductor."""
    from torchguard._torch.inductor import compile_row_maxima

    return compile_row_maxima(_ROW_MAXIMA)


def _row_maxima_op(z: Tensor, nan: bool, inf: bool, revision: int) -> list[Tensor]:
    return [status.contiguous() for status in ([_nan(z)] if nan else []) + ([_inf(z)] if inf else [])]


_ROW_MAXIMA = define_opaque(
    "row_maxima(Tensor z, bool nan, bool inf, int revision) -> Tensor[]",
    _row_maxima_op,
    lambda z, nan, inf, revision: [z.new_empty(z.shape[:-1]) for _ in range(nan + inf)],
)
