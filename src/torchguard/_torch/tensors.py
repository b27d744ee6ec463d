"""Tensors: versions, storages, tangents, pytrees of tensors, and the modes of a thread.

Everything here but `any_autocast` is required: where torch lacks a name, importing this module or the call fails. The
names are the same in torch 2.11 to 2.15.
"""

import contextlib
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

# The public context manager takes 1.5 us, two calls of this 0.3; a whole call of a small compiled function takes 20.
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
# Whether autocast is on for any device. The public function answers for one device, and would be called for each of
# them in every call. Degraded where torch lacks the private one: only CUDA's autocast is seen.
any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", torch.is_autocast_enabled)
grad_mode = torch.is_grad_enabled
Versions = list[tuple[Tensor, int]]
_version = operator.attrgetter("_version")
Structure = pytree.TreeSpec


def mutation_count(tensor: Tensor) -> int:
    """How often a tensor was changed in place: tells whether a note about its values is still valid.

    `_version` has no public name. Inference tensors have none: they count as never changed, and get no notes.
    """
    return 0 if tensor.is_inference() else tensor._version


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """How often each of some tensors was changed in place (`_version`)."""
    return [*map(_version, tensors)]


def versions_of(tensors: Sequence[Tensor]) -> Versions:
    """Tensors with how often each was changed in place (`_version`)."""
    return [(tensor, tensor._version) for tensor in tensors]


def is_unchanged(versions: Versions) -> bool:
    """Whether no tensor was changed in place since `versions_of`."""
    for tensor, before in versions:  # noqa: SIM110 (a generator takes twice as long, in every call)
        if tensor._version != before:
            return False
    return True


def has_tangent(values: Sequence[Any]) -> bool:
    """Whether forward mode is on and a tensor carries a tangent. No public way to ask is as fast as the level."""
    if forward_ad._current_level < 0:
        return False
    return any(isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None for value in values)


def copied(tensor: Tensor) -> Tensor:
    """A copy with the same strides, also overlapping ones."""
    with torch.inference_mode(False), torch.no_grad():
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        storage = tensor.untyped_storage().clone()
        return made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Switch autocast off for the CPU and CUDA."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def storage_of(tensor: Tensor) -> int | None:
    """The identity of a tensor's storage; fake tensors have no address, but `_cdata`. None for sparse tensors."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def storage_bytes(tensor: Tensor) -> int | torch.SymInt:
    return tensor.untyped_storage().nbytes()


def map_nested(tensor: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A nested tensor whose parts a function, which keeps their shapes, was applied to; itself if it changed none."""
    nested: Any = tensor
    if tensor.layout == torch.jagged:
        before = nested.values()
        values = function(before)
        if values is before:
            return tensor
        # The same offsets: sizes of two jagged tensors are equal only if these are.
        return torch.nested.nested_tensor_from_jagged(values, nested.offsets(), nested.lengths())
    parts = tensor.unbind()
    new = [function(one) for one in parts]
    return tensor if all(map(operator.is_, new, parts)) else torch.nested.as_nested_tensor(new)


def is_distributed(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor: who uses one has imported its module, which takes long."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def map_local(tensor: Any, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A DTensor to whose part in this process a function, which keeps the shape, was applied."""
    made = function(tensor.to_local())
    how = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
    return type(tensor).from_local(made, tensor.device_mesh, tensor.placements, **how)


# Pytrees. The public `torch.utils.pytree` came after torch 2.11.


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """The leaves of a pytree, and its structure."""
    return pytree.tree_flatten(value)


def unflatten(leaves: Sequence[Any], structure: Structure) -> Any:
    return pytree.tree_unflatten(leaves, structure)


def detached(value: Any) -> Any:
    """A pytree with its tensors detached."""
    return pytree.tree_map_only(Tensor, Tensor.detach, value)


def leaf_paths(value: Any) -> list[str]:
    """The path of each leaf of a pytree, as it would be written in code: `[0]['weight']`."""
    return [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(value)[0]]


def register_tuple(kind: type) -> None:
    """Have torch's pytrees, which DDP and FSDP use on what a model returns, take a subclass of tuple for a container.

    Required: without it they would not find the tensors that the model returned.
    """
    pytree.register_pytree_node(kind, lambda value: ([*value], None), lambda children, _: kind(children))
