"""Intervals of views, copies, concatenations and indexing: the elements are those of the operands."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchguard._graphs.op_facts import FACTS
from torchguard.compiled.certify.enclosure._intervals import Interval, UnboundedError, converted


def _rearrangement(map_: Callable[..., Tensor]) -> Callable[..., Interval]:
    def rule(x: Interval, *args: Any, dtype: torch.dtype, **options: Any) -> Interval:
        used = {name: value for name, value in options.items() if name not in ("memory_format", "implicit")}
        return x.rearranged(lambda t: map_(t, *args, **used))

    return rule


def splitting(map_: Callable[..., Sequence[Tensor]]) -> Callable[..., list[Interval]]:
    """The rule of an operator that splits a tensor."""

    def rule(x: Interval, *args: Any, dtype: Any, **options: Any) -> list[Interval]:
        lows, highs = map_(x.low, *args, **options), map_(x.high, *args, **options)
        return [Interval(a, b, x.dtype) for a, b in zip(lows, highs, strict=True)]

    return rule


def _slice(t: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    slices: list[slice] = [slice(None)] * t.dim()
    slices[dim] = slice(start, end, step)
    return t[tuple(slices)]


def _concatenation(join: Callable[..., Tensor]) -> Callable[..., Interval]:
    def rule(values: Sequence[Interval], dim: int = 0, *, dtype: torch.dtype) -> Interval:
        values = [converted(v, dtype) for v in values]
        return Interval(join([v.low for v in values], dim), join([v.high for v in values], dim), dtype)

    return rule


def known_index(index: Interval) -> Tensor:
    """The positions that an index holds."""
    if not index.is_known:
        raise UnboundedError("an index that is not known")
    # torch treats an index of uint8 as a mask.
    return index.low.to(torch.bool if index.dtype in (torch.bool, torch.uint8) else torch.int64)


def _embedding(weight: Interval, ids: Interval, *_: Any, dtype: torch.dtype) -> Interval:
    positions = known_index(ids)
    return weight.rearranged(lambda t: t[positions])


def _gather(x: Interval, dim: int, index: Interval, *, dtype: torch.dtype) -> Interval:
    positions = known_index(index)
    return x.rearranged(lambda t: t.gather(dim, positions))


def _index_select(x: Interval, dim: int, index: Interval, *, dtype: torch.dtype) -> Interval:
    positions = known_index(index)
    return x.rearranged(lambda t: t.index_select(dim, positions))


def _index(x: Interval, indices: Sequence[Interval | None], *, dtype: torch.dtype) -> Interval:
    positions = tuple(slice(None) if i is None else known_index(i) for i in indices)
    return x.rearranged(lambda t: t[positions])


def _overwriting(put: Callable[..., Tensor]) -> Callable[..., Interval]:
    """The rule of an operator that overwrites a part of a tensor."""

    def rule(base: Interval, part: Interval, *args: Any, dtype: torch.dtype) -> Interval:
        part = converted(part, dtype)
        return Interval(put(base.low, part.low, *args), put(base.high, part.high, *args), dtype)

    return rule


def _pad(x: Interval, pad: Sequence[int], value: float = 0, *, dtype: torch.dtype) -> Interval:
    filling = float(converted(value, dtype).low)
    return x.rearranged(lambda t: F.pad(t, list(pad), value=filling))


RULES: dict[str, Callable[..., Any]] = {
    "index": _index,
    "constant_pad_nd": _pad,
    "diag_embed": _rearrangement(lambda t, *args: t.diag_embed(*args)),
    "view": _rearrangement(lambda t, sizes: t.reshape(tuple(sizes))),
    "reshape": _rearrangement(lambda t, sizes: t.reshape(tuple(sizes))),
    "_unsafe_view": _rearrangement(lambda t, sizes: t.reshape(tuple(sizes))),
    "permute": _rearrangement(lambda t, dims: t.permute(tuple(dims))),
    "transpose": _rearrangement(lambda t, a, b: t.transpose(a, b)),
    "t": _rearrangement(lambda t: t.t()),
    "expand": _rearrangement(lambda t, sizes: t.expand(tuple(sizes))),
    "unsqueeze": _rearrangement(lambda t, dim: t.unsqueeze(dim)),
    "squeeze": _rearrangement(lambda t, *dim: t.squeeze(*(d if isinstance(d, int) else tuple(d) for d in dim))),
    "select": _rearrangement(lambda t, dim, index: t.select(dim, index)),
    "slice": _rearrangement(_slice),
    "diagonal": _rearrangement(lambda t, *args: t.diagonal(*args)),
    "unfold": _rearrangement(lambda t, dim, size, step: t.unfold(dim, size, step)),
    "select_scatter": _overwriting(torch.select_scatter),
    "slice_scatter": _overwriting(torch.slice_scatter),
    "diagonal_scatter": _overwriting(torch.diagonal_scatter),
    "flip": _rearrangement(lambda t, dims: t.flip(dims)),
    "roll": _rearrangement(lambda t, shifts, dims=(): t.roll(shifts, dims)),
    "repeat": _rearrangement(lambda t, repeats: t.repeat(tuple(repeats))),
    **{name: _rearrangement(lambda t: t) for name, facts in FACTS.items() if facts.identity},
    "tril": _rearrangement(lambda t, diagonal=0: t.tril(diagonal)),
    "triu": _rearrangement(lambda t, diagonal=0: t.triu(diagonal)),
    "split": splitting(lambda t, size, dim=0: t.split(size, dim)),
    "unsafe_split": splitting(lambda t, size, dim=0: t.split(size, dim)),
    "split_with_sizes": splitting(lambda t, sizes, dim=0: t.split(list(sizes), dim)),
    "unbind": splitting(lambda t, dim=0: t.unbind(dim)),
    "cat": _concatenation(torch.cat),
    "stack": _concatenation(torch.stack),
    "embedding": _embedding,
    "gather": _gather,
    "index_select": _index_select,
}
