"""Which of all the evidence of a call is the earliest, sample by sample."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchguard._torch import is_surely, surely_equal
from torchguard.watching.constants import constant
from torchguard.watching.kinds import FINE, kinds_of
from torchguard.watching.rows import Batch
from torchguard.watching.stacking import side_by_side

# A key, from the right: kind, position (counted down), order (counted down).
KIND, POSITION, LAST, ORDER = 0xFF, 8, (1 << 31) - 1, 40
# In the place of a dim along which samples lie: that is to be found out.
UNTOLD = -1


class Group(NamedTuple):
    """Evidence of one shape and dtype: `(evidence, batch, ..., pieces)`, and the number of each."""

    several: Tensor
    numbers: list[int]


def earliest(found: list[Tensor], dims: list[int], batch: Batch, most: int) -> tuple[Tensor, Tensor]:
    """The keys of the earliest evidence against each sample, so many, and how much there is in all.

    A key holds the order of the evidence, the first bad vector in it, and its kind. The larger it is the earlier the
    evidence was met; 0 stands for none.

    Args:
        dims: along which the samples of each piece of evidence lie, or `UNTOLD`.
    """
    keys = _keys(found, dims, batch)
    if most == 1:
        return keys.amax(0, keepdim=True), (keys > 0).sum(0)
    missing = max(0, most - keys.shape[0])
    return F.pad(keys, (0, 0, 0, missing)).topk(most, dim=0).values, (keys > 0).sum(0)


def _keys(found: list[Tensor], dims: Sequence[int], batch: Batch) -> Tensor:
    """A key for every piece of evidence and sample."""
    groups, strays = ([], []) if is_surely(batch.size == 0) else grouped(found, dims, batch)
    parts, numbers = [], []
    for group in groups:
        kinds = kinds_of(group.several.amax(-1)).to(torch.int64)
        kinds = kinds.flatten(2) if kinds.ndim > 2 else kinds.unsqueeze(-1)
        position = (LAST - torch.arange(kinds.shape[-1], device=kinds.device)).to(torch.int64) << POSITION
        parts.append(torch.where(kinds == FINE, 0, position | kinds).amax(-1))
        numbers += group.numbers
    if parts:
        keys = torch.cat(parts)
        parts = [torch.where(keys == 0, 0, keys | _early(len(found), numbers, keys))]
    if strays:
        # About no sample in particular: about all, unless one went bad before. Then it is an echo of that.
        kinds = torch.stack([kinds_of(found[i]).amax().to(batch.device, torch.int64) for i in strays]).unsqueeze(-1)
        keys = torch.where(kinds == FINE, 0, _early(len(found), strays, kinds) | (LAST << POSITION) | kinds)
        earlier = torch.cat(parts).amax() if parts else torch.zeros_like(keys)
        parts.append(torch.where(keys > earlier, keys, 0).expand(-1, batch.size))
    return torch.cat(parts) if parts else torch.zeros(1, batch.size, dtype=torch.int64, device=batch.device)


def _early(n: int, numbers: list[int], like: Tensor) -> Tensor:
    """The part of a key that tells the order, for evidence of these numbers, of `n`."""
    return constant([(n - i) << ORDER for i in numbers], like).unsqueeze(-1)


def grouped(found: list[Tensor], dims: Sequence[int], batch: Batch) -> tuple[list[Group], list[int]]:
    """The evidence in groups, and the numbers of what is about no sample."""
    alike: list[dict[int, Tensor]] = []
    strays = []
    for i, (one, dim) in enumerate(zip(found, dims, strict=True)):
        rows = rows_of(one, None if dim == UNTOLD else dim, batch)
        if any(is_surely(size == 0) for size in (one.shape if rows is None else rows.shape[1:])):
            continue  # nothing is there that could be bad
        if rows is None:
            strays.append(i)
            continue
        for group in alike:
            first = next(iter(group.values()))
            if first.dtype == rows.dtype and surely_equal(first.shape, rows.shape):
                group[i] = rows
                break
        else:
            alike.append({i: rows})
    return [Group(side_by_side([*group.values()]), [*group]) for group in alike], strays


def rows_of(found: Tensor, dim: int | None, batch: Batch) -> Tensor | None:
    """Evidence with one row for each sample in front, None if it has none."""
    along = batch.dim if dim is None else dim
    return batch.rows_first(found, along) if along < found.ndim - 1 else None
