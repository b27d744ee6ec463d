"""Operators of ours: calls that Dynamo keeps whole, and that AOTAutograd traces into, or nobody does.

What a body does while AOTAutograd runs it, Dynamo never sees. So it may hang notes on the tensors that are handed
around, and it is traced once where Dynamo would take long. What no backend sees either is not compiled, and runs as it
would in eager mode.
"""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import library as operators

from torchguard._torch import constant_in_graphs, in_transform, is_exporting

_OURS = operators.Library("torchguard", "DEF")


def define(schema: str, body: Callable[..., Any]) -> None:
    """Make `torch.ops.torchguard.<name>`. Its body runs eagerly too, under `torch.compile(backend="eager")`."""
    _OURS.define(schema)
    _OURS.impl(schema.split("(")[0], body, "CompositeImplicitAutograd")


def define_whole(schema: str, body: Callable[..., Any], shapes: Callable[..., Any]) -> None:
    """Make `torch.ops.torchguard.<name>`, one call in compiled code too. `shapes` is its body for fake tensors."""
    name = schema.split("(")[0]
    _OURS.define(schema)
    _OURS.impl(name, body, "CompositeExplicitAutograd")
    operators.register_fake(f"torchguard::{name}", shapes, lib=_OURS)


def revision_of(folder: Path) -> int:
    """A checksum of the source an operator traces into, to be one of its arguments.

    Torch's caches of compiled graphs know an operator by its name and arguments. This keeps a later version of ours
    from being served graphs of an earlier one.
    """
    return zlib.crc32(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))))


def are_kept_whole() -> bool:
    """Whether to call operators of ours: while Dynamo traces.

    Not for an export, since an exported program should hold nothing but standard operators; nor under a `torch.func`
    transform, since `vmap` knows no rule for ours.
    """
    return torch.compiler.is_dynamo_compiling() and _are_of_use()


@constant_in_graphs
def _are_of_use() -> bool:
    return not is_exporting() and not in_transform()
