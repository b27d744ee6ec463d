"""torchguard's custom operators: calls that Dynamo records as one node instead of tracing into them.

Dynamo traces Python slowly, cannot trace attributes that are set on tensors, and guards on everything it reads. The
body of an operator is invisible to it. There are two kinds: AOTAutograd traces into the body of the first (`define`),
so that Inductor fuses what it does; the second (`define_opaque`) stays one opaque call in compiled code and runs as in
eager mode.
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

# Stored for the process: a library that is collected takes its operators with it, and compiled functions go on calling
# them after this module was reloaded or dropped.
_LIBRARIES: dict[str, operators.Library] = process_state("libraries", dict)
if _LIBRARIES:
    separate_copies_in_dynamo()


def define(schema: str, body: Callable[..., Any]) -> Operator:
    """Define an operator whose body AOTAutograd traces; with `torch.compile(backend="eager")` it runs eagerly."""
    library, name = _defined(schema)
    library.impl(name, body, "CompositeImplicitAutograd")
    return _operator(library, name)


def define_opaque(schema: str, body: Callable[..., Any], shapes: Callable[..., Any]) -> Operator:
    """Define an operator that is one call in compiled code too. `shapes` is its body for fake tensors."""
    library, name = _defined(schema)
    library.impl(name, body, "CompositeExplicitAutograd")
    operators.register_fake(f"{library.ns}::{name}", shapes, lib=library)
    return _operator(library, name)


def free_namespace(name: str) -> str:
    """The first of the namespaces "torchguard", "torchguard_2", ... that has no operator of this name.

    A second import of this package, or a reload of a module, defines its operators again. The earlier operator stays:
    functions compiled before call it, and its body uses the classes of its own copy.
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


def source_checksum(folder: Path, files: str = "*.py") -> int:
    """A checksum of the source that an operator traces into, to be passed as one of its arguments.

    torch's caches of compiled graphs identify an operator by its name and arguments. The checksum keeps a later version
    of torchguard from being served graphs of an earlier one.
    """
    return zlib.crc32(b"".join(path.read_bytes() for path in sorted(folder.glob(files))))


def use_operators() -> bool:
    """Whether to call torchguard's operators instead of their bodies: while Dynamo traces.

    Not for an export, since an exported program should hold standard operators only; nor under a `torch.func`
    transform, since `vmap` has no rule for them.
    """
    return torch.compiler.is_dynamo_compiling() and _are_usable()


@constant_in_graphs
def _are_usable() -> bool:
    return not is_exporting() and not in_transform()
