"""Flags of all ranks: merged sample by sample, or one after the other.

A gather of tensors of different sizes ends in a crash or a hang, on gloo and on NCCL. So in eager mode each rank sends
a message of fixed size, which says what it has: all ranks raise where that does not go together. Flags that fit into
the message are in it, and one gather does. Larger ones follow in a second. A graph cannot raise: there, sizes have to
be the same on all ranks, and one gather always does.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Int, Int64, Shaped
from torch import Tensor

from torchguard._channel.config import CARRIERS, ErrorConfig
from torchguard._channel.packing import Flags, bits, words_to_flags
from torchguard._channel.record import merge
from torchguard._channel.validate import require_flags
from torchguard._torch.tracing import is_plain
from torchguard.distributed._group import Group, gathered, group_of, require_same
from torchguard.distributed._locations import checksum, translated
from torchguard.exceptions import BatchMismatchError

_CARRIERS = [*CARRIERS]
_HEADER, _CONTENT = 5, 256  # numbers of a message: what a rank has, and flags, 64 samples of the default config


class GatheredFlags(NamedTuple):
    """The flags of the samples of all ranks, rank 0's first.

    Attributes:
        flags: one row a sample.
        ranks: the rank that has the sample.
        samples: its index in the batch of that rank; -1 in rows that hold no sample.
        global_samples: its index in the batch of all ranks; -1 in rows that hold no sample.
    """

    flags: Flags
    ranks: Int64[Tensor, " all"]
    samples: Int64[Tensor, " all"]
    global_samples: Int64[Tensor, " all"]


def merge_flags(f: Flags, group: Group = None, config: ErrorConfig | None = None) -> Flags:
    """The errors that any rank has recorded for each sample, where all ranks of the group have the same samples.

    That is so in tensor, pipeline and sequence parallelism. Those of rank 0 count as the oldest. Every rank gets the
    same flags. Ranks with different samples: `gather_flags`.
    """
    require_flags("merge_flags", f)
    ranks = group_of("merge_flags", group)
    if ranks is None:
        return f
    if not is_plain(f):
        return merge(*(words_to_flags(words, f) for words in gathered(bits(f), ranks).unbind()), config=config)
    found, sizes, tables = _exchanged("merge_flags", f, ranks)
    require_same("merge_flags", "the number of samples", sizes, "Ranks with different samples: gather_flags.")
    parts = translated([words_to_flags(words, f) for words in found.unbind()], tables, ranks)
    return merge(*parts, config=config)


def gather_flags(f: Flags, group: Group = None, *, rows: int | None = None) -> GatheredFlags:
    """The flags of the samples of all ranks, with the rank and the global index of each.

    In eager mode, ranks may have different numbers of samples. In a graph the result has to have a fixed shape: give
    `rows` unless all ranks have equally many.

    Args:
        group: the ranks that have different samples; all by default.
        rows: the most samples of a rank. Each then has this many rows in the result; those without a sample are empty.

    >>> gather_flags(err.new_t(2)).global_samples
    tensor([0, 1])
    """
    require_flags("gather_flags", f)
    count = f.shape[0]
    ranks = group_of("gather_flags", group)
    if ranks is None:
        return _numbered(_fit(f, rows, count), torch.tensor([count], device=f.device), count if rows is None else rows)
    if not is_plain(f):
        # One row for the number of samples, so that one gather does.
        words, width = _fit(bits(f), rows, count), count if rows is None else rows
        size = torch.full((1, words.shape[1]), count, dtype=words.dtype, device=f.device)
        received = gathered(torch.cat([size, words]), ranks)
        parts = [words_to_flags(part, f) for part in received[:, 1:].unbind()]
        return _numbered(torch.cat(parts), received[:, 0, 0].to(torch.int64), width)
    found, sizes, tables = _exchanged("gather_flags", f, ranks, -1 if rows is None else rows)
    largest = max(sizes)
    parts = translated([words_to_flags(_fit(words, rows, largest), f) for words in found.unbind()], tables, ranks)
    all_rows = _numbered(torch.cat(parts), torch.tensor(sizes, device=f.device), largest if rows is None else rows)
    return all_rows if rows is not None else GatheredFlags(*(x[all_rows.samples >= 0] for x in all_rows))


def _fit(words: Shaped[Tensor, "batch words"], rows: int | None, largest: int) -> Shaped[Tensor, "rows words"]:
    """As many rows as were asked for.

    Args:
        largest: the most samples of a rank.
    """
    if rows is None:
        return words
    if largest > rows:
        raise BatchMismatchError(f"gather_flags: a batch has {largest} samples and rows is {rows}. Give more rows.")
    return torch.nn.functional.pad(words, (0, 0, 0, rows - words.shape[0]))


def _numbered(flags: Flags, sizes: Int64[Tensor, " ranks"], width: int) -> GatheredFlags:
    """Flags with `width` rows for each rank, and what each row is."""
    rank = torch.arange(sizes.shape[0], dtype=torch.int64, device=sizes.device).unsqueeze(1).expand(-1, width)
    sample = torch.arange(width, dtype=torch.int64, device=sizes.device).expand_as(rank)
    start = (sizes.cumsum(0) - sizes).unsqueeze(1)
    is_used = sample < sizes.unsqueeze(1)
    in_rank, in_all = torch.where(is_used, sample, -1), torch.where(is_used, start + sample, -1)
    return GatheredFlags(flags, rank.flatten(), in_rank.flatten(), in_all.flatten())


def _exchanged(
    who: str, f: Flags, group: dist.ProcessGroup, rows: int = -1
) -> tuple[Int[Tensor, "ranks rows words"], list[int], list[int]]:
    """The words of the flags of each rank, its number of samples, and the checksum of its location names.

    Raises where flags do not match.
    """
    words = bits(f)
    own = torch.tensor([f.shape[0], f.shape[1], _CARRIERS.index(f.dtype), rows, checksum()], device=f.device)
    content = words.reshape(-1)[:_CONTENT].to(torch.int64)
    message = torch.nn.functional.pad(torch.cat([own, content]), (0, _CONTENT - len(content)))
    messages = gathered(message, group)
    sizes, widths, carriers, rows_of_ranks, tables = zip(*messages[:, :_HEADER].tolist(), strict=True)
    advice = "Use one ErrorConfig on all ranks."
    require_same(who, "the dtype of their flags", [_CARRIERS[carrier] for carrier in carriers], advice)
    require_same(who, "the words of their flags", widths, advice)
    require_same(who, "rows", [None if one < 0 else one for one in rows_of_ranks], "Give the same on all ranks.")
    shape = len(sizes), max(sizes), f.shape[1]
    if shape[1] * shape[2] <= _CONTENT:
        found = messages[:, _HEADER : _HEADER + shape[1] * shape[2]].reshape(shape).to(words.dtype)
    else:
        found = gathered(torch.nn.functional.pad(words, (0, 0, 0, shape[1] - f.shape[0])), group)
    return found, [*sizes], [*tables]
