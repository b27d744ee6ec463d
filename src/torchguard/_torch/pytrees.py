"""Nested containers."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

Structure = pytree.TreeSpec


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """The leaves of nested containers, and how they are nested; the public `torch.utils.pytree` came after 2.11."""
    return pytree.tree_flatten(value)


def unflatten(leaves: Sequence[Any], structure: Structure) -> Any:
    return pytree.tree_unflatten(leaves, structure)


def detached(value: Any) -> Any:
    """Nested containers with their tensors detached."""
    return pytree.tree_map_only(Tensor, Tensor.detach, value)


def paths(value: Any) -> list[str]:
    """Where each leaf of a value lies, as it would be written: `[0]['weight']`."""
    return [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(value)[0]]
