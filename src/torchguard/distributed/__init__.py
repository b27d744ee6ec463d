"""Flags, decisions and losses over the ranks of a process group. Without one, or with one rank, all of it does nothing.

Every function is one call of the same function on every rank of the group. `docs/distributed.md` has examples.
"""

from torchguard.distributed._agree import agree, any_err
from torchguard.distributed._averages import (
    all_reduce_parameter,
    average_gradients,
    calculate_loss_distributed,
    mean_ok,
)
from torchguard.distributed._digest import Digest, digest
from torchguard.distributed._failures import name_failures
from torchguard.distributed._flags import GatheredFlags, gather_flags, merge_flags
from torchguard.distributed._gather import all_gather
from torchguard.distributed._report import RankIncident, debug_distributed_rank, gather_report
from torchguard.exceptions import DistributedError, RankFailedError, RankMismatchError

__all__ = [
    "Digest",
    "DistributedError",
    "GatheredFlags",
    "RankFailedError",
    "RankIncident",
    "RankMismatchError",
    "agree",
    "all_gather",
    "all_reduce_parameter",
    "any_err",
    "average_gradients",
    "calculate_loss_distributed",
    "debug_distributed_rank",
    "digest",
    "gather_flags",
    "gather_report",
    "mean_ok",
    "merge_flags",
    "name_failures",
]
