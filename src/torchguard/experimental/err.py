"""`torchguard.err` whose new flags are floats."""

from dataclasses import replace as _replace

import torch
from torch import Tensor

from torchguard._channel import record
from torchguard._channel.config import ErrorConfig, config_of
from torchguard._channel.packing import Flags
from torchguard._renamed import renamed
from torchguard.checks import find
from torchguard.err import *  # noqa: F403 - the same namespace, but for what follows
from torchguard.err import __all__ as _err_all

__all__ = [*_err_all, "find"]  # pyright: ignore[reportUnsupportedDunderAll]


@renamed(reference="x")
def new(x: Tensor, config: ErrorConfig | None = None) -> Flags:
    """Empty flags for the samples of `x`."""
    return record.new(x, _in_floats(config))


@renamed(batch_size="n")
def new_t(n: int, device: torch.device | str | None = None, config: ErrorConfig | None = None) -> Flags:
    """Empty flags for `n` samples."""
    return record.new_t(n, device, _in_floats(config))


@renamed(loc="location", batch_size="n")
def from_code(
    code: int,
    location: int,
    n: int,
    device: torch.device | str | None = None,
    severity: int | None = None,
    config: ErrorConfig | None = None,
) -> Flags:
    """Flags for `n` samples that all hold the same one error."""
    return record.from_code(code, location, n, device, severity, _in_floats(config))


def _in_floats(config: ErrorConfig | None) -> ErrorConfig:
    config = config_of("err.new", config)
    return config if config.flag_dtype.is_floating_point else _replace(config, flag_dtype=torch.float32)
