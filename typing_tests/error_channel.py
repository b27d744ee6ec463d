# pyright: reportUnnecessaryTypeIgnoreComment=true
"""A function with renamed parameters keeps its signature: `make types` runs pyright over this file."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import nn

from torchguard import HAS, IF, Err, Ok, err, error_t, fix, flag_nan, flags, push, typing

x = torch.ones(2, 3)
f = err.new(x)
layer = nn.Linear(3, 3)


def forward(x: typing.Tensor[typing.float32_t, ("batch",)]) -> typing.Tensor[error_t, ("batch", "words")]:
    return err.new(x)


assert_type(forward(x), torch.Tensor)
assert_type(flag_nan(x, layer, f), torch.Tensor)
assert_type(fix(x, f, "head", fallback=lambda: x), tuple[torch.Tensor, torch.Tensor])
assert_type(err.push(f, err.NAN, layer, where=x > 1), torch.Tensor)
assert_type(push(f, err.NAN, "head", severity=err.WARN), torch.Tensor)
assert_type(IF(HAS(f), lambda: 1).ELIF(HAS(f), lambda: 2).ELSE(lambda: 3), int)
assert_type(flags.summary(f), dict[str, dict[str, int]])
assert_type(Ok(1).ok_value, int)
assert_type(Err("why").err_value, str)

# These have to be errors.
flag_nan(3, layer, f)  # pyright: ignore[reportArgumentType]
flag_nan(x)  # pyright: ignore[reportCallIssue]
err.is_ok()  # pyright: ignore[reportCallIssue]
err.push(f, err.NAN, 1.5)  # pyright: ignore[reportArgumentType]
IF(HAS(f), 3)  # pyright: ignore[reportArgumentType]

# To a checker, a parameter has its new name alone.
flag_nan(x, layer, flags=f)  # pyright: ignore[reportCallIssue]
