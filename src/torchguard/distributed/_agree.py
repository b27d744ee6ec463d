"""One decision for all ranks, by one reduction of a few numbers: no rank skips a step that another takes."""

import math

import torch
import torch.distributed as dist
from jaxtyping import Bool
from torch import Tensor

from torchguard._channel.packing import Flags
from torchguard._channel.query import any_err as any_err_here
from torchguard._channel.validate import require_flags
from torchguard._torch.tracing import can_read
from torchguard.distributed._group import Group, device_of, group_of, largest, total
from torchguard.exceptions import OutOfRangeError, RankMismatchError

Vote = Flags | Bool[Tensor, ""] | bool


def any_err(f: Vote, group: Group = None) -> Bool[Tensor, ""]:
    """True on every rank if any sample of any rank has an error.

    Args:
        f: the flags of this rank's samples, or a bool of your own.
        group: the ranks to ask; all by default.
    """
    ranks = group_of("any_err", group)
    vote = _vote("any_err", f, ranks)
    return vote if ranks is None else largest(vote.to(torch.int64), ranks) > 0


def agree(f: Vote, policy: str | float = "any", group: Group = None) -> Bool[Tensor, ""]:
    """Whether enough ranks have an error: one decision that all ranks share.

    A rank votes yes if one of its samples has an error. Ranks that give different policies would decide differently:
    all of them raise `RankMismatchError`. In a graph and on a GPU, where that cannot be raised, all of them get True.

    Args:
        f: the flags of this rank's samples, or a bool of your own: `agree(err.is_err(f).float().mean() > 0.1)`.
        policy: "any" rank, a "majority" of the ranks (more than half), or at least this fraction of them.
        group: the ranks that vote; all by default.

    >>> f = err.from_code(err.NAN, location=1, n=2)
    >>> bool(agree(f, "majority"))
    True
    """
    ranks = group_of("agree", group)
    vote = _vote("agree", f, ranks)
    size = 1 if ranks is None else dist.get_world_size(ranks)
    needed = _needed(policy, size)
    if ranks is None:
        return vote
    # All have the same number if and only if size * sum(n^2) == sum(n)^2 (Cauchy and Schwarz). n <= size: no overflow.
    mine = torch.tensor([needed, needed * needed], dtype=torch.int64, device=vote.device)
    votes, numbers, squares = total(torch.cat([vote.to(torch.int64).reshape(1), mine]), ranks).unbind()
    is_mixed = squares * size != numbers * numbers
    if can_read(is_mixed) and is_mixed:
        raise RankMismatchError(
            f"agree: the ranks have different policies. This one has {policy!r}, which takes {needed} of {size} ranks."
        )
    return (votes >= needed) | is_mixed


def _needed(policy: str | float, size: int) -> int:
    """How many ranks have to vote yes."""
    if policy == "any":
        return 1
    if policy == "majority":
        return size // 2 + 1
    if isinstance(policy, (int, float)) and not isinstance(policy, bool) and 0 < policy <= 1:
        return max(1, math.ceil(policy * size - 1e-9))
    raise OutOfRangeError(f"agree: policy is {policy!r}. Give 'any', 'majority', or a fraction of the ranks in (0, 1].")


def _vote(who: str, f: Vote, group: dist.ProcessGroup | None) -> Bool[Tensor, ""]:
    if isinstance(f, bool):
        return torch.tensor(f, dtype=torch.bool, device=device_of(group))
    if isinstance(f, Tensor) and f.dtype == torch.bool and f.ndim == 0:
        return f
    require_flags(who, f)
    return any_err_here(f)
