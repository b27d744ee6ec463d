"""The summary of a call: row statuses to flags, and the earliest fault of each sample.

Every check of a call leaves a row status. `origins.py` finds the earliest fault of each sample, its origin. Without
quarantine, later faults of the sample count as propagated from it. If quarantine replaced each fault when it was met, a
later one is a fault of its own, and is recorded as well.

In a compiled call the statuses come from hundreds of kernels. Dynamo sees one operator, `summarize_call`, because it is
slow to trace Python code that examines each status. AOTAutograd runs its body. For a GPU the body is traced and
compiled. For the CPU it stacks equal shapes and calls a second operator, `summarize_call_eager`, which is not compiled:
it would take long to compile, and usually finds that all is finite and returns at once.
"""

import functools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchguard._channel.codes import DEFAULT_SEVERITY, ErrorCode, Severity
from torchguard._channel.config import ErrorConfig
from torchguard._channel.packing import Flags, capacity, pack, zero_flags
from torchguard._channel.slot_bits import LOCATION_SHIFT, pack_slot
from torchguard._operators import define, define_opaque, use_operators
from torchguard._torch.tracing import can_read, in_transform, is_exporting, is_shape_only, is_traced
from torchguard._watch.batch import Batch, row_code
from torchguard._watch.detect import (
    FAULT_CODES,
    OK,
    REVISION,
    all_finite,
    compiles_summary,
    deferred_scan,
    is_skipped,
    scan,
)
from torchguard._watch.gradient_probes import set_origins
from torchguard._watch.origins import RowStatuses, checks_of, earliest_faults, grouped, lookup
from torchguard._watch.path_bits import NO_ORDER, CallOrder, all_checks, order_number, records_in_graph
from torchguard.checks import floats_of

# The slot of each fault, and of each code that a warning may have, without the location.
_FAULT_SLOTS = tuple(pack_slot(code, 0, DEFAULT_SEVERITY[code]) for code in FAULT_CODES)
_WARNING_SLOTS = tuple(pack_slot(code, 0, DEFAULT_SEVERITY.get(code, Severity.WARN)) for code in range(16))
_FALLBACK = pack_slot(ErrorCode.FALLBACK_VALUE, 0, Severity.WARN)
_CPU = torch.device("cpu")
# The rows of `CallSummary.origins` before those of the path.
NUM_ORIGINS = 3


class CallSummary(NamedTuple):
    """One call, sample by sample. Locations are given by their index in `WatchState.paths`.

    Args:
        origins: `(NUM_ORIGINS, batch)`: the location where the sample went bad first (`CallRecord.check` has the
            numbers of arguments), at how many further locations it was bad, and the position of the first bad vector at
            the origin, counted over the dims between batch and last. All three are -1 for a sample that is finite
            everywhere. Further rows, if there are any, are the path of the sample: see `path_bits.py`.
        warnings: `(codes, batch)`, if there are any: 16 times the location where the warning came up first, plus its
            code; -1 for none.
        ids: `(batch,)`, the ids of the samples, if they were given.
        is_clean: whether it is known without reading that there is no fault.
    """

    flags: Flags
    origins: Tensor
    warnings: Tensor | None
    ids: Tensor | None = None
    is_clean: bool = False


class FaultHandling(NamedTuple):
    """What a call does with faults, as far as its summary depends on it.

    Args:
        quarantine: whether the output of bad samples is replaced.
        replaced: whether each fault was replaced when it was met, so that the next is a fault of its own.
        mixes: whether the model may have mixed samples, so that a fault of one counts for all.
    """

    quarantine: bool
    replaced: bool
    mixes: bool


def summarize(
    checked: RowStatuses,
    warnings: Tensor | None,
    location_ids: Tensor,
    batch: Batch,
    handling: FaultHandling,
    config: ErrorConfig,
    probes: Tensor | None,
) -> CallSummary:
    """The summary of a call.

    Args:
        warnings: see `CallSummary`.
        location_ids: the id of each location, followed by 0.
        probes: the gradient probes of the call, if it has any. Their backward pass is given the origins.
    """
    if use_operators():
        number = order_number(tuple(checked.locations)) if records_in_graph(batch.device) else NO_ORDER
        found = _call_summarize(checked, probes, warnings, location_ids, batch, handling, config, number)
        return CallSummary(*found, warnings)
    if is_clean := warnings is None and _all_ok(checked.statuses):
        found = _clean(batch, config)
    else:
        can_record = not is_exporting() and not in_transform()
        number = order_number(tuple(checked.locations)) if can_record else NO_ORDER
        order = all_checks(number, len(checked.statuses))
        found = _summarize(checked, warnings, location_ids, batch, handling, config, order)
    set_origins(probes, found[1])
    return CallSummary(*found, warnings, None, is_clean)


