"""What a closure can change: the modules, tensors, containers, objects and random generators that it reaches.

A training closure is `lambda b: F.cross_entropy(model(b["x"]), b["y"], reduction="none")`. It reaches the model through
a cell or a global, and often more: a teacher, a queue of keys, a hidden state that one step leaves to the next. All of
it is found by following references: cells, defaults, the globals that its code names, attributes, items, and the same
for functions that it calls. Code of torch, NumPy and the standard library is not entered.
"""

import collections
import functools
import random
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchguard._torch.modules import wrapped_function
from torchguard._torch.training import module_dicts

SIMPLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, np.generic, type)
_FOREIGN = ("torch", "numpy", "builtins", "torchguard", *sys.stdlib_module_names)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_CONTAINERS = (dict, list, set, collections.deque)
_MAX_OBJECTS = 50_000  # that are followed, the nearest first
_MAX_ITEMS = 4096  # of a container that is entered; a larger one is data, not state
_HOOKS = frozenset(
    name for name in vars(nn.Module()) if "hooks" in name or name in ("_parameters", "_buffers", "_modules")
)


@dataclass
class Reached:
    """What a closure reaches, each with a name for messages.

    Args:
        modules: every module.
        tensors: tensors that are neither parameters nor buffers of a module.
        states: mutable containers, the `__dict__` of objects, the cells of functions, and globals that code assigns.
        generators: generators of random numbers other than torch's, NumPy's and Python's own.
        globals: the globals that code reads, each as namespace, name and value.
        iterators: generators, files and other iterators, which cannot be rewound.
        is_complete: whether there was nothing more to follow.
    """

    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    states: list[tuple[str, Any]] = field(default_factory=list)
    generators: list[tuple[str, Any]] = field(default_factory=list)
    globals: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    iterators: list[str] = field(default_factory=list)
    is_complete: bool = True


class GlobalNames:
    """The globals that a function assigns, as one piece of state."""

    def __init__(self, namespace: dict[str, Any], names: tuple[str, ...]) -> None:
        self._namespace, self._names = namespace, names

    def read(self) -> dict[str, Any]:
        return {name: self._namespace[name] for name in self._names if name in self._namespace}

    def write(self, values: dict[str, Any]) -> None:
        for name in self._names:
            self._namespace.pop(name, None)
        self._namespace.update(values)


class Slots:
    """The attributes of an object whose class has `__slots__`."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        classes = type(owner).__mro__
        listed = [vars(one).get("__slots__", ()) for one in classes]
        self._names = [name for names in listed for name in ((names,) if isinstance(names, str) else names)]

    def read(self) -> dict[str, Any]:
        return {name: getattr(self._owner, name) for name in self._names if hasattr(self._owner, name)}

    def write(self, values: dict[str, Any]) -> None:
        for name in self._names:
            if name in values:
                object.__setattr__(self._owner, name, values[name])
            elif hasattr(self._owner, name):
                object.__delattr__(self._owner, name)


def reach(roots: dict[str, Any]) -> Reached:
    """Everything mutable that can be reached from these objects."""
    found = Reached()
    seen: set[int] = set()
    waiting = collections.deque(roots.items())
    while waiting and found.is_complete:
        name, value = waiting.popleft()
        if isinstance(value, SIMPLE) or id(value) in seen:
            continue
        seen.add(id(value))
        waiting += _enter(name, value, found)
        found.is_complete = len(seen) < _MAX_OBJECTS
    return found


def _enter(name: str, value: Any, found: Reached) -> list[tuple[str, Any]]:
    """Note a value, and list what it refers to."""
    if isinstance(value, Tensor):
        found.tensors.append((name, value))
        return []
    if isinstance(value, nn.Module):
        return _enter_module(name, value, found)
    if isinstance(value, _CONTAINERS):
        if len(value) > _MAX_ITEMS:
            return []
        found.states.append((name, value))
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [(f"{name}[{key!r}]", item) for key, item in items]
    if isinstance(value, (tuple, frozenset)):
        return [(f"{name}[{key}]", item) for key, item in enumerate(value)] if len(value) <= _MAX_ITEMS else []
    if isinstance(value, _GENERATORS):
        found.generators.append((name, value))
        return []
    if isinstance(value, types.MethodType):
        return [(name, value.__self__), (name, value.__func__)]
    if isinstance(value, functools.partial):
        return [(name, value.func), (name, value.args), (name, value.keywords)]
    if isinstance(value, types.FunctionType):
        return [*_enter_function(name, value, found)]
    if isinstance(value, types.CellType):
        found.states.append((name, value))
        return [(name, value.cell_contents)] if is_filled(value) else []
    if _is_foreign(type(value).__module__) and not isinstance(value, types.SimpleNamespace):
        if isinstance(value, Iterator):
            found.iterators.append(name)
        return []
    if hasattr(value, "__dict__"):
        found.states.append((name, value.__dict__))
        return [(f"{name}.{key}", item) for key, item in vars(value).items()]
    slots = Slots(value)
    found.states.append((name, slots))
    return [(f"{name}.{key}", item) for key, item in slots.read().items()]


def _enter_module(name: str, module: nn.Module, found: Reached) -> list[tuple[str, Any]]:
    found.modules.append((name, module))
    if isinstance(module, nn.parallel.DistributedDataParallel):  # its own attributes belong to its reducer
        return [(f"{name}.module", module.module)]
    own = [(f"{name}.{key}", item) for key, item in vars(module).items() if key not in _HOOKS]
    return own + [(f"{name}.{key}", child) for key, child in module_dicts(module)[2].items()]


def _enter_function(name: str, function: types.FunctionType, found: Reached) -> Iterator[tuple[str, Any]]:
    if (wrapped := wrapped_function(function)) is not None:
        yield name, wrapped
    if _is_foreign(function.__module__ or ""):
        return
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield variable, cell
    yield from (("a default", value) for value in function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()
    names = _names_of(function.__code__)
    namespace = function.__globals__
    if assigned := tuple(sorted(names & _assigned_globals(function.__code__))):
        found.states.append((", ".join(assigned), GlobalNames(namespace, assigned)))
    for variable in names & namespace.keys():
        value = namespace[variable]
        found.globals.append((namespace, variable, value))
        if not isinstance(value, types.ModuleType):
            yield variable, value
        elif not _is_foreign(value.__name__):
            members = vars(value)
            for member in names & members.keys():
                found.globals.append((members, member, members[member]))
                yield f"{variable}.{member}", members[member]


@functools.lru_cache(maxsize=4096)
def _names_of(code: types.CodeType) -> frozenset[str]:
    """The names of globals and attributes in code and in the functions that it defines."""
    inner = (_names_of(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(code.co_names).union(*inner)


@functools.lru_cache(maxsize=4096)
def _assigned_globals(code: types.CodeType) -> frozenset[str]:
    import dis

    own = {one.argval for one in dis.get_instructions(code) if one.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")}
    inner = (_assigned_globals(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(own).union(*inner)


@functools.lru_cache(maxsize=4096)
def _is_foreign(module: str) -> bool:
    return module.split(".")[0] in _FOREIGN


def is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (an empty cell raises)
    except ValueError:
        return False
    return True
