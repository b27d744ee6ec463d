"""The summary of a call, in eager mode and in graphs (`call_summary.py` has what it consists of).

In a compiled call the statuses come from hundreds of kernels. Dynamo sees one operator, `summarize_call`, because it is
slow to trace Python code that examines each status. AOTAutograd runs its body. For a GPU it calls an operator that
launches kernels (`gpu_summary.py`), or is traced and compiled where these cannot be used. For the CPU it stacks equal
shapes and calls a second operator, `summarize_call_eager`, which is not compiled: it would take long to compile, and
usually finds that all is finite and returns at once.
"""

import functools
import json
from typing import Any

import torch
from torch import Tensor

from torchguard._channel.config import ErrorConfig
from torchguard._channel.detect import floats_of
from torchguard._channel.packing import Flags
from torchguard._operators import define, define_opaque, use_operators
from torchguard._torch.tracing import in_transform, is_exporting, is_shape_only, is_traced
from torchguard._watch.batch import Batch, row_code
from torchguard._watch.call_summary import (
    FALLBACK_SLOT,
    FAULT_SLOTS,
    CallSummary,
    FaultHandling,
    all_ok,
    clean_summary,
    flags_and_origins,
    is_ok,
    most_faults,
)
from torchguard._watch.detect import (
    all_finite,
    compiles_summary,
    deferred_scan,
    is_skipped,
    scan,
)
from torchguard._watch.gpu_summary import can_summarize, gpu_summary
from torchguard._watch.gradient_probes import set_origins
from torchguard._watch.history_table import HistoryTable
from torchguard._watch.magnitudes import REVISION
from torchguard._watch.origins import RowStatuses, grouped
from torchguard._watch.path_bits import NO_ORDER, CallOrder, all_checks, order_number

_CPU = torch.device("cpu")


def summarize(
    checked: RowStatuses,
    warnings: Tensor | None,
    location_ids: Tensor,
    batch: Batch,
    handling: FaultHandling,
    config: ErrorConfig,
    probes: Tensor | None,
    history: HistoryTable | None,
    ids: Tensor | None,
) -> CallSummary:
    """The summary of a call.

    Args:
        warnings: see `CallSummary`.
        location_ids: the id of each location, followed by 0.
        probes: the gradient probes of the call, if it has any. Their backward pass is given the origins.
        history: where a graph writes the entries of the call, if it has a table on the device.
        ids: those of the samples, if they were given.
    """
    if use_operators():
        number = order_number(tuple(checked.locations))
        found = _call_summarize(checked, probes, warnings, location_ids, batch, handling, config, number, history, ids)
        return CallSummary(*found, warnings)
    if is_clean := warnings is None and all_ok(checked.statuses):
        found = clean_summary(batch, config)
    else:
        can_record = not is_exporting() and not in_transform()
        number = order_number(tuple(checked.locations)) if can_record else NO_ORDER
        order = all_checks(number, len(checked.statuses))
        found = flags_and_origins(checked, warnings, location_ids, batch, handling, config, order)
    set_origins(probes, found[1])
    return CallSummary(*found, warnings, None, is_clean)


def _layout(config: ErrorConfig) -> tuple[torch.dtype, int, int | None]:
    """What a summary needs of a configuration, as an operator takes it."""
    transposes_from = config.transpose_threshold if config.use_transposed_layout else None
    return config.flag_dtype, config.num_slots, transposes_from


@functools.lru_cache(64)
def _config(dtype: torch.dtype, slots: int, transposes_from: int | None) -> ErrorConfig:
    config = ErrorConfig(num_slots=slots, flag_dtype=dtype, use_transposed_layout=transposes_from is not None)
    config.transpose_threshold = transposes_from or 0
    return config


def _call_summarize(
    checked: RowStatuses,
    probes: Tensor | None,
    warnings: Tensor | None,
    location_ids: Tensor,
    batch: Batch,
    handling: FaultHandling,
    config: ErrorConfig,
    order: int,
    history: HistoryTable | None,
    ids: Tensor | None,
) -> tuple[Flags, Tensor]:
    """Call the operator `summarize_call`. `order` is the number of the order of the checks."""
    samples = (batch.size, batch.lengths, batch.dim, batch.device)
    how = (*handling, *_layout(config), order, REVISION)
    table = (None, None, None) if history is None else (*history, ids)
    return _SUMMARIZE_CALL(*checked, probes, warnings, location_ids, *table, *samples, *how)


