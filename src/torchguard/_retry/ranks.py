"""One decision for all ranks. Every rank runs a step as often as the others and agrees with them on each outcome.

The samples of all ranks form one batch: rank 0's first. A run of some of them is a run of each rank on those it has. A
rank that has none of them still takes part, or the others would wait for its gradients: it runs a sample that another
rank sent it, and multiplies its loss by zero.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchguard.exceptions import RetryError


class Alone:
    """One process."""

    rank, size = 0, 1

    def total(self, value: Tensor) -> Tensor:
        """The sum over all ranks."""
        return value

    def total_number(self, number: int) -> int | Tensor:
        return number

    def gather(self, value: Any) -> list[Any]:
        """The value of each rank."""
        return [value]

    def any(self, flag: bool) -> bool:
        return flag


class Ranks(Alone):
    """The processes of a group, each of which calls the same methods in the same order."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def total(self, value: Tensor) -> Tensor:
        value = value.detach().clone()
        dist.all_reduce(value, group=self.group)
        return value

    def total_number(self, number: int) -> int | Tensor:
        return self.total(torch.tensor(float(number), device=self.device))

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def any(self, flag: bool) -> bool:
        return bool(self.total(torch.tensor(float(flag), device=self.device)))


def ranks_of(modules: list[tuple[str, nn.Module]], group: dist.ProcessGroup | None, device: torch.device) -> Alone:
    """The ranks that share the gradients of these modules: those of DDP, FSDP2, or of the group that is given."""
    if not dist.is_available() or not dist.is_initialized():
        return Alone()
    if group is None:
        group = _group_of(modules)
    if group is None or dist.get_world_size(group) == 1:
        return Alone()
    return Ranks(group, device)


def _group_of(modules: list[tuple[str, nn.Module]]) -> dist.ProcessGroup | None:
    for path, module in modules:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            return module.process_group
        for parameter in module.parameters(recurse=False):
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is None:
                continue
            if mesh.ndim > 1:
                raise RetryError(
                    f"Retry: {path} is distributed over a mesh of {mesh.ndim} dims. Give process_group=, the ranks "
                    "that have different samples."
                )
            return mesh.get_group()
    return None
