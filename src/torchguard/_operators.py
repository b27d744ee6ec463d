"""Operators of ours: calls that Dynamo keeps whole, and that AOTAutograd traces into, or nobody does.

What a body does while AOTAutograd runs it, Dynamo never sees. So it may hang notes on the tensors that are handed
around, and it is traced once where Dynamo would take long. What no backend sees either is not compiled, and runs as it
would in eager mode.
"""

import itertools
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import library as operators

from torchguard._torch.process import process_state, separate_copies_in_dynamo
from torchguard._torch.tracing import constant_in_graphs, in_transform, is_exporting

Operator = Callable[..., Any]

# Kept for the process, with the operators in it: a library that is collected takes its operators with it, and compiled
# functions go on calling them when this module is gone, or was reloaded.
_LIBRARIES: dict[str, operators.Library] = process_state("libraries", dict)
if _LIBRARIES:
    separate_copies_in_dynamo()


def define(schema: str, body: Callable[..., Any]) -> Operator:
    """Make an operator. Its body runs eagerly too, under `torch.compile(backend="eager")`."""
    library, name = _defined(schema)
    library.impl(name, body, "CompositeImplicitAutograd")
    return _operator(library, name)


def define_whole(schema: str, body: Callable[..., Any], shapes: Callable[..., Any]) -> Operator:
    """Make an operator that is one call in compiled code too. `shapes` is its body for fake tensors."""
    library, name = _defined(schema)
    library.impl(name, body, "CompositeExplicitAutograd")
    operators.register_fake(f"{library.ns}::{name}", shapes, lib=library)
    return _operator(library, name)


def free_namespace(name: str) -> str:
    """Where an operator can be defined under a name: "torchguard"; where that was done before, "torchguard_2", ...

    So it was when this package is imported a second time, or a module of it is reloaded. The operator that is there
    stays: what was compiled before calls it, and its body knows the classes of its own modules.
    """
    numbered = (f"torchguard_{number}" for number in itertools.count(2))
    namespaces = itertools.chain(["torchguard"], numbered)
    return next(one for one in namespaces if not hasattr(getattr(torch.ops, one), name))


def _defined(schema: str) -> tuple[operators.Library, str]:
    name = schema.split("(")[0]
    namespace = free_namespace(name)
    if namespace not in _LIBRARIES:
        _LIBRARIES[namespace] = operators.Library(namespace, "FRAGMENT")
    _LIBRARIES[namespace].define(schema)
    return _LIBRARIES[namespace], name


def _operator(library: operators.Library, name: str) -> Operator:
    return getattr(getattr(torch.ops, library.ns), name)


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
