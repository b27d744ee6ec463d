"""One decision for all ranks. Every rank runs a step as often as the others and agrees with them on each outcome.

The samples of all ranks form one batch: rank 0's first. A run of some of them is a run of each rank on those it has. A
rank that has none of them still takes part, or the others would wait for its gradients: it runs the part of another
rank, and multiplies its loss by zero.
"""

import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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

    def send(self, value: Any, source: int) -> Any:
        """The value of one rank."""
        return value

    def largest(self, number: int) -> int:
        return number

    def any(self, flag: bool) -> bool:
        return self.largest(int(flag)) > 0

    def union(self, names: list[str]) -> list[str]:
        """The names of all ranks, each once."""
        return [*dict.fromkeys(name for some in self.gather(names) for name in some)]


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

    def largest(self, number: int) -> int:
        found = torch.tensor(number, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return int(found)


def ranks_of(group: dist.ProcessGroup | None, device: torch.device) -> Alone:
    if group is None or dist.get_world_size(group) == 1:
        return Alone()
    return Ranks(group, device)
