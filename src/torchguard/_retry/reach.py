"""What a closure can change: the modules, tensors, containers, objects and random generators that it reaches.

A training closure is `lambda b: F.cross_entropy(model(b["x"]), b["y"], reduction="none")`. It reaches the model through
a cell or a global, and often more: a teacher, a queue of keys, a hidden state that one step leaves to the next. All of
it is found by following references: cells, defaults, the globals that its code names, attributes, items, and the same
for functions that it calls and for the methods of the user's own classes. Code of torch, NumPy and the standard library
is not entered. Functions and classes of installed packages are not searched for globals, and of their objects, three
are followed one behind the other: a trainer leads to everything.
"""

import argparse
import array
import collections
import contextvars
import ctypes
import functools
import io
import multiprocessing.sharedctypes
import queue
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchguard._retry.hooks import Observer
from torchguard._retry.names import ClassNames, GlobalNames, Length, ScriptAttributes, Slots, Variable, slots_of
from torchguard._retry.packages import Followed, is_foreign, is_own, is_private
from torchguard._torch.modules import wrapped_function
from torchguard._torch.training import (
    active_modes,
    functions_of_operators,
    hooks_of,
    hooks_of_all_modules,
    hooks_of_tensor,
    module_dicts,
)
from torchguard.exceptions import RetryError

SIMPLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, np.generic)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_CONTAINERS = (dict, list, set, collections.deque)
_PLAIN = (  # of torch and the standard library, entered as a user's
    *(types.SimpleNamespace, argparse.Namespace, collections.UserDict, collections.UserList, collections.ChainMap),
    *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet, queue.Queue, threading.local),
    *(torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler, torch.quasirandom.SobolEngine),
    *(torch.distributions.Distribution, torch.distributions.Transform),
    *(multiprocessing.sharedctypes.SynchronizedBase, Followed),
)
_BUFFERS = (np.ndarray, array.array, bytearray)
MEMORY = (type(ctypes.c_int()).__mro__[1], ctypes.Structure, ctypes.Union, ctypes.Array)
_HELD: dict[type, Callable[[Any], Iterable[Any]]] = {  # objects that lead to others, and have no state of their own
    types.MethodType: lambda one: (one.__self__, one.__func__),
    functools.partial: lambda one: (one.func, one.args, one.keywords),
    functools.partialmethod: lambda one: (one.func, one.args, one.keywords),
    functools.cached_property: lambda one: (one.func,),
    functools.singledispatchmethod: lambda one: (one.dispatcher,),
    type(functools.lru_cache(lambda: None)): lambda one: (one.__wrapped__,),
    property: lambda one: (one.fget, one.fset, one.fdel),
    weakref.ref: lambda one: (one(),),
    memoryview: lambda one: (one.obj,),
}
_HOLDERS = (tuple, frozenset, *_HELD, *_BUFFERS, *_CONTAINERS, *_GENERATORS)  # a user's subclass may have attributes
_ENTERED = (Tensor, nn.Module, type, types.FunctionType, types.CellType, contextvars.ContextVar, *_HOLDERS)
_CONSUMED = (Iterator, queue.SimpleQueue)
_MAX_OBJECTS = 50_000  # that are followed, the nearest first
_MAX_DEPTH = 3  # objects of installed packages that are followed one behind the other
_MAX_ITEMS = 4096  # of a container that is entered; a larger one is data, not state
_MAX_ARRAYS = 2**22  # bytes of all arrays that are state, the nearest first; more are data
_HOOKS = frozenset(
    name for name in vars(nn.Module()) if "hooks" in name or name in ("_parameters", "_buffers", "_modules")
)


@dataclass
class Reached:
    """What a closure reaches, each with a name for messages.

    Args:
        modules: every module.
        tensors: tensors that are neither parameters nor buffers of a module.
        states: mutable containers, the `__dict__` of objects, arrays, the cells of functions, and `Names`.
        unsaved: what is too large or of a kind that cannot be saved. A closure must not change it.
        generators: generators of random numbers other than torch's, NumPy's and Python's own.
        iterators: those that a function names or a module has, and queues, which cannot be put back.
        hooks: of modules and parameters. What those reach that take part in what is computed comes last.
        of_hooks: the number of the first of `states` that only hooks reach.
        globals: the globals that code reads, each as namespace, name and value.
        is_complete: whether there was nothing more to follow.
        array_bytes: of the arrays in `states`.
    """

    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    states: list[tuple[str, Any]] = field(default_factory=list)
    unsaved: list[tuple[str, Any]] = field(default_factory=list)
    generators: list[tuple[str, Any]] = field(default_factory=list)
    iterators: list[str] = field(default_factory=list)
    hooks: list[tuple[str, Any]] = field(default_factory=list)
    of_hooks: int = 0
    globals: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    is_complete: bool = True
    array_bytes: int = 0


