"""What the tests on several ranks share."""

import torch
from torch import Tensor

from torchguard import ErrorConfig, ErrorLocation, distributed, err


def flags_with(count: int, bad: list[int], location: str = "encoder", config: ErrorConfig | None = None) -> Tensor:
    """Flags of some samples, of which some have a NaN."""
    where = torch.zeros(count, dtype=torch.bool)
    where[bad] = True
    where_in_model = ErrorLocation.register(location)
    return err.push(err.new_t(count, config=config), err.NAN, where_in_model, config=config, where=where)


def everything(f: Tensor, losses: Tensor, x: Tensor, step: int) -> tuple[Tensor, ...]:
    """All functions of flags and losses that a graph can hold."""
    return (
        distributed.any_err(f),
        distributed.agree(f, "majority"),
        *distributed.gather_flags(f, rows=8),
        *distributed.digest(f, step=step),
        distributed.merge_flags(f[:2]),
        distributed.mean_ok(f, losses),
        distributed.all_gather(x),
    )
