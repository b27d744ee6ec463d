"""A digest of the flags of all ranks by one small SUM: 147 numbers, and one more for every 45 ranks.

A gather over thousands of ranks takes as many steps as there are ranks, a reduction their logarithm. Counts are summed.
Two more questions are answered by the same sum:

- Have all ranks the same step? The bits of the step are counted: each is set on no rank, or on all of them.
- What is the error of the first bad rank? It is a number below 2**42, and 45 ranks share one float64, to which each
  adds its number times another power of 2**44. All that later ranks add is then less than a third of the first bad
  rank's power, however it is rounded. So that power is the first of which the sum holds at least one.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from torchguard._channel.codes import ErrorCode
from torchguard._channel.packing import Flags, unpack
from torchguard._channel.query import is_err
from torchguard._channel.slot_bits import CODE_BITS, CODE_MASK, LOCATION_BITS, LOCATION_MASK, SLOT_MASK, slot_code
from torchguard._channel.validate import require_flags
from torchguard._torch.tracing import can_read
from torchguard.distributed._group import Group, group_of, total
from torchguard.distributed._locations import checksum
from torchguard.exceptions import RankMismatchError
from torchguard.locations import ErrorLocation

_CODES = CODE_MASK + 1
_SAMPLE_BITS = 28
_MAX_SAMPLE = (1 << _SAMPLE_BITS) - 1
_BITS = 64  # of an int64
_SHARED, _BASE, _TOP = 45, 44, 960  # the ranks that share a float64, whose first adds multiples of 2**960


class Digest(NamedTuple):
    """The errors of the samples of all ranks in one step: the same on every rank. `str` describes it.

    Attributes:
        samples: of all ranks.
        bad: how many of them have an error.
        bad_ranks: how many ranks have a bad sample.
        codes: for each code, how many samples have it.
        rank: the first rank that has a bad sample; -1 if none has, as in the fields that follow.
        sample: the first bad sample of that rank, by its index in its batch.
        location: the id of the location of its first error.
        code: of its first error.
        step: as it was given; -1 if the ranks gave different ones.
        is_consistent: False if the ranks gave different steps, or if they have different ids for their locations: the
            id is then that of the rank.
    """

    samples: Int64[Tensor, ""]
    bad: Int64[Tensor, ""]
    bad_ranks: Int64[Tensor, ""]
    codes: Int64[Tensor, " 16"]
    rank: Int64[Tensor, ""]
    sample: Int64[Tensor, ""]
    location: Int64[Tensor, ""]
    code: Int64[Tensor, ""]
    step: Int64[Tensor, ""]
    is_consistent: Bool[Tensor, ""]

    def __str__(self) -> str:
        values = torch.cat([field.detach().to(torch.int64).reshape(-1) for field in self]).tolist()
        samples, bad, bad_ranks, *codes = values[: 3 + _CODES]
        rank, sample, location, code, step, is_consistent = values[3 + _CODES :]
        prefix = "" if step < 0 else f"step {step}: "
        if not bad:
            return f"{prefix}{samples} samples, no errors"
        counts = ", ".join(f"{count}x{ErrorCode.name(code)}" for code, count in enumerate(codes) if count)
        name = ErrorLocation.name(location) if is_consistent else f"location {location} of that rank"
        on_ranks = f"{bad_ranks} rank{'s' if bad_ranks > 1 else ''}"
        first = f"the first is rank {rank}, sample {sample}: {ErrorCode.name(code)} at {name}"
        return f"{prefix}{bad} of {samples} samples are bad, on {on_ranks} ({counts}); {first}"


def digest(f: Flags, group: Group = None, *, step: int | Tensor = -1) -> Digest:
    """Counts by code, and the first error of the first bad rank, over the samples of all ranks.

    Ranks that give different steps have lost each other: all of them raise `RankMismatchError`, or, in a graph and on a
    GPU, get `is_consistent=False`.

    Args:
        group: the ranks that have different samples; all by default.
        step: the number of the step; in a graph a tensor, or each step would be compiled anew.

    >>> f = err.from_code(err.NAN, ErrorLocation.register("head"), n=2)
    >>> print(digest(f, step=7))
    step 7: 2 of 2 samples are bad, on 1 rank (2xNAN); the first is rank 0, sample 0: NAN at head
    """
    require_flags("digest", f)
    ranks = group_of("digest", group)
    rank, size = (0, 1) if ranks is None else (dist.get_rank(ranks), dist.get_world_size(ranks))
    now = torch.as_tensor(step, dtype=torch.int64, device=f.device)
    table = torch.full_like(now, 0 if ranks is None else checksum())
    parts = [_counts(f), _bits(now), _bits(table), _powers(_first(f), rank, size)]
    found = torch.cat([part.to(torch.float64) for part in parts])
    if ranks is not None:
        found = total(found, ranks)
    counts, of_step, of_table, firsts = found.split([len(part) for part in parts])
    is_same_step, is_same_table = (((bits == 0) | (bits == size)).all() for bits in (of_step, of_table))
    if can_read(found) and not is_same_step:
        raise RankMismatchError(f"digest: the ranks are at different steps. This one is at {int(now)}.")
    first_rank, key = _decoded(firsts)
    none = torch.full_like(key, -1)
    fields = (
        first_rank,
        (key >> (LOCATION_BITS + CODE_BITS)) & _MAX_SAMPLE,
        (key >> CODE_BITS) & LOCATION_MASK,
        key & CODE_MASK,
    )
    first_rank, sample, location, code = (torch.where(key > 0, field, none) for field in fields)
    sums, agreed = counts.to(torch.int64), torch.where(is_same_step, now, none)
    is_consistent = is_same_step & is_same_table
    return Digest(sums[0], sums[1], sums[2], sums[3:], first_rank, sample, location, code, agreed, is_consistent)


def _bits(number: Int64[Tensor, ""]) -> Int64[Tensor, " 64"]:
    return (number >> torch.arange(_BITS, device=number.device)) & 1


def _powers(key: Int64[Tensor, ""], rank: int, size: int) -> Float64[Tensor, " slots"]:
    """A number for every 45 ranks; that of this rank holds its error."""
    slots = torch.arange(-(-size // _SHARED), device=key.device)
    scaled = key.to(torch.float64) * 2.0 ** (_TOP - _BASE * (rank % _SHARED))
    return torch.where(slots == rank // _SHARED, scaled, 0.0)


def _decoded(sums: Float64[Tensor, " slots"]) -> tuple[Int64[Tensor, ""], Int64[Tensor, ""]]:
    """The first bad rank and its error, from the sums over all ranks. The error is 0 if there is none."""
    scales = [2.0 ** (_BASE * i - _TOP) for i in range(_SHARED)]
    multiples = (sums.unsqueeze(1) * torch.tensor(scales, dtype=sums.dtype, device=sums.device)).flatten()
    ranks = torch.arange(len(multiples), device=sums.device)
    first = torch.where(multiples >= 1, ranks, len(multiples) - 1).amin()
    return first, multiples.index_select(0, first.reshape(1))[0].floor().to(torch.int64)


def _counts(f: Flags) -> Int64[Tensor, " 19"]:
    """The samples, the bad ones, 1 if there is one, and the samples with each code."""
    # A slot without an error has code 0, whose column is not counted.
    code = slot_code(unpack(f).to(torch.int64))
    has_code = torch.zeros(f.shape[0], _CODES, dtype=torch.int64, device=f.device).scatter(1, code, 1)
    bad = is_err(f).sum()
    size = torch.full_like(bad, f.shape[0])
    counts = torch.nn.functional.pad(has_code.sum(0)[1:], (1, 0))
    return torch.cat([torch.stack([size, bad, (bad > 0).to(torch.int64)]), counts])


def _first(f: Flags) -> Int64[Tensor, ""]:
    """Sample, location and code of the first error as one number; 0 for no error."""
    if f.shape[0] == 0:
        return torch.zeros((), dtype=torch.int64, device=f.device)
    bad, last = is_err(f), f.shape[0] - 1
    samples = torch.arange(f.shape[0], dtype=torch.int64, device=f.device)
    sample = torch.where(bad, samples, last).amin(0)
    slot = unpack(f).index_select(0, sample.reshape(1))[0, 0].to(torch.int64) & SLOT_MASK
    key = (sample.clamp(max=_MAX_SAMPLE) << (LOCATION_BITS + CODE_BITS)) | (slot >> 2)
    return torch.where(bad.any(), key, 0)