def reach(roots: dict[str, Any], stepped: Iterable[torch.optim.Optimizer] = ()) -> Reached:
    """Everything mutable that can be reached from these objects.

    Args:
        roots: the models and the closure.
        stepped: optimizers that step after the closure. Of these, only the options are followed.
    """
    found = Reached()
    seen = {id(optimizer) for optimizer in stepped}
    waiting = collections.deque((name, value, 0) for name, value in roots.items())
    waiting += [("an operator", one, 0) for one in functions_of_operators() if is_own(one.__module__ or "")]
    waiting += [("a mode", one, 0) for one in active_modes()]
    for group in (group for optimizer in stepped for group in optimizer.param_groups):
        found.states.append(("the options of the optimizer", group))
        found.hooks += [("a hook of a parameter", hook) for one in group["params"] for hook in hooks_of_tensor(one)]
        waiting += [(key, value, 0) for key, value in group.items() if key != "params"]
    _follow(waiting, seen, found)
    found.of_hooks = len(found.states)
    found.hooks += [("a hook of all modules", hook) for hook in hooks_of_all_modules()]
    observers: dict[int, Observer] = {}
    is_reached = functools.partial(_is_reached, seen, found)
    while found.is_complete:  # hooks may reach modules with hooks, and what other hooks change
        observers |= {id(hook): Observer(hook) for _, hook in found.hooks if id(hook) not in observers}
        assigned = {place for observer in observers.values() for place in observer.assigned}
        others = [(name, hook) for name, hook in found.hooks if id(hook) not in seen]
        taking_part = [(name, hook) for name, hook in others if observers[id(hook)].takes_part(is_reached, assigned)]
        if not taking_part:
            break
        _follow(collections.deque((name, hook, 0) for name, hook in taking_part), seen, found)
        seen |= {id(hook) for _, hook in taking_part}
    return found


def _is_reached(seen: set[int], found: Reached, value: Any) -> bool:
    if not isinstance(value, GlobalNames):
        return id(value) in seen
    assigned = [state for _, state in found.states if isinstance(state, GlobalNames)]
    names = {*value.names}
    return any(one.namespace is value.namespace and names & {*one.names} for one in assigned) or any(
        namespace is value.namespace and name in names for namespace, name, _ in found.globals
    )


def _follow(waiting: collections.deque[tuple[str, Any, int]], seen: set[int], found: Reached) -> None:
    while waiting and found.is_complete:
        name, value, depth = waiting.popleft()
        if isinstance(value, SIMPLE) or id(value) in seen:
            continue
        if _is_of_package(value):
            depth += 1
            if depth > _MAX_DEPTH:
                continue
        seen.add(id(value))
        waiting += [(child, item, depth) for child, item in _enter(name, value, found)]
        found.is_complete = len(seen) < _MAX_OBJECTS


def _is_of_package(value: Any) -> bool:
    """Whether this is a plain object of an installed package: a trainer's, say, which leads to all that there is."""
    return not isinstance(value, _ENTERED) and not is_own(type(value).__module__)


def _enter(name: str, value: Any, found: Reached) -> list[tuple[str, Any]]:
    """Note a value, and list what it refers to."""
    if isinstance(value, _HOLDERS) and is_own(type(value).__module__):
        return [*_enter_kind(name, value, found), *_enter_attributes(name, value, found)]
    return _enter_kind(name, value, found)


