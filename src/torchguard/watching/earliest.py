"""Which of all the evidence of a call is the earliest, sample by sample."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from torchguard._torch import is_shape_only, is_surely, surely_equal
from torchguard.operators import are_kept_whole, define, revision_of
from torchguard.watching.kinds import FINE, kinds_of, says_nothing
from torchguard.watching.rows import Batch

# A key, from the right: kind, position (counted down), order (counted down).
KIND, POSITION, LAST, ORDER = 0xFF, 8, (1 << 31) - 1, 40
# In the place of a dim along which samples lie: that is to be found out.
UNTOLD = -1
# So much evidence is put together at a time on a GPU. Inductor would write more than that side by side in memory, and
# then not fuse the looks with what else reads a tensor.
_TOGETHER = 8
_REVISION = revision_of(Path(__file__).parent)


def earliest(found: list[Tensor], dims: list[int], ranks: list[int], batch: Batch, most: int) -> tuple[Tensor, Tensor]:
    """The keys of the earliest evidence against each sample, so many, and how much there is in all.

    A key holds the order of the evidence, the first bad vector in it, and its kind. The larger it is the earlier the
    evidence was met; 0 stands for none.

    Args:
        dims: along which the samples of each piece of evidence lie, or `UNTOLD`.
        ranks: of the tensors that were looked at. Evidence of the same rank is about pieces of vectors.
    """
    if are_kept_whole():
        # What is asked of every piece of evidence takes Dynamo long, and a large model has hundreds.
        size, lengths, dim = batch.size, batch.lengths, batch.dim
        return torch.ops.torchguard.earliest(found, dims, ranks, size, lengths, dim, batch.device, most, _REVISION)
    return _earliest(found, dims, ranks, batch, most)


def _earliest(
    found: list[Tensor], dims: Sequence[int], ranks: Sequence[int], batch: Batch, most: int
) -> tuple[Tensor, Tensor]:
    keys = _keys(found, dims, ranks, batch)
    if most == 1:
        return keys.amax(0, keepdim=True), (keys > 0).sum(0)
    missing = max(0, most - keys.shape[0])
    return F.pad(keys, (0, 0, 0, missing)).topk(most, dim=0).values, (keys > 0).sum(0)


def _keys(found: list[Tensor], dims: Sequence[int], ranks: Sequence[int], batch: Batch) -> Tensor:
    """A key for every piece of evidence and sample."""
    groups, strays = _sorted(found, dims, ranks, batch)
    parts, numbers = [], []
    if is_surely(batch.size == 0):
        groups, strays = [], []
    for group in groups:
        several = [*group.values()]
        many = len(several) if batch.device.type == "cpu" else _TOGETHER
        for i in range(0, len(several), many):
            kinds = kinds_of(torch.stack(several[i : i + many])).to(torch.int64)
            kinds = kinds.flatten(2) if kinds.ndim > 2 else kinds.unsqueeze(-1)
            position = (LAST - torch.arange(kinds.shape[-1], device=kinds.device)).to(torch.int64) << POSITION
            parts.append(torch.where(kinds == FINE, 0, position | kinds).amax(-1))
        numbers += [*group]
    if parts:
        keys, early = torch.cat(parts), _counted_down(len(found), numbers, batch.device).unsqueeze(-1) << ORDER
        parts = [torch.where(keys == 0, 0, keys | early)]
    if strays:
        # About no sample in particular: about all, unless one went bad before. Then it is an echo of that.
        kinds = torch.stack([kinds_of(found[i]).amax().to(batch.device, torch.int64) for i in strays]).unsqueeze(-1)
        early = _counted_down(len(found), strays, batch.device).unsqueeze(-1) << ORDER
        keys = torch.where(kinds == FINE, 0, early | (LAST << POSITION) | kinds)
        earlier = torch.cat(parts).amax() if parts else torch.zeros_like(keys)
        parts.append(torch.where(keys > earlier, keys, 0).expand(-1, batch.size))
    return torch.cat(parts) if parts else torch.zeros(1, batch.size, dtype=torch.int64, device=batch.device)


def _counted_down(n: int, numbers: list[int], device: torch.device) -> Tensor:
    """`n` less each number. By ranges, of which there are few: a list would have to be copied from the host."""
    runs: list[list[int]] = []
    for i in numbers:
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return torch.cat([torch.arange(n - first, n - last - 1, -1, device=device) for first, last in runs])


def _sorted(
    found: list[Tensor], dims: Sequence[int], ranks: Sequence[int], batch: Batch
) -> tuple[list[dict[int, Tensor]], list[int]]:
    """The evidence by number: with the samples in front, in groups that can be stacked; and what is about none."""
    groups: list[dict[int, Tensor]] = []
    strays = []
    for i, (one, dim, rank) in enumerate(zip(found, dims, ranks, strict=True)):
        if says_nothing(one):
            continue
        whole = one.amax(-1) if one.ndim == rank > 1 and not is_surely(one.shape[-1] == 0) else one
        rows = batch.rows_first(whole, None if dim == UNTOLD else dim)
        about = one.shape if rows is None else rows.shape[1:]
        if any(is_surely(size == 0) for size in about):
            continue  # nothing is there that could be bad
        if rows is None:
            strays.append(i)
            continue
        for group in groups:
            first = next(iter(group.values()))
            if first.dtype == rows.dtype and surely_equal(first.shape, rows.shape):
                group[i] = rows
                break
        else:
            groups.append({i: rows})
    return groups, strays


def _earliest_op(
    found: list[Tensor],
    dims: Sequence[int],
    ranks: Sequence[int],
    size: int,
    lengths: Sequence[int],
    dim: int,
    device: torch.device,
    most: int,
    revision: int,
) -> tuple[Tensor, Tensor]:
    if is_shape_only(found[0]):
        keys = torch.zeros(most, size, dtype=torch.int64, device=device)
        return keys, keys.sum(0)
    return _earliest(found, dims, ranks, Batch(size, tuple(lengths), dim, device), most)


define(
    "earliest(Tensor[] found, int[] dims, int[] ranks, SymInt size, SymInt[] lengths, int dim, Device device, "
    "int most, int revision) -> (Tensor, Tensor)",
    _earliest_op,
)