def _summarize_call_op(
    statuses: list[Tensor],
    locations: list[int],
    rows: list[int],
    probes: Tensor | None,
    warnings: Tensor | None,
    location_ids: Tensor,
    entries: Tensor | None,
    counts: Tensor | None,
    ids: Tensor | None,
    size: int,
    lengths: list[int],
    dim: int,
    device: torch.device,
    quarantine: bool,
    replaced: bool,
    mixes: bool,
    dtype: torch.dtype,
    slots: int,
    transposes_from: int | None,
    order: int,
    revision: int,
) -> tuple[Flags, Tensor]:
    checked, batch = RowStatuses(statuses, locations, rows), Batch(size, tuple(lengths), dim, device)
    config = _config(dtype, slots, transposes_from)
    handling = FaultHandling(quarantine, replaced, mixes)
    history = None if entries is None or counts is None else HistoryTable(entries, counts)
    found = _summarize_traced(
        checked, warnings, location_ids, batch, handling, config, all_checks(order, len(statuses)), history, ids
    )
    set_origins(probes, found[1])
    return found


def _summarize_traced(
    checked: RowStatuses,
    warnings: Tensor | None,
    location_ids: Tensor,
    batch: Batch,
    handling: FaultHandling,
    config: ErrorConfig,
    order: CallOrder,
    history: HistoryTable | None,
    ids: Tensor | None,
) -> tuple[Flags, Tensor]:
    if is_shape_only(checked.statuses[0]):
        if history is not None:
            history.mark_written()
        return clean_summary(batch, config, order.num_rows)
    kept = [i for i, status in enumerate(checked.statuses) if not is_skipped(status)]
    checked, order = checked.only(kept), order._replace(kept=tuple(kept))
    found = _summarize_by_kernels(checked, warnings, location_ids, batch, handling, config, order, history, ids)
    if found is None:
        found = _summarize_in_graph(checked, warnings, location_ids, batch, handling, config, order)
        if history is not None:
            history.write(*found, ids)
    return found


def _summarize_by_kernels(
    checked: RowStatuses,
    warnings: Tensor | None,
    location_ids: Tensor,
    batch: Batch,
    handling: FaultHandling,
    config: ErrorConfig,
    order: CallOrder,
    history: HistoryTable | None,
    ids: Tensor | None,
) -> tuple[Flags, Tensor] | None:
    """Flags and origins, and the entries of the history, by the kernels of a GPU; None where these are not used."""
    statuses = checked.statuses
    if warnings is not None or not statuses or not is_traced(statuses[0]) or not can_summarize(checked, batch, config):
        return None
    most = most_faults(config.num_slots, len(statuses), handling)
    words = config.words_for(config.flag_dtype)
    fallback = FALLBACK_SLOT if handling.quarantine and config.num_slots > 1 else None
    how = (FAULT_SLOTS, most, fallback, handling.mixes, words, order)
    return gpu_summary(checked, location_ids, batch, *how, history, ids)


def _summarize_in_graph(
    checked: RowStatuses,
    warnings: Tensor | None,
    location_ids: Tensor,
    batch: Batch,
    handling: FaultHandling,
    config: ErrorConfig,
    order: CallOrder,
) -> tuple[Flags, Tensor]:
    statuses, locations, rows = checked
    if not statuses or compiles_summary(batch.device) or not is_traced(statuses[0]):
        return flags_and_origins(checked, warnings, location_ids, batch, handling, config, order)
    sources = {i: one.tensor for i, one in enumerate(map(deferred_scan, statuses)) if one is not None}
    rest = [i for i in range(len(statuses)) if i not in sources]
    groups, alone = grouped(statuses, rows, batch, rest)
    in_groups = [i for group in groups for i in group.numbers]
    rows = [row_code(0) if i in in_groups else code for i, code in enumerate(rows)]
    return _call_summarize_eager(
        [group.stacked for group in groups],
        [statuses[i] for i in alone],
        [*sources.values()],
        json.dumps([in_groups, alone, [*sources], locations, rows, order.kept]),
        warnings,
        location_ids,
        batch,
        handling,
        config,
        order,
    )


