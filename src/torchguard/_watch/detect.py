"""Checking a tensor: a row status for every vector along its last dim, by one reduction.

The status of a vector is the largest magnitude in it, or the bits of that magnitude (`magnitudes.py`). (Checks
of indices have an int8 status instead: the fault itself.) The statuses have the shape of the tensor, with the pieces of
a vector as their last dim: one piece, or on a GPU several of a long vector.

Checking must cost next to nothing in compiled code, so this file works around three properties of torch and
onnxruntime:

- **Deferred scans.** Compiled for the CPU, a scan that can be fused with nothing (the model's input and output) takes
  longer to compile than it ever saves. The tensor is therefore saved on its status as `_torchguard_source`, and the
  summary of the call, which is not compiled, scans the tensor itself. The status is then dead code. On a GPU the same
  is done with all small tensors: a kernel for each check would take longer to launch than to run, so the summary copies
  them together and scans them with one kernel (`origins.py`).
- **No NaN in a reduction of an export.** onnxruntime's `ReduceMax` drops NaN. In an export, every element becomes a
  fault, an int8, before anything is reduced.
- **An operator.** Dynamo traces each Python call slowly, and a large model has hundreds of checks. It sees one call
  of the operator `row_status`; AOTAutograd runs the body. The checksum of this package's source is an argument, since
  torch's caches of compiled graphs know an operator by its name and arguments alone.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchguard._channel.codes import ErrorCode
from torchguard._channel.detect import floats_of
from torchguard._operators import define, use_operators
from torchguard._torch.tensors import is_distributed, mutation_count
from torchguard._torch.tracing import is_exporting, is_shape_only, is_surely, is_traced
from torchguard._watch.magnitudes import REVISION, dtype_of_largest, inf_of, largest_magnitudes, num_pieces, reads_bits
from torchguard.exceptions import WatchError

# Faults in order of rank: where a vector has several, the last one counts.
FAULT_CODES = (ErrorCode.OK, ErrorCode.OUT_OF_BOUNDS, ErrorCode.NEGATIVE_IDX, ErrorCode.INF, ErrorCode.NAN)
OK, OUT_OF_BOUNDS, NEGATIVE, INF, NAN = range(len(FAULT_CODES))
# Attribute of a row status whose scan is deferred: a `DeferredScan`.
_SOURCE = "_torchguard_source"
# From this number on, vectors occupy a GPU however long they are.
_MANY_VECTORS = 1_024
# Tensors of up to this many numbers are scanned together at the end of a call on a GPU. Until then their memory is
# kept: at most 1 MiB each in float32.
_MAX_SMALL = 2**18
# What a gradient probe receives for a sample. Gradients may be added up: one NaN outweighs any number of Infs.
PROBE_INF, PROBE_NAN = 1.0, 2.0**20


class DeferredScan(NamedTuple):
    """A tensor to scan instead of using its status, and its number of in-place changes at the time of the check.

    Args:
        limit: magnitudes from here on count as Inf.
    """

    tensor: Tensor
    changes: int
    limit: float


def row_status(z: Tensor, alone: bool = False, keep_neg_inf: bool = False, norm_widths: Sequence[int] = ()) -> Tensor:
    """The row status of `z`, by a reduction that fuses with what else reads the vectors.

    Args:
        alone: whether nothing else reads the vectors in the same pass, so that the scan may be deferred.
        keep_neg_inf: whether -Inf counts as finite.
        norm_widths: the lengths of the vectors that the model normalizes: see `scan`.
    """
    if use_operators():
        return call_row_status(z, alone, keep_neg_inf, norm_widths)
    return scan(without_neg_inf(z) if keep_neg_inf else z, norm_widths)


def without_neg_inf(z: Tensor) -> Tensor:
    return z if z.is_complex() else torch.where(z.detach() == -math.inf, 0, z.detach())


def call_row_status(z: Tensor, alone: bool, keep_neg_inf: bool, norm_widths: Sequence[int]) -> Tensor:
    """Call the operator `row_status`."""
    return ROW_STATUS(z, alone, keep_neg_inf, norm_widths, REVISION)


def _row_status_op(z: Tensor, alone: bool, keep_neg_inf: bool, norm_widths: Sequence[int], revision: int) -> Tensor:
    return empty_status(z) if is_shape_only(z) else deferrable_status(z, alone, keep_neg_inf, norm_widths)


def deferrable_status(
    z: Tensor, alone: bool, keep_neg_inf: bool, norm_widths: Sequence[int], limit: float = math.inf
) -> Tensor:
    """The row status of `z`, in a graph. The scan is deferred where that is cheaper.

    Args:
        limit: magnitudes from here on count as Inf.
    """
    status = scan(without_neg_inf(z) if keep_neg_inf else z, norm_widths, limit)
    defers = is_small(z) if compiles_summary(z.device) else alone and limit == math.inf
    if defers and not keep_neg_inf and is_traced(z) and not z.is_inference():  # inference tensors count no changes
        setattr(status, _SOURCE, DeferredScan(z.detach(), mutation_count(z), limit))
    return status


def compiles_summary(device: torch.device) -> bool:
    """Whether the summary of a call is compiled as part of a graph. On the CPU it is not."""
    return device.type != "cpu"


def is_small(z: Tensor) -> bool:
    """Whether a kernel that scans this tensor alone would take longer to launch than to run."""
    if z.ndim < 2 or not z.is_floating_point() or z.element_size() == 1:
        return False
    return all(isinstance(size, int) for size in z.shape) and 0 < z.numel() <= _MAX_SMALL


ROW_STATUS = define(
    "row_status(Tensor z, bool alone, bool keep_neg_inf, int[] norm_widths, int revision) -> Tensor", _row_status_op
)


def deferred_scan(status: Tensor) -> DeferredScan | None:
    """The scan that was deferred, if it was and the tensor did not change since."""
    found: DeferredScan | None = getattr(status, _SOURCE, None)
    return found if found is not None and mutation_count(found.tensor) == found.changes else None


def scan(z: Tensor, norm_widths: Sequence[int] = (), limit: float = math.inf) -> Tensor:
    """The row status of `z`, by operations that a backend can fuse.

    Args:
        norm_widths: the lengths of the vectors that the model normalizes. Vectors of such a length are scanned whole,
            as a norm reads them: Inductor fuses reductions of one size alone. Others are scanned in pieces if they are
            long, which is faster where nothing else reduces them.
        limit: magnitudes from here on count as Inf.
    """
    ndim, is_complex = z.ndim, z.is_complex()
    z = z if reads_bits(z) else floats_of(z)  # bits need no detach: integers have no gradient
    if ndim == 0:
        z = z.reshape(-1)
    elif z.ndim == 1 or z.shape[-1] == 0:
        z = z.unsqueeze(-1)
    if is_exporting():
        return _exported_status(z, limit)
    pieces = num_pieces(z.shape[-1]) if not z.is_cpu and z.ndim in (2, 3) and not is_complex else 1
    if pieces > 1 and z.shape[-1] in norm_widths and is_surely(z.numel() >= _MANY_VECTORS * z.shape[-1]):
        pieces = 1
    return largest_magnitudes(z, pieces, limit)


def _exported_status(z: Tensor, limit: float) -> Tensor:
    """The row status of floats in an export, as faults. Magnitudes from `limit` on count as Inf."""
    faults = torch.where(z != z, NAN, torch.where(z.abs() < limit, OK, INF)).to(torch.int8)
    return faults.amax(-1, keepdim=True)


def empty_status(z: Tensor) -> Tensor:
    """A tensor with the shape and dtype of the status of `z`, for tracers that need no values."""
    if is_distributed(z):
        raise WatchError(
            "watch: a graph of this model would compute with DTensors (tensor parallelism), and a watched model is not "
            "compiled with these. Call it in eager mode."
        )
    if z.ndim < 2 or z.is_complex() or z.element_size() == 1 or z.shape[-1] == 0:
        return scan(z)
    pieces = 1 if z.is_cpu or z.ndim > 3 else num_pieces(z.shape[-1])
    return z.new_empty([*z.shape[:-1], pieces], dtype=dtype_of_largest(z))


def skipped_status(like: Tensor) -> Tensor:
    """The status of a tensor that is not checked, such as one that was checked just before: it has no entries."""
    return like.new_empty(0)


def is_skipped(status: Tensor) -> bool:
    return status.ndim == 1 and is_surely(status.shape[0] == 0)


def index_status(ids: Tensor, size: int) -> Tensor:
    """The row status of indices into a table of that size."""
    faults = torch.where(ids < 0, NEGATIVE, torch.where(ids >= size, OUT_OF_BOUNDS, OK)).to(torch.int8)
    return faults.amax(-1, keepdim=True) if faults.ndim > 1 else faults.unsqueeze(-1)


def faults_of(status: Tensor) -> Tensor:
    """The fault that each entry of a status stands for, `OK` to `NAN`, as int8."""
    if status.dtype == torch.int8:
        return status
    return torch.where(is_nan(status), NAN, torch.where(is_finite(status), OK, INF)).to(torch.int8)


def is_finite(status: Tensor) -> Tensor:
    """Whether each vector is finite. One operation, since it runs at every module."""
    if status.dtype == torch.int8:
        return status == OK
    return status < inf_of(status.dtype)


def is_nan(status: Tensor) -> Tensor:
    return status != status if status.is_floating_point() else status > inf_of(status.dtype)


def all_finite(z: Tensor) -> bool:
    """Whether all numbers are finite. Reads a value, by few calls: it runs rarely, so each call is slow."""
    z = z.detach()
    if math.isfinite(z.sum().item()) or z.numel() == 0:
        return True
    low, high = z.aminmax()  # the sum of finite numbers may overflow
    return low.item() > -math.inf and high.item() < math.inf


def only_fault(status: Tensor, fault: int) -> Tensor:
    """The status as faults, with every fault but this one counted as OK."""
    faults = faults_of(status)
    return torch.where(faults == fault, faults, OK)