def _summarize(
    checked: RowStatuses,
    warnings: Tensor | None,
    location_ids: Tensor,
    batch: Batch,
    handling: FaultHandling,
    config: ErrorConfig,
    order: CallOrder,
) -> tuple[Flags, Tensor]:
    """Flags and origins."""
    f = zero_flags(batch.size, batch.device, config.flag_dtype, config)
    room = capacity(f, config)
    most = max(1, min(room // 2, len(checked.statuses))) if handling.replaced else 1
    fault, check, position, times, keys = earliest_faults(checked, batch, most, handling.mixes)
    location = lookup(check, [*checked.locations, -1])
    location_bits = location_ids.to(location.device)[location] << LOCATION_SHIFT
    slots = torch.where(fault == OK, 0, location_bits | lookup(fault, _FAULT_SLOTS))
    if handling.quarantine:
        slots = _alternate(slots, torch.where(fault == OK, 0, location_bits | _FALLBACK))
    if warnings is not None:
        slots = _empty_last(torch.cat([slots, _warning_slots(warnings, location_ids)]))
    origins = torch.stack([location[0], times - 1, position])
    if order.num_rows:
        origins = torch.cat([origins, order.rows(checks_of(keys, len(checked.statuses)))])
    return pack(slots[:room].t(), f), origins


def _alternate(a: Tensor, b: Tensor) -> Tensor:
    """Rows of both tensors in turn."""
    if is_exporting():  # before torch 2.13, `flatten` would limit the batch of an exported program
        return torch.stack([row for pair in zip(a, b, strict=True) for row in pair])
    return torch.stack([a, b], 1).flatten(0, 1)


def _all_ok(statuses: list[Tensor]) -> bool:
    """Whether there is no fault, as far as that can be read without waiting for a device."""
    if not statuses:
        return True
    if not can_read(statuses[0]) or not all(status.is_cpu for status in statuses):
        return False
    dtypes = {status.dtype for status in statuses}
    return all(_is_ok(torch.cat([one.flatten() for one in statuses if one.dtype == dtype])) for dtype in dtypes)


def _is_ok(status: Tensor) -> bool:
    if status.dtype == torch.int8:
        return status.numel() == 0 or status.amax().item() <= OK
    return all_finite(status)


def _clean(batch: Batch, config: ErrorConfig, path_rows: int = 0) -> tuple[Flags, Tensor]:
    """Flags and origins of a call without faults."""
    f = zero_flags(batch.size, batch.device, config.flag_dtype, config)
    return f, torch.full((NUM_ORIGINS + path_rows, batch.size), -1, dtype=torch.int64, device=batch.device)


def first_warnings(recorded: Sequence[tuple[int, int, Tensor]]) -> Tensor | None:
    """`CallSummary.warnings`, from the location, the code and the `(batch,)` mask of each warning of a call.

    A warning counts where it comes up first: a layer that passes on zeros is no second cause.
    """
    firsts = []
    for code in sorted({code for _, code, _ in recorded}):
        masks = torch.stack([mask for _, other, mask in recorded if other == code])
        packed = [location * 16 + code for location, other, _ in recorded if other == code]
        first = lookup(masks.to(torch.int8).argmax(0), packed)
        firsts.append(torch.where(masks.any(0), first, -1))
    return torch.stack(firsts) if firsts else None


def _warning_slots(warnings: Tensor, location_ids: Tensor) -> Tensor:
    location, code = warnings >> 4, warnings & 0xF
    location_bits = location_ids.to(location.device)[location] << LOCATION_SHIFT
    return torch.where(warnings < 0, 0, location_bits | lookup(code, _WARNING_SLOTS))


def _empty_last(slots: Tensor) -> Tensor:
    # Keys that differ, not a stable sort: ONNX has none.
    order = torch.where(slots == 0, len(slots), 0) + torch.arange(len(slots), device=slots.device).unsqueeze(-1)
    order = order.sort(dim=0).indices
    return slots.gather(0, order)


# The operators.


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
) -> tuple[Flags, Tensor]:
    """Call the operator `summarize_call`. `order` is the number of the order of the checks."""
    samples = (batch.size, batch.lengths, batch.dim, batch.device)
    how = (*handling, *_layout(config), order, REVISION)
    return _SUMMARIZE_CALL(*checked, probes, warnings, location_ids, *samples, *how)


def _summarize_call_op(
    statuses: list[Tensor],
    locations: list[int],
    rows: list[int],
    probes: Tensor | None,
    warnings: Tensor | None,
    location_ids: Tensor,
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
    found = _summarize_traced(
        checked, warnings, location_ids, batch, handling, config, all_checks(order, len(statuses))
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
) -> tuple[Flags, Tensor]:
    if is_shape_only(checked.statuses[0]):
        return _clean(batch, config, order.num_rows)
    kept = [i for i, status in enumerate(checked.statuses) if not is_skipped(status)]
    checked, order = checked.only(kept), order._replace(kept=tuple(kept))
    statuses, locations, rows = checked
    if not statuses or compiles_summary(batch.device) or not is_traced(statuses[0]):
        return _summarize(checked, warnings, location_ids, batch, handling, config, order)
    sources = {i: one.tensor for i, one in enumerate(map(deferred_scan, statuses)) if one is not None}
    rest = [i for i in range(len(statuses)) if i not in sources]
    groups, alone = grouped(statuses, rows, batch, rest)
    in_groups = [i for group in groups for i in group.numbers]
    rows = [row_code(0) if i in in_groups else code for i, code in enumerate(rows)]
    return _call_summarize_eager(
        [group.stacked for group in groups],
        [statuses[i] for i in alone],
        [*sources.values()],
        json.dumps([in_groups, alone, [*sources], locations, rows, kept]),
        warnings,
        location_ids,
        batch,
        handling,
        config,
        order,
    )


_SUMMARIZE_CALL = define(
    "summarize_call(Tensor[] statuses, int[] locations, int[] rows, Tensor? probes, Tensor? warnings, "
    "Tensor location_ids, SymInt size, SymInt[] lengths, int dim, Device device, bool quarantine, bool replaced, "
    "bool mixes, ScalarType dtype, int slots, int? transposes_from, int order, int revision) -> (Tensor, Tensor)",
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
    is_ok = all(map(_is_ok, groups)) and all(map(_is_ok, alone)) and all(all_finite(floats_of(z)) for z in sources)
    if warnings is None and is_ok:
        return _clean(batch, config, all_checks(order, checks).num_rows)
    in_groups, in_alone, in_sources, locations, rows, kept = json.loads(numbers)
    statuses = dict(zip(in_groups, (one for group in groups for one in group), strict=True))
    statuses |= zip(in_alone, alone, strict=True)
    statuses |= zip(in_sources, map(scan, sources), strict=True)
    found = sorted(statuses)
    checked = RowStatuses([statuses[i] for i in found], [locations[i] for i in found], [rows[i] for i in found])
    handling, path = FaultHandling(quarantine, replaced, mixes), CallOrder(order, checks, tuple(kept[i] for i in found))
    return _summarize(checked, warnings, location_ids, batch, handling, config, path)


def _summarize_call_eager_shapes(*arguments: Any) -> tuple[Flags, Tensor]:
    size, lengths, dim, _, _, _, *layout, order, checks = arguments[6:]
    return _clean(Batch(size, tuple(lengths), dim, _CPU), _config(*layout), all_checks(order, checks).num_rows)


_SUMMARIZE_CALL_EAGER = define_opaque(
    "summarize_call_eager(Tensor[] groups, Tensor[] alone, Tensor[] sources, str numbers, Tensor? warnings, "
    "Tensor location_ids, SymInt size, SymInt[] lengths, int dim, bool quarantine, bool replaced, bool mixes, "
    "ScalarType dtype, int slots, int? transposes_from, int order, int checks) -> (Tensor, Tensor)",
    _summarize_call_eager_op,
    _summarize_call_eager_shapes,
)