_SUMMARIZE_CALL = define(
    "summarize_call(Tensor[] statuses, int[] locations, int[] rows, Tensor? probes, Tensor? warnings, "
    "Tensor location_ids, Tensor(a!)? entries, Tensor(b!)? counts, Tensor? ids, SymInt size, SymInt[] lengths, "
    "int dim, Device device, bool quarantine, bool replaced, bool mixes, ScalarType dtype, int slots, "
    "int? transposes_from, int order, int revision) -> (Tensor, Tensor)",
    _summarize_call_op,
)


def _call_summarize_eager(
    groups: list[Tensor],
    alone: list[Tensor],
    sources: list[Tensor],
    numbers: str,
    warnings: Tensor | None,
    location_ids: Tensor,
    batch: Batch,
    handling: FaultHandling,
    config: ErrorConfig,
    order: CallOrder,
) -> tuple[Flags, Tensor]:
    """Call the operator `summarize_call_eager`.

    Args:
        groups: stacked statuses.
        alone: the statuses of unbatched tensors.
        sources: tensors whose scan was deferred.
        numbers: six lists as JSON, because passing lists of integers to an operator takes longer than all its work:
            the numbers of the checks in `groups`, `alone` and `sources`; and for every check its location, its row
            code, and its number among all checks of the call.
    """
    how = (batch.size, batch.lengths, batch.dim, *handling, *_layout(config), order.number, order.checks)
    return _SUMMARIZE_CALL_EAGER(groups, alone, sources, numbers, warnings, location_ids, *how)


def _summarize_call_eager_op(
    groups: list[Tensor],
    alone: list[Tensor],
    sources: list[Tensor],
    numbers: str,
    warnings: Tensor | None,
    location_ids: Tensor,
    size: int,
    lengths: list[int],
    dim: int,
    quarantine: bool,
    replaced: bool,
    mixes: bool,
    dtype: torch.dtype,
    slots: int,
    transposes_from: int | None,
    order: int,
    checks: int,
) -> tuple[Flags, Tensor]:
    batch, config = Batch(size, tuple(lengths), dim, _CPU), _config(dtype, slots, transposes_from)
    is_clean = all(map(is_ok, (*groups, *alone))) and all(all_finite(floats_of(z)) for z in sources)
    if warnings is None and is_clean:
        return clean_summary(batch, config, all_checks(order, checks).num_rows)
    in_groups, in_alone, in_sources, locations, rows, kept = json.loads(numbers)
    statuses = dict(zip(in_groups, (one for group in groups for one in group), strict=True))
    statuses |= zip(in_alone, alone, strict=True)
    statuses |= zip(in_sources, map(scan, sources), strict=True)
    found = sorted(statuses)
    checked = RowStatuses([statuses[i] for i in found], [locations[i] for i in found], [rows[i] for i in found])
    handling, path = FaultHandling(quarantine, replaced, mixes), CallOrder(order, checks, tuple(kept[i] for i in found))
    return flags_and_origins(checked, warnings, location_ids, batch, handling, config, path)


def _summarize_call_eager_shapes(*arguments: Any) -> tuple[Flags, Tensor]:
    size, lengths, dim, _, _, _, *layout, order, checks = arguments[6:]
    return clean_summary(Batch(size, tuple(lengths), dim, _CPU), _config(*layout), all_checks(order, checks).num_rows)


_SUMMARIZE_CALL_EAGER = define_opaque(
    "summarize_call_eager(Tensor[] groups, Tensor[] alone, Tensor[] sources, str numbers, Tensor? warnings, "
    "Tensor location_ids, SymInt size, SymInt[] lengths, int dim, bool quarantine, bool replaced, bool mixes, "
    "ScalarType dtype, int slots, int? transposes_from, int order, int checks) -> (Tensor, Tensor)",
    _summarize_call_eager_op,
    _summarize_call_eager_shapes,
)
