"""Values that hold tensors: tuples, lists, mappings and dataclasses, taken apart and put together again."""

import copy
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

# An index, a key, or the name of an attribute.
Step = Any


def parts_of(value: Any) -> list[tuple[Step, Any]]:
    """The parts of a value that may hold tensors, each with the step that leads to it; none for anything else."""
    if value is None or isinstance(value, (Tensor, str, int, float, FunctionType)):
        return []
    if isinstance(value, Mapping):
        return [*value.items()]
    if isinstance(value, (tuple, list)):
        return [*zip(getattr(value, "_fields", range(len(value))), value, strict=True)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(name, getattr(value, name, None)) for name in value.__dataclass_fields__]
    return []


def part_at(value: Any, step: Step) -> Any:
    """The part of a value one step away, None if there is no such part."""
    if isinstance(value, Mapping):
        return value.get(step)
    if isinstance(step, int):
        return value[step] if isinstance(value, (tuple, list)) and step < len(value) else None
    return getattr(value, str(step), None)


def with_parts(value: Any, new: Mapping[Step, Any]) -> Any:
    """A copy of a value with other parts at some steps; it keeps its kind and its other parts."""
    if not new:
        return value
    return _traced_copy(value, new) if is_compiling() else _copy(value, new)


def mapped(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """A value with `fn` applied to every tensor in it."""
    if isinstance(value, Tensor):
        return fn(value)
    if type(value) is tuple:  # as most are: Dynamo takes long over what follows
        items = []
        for part in value:
            items.append(mapped(part, fn))  # noqa: PERF401
        return tuple(items)
    return with_parts(value, {step: mapped(part, fn) for step, part in parts_of(value) if _holds_a_tensor(part)})


def tensors_in(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[tuple[Step, ...], Tensor]]:
    """Every tensor in a value, with the steps that lead to it."""
    if isinstance(value, Tensor):
        return [((), value)]
    found = []
    # A list, not a generator: Dynamo takes long over these. And it cannot compare tuples.
    if is_compiling() or not any(value is other for other in above):
        for step, part in parts_of(value):
            found += [((step, *steps), tensor) for steps, tensor in tensors_in(part, (*above, value))]
    return found


def _holds_a_tensor(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    for _, part in parts_of(value):  # noqa: SIM110 (a loop is faster to trace than a generator)
        if _holds_a_tensor(part):
            return True
    return False


def _copy(value: Any, new: Mapping[Step, Any]) -> Any:
    """No constructor is called: it may want other arguments, or do more than construct."""
    if isinstance(value, tuple):
        items = _items(value, new)
        return tuple.__new__(type(value), items) if hasattr(value, "_fields") else type(value)(items)
    copied = copy.copy(value)
    for step, part in new.items():
        if isinstance(value, (Mapping, list)):
            copied[step] = part
        else:
            object.__setattr__(copied, step, part)
    return copied


def _traced_copy(value: Any, new: Mapping[Step, Any]) -> Any:
    """The same by what Dynamo of torch 2.11 can trace."""
    if isinstance(value, (tuple, list)):
        items = _items(value, new)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value) is dict:
        return {**value, **new}
    if type(value) in (OrderedDict, defaultdict):
        copied = value.copy()
        for step, part in new.items():
            copied[step] = part
        return copied
    return dataclasses.replace(value, **new)


def _items(value: Any, new: Mapping[Step, Any]) -> list[Any]:
    return [new.get(step, part) for step, part in parts_of(value)]
