"""Process groups, and the three collectives that everything here is made of: SUM, MAX and gather.

NCCL has no bitwise reductions, and no reductions of bool or int16. So flags are never reduced by OR: they are gathered,
or their content is encoded as int64 numbers for SUM and MAX, which every backend has.

Dynamo replaces the functions of `torch.distributed` by functional collectives, which a graph can hold.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchguard.exceptions import DistributedError, RankMismatchError

Group = dist.ProcessGroup | DeviceMesh | None

# torch 2.13 has new names for these, and deprecates the old ones.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def group_of(who: str, group: Group) -> dist.ProcessGroup | None:
    """The process group to communicate in; None if there is nobody to communicate with.

    Args:
        group: a process group, a mesh of one dim, or None for all ranks.
    """
    if not dist.is_available() or not dist.is_initialized():
        if group is not None:
            raise DistributedError(f"{who}: group is given, and there is no process group. Call init_process_group.")
        return None
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise DistributedError(
                f"{who}: group is a mesh of {group.ndim} dims {group.mesh_dim_names}. Give the dim whose ranks have "
                "different samples: mesh['dp']."
            )
        group = group.get_group()
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise DistributedError(f"{who}: group is {group!r}. Give a process group that this rank is in, or None.")
    return None if dist.get_world_size(group) == 1 else group


def total(x: Shaped[Tensor, "..."], group: dist.ProcessGroup) -> Shaped[Tensor, "..."]:
    """The sum over all ranks."""
    found = x.detach().clone()
    dist.all_reduce(found, op=dist.ReduceOp.SUM, group=group)
    return found


def largest(x: Shaped[Tensor, "..."], group: dist.ProcessGroup) -> Shaped[Tensor, "..."]:
    """The maximum over all ranks."""
    found = x.detach().clone()
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return found


def gathered(x: Shaped[Tensor, "*shape"], group: dist.ProcessGroup) -> Shaped[Tensor, "ranks *shape"]:
    """The tensor of each rank. All have to have the same shape and dtype."""
    size = dist.get_world_size(group)
    flat = x.detach().contiguous().reshape(-1)
    found = flat.new_empty(size * flat.shape[0])
    all_gather_single(found, flat, group=group)
    return found.reshape(size, *x.shape)


def gathered_numbers(numbers: list[int], device: torch.device, group: dist.ProcessGroup) -> list[list[int]]:
    """The numbers of each rank, on the host. The same count on all ranks."""
    return gathered(torch.tensor(numbers, dtype=torch.int64, device=device), group).tolist()


def require_same(who: str, what: str, values: Sequence[object], advice: str) -> None:
    """Raise on every rank unless all ranks have the same value."""
    if len(set(map(str, values))) > 1:
        listed = ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(values[:8]))
        more = f" and {len(values) - 8} more" if len(values) > 8 else ""
        raise RankMismatchError(f"{who}: the ranks differ in {what}: {listed}{more}. {advice}")


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """A device whose tensors the group can send: NCCL sends none of the CPU's."""
    accelerator = torch.accelerator.current_accelerator()
    if group is None or accelerator is None or "gloo" in dist.get_backend(group):
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
