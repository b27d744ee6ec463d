"""The summary of a call on a GPU, by two kernels (`summary_kernels.py`).

Compiled, a summary is a dozen kernels and more, and each takes the host longer to launch than the GPU to run. They
would differ from model to model, too, and be compiled with each. So it is one operator that is not compiled:

1. All statuses are copied together. A status consists of the bits of magnitudes, and so does a value
   without its sign: the values of small tensors (`detect.is_small`) are taken as they are instead of their statuses,
   which leaves no kernel for their checks.
2. One kernel finds the first bad vector of every check and sample.
3. Another makes the flags and the origins, and writes the history.

What is known of the checks when the graph is traced (a `CheckTable`) is a constant of the graph. So sizes have to be
known; otherwise, and without Triton, the summary is compiled (`summarize.py`).
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchguard._channel.config import ErrorConfig
from torchguard._channel.packing import Flags
from torchguard._operators import define_opaque
from torchguard._torch.inductor import compile_to_call
from torchguard._watch.batch import FOR_ALL, MIXED, Batch, row_code
from torchguard._watch.detect import deferred_scan
from torchguard._watch.history_table import HistoryTable
from torchguard._watch.magnitudes import REVISION, bits_of, inf_bits
from torchguard._watch.origins import BY_SIZE, NUM_ORIGINS, RowStatuses
from torchguard._watch.path_bits import CallOrder
from torchguard._watch.zeros import has_triton

# The kinds of checks: of tensors with samples; of others, whose faults count for all samples if none was bad before;
# and of tensors that mix samples, whose faults count for all that were good before.
_OF_SAMPLES, _UNBATCHED, _FOR_ALL = range(3)
# In place of the number of entries a vector: all of a tensor is one vector.
_ALL = 2**31 - 1
# In place of the bits of Inf: an entry is a fault itself.
_IS_FAULT = -1
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_INF_OF_FLOAT16 = 0x7C00


class CheckTable(NamedTuple):
    """What is known of the checks of a call.

    Args:
        entries: the statuses, or values, flat and sample by sample, by their size in bytes.
        statuses: for each of these its first entry among those of its size, its entries a sample, the distance between
            two samples (0 if all have the same entries), its entries a vector, the bits from which on a magnitude
            counts as a fault, the bits of Inf, and the number of its check.
        checks: for each check that is summarized its location, its kind, and its number among all checks of the call.
    """

    entries: dict[int, list[Tensor]]
    statuses: dict[int, list[tuple[int, ...]]]
    checks: list[tuple[int, ...]]


def can_summarize(checked: RowStatuses, batch: Batch, config: ErrorConfig) -> bool:
    """Whether the kernels can summarize these statuses."""
    if batch.device.type != "cuda" or config.flag_dtype != torch.int64 or not has_triton():
        return False
    sizes = (batch.size, *(size for status in checked.statuses for size in status.shape))
    return (
        all(isinstance(size, int) for size in sizes)
        and batch.size > 0
        and not config.should_transpose(batch.size)
        and all(status.device == batch.device for status in checked.statuses)
    )


def gpu_summary(
    checked: RowStatuses,
    location_ids: Tensor,
    batch: Batch,
    slots_of_faults: Sequence[int],
    most: int,
    fallback: int | None,
    mixes: bool,
    words: int,
    order: CallOrder,
    history: HistoryTable | None,
    ids: Tensor | None,
) -> tuple[Flags, Tensor] | None:
    """Flags and origins of a call. Its entries are written to the history. None if all that was checked is empty.

    Args:
        slots_of_faults: the slot of each fault, without the location.
        most: how many faults of a sample become slots.
        fallback: the slot that follows that of each fault, without the location, if values were replaced.
        mixes: whether the model may have mixed samples, so that a fault of one counts for all.
        words: the number of words of flags.
    """
    found = _check_table(checked, batch, order.kept)
    if not found.checks:
        return None
    sizes = sorted(found.entries)
    numbers = [*slots_of_faults, order.number]
    numbers += [n for size in sizes for status in found.statuses[size] for n in status]
    numbers += [n for check in found.checks for n in check]
    _compile_to_call()
    return _SUMMARIZE_ON_GPU(
        [one for size in sizes for one in found.entries[size]],
        [len(found.entries[size]) for size in sizes],
        torch.tensor(numbers, device=batch.device),
        location_ids.to(batch.device),
        *(history or (None, None)),
        None if ids is None else ids.to(batch.device),
        batch.size,
        words,
        most,
        fallback,
        mixes,
        order.num_rows,
        REVISION,
    )


def _check_table(checked: RowStatuses, batch: Batch, kept: Sequence[int]) -> CheckTable:
    """The table of the checks of a call, without those of empty tensors.

    Args:
        kept: the numbers of the checks among all of the call.
    """
    found, alike = CheckTable({}, {}, []), {}
    usual = next((one.element_size() for one in checked.statuses if one.dtype != torch.int8), 4)
    for status, location, code, number in zip(*checked, kept, strict=True):
        z, *numbers, kind = _entries(status, code, batch)
        if z.numel():
            z = z.to(_INTEGERS[usual]) if status.dtype == torch.int8 else z
            alike.setdefault(z.element_size(), []).append((z.flatten(), *numbers, kind, len(found.checks)))
            found.checks.append((location, kind, number))
    for size, statuses in alike.items():
        start = 0
        # Long ones first: the addresses of what is next to them are multiples of 16 then.
        for z, vector, limit, inf, kind, check in sorted(statuses, key=lambda one: -one[0].shape[0]):
            count = z.shape[0] // batch.size if kind == _OF_SAMPLES else z.shape[0]
            stride = count if kind == _OF_SAMPLES else 0
            found.entries.setdefault(size, []).append(z)
            found.statuses.setdefault(size, []).append((start, count, stride, vector, limit, inf, check))
            start += z.shape[0]
    return found


def _entries(status: Tensor, code: int, batch: Batch) -> tuple[Tensor, int, int, int, int]:
    """The entries of a status, sample by sample, those of a vector, the bits of its limit and of Inf, its kind."""
    deferred = deferred_scan(status) if code == row_code(0) else None
    if deferred is not None and deferred.tensor.shape[0] == batch.size:
        z, inf = deferred.tensor, _inf_bits(deferred.tensor.dtype)
        limit = inf if deferred.limit == math.inf else bits_of(deferred.limit, z.dtype)
        return z, z.shape[-1], limit, inf, _OF_SAMPLES
    inf = _inf_bits(status.dtype)
    limit = abs(inf)  # 1 if entries are faults
    by_sample = batch.status_by_sample(status, None if code == BY_SIZE else code)
    if by_sample is not None:
        return by_sample, by_sample.shape[-1], limit, inf, _OF_SAMPLES
    has_rows = code == FOR_ALL or (code == MIXED and not batch.is_unbatched(status.shape))
    return status, _ALL, limit, inf, _FOR_ALL if has_rows else _UNBATCHED


def _inf_bits(dtype: torch.dtype) -> int:
    """The bits of Inf in a status, or a tensor, of a dtype."""
    if dtype == torch.int8:
        return _IS_FAULT
    if dtype == torch.float16:
        return _INF_OF_FLOAT16
    return inf_bits(dtype)


def _summarize_on_gpu_op(
    statuses: list[Tensor],
    sizes: list[int],
    table: Tensor,
    location_ids: Tensor,
    entries: Tensor | None,
    counts: Tensor | None,
    ids: Tensor | None,
    batch: int,
    words: int,
    most: int,
    fallback: int | None,
    mixes: bool,
    path_rows: int,
    revision: int,
) -> tuple[Flags, Tensor]:
    from torchguard._watch.summary_kernels import summarize_statuses

    flags, origins = table.new_empty(batch, words), table.new_empty(NUM_ORIGINS + path_rows, batch)
    history = None if entries is None or counts is None else HistoryTable(entries, counts)
    summarize_statuses(statuses, sizes, table, location_ids, ids, flags, origins, history, most, fallback, mixes)
    return flags, origins


def _summarize_on_gpu_shapes(statuses: Any, sizes: Any, table: Tensor, *arguments: Any) -> tuple[Flags, Tensor]:
    batch, words, path_rows = arguments[4], arguments[5], arguments[-2]
    return table.new_empty(batch, words), table.new_empty(NUM_ORIGINS + path_rows, batch)


_SUMMARIZE_ON_GPU = define_opaque(
    "summarize_on_gpu(Tensor[] statuses, int[] sizes, Tensor table, Tensor location_ids, Tensor(a!)? entries, "
    "Tensor(b!)? counts, Tensor? ids, int batch, int words, int most, int? fallback, bool mixes, int path_rows, "
    "int revision) -> (Tensor, Tensor)",
    _summarize_on_gpu_op,
    _summarize_on_gpu_shapes,
)
summarize_on_gpu = _summarize_on_gpu_op  # what Inductor's code calls


@functools.cache
def _compile_to_call() -> None:
    """Have Inductor call the function itself. Only when it is first needed, since this loads all of Inductor."""
    compile_to_call(_SUMMARIZE_ON_GPU, "torchguard._watch.gpu_summary:summarize_on_gpu")