def _enter_kind(name: str, value: Any, found: Reached) -> list[tuple[str, Any]]:
    if isinstance(value, Tensor):
        found.tensors.append((name, value))
        found.hooks += [(f"a hook of {name}", hook) for hook in hooks_of_tensor(value)]
        return []
    if isinstance(value, nn.Module):
        return [(type(value).__name__, type(value)), *_enter_module(name, value, found)]
    if isinstance(value, type):
        return _enter_class(value, found) if is_own(value.__module__) else []
    if isinstance(value, _BUFFERS):
        _enter_array(name, value, found)
        return []
    if isinstance(value, _CONTAINERS):
        if len(value) > _MAX_ITEMS:
            found.states += [(name, Length(value))] if isinstance(value, (dict, list)) else []
            found.unsaved.append((name, value))
            return []
        found.states.append((name, value))
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [(f"{name}[{_text(key)}]", item) for key, item in items]
    if isinstance(value, (tuple, frozenset)):
        return [(f"{name}[{key}]", item) for key, item in enumerate(value)] if len(value) <= _MAX_ITEMS else []
    if isinstance(value, random.SystemRandom):
        raise RetryError(f"Retry: {name} draws its random numbers from the system, which cannot be put back.")
    if isinstance(value, _GENERATORS):
        found.generators.append((name, value))
        return []
    if isinstance(value, contextvars.ContextVar):
        found.states.append((name, Variable(value)))
        return []
    if isinstance(value, tuple(_HELD)):
        held_by = next(held for kind, held in _HELD.items() if isinstance(value, kind))
        return [(name, one) for one in held_by(value)]
    if isinstance(value, MEMORY):
        found.unsaved.append((name, value))
        return []
    if isinstance(value, types.FunctionType):
        return [*_enter_function(name, value, found)]
    if isinstance(value, types.CellType):
        found.states.append((name, value))
        return [(name, value.cell_contents)] if is_filled(value) else []
    if type(value).__name__ == "AccumulateGrad":  # which nobody keeps but for its hooks, which torch does not list
        raise RetryError(
            f"Retry: {name} is the node of autograd that accumulates a parameter's gradient. Hooks on it cannot be "
            "seen, so what they change cannot be put back. Register them on the parameter, and do not keep the node."
        )
    if isinstance(value, (*_CONSUMED, np.random.SeedSequence)):
        found.unsaved.append((name, value))
    if is_foreign(type(value).__module__) and not isinstance(value, _PLAIN):
        if hasattr(value, "__dict__") and not is_private(type(value).__module__):
            found.unsaved.append((name, value))
        return []
    return _enter_attributes(name, value, found)


def _text(key: Any) -> str:
    """A key as messages show it: the repr of a tensor, such as an optimizer's parameter, reads all its elements."""
    return repr(key) if isinstance(key, (str, int, float)) else type(key).__name__


def _enter_attributes(name: str, value: Any, found: Reached) -> list[tuple[str, Any]]:
    held: dict[str, Any] = {}
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict) and attributes is not value:
        found.states.append((name, attributes))
        held |= attributes
    if slots_of(type(value)):
        slots = Slots(value)
        found.states.append((name, slots))
        held |= slots.read()
    return [(type(value).__name__, type(value)), *((f"{name}.{key}", item) for key, item in held.items())]


def _enter_array(name: str, value: Any, found: Reached) -> None:
    size = memoryview(value).nbytes if isinstance(value, (array.array, bytearray)) else value.nbytes
    is_object = isinstance(value, np.ndarray) and value.dtype.hasobject
    if is_object or found.array_bytes + size > _MAX_ARRAYS:
        found.unsaved.append((name, value))
    elif not isinstance(value, np.ndarray) or value.flags.writeable:
        found.array_bytes += size
        found.states.append((name, value))


def _enter_class(cls: type, found: Reached) -> list[tuple[str, Any]]:
    """The attributes of one of the user's own classes, its methods, and the classes that it is made from."""
    found.states.append((cls.__name__, ClassNames(cls)))
    own = [(key, getattr(item, "__func__", item)) for key, item in vars(cls).items()]
    own = [(key, item) for key, item in own if not key.startswith("__") or isinstance(item, types.FunctionType)]
    made_from = (*cls.__bases__, type(cls))
    return [(f"{cls.__name__}.{key}", item) for key, item in own] + [(one.__name__, one) for one in made_from]


def _enter_module(name: str, module: nn.Module, found: Reached) -> list[tuple[str, Any]]:
    found.modules.append((name, module))
    if isinstance(module, torch.jit.ScriptModule):
        state = ScriptAttributes(module)
        found.states += [(name, state)] if state.names else []
        for key, item in state.read().items():
            if type(item).__name__ == "ScriptObject":
                raise RetryError(f"Retry: {name}.{key} is an object of TorchScript, whose state cannot be put back.")
    found.hooks += [(f"a hook of {name}", hook) for hook in hooks_of(module)]
    if isinstance(module, nn.parallel.DistributedDataParallel):  # its own attributes belong to its reducer
        return [(f"{name}.module", module.module)]
    own = [(f"{name}.{key}", item) for key, item in vars(module).items() if key not in _HOOKS]
    for path, item in own:
        _note_iterator(path, item, found)
    return own + [(f"{name}.{key}", child) for key, child in module_dicts(module)[2].items()]


