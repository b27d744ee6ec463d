"""Pytrees: values that hold tensors in tuples, lists, mappings and dataclasses.

torchguard walks pytrees in four places, because one walker cannot serve them all:

- `children`, `map_tensors` and `tensors_in` below take whatever a model is given or returns. Dynamo traces them, so
  they are plain loops and list comprehensions. They enter every mapping and dataclass, also those that nobody
  registered with torch; with `objects`, for what a model returns, also plain objects.
- `PytreeSpec` below describes the arguments and results of a compiled function. It uses torch's own pytrees, which
  compare two structures exactly and know the classes that a user registered. It raises for leaves that are no tensors.
- `typing/_containers.py` walks an annotation and a value side by side: the annotation decides what is entered.
- `control._select` walks two values side by side in traced code, and raises where they differ.
"""

import copy
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from torchguard._torch.tensors import Structure, flatten, leaf_paths, unflatten
from torchguard.exceptions import CompileError, LeafTypeError

# An index, a key, or the name of an attribute.
Key = Any


# How many plain objects, one inside the other, are entered in what a model returns. It ends cycles as well.
OBJECTS = 2


def children(value: Any, objects: int = 0) -> list[tuple[Key, Any]]:
    """The children of a container that may hold tensors, each with its key; empty for anything else.

    Args:
        objects: how many plain objects to enter, one inside the other.
    """
    if value is None or isinstance(value, (Tensor, str, int, float, FunctionType)):
        return []
    if isinstance(value, Mapping):
        return [*value.items()]
    if isinstance(value, (tuple, list)):
        return [*zip(getattr(value, "_fields", range(len(value))), value, strict=True)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(name, getattr(value, name, None)) for name in value.__dataclass_fields__]
    return _attributes(value) if objects and _is_plain_object(value) else []


def _is_plain_object(value: Any) -> bool:
    """Whether an object is nothing but its attributes.

    Not if it can be called, as functions and modules can, nor if it has a method `update`: the caches of transformers
    and the metrics of torchmetrics are state, which a copy would separate from its owner.
    """
    return not isinstance(value, type) and not callable(value) and not hasattr(value, "update")


def _attributes(value: Any) -> list[tuple[Key, Any]]:
    """The attributes of an object: those in its `__dict__`, or in the slots of its classes."""
    if hasattr(value, "__dict__"):
        return [*value.__dict__.items()]
    names = [name for kind in type(value).__mro__ for name in _slots(kind)]
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


def _slots(kind: type) -> list[str]:
    slots = kind.__dict__.get("__slots__", ())
    return [slots] if isinstance(slots, str) else [*slots]


def _inner(value: Any, objects: int) -> int:
    """How many plain objects to enter in the children of a value."""
    if value is None:  # Dynamo of torch 2.11 cannot tell whether it is a dataclass
        return objects
    if not objects or isinstance(value, (Mapping, tuple, list)) or dataclasses.is_dataclass(value):
        return objects
    return objects - 1


def child_at(value: Any, key: Key) -> Any:
    """The child of a container under a key; None if there is no such child."""
    if isinstance(value, Mapping):
        return value.get(key)
    if isinstance(key, int):
        return value[key] if isinstance(value, (tuple, list)) and key < len(value) else None
    return getattr(value, str(key), None)


def replace_children(value: Any, new: Mapping[Key, Any]) -> Any:
    """A copy of a container, of the same class, with other children under some keys.

    Raises:
        LeafTypeError: a plain object cannot be copied.
    """
    if not new:
        return value
    if not isinstance(value, (Mapping, tuple, list)) and not dataclasses.is_dataclass(value):
        return _copy_object(value, new)
    return _traced_copy(value, new) if is_compiling() else _copy(value, new)


def map_tensors(value: Any, fn: Callable[[Tensor], Tensor], objects: int = 0) -> Any:
    """Apply `fn` to every tensor in a pytree; `objects` as in `children`."""
    if isinstance(value, Tensor):
        return fn(value)
    if type(value) is tuple:  # the most frequent container: Dynamo is slow to trace the general case below
        items = []
        for child in value:
            items.append(map_tensors(child, fn, objects))  # noqa: PERF401
        return tuple(items)
    inner = _inner(value, objects)
    return replace_children(
        value,
        {key: map_tensors(child, fn, inner) for key, child in children(value, objects) if _holds_tensor(child, inner)},
    )


def tensors_in(value: Any, ancestors: tuple[Any, ...] = (), objects: int = 0) -> list[tuple[tuple[Key, ...], Tensor]]:
    """Every tensor in a pytree, with the keys that lead to it. A container that holds itself is entered once."""
    if isinstance(value, Tensor):
        return [((), value)]
    found = []
    # A list, because Dynamo is slow to trace generators. Dynamo cannot compare the ancestors, so it skips that.
    if is_compiling() or not any(value is ancestor for ancestor in ancestors):
        inner = _inner(value, objects)
        for key, child in children(value, objects):
            found += [((key, *keys), tensor) for keys, tensor in tensors_in(child, (*ancestors, value), inner)]
    return found


