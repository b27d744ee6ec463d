"""Intervals of what only moves, repeats, picks or joins elements."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchguard.compiled.certify.enclosure._intervals import Interval, UnboundedError, converted


def _moved(map_: Callable[..., Tensor]) -> Callable[..., Interval]:
    def rule(x: Interval, *args: Any, dtype: torch.dtype, **options: Any) -> Interval:
        kept = {name: value for name, value in options.items() if name not in ("memory_format", "implicit")}
        return x.arranged(lambda t: map_(t, *args, **kept))

    return rule


def parts(map_: Callable[..., Sequence[Tensor]]) -> Callable[..., list[Interval]]:
    """A map that takes a tensor apart."""

    def rule(x: Interval, *args: Any, dtype: Any, **options: Any) -> list[Interval]:
        lows, highs = map_(x.low, *args, **options), map_(x.high, *args, **options)
        return [Interval(a, b, x.dtype) for a, b in zip(lows, highs, strict=True)]

    return rule


def _sliced(t: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    places: list[slice] = [slice(None)] * t.dim()
    places[dim] = slice(start, end, step)
    return t[tuple(places)]


def _joining(join: Callable[..., Tensor]) -> Callable[..., Interval]:
    def rule(values: Sequence[Interval], dim: int = 0, *, dtype: torch.dtype) -> Interval:
        values = [converted(v, dtype) for v in values]
        return Interval(join([v.low for v in values], dim), join([v.high for v in values], dim), dtype)

    return rule


def _places(index: Interval) -> Tensor:
    if not index.is_known:
        raise UnboundedError("a place that is not known")
    # uint8 is an old way to write a mask.
    return index.low.to(torch.bool if index.dtype in (torch.bool, torch.uint8) else torch.int64)


def _embedding(weight: Interval, ids: Interval, *_: Any, dtype: torch.dtype) -> Interval:
    places = _places(ids)
    return weight.arranged(lambda t: t[places])


def _gather(x: Interval, dim: int, index: Interval, *, dtype: torch.dtype) -> Interval:
    places = _places(index)
    return x.arranged(lambda t: t.gather(dim, places))


def _index_select(x: Interval, dim: int, index: Interval, *, dtype: torch.dtype) -> Interval:
    places = _places(index)
    return x.arranged(lambda t: t.index_select(dim, places))


def _index(x: Interval, indices: Sequence[Interval | None], *, dtype: torch.dtype) -> Interval:
    places = tuple(slice(None) if i is None else _places(i) for i in indices)
    return x.arranged(lambda t: t[places])


def _padded(x: Interval, pad: Sequence[int], value: float = 0, *, dtype: torch.dtype) -> Interval:
    filling = float(converted(value, dtype).low)
    return x.arranged(lambda t: F.pad(t, list(pad), value=filling))


RULES: dict[str, Callable[..., Any]] = {
    "index": _index,
    "constant_pad_nd": _padded,
    "diag_embed": _moved(lambda t, *args: t.diag_embed(*args)),
    "view": _moved(lambda t, sizes: t.reshape(tuple(sizes))),
    "reshape": _moved(lambda t, sizes: t.reshape(tuple(sizes))),
    "_unsafe_view": _moved(lambda t, sizes: t.reshape(tuple(sizes))),
    "permute": _moved(lambda t, dims: t.permute(tuple(dims))),
    "transpose": _moved(lambda t, a, b: t.transpose(a, b)),
    "t": _moved(lambda t: t.t()),
    "expand": _moved(lambda t, sizes: t.expand(tuple(sizes))),
    "unsqueeze": _moved(lambda t, dim: t.unsqueeze(dim)),
    "squeeze": _moved(lambda t, *dim: t.squeeze(*(d if isinstance(d, int) else tuple(d) for d in dim))),
    "select": _moved(lambda t, dim, index: t.select(dim, index)),
    "slice": _moved(_sliced),
    "diagonal": _moved(lambda t, *args: t.diagonal(*args)),
    "flip": _moved(lambda t, dims: t.flip(dims)),
    "roll": _moved(lambda t, shifts, dims=(): t.roll(shifts, dims)),
    "repeat": _moved(lambda t, repeats: t.repeat(tuple(repeats))),
    **{name: _moved(lambda t: t) for name in ("clone", "alias", "contiguous", "detach", "lift_fresh")},
    "tril": _moved(lambda t, diagonal=0: t.tril(diagonal)),
    "triu": _moved(lambda t, diagonal=0: t.triu(diagonal)),
    "split": parts(lambda t, size, dim=0: t.split(size, dim)),
    "unsafe_split": parts(lambda t, size, dim=0: t.split(size, dim)),
    "split_with_sizes": parts(lambda t, sizes, dim=0: t.split(list(sizes), dim)),
    "unbind": parts(lambda t, dim=0: t.unbind(dim)),
    "cat": _joining(torch.cat),
    "stack": _joining(torch.stack),
    "embedding": _embedding,
    "gather": _gather,
    "index_select": _index_select,
}
