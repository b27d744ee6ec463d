"""Operations as they are dispatched: a mode that sees each of them, what an operation writes to, and storages.

`TorchDispatchMode` and operator schemas are how torch's own tools see ATen operations, and have no public name. All of
this is required, and the same in torch 2.11 to 2.15.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

__all__ = ["DispatchMode", "StorageWeakRef"]


def short_name(op: Any) -> str:
    """The name of an ATen operation without namespace and overload: `add_`. Others keep their namespace."""
    namespace, name = op._schema.name.split("::")
    return name if namespace == "aten" else f"{namespace}::{name}"


def overload_of(op: Any) -> str:
    return op._schema.overload_name


def named_arguments(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names of the schema, defaults included."""
    named = {}
    for i, argument in enumerate(op._schema.arguments):
        if i < len(args):
            named[argument.name] = args[i]
        elif argument.name in kwargs:
            named[argument.name] = kwargs[argument.name]
        else:
            named[argument.name] = argument.default_value if argument.has_default_value() else None
    return named


def positional_names(op: Any) -> list[str]:
    return [argument.name for argument in op._schema.arguments if not argument.kwarg_only]


# Operations whose schemas do not say what they write to.
_WRITTEN = {"fsdp::all_gather_copy_in": ["all_gather_output"]}


def written_arguments(op: Any) -> list[str]:
    """The names of the arguments that an operation writes to."""
    return _WRITTEN.get(op._schema.name) or [
        a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write
    ]


def makes_view(op: Any) -> bool:
    return op.is_view


@functools.cache
def is_composite(op: Any) -> bool:
    """Whether an operation is made of others for every device. Some have no entry in the dispatcher: `sym_size`."""
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    except RuntimeError:
        return False


def is_higher_order(op: Any) -> bool:
    """Whether an operator takes functions, such as that of `torch.cond`. It has no schema."""
    return isinstance(op, torch._ops.HigherOrderOperator)


def is_query(op: Any) -> bool:
    """Whether an operation only asks for a property of a fake tensor, such as its device."""
    return op.namespace == "prim"


def has_tag(op: Any, tag: torch.Tag) -> bool:
    return tag in op.tags


def weak_storage(tensor: Tensor) -> StorageWeakRef:
    """A reference to a tensor's storage that does not keep its memory. While it exists, its number is not reused."""
    return StorageWeakRef(tensor.untyped_storage())
