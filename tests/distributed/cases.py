"""What the tests on several ranks share."""

import torch
from torch import Tensor

from torchguard import ErrorConfig, ErrorLocation, err


def flags_with(count: int, bad: list[int], location: str = "encoder", config: ErrorConfig | None = None) -> Tensor:
    """Flags of some samples, of which some have a NaN."""
    where = torch.zeros(count, dtype=torch.bool)
    where[bad] = True
    where_in_model = ErrorLocation.register(location)
    return err.push(err.new_t(count, config=config), err.NAN, where_in_model, config=config, where=where)
