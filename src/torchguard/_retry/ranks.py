"""One decision for all ranks. Every rank runs a step as often as the others and agrees with them on each outcome.

The samples of all ranks form one batch: rank 0's first. A run of some of them is a run of each rank on those it has. A
rank that has none of them still takes part, or the others would wait for its gradients: it runs the part of another
rank, and multiplies its loss by zero.

With tensor parallelism several ranks have the same samples, and each has another part of the gradients. A fault that
only one of them sees is decided on by all: they would wait for each other in the next collective otherwise.
"""

import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchguard.exceptions import RetryError


class Alone:
    """Ranks of which none has samples that others have not: one process, or tensor parallelism alone.

    Args:
        device: of the numbers that are sent.
        deciding: groups of ranks that agree on each outcome. With tensor parallelism they have the same samples.
    """

    rank, size = 0, 1

    def __init__(self, device: torch.device, deciding: Sequence[dist.ProcessGroup] = ()) -> None:
        self.device, self.deciding = device, deciding

    def total(self, value: Tensor) -> Tensor:
        """The sum over all ranks."""
        return value

    def total_number(self, number: int) -> int | Tensor:
        return number

    def gather(self, value: Any) -> list[Any]:
        """The value of each rank."""
        return [value]

    def send(self, value: Any, source: int) -> Any:
        """The value of one rank."""
        return value

    def largest(self, number: int) -> int:
        """The largest number of all ranks, those with the same samples included."""
        if not self.deciding:
            return number
        found = torch.tensor(number, device=self.device)
        for group in self.deciding:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        return int(found)

    def any(self, flag: bool) -> bool:
        return self.largest(int(flag)) > 0

    def union(self, names: list[str]) -> list[str]:
        """The names of all ranks, each once."""
        return [*dict.fromkeys(name for some in self.gather(names) for name in some)]


class Ranks(Alone):
    """The processes of a group, each of which calls the same methods in the same order."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, with_same_samples: Sequence[dist.ProcessGroup]
    ) -> None:
        super().__init__(device, (group, *with_same_samples))
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def total(self, value: Tensor) -> Tensor:
        value = value.detach().clone()
        dist.all_reduce(value, group=self.group)
        return value

    def total_number(self, number: int) -> int | Tensor:
        return self.total(torch.tensor(number, dtype=torch.float64, device=self.device))

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def send(self, value: Any, source: int) -> Any:
        sent: bytes | str = b""
        if self.rank == source:
            try:
                sent = pickle.dumps(value)
            except Exception as exception:
                sent = f"{type(exception).__name__}: {exception}"
        box = [sent]
        dist.broadcast_object_list(box, group=self.group, group_src=source)
        if isinstance(box[0], str):
            raise RetryError(
                f"Retry: a rank has none of the good samples, and the batch of another cannot be sent to it ({box[0]})."
            )
        return pickle.loads(box[0])


def ranks_of(group: dist.ProcessGroup | None, device: torch.device, meshes: Iterable[Any]) -> Alone:
    """The ranks of a step.

    Args:
        group: the ranks with different samples; None for this process alone.
        device: of the numbers that are sent.
        meshes: those of DTensors. Ranks of them that are not in `group` have the same samples.
    """
    others = _groups_beside(group, meshes)
    if group is None or dist.get_world_size(group) == 1:
        return Alone(device, others)
    return Ranks(group, device, others)


def _groups_beside(group: dist.ProcessGroup | None, meshes: Iterable[Any]) -> list[dist.ProcessGroup]:
    known = set() if group is None else {*dist.get_process_group_ranks(group)}
    groups = {mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim)}
    beside = {(*dist.get_process_group_ranks(one),): one for one in groups}
    return [one for ranks, one in sorted(beside.items()) if not {*ranks} <= known]