def _holds_tensor(value: Any, objects: int = 0) -> bool:
    if isinstance(value, Tensor):
        return True
    inner = _inner(value, objects)
    for _, child in children(value, objects):  # noqa: SIM110 (a loop is faster to trace than a generator)
        if _holds_tensor(child, inner):
            return True
    return False


def _copy(value: Any, new: Mapping[Key, Any]) -> Any:
    """Copy without calling the constructor, which may take other arguments or have side effects."""
    if isinstance(value, tuple):
        items = _items(value, new)
        return tuple.__new__(type(value), items) if hasattr(value, "_fields") else type(value)(items)
    copied = copy.copy(value)
    for key, child in new.items():
        if isinstance(value, (Mapping, list)):
            copied[key] = child
        else:
            object.__setattr__(copied, key, child)
    return copied


def _copy_object(value: Any, new: Mapping[Key, Any]) -> Any:
    """A copy of a plain object, attribute by attribute: no code of its class runs."""
    kind = type(value)
    if not is_compiling() and kind.__new__ is not object.__new__:
        raise LeafTypeError(
            f"a {kind.__name__} cannot be copied with other tensors: its class has a __new__ of its own. Return a "
            "tuple, a dict or a dataclass."
        )
    copied = object.__new__(kind)
    for name, child in _attributes(value):
        object.__setattr__(copied, name, new.get(name, child))
    return copied


def _traced_copy(value: Any, new: Mapping[Key, Any]) -> Any:
    """The same with operations that Dynamo of torch 2.11 can trace."""
    if isinstance(value, (tuple, list)):
        items = _items(value, new)
        # Dynamo of torch 2.11 and named results of torch, such as that of `sort`: it says that they have `_fields`.
        is_named = hasattr(value, "_fields") and type(value).__module__ != "torch.return_types"
        return type(value)(*items) if is_named else type(value)(items)
    if type(value) is dict:
        return {**value, **new}
    if type(value) in (OrderedDict, defaultdict):
        copied = value.copy()
        for key, child in new.items():
            copied[key] = child
        return copied
    return dataclasses.replace(value, **new)


def _items(value: Any, new: Mapping[Key, Any]) -> list[Any]:
    return [new.get(key, child) for key, child in children(value)]


@dataclasses.dataclass(frozen=True)
class PytreeSpec:
    """The structure of a pytree whose leaves are tensors or None.

    Args:
        structure: torch's description of the containers.
        positions: which of the leaves are tensors; the others are None.
        count: the number of leaves.
        is_tensor: whether the whole pytree is one tensor.
        is_tuple: whether it is a flat tuple of tensors.
        text: the structure as messages print it.
    """

    structure: Structure
    positions: tuple[int, ...]
    count: int
    is_tensor: bool
    is_tuple: bool
    text: str = dataclasses.field(compare=False)

    def flatten(self, value: Any, what: str) -> list[Any]:
        """The leaves of a value of this structure, without those that are None here.

        Raises:
            LeafTypeError: the value has another structure.
        """
        leaves, structure = flatten(value)
        if structure != self.structure:
            raise LeafTypeError(f"{what}: expected the structure {self.text}, got {_describe(value)}.")
        return [leaves[position] for position in self.positions]

    def unflatten(self, tensors: Sequence[Any]) -> Any:
        """A pytree of this structure that holds these tensors."""
        if self.is_tensor:
            return tensors[0]
        if self.is_tuple:
            return tuple(tensors)
        leaves: list[Any] = [None] * self.count
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        return unflatten(leaves, self.structure)


def flatten_tensors(value: Any, what: str, advice: str) -> tuple[PytreeSpec, list[Tensor]]:
    """The structure of a pytree, and its tensors.

    Raises:
        CompileError: a leaf is neither a tensor nor None.
    """
    leaves, structure = flatten(value)
    for leaf, path in zip(leaves, leaf_paths(value), strict=True):
        if leaf is not None and not isinstance(leaf, Tensor):
            raise CompileError(f"{what}{path}: expected a tensor, got {type(leaf).__name__}. {advice}".rstrip())
    positions = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    is_tuple = type(value) is tuple and all(isinstance(child, Tensor) for child in value)
    spec = PytreeSpec(structure, positions, len(leaves), isinstance(value, Tensor), is_tuple, _describe(value))
    return spec, [leaves[position] for position in positions]


def _describe(value: Any) -> str:
    """Containers with `*` for each tensor: `(*, {'mask': *})`."""
    text = _text(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _text(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        inner = ", ".join(map(_text, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_text(child)}" for key, child in value.items()) + "}"
    return "*" if isinstance(value, Tensor) else type(value).__name__
