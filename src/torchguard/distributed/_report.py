"""The reports of watched models on all ranks, as one."""

import re
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchguard._watch import Incident
from torchguard.distributed._group import Group, group_of

# Names that wrappers add to the paths of modules.
_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")


class RankIncident(NamedTuple):
    """An incident of a sample of some rank.

    Attributes:
        rank: in the group.
        global_sample: the index of the sample in the batch of all ranks, rank 0's first.
        path: the module, without the names that wrappers such as DDP add.
        incident: what the rank reports.
    """

    rank: int
    global_sample: int
    path: str
    incident: Incident

    def __str__(self) -> str:
        return f"rank {self.rank}, global sample {self.global_sample}: {self.incident}"


def gather_report(guarded: Any, group: Group = None) -> list[RankIncident]:
    """The incidents of the last call of a watched model on all ranks; every rank gets the same list.

    Args:
        guarded: the watched model of this rank, or a DDP that holds it.
        group: the ranks that have different samples; all by default.
    """
    is_replicated = isinstance(guarded, DistributedDataParallel)
    model: Any = guarded.module if is_replicated and not hasattr(type(guarded), "report") else guarded
    ranks = group_of("gather_report", group)
    count = 0 if model.flags is None else int(model.flags.shape[0])
    prefix = "module." if is_replicated and model is guarded else ""
    own = count, [(_clean(one.path, prefix), one) for one in model.report()]
    found: list[tuple[int, list[tuple[str, Incident]]]] = [own]
    if ranks is not None:
        found = found * dist.get_world_size(ranks)
        dist.all_gather_object(found, own, group=ranks)
    starts = [sum(size for size, _ in found[:rank]) for rank in range(len(found))]
    return [
        RankIncident(rank, start + incident.sample, path, incident)
        for rank, (start, (_, incidents)) in enumerate(zip(starts, found, strict=True))
        for path, incident in incidents
    ]


def _clean(path: str, prefix: str) -> str:
    return _WRAPPERS.sub("", path.removeprefix(prefix)).removeprefix(".")
