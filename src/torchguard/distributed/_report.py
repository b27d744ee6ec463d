"""What every rank has: the incidents of watched models in one list, and a line about a tensor for each rank."""

import dataclasses
import re
import sys
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torchguard._torch.modules import uncompiled
from torchguard._watch import Incident
from torchguard.distributed._group import Group, group_of
from torchguard.exceptions import DistributedError

# Names that wrappers add to the paths of modules.
_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")


class RankIncident(NamedTuple):
    """An incident of a sample of some rank.

    Attributes:
        rank: in the group.
        global_sample: the index of the sample in the batch of all ranks, rank 0's first.
        path: the module, without the names that wrappers such as DDP add.
        incident: what the rank reports, with that path.
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
        guarded: the watched model of this rank, or a DDP or a compiled module that holds it.
        group: the ranks that have different samples; all by default.
    """
    model = _watched(guarded)
    ranks = group_of("gather_report", group)
    count, incidents = 0 if model.flags is None else int(model.flags.shape[0]), model.report()
    prefix = "module." if isinstance(model, DistributedDataParallel) else ""
    own = count, [dataclasses.replace(one, path=_clean(one.path, prefix)) for one in incidents]
    found: list[tuple[int, list[Incident]]] = [own]
    if ranks is not None:
        found = found * dist.get_world_size(ranks)
        dist.all_gather_object(found, own, group=ranks)
    starts = [sum(size for size, _ in found[:rank]) for rank in range(len(found))]
    return [
        RankIncident(rank, start + incident.sample, incident.path, incident)
        for rank, (start, (_, incidents)) in enumerate(zip(starts, found, strict=True))
        for incident in incidents
    ]


def _watched(model: Any) -> Any:
    """The watched model in a DDP or in a compiled module."""
    model = uncompiled(model)
    while isinstance(model, DistributedDataParallel) and not hasattr(type(model), "report"):
        model = uncompiled(model.module)
    if not hasattr(type(model), "report"):
        raise DistributedError(f"gather_report: {type(model).__name__} is no watched model. Give that of watch().")
    return model


def _clean(path: str, prefix: str) -> str:
    return _WRAPPERS.sub("", path.removeprefix(prefix)).removeprefix(".")


def debug_distributed_rank(tensor: Tensor, name: str = "tensor", file: Any = None) -> Tensor:
    """Print one line about a tensor on every rank, and return the tensor.

    No rank waits for another, so it may stand where only some ranks come by. In a graph it prints nothing. Reading the
    values waits for the device.

    Args:
        file: where to print; stderr by default.
    """
    if torch.compiler.is_compiling():
        return tensor
    is_initialized = dist.is_available() and dist.is_initialized()
    rank, size = (dist.get_rank(), dist.get_world_size()) if is_initialized else (0, 1)
    line = f"rank {rank} of {size}: {name}: {_described(tensor.detach())}\n"
    out = sys.stderr if file is None else file
    out.write(line)  # one call, so that the lines of several ranks do not mix
    out.flush()
    return tensor


def _described(x: Tensor) -> str:
    local: Tensor = getattr(x, "to_local", lambda: x)()  # of a DTensor, what this rank has
    text = f"shape={tuple(x.shape)}, dtype={x.dtype}, device={x.device}"
    if local is not x:
        text += f", of which this rank has {tuple(local.shape)}"
    if not local.numel() or local.is_complex() or local.dtype == torch.bool:
        return text
    values = local.to(torch.float64)
    finite = values[values.isfinite()]
    span = f", {finite.min():.6g} to {finite.max():.6g}" if finite.numel() else ""
    return f"{text}{span}, {int(values.isnan().sum())} NaN, {int(values.isinf().sum())} Inf"
