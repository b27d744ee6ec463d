"""The Triton kernels of `gpu_summary`. Importing this loads Triton, which comes with torch for a GPU.

Nothing but dtypes is a constant of a kernel: a process compiles each of them once, for all models.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from torchguard._channel.slot_bits import CODE_MASK, CODE_SHIFT, LOCATION_SHIFT, SLOTS_PER_WORD
from torchguard._watch.detect import FAULT_CODES, INF, NAN
from torchguard._watch.history_table import COLUMNS, FIELDS, HALF, NO_ID, HistoryTable
from torchguard._watch.kernels import on_device_of
from torchguard._watch.origins import FAULT_MASK, MAX_POSITION, NUM_ORIGINS, ORDER_SHIFT, POSITION_SHIFT
from torchguard._watch.path_bits import NO_ORDER, WORD_BITS

# The table of checks begins with the slot of each fault and the number of the order. Then it has integers for each
# status, and for each check.
_AT_ORDER, _OF_FAULTS, _OF_STATUS, _OF_CHECK = map(tl.constexpr, (len(FAULT_CODES), len(FAULT_CODES) + 1, 7, 3))
# How many entries of a status a program reads at a time, and its warps: for short ones and for others.
_SHORT, _LONG = (1_024, 4), (4_096, 8)
# How many keys the program of a sample reads at a time.
_AT_ONCE = tl.constexpr(256)
# What `firsts` begins with: the first key of each kind of check, the counts of the history before the call, padding.
_FIRSTS = tl.constexpr(8)
# The arguments of `_summarize_kernel` that are no tensors.
_NUMBERS = ["checks", "batch", "lanes", "most", "pairs", "mixes", "origin_rows", "fallback"]
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

_INF, _NAN = map(tl.constexpr, (INF, NAN))
_FAULT, _MAX_POSITION, _POSITION, _ORDER = map(tl.constexpr, (FAULT_MASK, MAX_POSITION, POSITION_SHIFT, ORDER_SHIFT))
_LOCATION, _CODE, _CODE_MASK = map(tl.constexpr, (LOCATION_SHIFT, CODE_SHIFT, CODE_MASK))
_COLUMNS, _FIELDS, _HALF, _NO_ID = map(tl.constexpr, (COLUMNS, FIELDS, HALF, NO_ID))
_ORIGINS, _WORD_BITS, _NO_ORDER = map(tl.constexpr, (NUM_ORIGINS, WORD_BITS, NO_ORDER))
# Kernels as compiled for addresses that are multiples of 16: Triton's own lookup takes three times as long. (Not used
# on ROCm, where Triton specialises on more than that.)
_KERNELS: dict[tuple[Any, ...], Any] = {}


def _launch(kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], block: int | None, warps: int) -> None:
    tensors = [one for one in arguments if isinstance(one, Tensor)]
    blocks = () if block is None else (block,)
    if any(one.data_ptr() % 16 for one in tensors) or torch.version.cuda is None:
        kernel[grid](*arguments, *blocks, num_warps=warps)
        return
    key = (kernel, block, tensors[0].get_device(), *(None if one is None else type(one) for one in arguments))
    key = (*key, *(one.dtype for one in tensors))
    compiled = _KERNELS.get(key)
    if compiled is None:
        _KERNELS[key] = kernel[grid](*arguments, *blocks, num_warps=warps)
    else:
        compiled[grid](*arguments, *blocks)


@triton.jit(do_not_specialize=["number", "checks", "batch"])
def _find_keys_kernel(entries, table, keys, firsts, counts, number, checks, batch, block: tl.constexpr):
    sample, of_status = tl.program_id(1).to(tl.int64), table + _OF_FAULTS + (number + tl.program_id(0)) * _OF_STATUS
    count, stride, vector = tl.load(of_status + 1), tl.load(of_status + 2), tl.load(of_status + 3)
    limit, inf, check = tl.load(of_status + 4), tl.load(of_status + 5), tl.load(of_status + 6)
    bits: tl.constexpr = (1 << (entries.dtype.element_ty.primitive_bitwidth - 1)) - 1
    entries += tl.load(of_status) + sample * stride
    first = tl.full([block], _MAX_POSITION, dtype=tl.int32)  # bad entry
    for begin in range(0, count, block):
        at = (begin + tl.arange(0, block)).to(tl.int32)
        magnitude = tl.load(entries + at, mask=at < count, other=0) & bits
        first = tl.minimum(first, tl.where(magnitude >= limit, at, _MAX_POSITION))
    bad = tl.min(first, 0).to(tl.int64)
    if bad < count:
        position, worst = bad // vector, tl.zeros([block], dtype=tl.int64)
        end = tl.minimum((position + 1) * vector, count)
        for begin in range(position * vector, end, block):
            at = begin + tl.arange(0, block)
            magnitude = tl.load(entries + at, mask=at < end, other=0).to(tl.int64) & bits
            fault = tl.where(magnitude > inf, _NAN, tl.where(magnitude >= limit, _INF, 0)).to(tl.int64)
            worst = tl.maximum(worst, tl.where(inf < 0, magnitude, fault))
        key = ((checks - check) << _ORDER) | ((_MAX_POSITION - position) << _POSITION) | tl.max(worst, 0)
        tl.store(keys + check * batch + sample, key)
        kind = tl.load(table + _OF_FAULTS + checks * _OF_STATUS + check * _OF_CHECK + 1)
        tl.atomic_max(firsts + kind, key)
        tl.store(firsts + _FIRSTS + sample, 1, mask=kind != 1)
    if counts is not None:
        is_one_program = number + tl.program_id(0) + tl.program_id(1) == 0
        tl.store(firsts + 3, tl.load(counts), mask=is_one_program)
        tl.store(firsts + 4, tl.load(counts + 1), mask=is_one_program)


@triton.jit
def _keys_of(keys, of_checks, check, sample, checks, batch, first_of_samples):
    """Keys of a sample. A fault of an unbatched tensor counts if no sample went bad before it."""
    is_inside = check < checks
    found = tl.load(keys + check * batch + sample, mask=is_inside, other=0)
    kind = tl.load(of_checks + check * _OF_CHECK + 1, mask=is_inside, other=0)
    return tl.where((kind == 1) & (found <= first_of_samples), 0, found)


@triton.jit(do_not_specialize=["checks", "batch", "lanes", "most", "pairs", "mixes", "origin_rows", "fallback"])
def _summarize_kernel(
    keys,
    firsts,
    table,
    location_ids,
    ids,
    flags,
    origins,
    entries,
    counts,
    checks,
    batch,
    lanes,
    most,
    pairs,
    mixes,
    origin_rows,
    fallback,
):
    sample, at = tl.program_id(0).to(tl.int64), tl.arange(0, _AT_ONCE)
    first_of_samples, first_unbatched = tl.load(firsts), tl.load(firsts + 1)
    first = tl.maximum(tl.maximum(first_of_samples, first_unbatched), tl.load(firsts + 2))
    flags, origins = flags + sample * lanes, origins + sample
    bad = tl.zeros([], dtype=tl.int64)  # samples, before this one and in all
    total = bad
    if first == 0:  # as usual
        for lane in range(0, lanes, _AT_ONCE):
            tl.store(flags + lane + at, tl.zeros([_AT_ONCE], dtype=tl.int16), mask=lane + at < lanes)
        minus_ones = tl.full([_AT_ONCE], -1, dtype=tl.int64)
        tl.store(origins + at * batch, minus_ones, mask=at < origin_rows)
    else:
        of_checks, path_words = table + _OF_FAULTS + checks * _OF_STATUS, origin_rows - _ORIGINS - 1
        for s in range(0, batch, _AT_ONCE):
            other = s + at
            is_bad = tl.load(firsts + _FIRSTS + other, mask=other < batch, other=0)
            is_bad = tl.where((mixes > 0) | (first_unbatched > first_of_samples), 1, is_bad)
            is_bad = tl.where(other < batch, is_bad, 0)
            bad += tl.sum(tl.where(other < sample, is_bad, 0), 0)
            total += tl.sum(is_bad, 0)
        times = tl.zeros([], dtype=tl.int64)
        for c in range(0, checks, _AT_ONCE):
            found = _keys_of(keys, of_checks, c + at, sample, checks, batch, first_of_samples)
            times += tl.sum((found > 0).to(tl.int64), 0)
        is_lonely = (times == 0) & (mixes > 0)  # of mixed samples, the fault of one counts for all
        times = tl.where(is_lonely, 1, times)
        before = tl.where(is_lonely, first + 1, 0x7FFFFFFFFFFFFFFF)
        origin = times - times - 1
        position, code = origin, origin
        for rank in range(most):
            best = tl.where(is_lonely & (rank == 0), first, 0)
            for c in range(0, checks, _AT_ONCE):
                found = _keys_of(keys, of_checks, c + at, sample, checks, batch, first_of_samples)
                best = tl.maximum(best, tl.max(tl.where(found < before, found, 0), 0))
            before = best
            location = tl.load(of_checks + (checks - (best >> _ORDER)) * _OF_CHECK, mask=best > 0, other=0)
            base = tl.load(location_ids + location, mask=best > 0, other=0) << _LOCATION
            slot = tl.where(best > 0, base | tl.load(table + (best & _FAULT)), 0)
            if rank == 0:
                origin = tl.where(best > 0, location, -1)
                position = tl.where(best > 0, _MAX_POSITION - ((best >> _POSITION) & _MAX_POSITION), -1)
                code = (slot >> _CODE) & _CODE_MASK
            lane = rank * (1 + pairs)
            tl.store(flags + lane, slot.to(tl.int16), mask=lane < lanes)
            replaced = tl.where(best > 0, base | fallback, 0).to(tl.int16)
            tl.store(flags + lane + 1, replaced, mask=(pairs > 0) & (lane + 1 < lanes))
        for lane in range(most * (1 + pairs), lanes):
            tl.store(flags + lane, tl.zeros([], dtype=tl.int16))
        tl.store(origins, origin)
        tl.store(origins + batch, times - 1)
        tl.store(origins + 2 * batch, position)
        order = tl.load(table + _AT_ORDER)
        tl.store(origins + _ORIGINS * batch, order, mask=origin_rows > _ORIGINS)
        is_kept = times < 0
        entry = origins
        if entries is not None:
            number = tl.load(firsts + 4) + bad
            is_kept = (origin >= 0) & ((number < _HALF) | (bad + 1 > total - _HALF))
            entry = entries + tl.where(number < _HALF, number, _HALF + (number - _HALF) % _HALF) * _COLUMNS
            tl.store(entry, tl.load(firsts + 3), mask=is_kept)
            tl.store(entry + 1, batch.to(tl.int64), mask=is_kept)
            tl.store(entry + 2, sample, mask=is_kept)
            if ids is not None:
                tl.store(entry + 3, tl.load(ids + sample), mask=is_kept)
            else:
                tl.store(entry + 3, times - times + _NO_ID, mask=is_kept)
            tl.store(entry + 4, origin, mask=is_kept)
            tl.store(entry + 5, times - 1, mask=is_kept)
            tl.store(entry + 6, position, mask=is_kept)
            tl.store(entry + 7, code, mask=is_kept)
            words = tl.where(at == 0, order, _NO_ORDER)
            is_word = (at == 0) | ((at > path_words) & (at < _COLUMNS - _FIELDS))
            tl.store(entry + _FIELDS + at, words, mask=is_kept & is_word)
        for word in range(path_words):
            path = tl.zeros([], dtype=tl.int64)
            for c in range(0, checks, _AT_ONCE):
                check = c + at
                found = _keys_of(keys, of_checks, check, sample, checks, batch, first_of_samples)
                found = tl.where(is_lonely & (check == checks - (first >> _ORDER)), 1, found)
                of_call = tl.load(of_checks + check * _OF_CHECK + 2, mask=check < checks, other=-1)
                bit = (tl.zeros([_AT_ONCE], dtype=tl.int64) + 1) << (of_call % _WORD_BITS)
                path += tl.sum(tl.where((found > 0) & (of_call // _WORD_BITS == word), bit, 0), 0)
            tl.store(origins + (_ORIGINS + 1 + word) * batch, path)
            if entries is not None:
                tl.store(entry + _FIELDS + 1 + word, path, mask=is_kept)
    if counts is not None:
        tl.store(counts, tl.load(firsts + 3) + 1, mask=sample == 0)
        tl.store(counts + 1, tl.load(firsts + 4) + total, mask=sample == 0)


def summarize_statuses(
    statuses: Sequence[Tensor],
    sizes: Sequence[int],
    table: Tensor,
    location_ids: Tensor,
    ids: Tensor | None,
    flags: Tensor,
    origins: Tensor,
    history: HistoryTable | None,
    most: int,
    fallback: int | None,
    mixes: bool,
) -> None:
    """Write the flags and origins of a call, and the entries of its history.

    Args:
        statuses: statuses, or values, flat. Those of one size in bytes follow one another, or are one tensor.
        sizes: how many statuses there are of each size in bytes.
        table: the table of checks.
        most: how many faults of a sample become slots.
        fallback: the slot that follows that of each fault, without the location, if values were replaced.
    """
    checks, batch = sum(sizes), len(flags)
    # The first key of each kind, the counts, and which samples have faults; and a key for each check and sample.
    firsts, keys = table.new_zeros(_FIRSTS.value + checks * batch + batch + batch % 2).tensor_split(
        [_FIRSTS.value + batch + batch % 2]
    )
    (entries, counts), number = history or (None, None), 0
    for (width, group), size in zip(itertools.groupby(statuses, Tensor.element_size), sizes, strict=True):
        together = [z if z.dtype == _INTEGERS[width] else z.view(_INTEGERS[width]) for z in group]
        joined = torch.cat(together) if len(together) > 1 else together[0].contiguous()
        block, warps = _SHORT if joined.numel() <= 4 * _SHORT[0] * size * batch else _LONG
        arguments = (joined, table, keys, firsts, counts, number, checks, batch)
        with on_device_of(table):
            _launch(_find_keys_kernel, (size, batch, 1), arguments, block, warps)
        number += size
    tensors = (keys, firsts, table, location_ids, ids, flags.view(torch.int16), origins, entries, counts)
    how = (most, int(fallback is not None), int(mixes), len(origins), fallback or 0)
    with on_device_of(table):
        numbers = (checks, batch, flags.shape[1] * SLOTS_PER_WORD, *how)
        _launch(_summarize_kernel, (batch, 1, 1), (*tensors, *numbers), None, 4)