def _enter_function(name: str, function: types.FunctionType, found: Reached) -> Iterator[tuple[str, Any]]:
    if (wrapped := wrapped_function(function)) is not None:
        yield name, wrapped
    # Not `__module__`, which `functools.wraps` copies: what `torch.compile` returns holds state of Dynamo.
    home = function.__globals__.get("__name__") or ""
    if is_foreign(home):  # made by a decorator: what it holds of the user's own
        yield from ((name, one) for one in _functions_in(function))
        return
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        _note_iterator(variable, cell.cell_contents if is_filled(cell) else None, found)
        yield variable, cell
    yield from (("a default", value) for value in function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()
    if not is_own(home):
        return
    names = _names_of(function.__code__)
    namespace = function.__globals__
    if assigned := tuple(sorted(names & _assigned(function.__code__, "STORE_GLOBAL", "DELETE_GLOBAL"))):
        found.states.append((", ".join(assigned), GlobalNames(namespace, assigned)))
    if function.__dict__ or function.__name__ in names:
        found.states.append((name, function.__dict__))
        yield from ((f"{name}.{key}", value) for key, value in function.__dict__.items())
    if "globals" in names:  # which may change any of them by name
        variables = {key: one for key, one in namespace.items() if not key.startswith("__") and not _is_code(one)}
        found.states.append(("a global", GlobalNames(namespace, tuple(variables))))
        yield from variables.items()
    attributes = _assigned(function.__code__, "STORE_ATTR", "DELETE_ATTR")
    for module in _modules_named(function.__code__) - namespace.keys():
        yield from _enter_namespace(module, sys.modules[module], names, attributes, found)
    for variable in names & namespace.keys():
        value = namespace[variable]
        found.globals.append((namespace, variable, value))
        if isinstance(value, types.ModuleType):
            yield from _enter_namespace(variable, value, names, attributes, found)
        else:
            _note_iterator(variable, value, found)
            yield variable, value


def _enter_namespace(
    name: str, module: types.ModuleType, names: frozenset[str], attributes: frozenset[str], found: Reached
) -> Iterator[tuple[str, Any]]:
    """What code names of one of the user's own Python modules, and of those in it."""
    if is_foreign(module.__name__):
        return
    members = vars(module)
    if "setattr" in names:
        attributes = frozenset(key for key, one in members.items() if not key.startswith("__") and not _is_code(one))
    if assigned := tuple(sorted(attributes & members.keys())):
        found.states.append((name, GlobalNames(members, assigned)))
    for member in names & members.keys():
        value = members[member]
        found.globals += [] if member in attributes else [(members, member, value)]
        if not isinstance(value, types.ModuleType):
            yield f"{name}.{member}", value
        elif value.__name__.startswith(f"{module.__name__}."):
            yield from _enter_namespace(f"{name}.{member}", value, names, attributes, found)


def _functions_in(function: types.FunctionType) -> list[Any]:
    """The user's own functions that a function of torch or the standard library holds."""
    held = [cell.cell_contents for cell in function.__closure__ or () if is_filled(cell)]
    held += [item for one in held if isinstance(one, (list, tuple)) for item in one[:_MAX_ITEMS]]
    held += [*getattr(function, "registry", {}).values()]  # of `functools.singledispatch`
    functions = (types.FunctionType, types.MethodType, functools.partial)
    return [one for one in held if isinstance(one, functions) and is_own(getattr(one, "__module__", None) or "")]


def _is_code(value: Any) -> bool:
    return isinstance(value, (types.ModuleType, types.FunctionType, type))


@functools.lru_cache(maxsize=4096)
def _modules_named(code: types.CodeType) -> frozenset[str]:
    """The user's own modules that code imports, or takes from `sys.modules`."""
    are_looked_up = bool({"modules", "import_module"} & {*code.co_names})
    texts = [one for one in code.co_consts if are_looked_up and isinstance(one, str)]
    inner = (_modules_named(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(one for one in (*code.co_names, *texts) if one in sys.modules and is_own(one)).union(*inner)


def _note_iterator(name: str, value: Any, found: Reached) -> None:
    if isinstance(value, _CONSUMED) and not isinstance(value, io.IOBase):
        found.iterators.append(name)


@functools.lru_cache(maxsize=4096)
def _names_of(code: types.CodeType) -> frozenset[str]:
    """The names of globals and attributes in code and in the functions that it defines."""
    inner = (_names_of(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(code.co_names).union(*inner)


@functools.lru_cache(maxsize=4096)
def _assigned(code: types.CodeType, *operations: str) -> frozenset[str]:
    """The names that these operations assign in code and in the functions that it defines."""
    import dis

    own = {one.argval for one in dis.get_instructions(code) if one.opname in operations}
    inner = (_assigned(const, *operations) for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(own).union(*inner)


def is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (an empty cell raises)
    except ValueError:
        return False
    return True
