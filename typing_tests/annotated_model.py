# pyright: reportUnnecessaryTypeIgnoreComment=true
"""To a static type checker, every annotated tensor is a `torch.Tensor`: `make types` runs pyright over this file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, assert_type

import torch
from jaxtyping import Float
from torch import nn

from torchguard import Result, err, tensorcheck
from torchguard.exceptions import CastError
from torchguard.typing import (
    Broadcast,
    Dim,
    Tensor,
    bool_t,
    error_t,
    float32_t,
    int64_t,
    type_cast,
)

Rows = Tensor[float32_t, ("batch", "features")]


class Pair(NamedTuple):
    x: Tensor[float32_t, (..., "features")]
    mask: Tensor[bool_t, ("batch",)] | None = None


@dataclasses.dataclass
class Batch:
    ids: Tensor[int64_t, ("batch", "seq"), "cpu", False]
    extra: dict[str, Tensor[float32_t, ()]]


class Encoder(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.up = nn.Linear(hidden, 4 * hidden)

    @tensorcheck
    def forward(
        self,
        x: Tensor[float32_t, ("batch", "seq", Dim.hidden)],
        bias: Tensor[float32_t, (Broadcast, Dim.hidden)],
        other: Float[torch.Tensor, "batch seq"] | None = None,
    ) -> tuple[Tensor[float32_t, ("batch", "seq", Dim.hidden * 4)], Tensor[error_t, ("batch", "words")]]:
        assert_type(x, torch.Tensor)
        return self.up(x + bias), err.new(x)

    @tensorcheck(auto_detect={err.NAN})
    def pooled(self, x: Rows) -> Rows:
        assert_type(x, torch.Tensor)
        return x.mean(0, keepdim=True)


@tensorcheck
def first(batch: Batch, pair: Pair) -> Tensor[float32_t, ()]:
    assert_type(batch.ids, torch.Tensor)
    assert_type(pair.mask, torch.Tensor | None)
    return batch.extra["a"]


encoder = Encoder(8)
plain: torch.Tensor = torch.ones(2, 3, 8)
narrow: Tensor[float32_t, ("n",)] = plain
back: torch.Tensor = narrow

assert_type(encoder.forward(plain, plain), tuple[torch.Tensor, torch.Tensor])
assert_type(encoder.pooled(plain), torch.Tensor)
assert_type(first(Batch(plain, {"a": plain}), Pair(plain)), torch.Tensor)
assert_type(type_cast[float32_t](plain), Result[torch.Tensor, CastError])

# A decorated function keeps its signature: these have to be errors.
encoder.pooled(3)  # pyright: ignore[reportArgumentType]
encoder.pooled(plain, plain)  # pyright: ignore[reportCallIssue]
plain.nope()  # pyright: ignore[reportAttributeAccessIssue]
first(1, Pair(plain))  # pyright: ignore[reportArgumentType]
tensorcheck(auto_detect="NAN")(lambda x: x)  # pyright: ignore[reportArgumentType]

decorator: Callable[[Callable[..., Any]], Callable[..., Any]] = tensorcheck(auto_detect=False)
