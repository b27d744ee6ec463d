"""Whether guards still hold, told by what has not changed since they last did.

A check of all guards of a large model reads thousands of objects in C++, which takes 0.1 ms when they are cached and
three times that when they are not. An audit that finds nothing has read the same state as before. CPython 3.11 numbers
states: a dict has a version that every change to it replaces, a class has one that a change to it or to its bases
replaces, and what an object or a function refers to are pointers at known offsets. So once a whole check has passed,
those words are read in one gather (`numpy.take` over the process's memory). While they are the same, the guards that
depend on them alone hold: those on attributes, dicts, types, classes and functions that are reached from a module of
the frame, or from a module of Python. Tensors have no version: `TensorGuards` checks all parameters in one call.
What neither covers, such as lists, arguments and the state of torch, is checked by a smaller tree.

Memory is safe, since every object whose memory is read is held by a strong reference. These must not keep a model
alive: the collector cannot see them, because C++ owns the callback that leads here. So they are dropped when a module
of the frame dies, and before each full collection of garbage; the next checks read the tree, and then collect them
anew. Meanwhile a submodule that the user replaced can live until the next check.

Degraded where Python is not CPython 3.11, its objects are not laid out as expected, or torch has no `TensorGuards` or
`dict_version` (`can_read_words`): every check is one of the tree. Python 3.12 removed the public versions of dicts.
"""

import ast
import contextlib
import gc
import operator
import re
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C._dynamo import guards as dynamo_guards

from torchguard._torch.guards import Guards
from torchguard._torch.words import (
    CELL_CONTENTS,
    CLASS_VERSION,
    DICT_VERSION,
    FUNCTION,
    HAS_MANAGED_DICT,
    HAS_VALID_VERSION,
    MANAGED_DICT,
    TYPE,
    Words,
    can_read_words,
    dict_of,
    read_word,
)

_CONSTANTS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout)
_TENSORS = (torch.Tensor, nn.Parameter)
_OF_PYTHON = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, dict)
# Checks of the tree before the words are read for the first time, and the least number before they are read again.
_FIRST_WAIT, _NEXT_WAIT = 1, 32


class _Unknown:
    """In place of a value that may be another one at the next check."""


class _ClassDict(NamedTuple):
    """In place of the read-only dict of a class, whose version covers it."""

    owner: type


UNKNOWN = _Unknown()
# How an object looks up its attributes, unless its class changes that.
_PLAIN_LOOKUPS = (vars(object)["__getattribute__"], vars(types.ModuleType)["__getattribute__"])


class QuickCheck:
    """A check of all guards of a tree that is quick while nothing has changed."""

    def __init__(self, guards: Guards) -> None:
        self._guards = guards
        self._state: _State | None = None
        self._wait = _FIRST_WAIT
        self._next_wait = _NEXT_WAIT
        if can_read_words():
            _quick_checks.add(self)
            if _release_before_collection not in gc.callbacks:
                gc.callbacks.append(_release_before_collection)

    def check(self, f_locals: dict[str, Any]) -> bool:
        """Whether a call with these locals satisfies all guards: the answer of the tree."""
        state = self._state
        if state is not None:
            if state.is_unchanged(f_locals):
                return state.rest.check(f_locals)
            self._state = None
        if not self._guards.check(f_locals):
            return False
        if self._wait:
            self._wait -= 1
        elif can_read_words():
            self._read(f_locals)
        return True

    @property
    def is_quick(self) -> bool:
        """Whether the next check starts with the words."""
        return self._state is not None

    def release(self, _: object = None) -> None:
        """Drop all references to the user's objects."""
        self._state = None

    def _read(self, f_locals: dict[str, Any]) -> None:
        # Reading takes as long as a hundred checks. A model that changes all the time makes it rarer and rarer.
        self._wait, self._next_wait = self._next_wait, 2 * self._next_wait
        plan = _Plan(self._guards, f_locals, self.release)
        state = plan.state() if plan.roots else None
        if state is not None and self._guards.check(f_locals) and state.is_unchanged(f_locals):
            self._state = state


class _State:
    """The words behind guards that hold, and the objects they were read from."""

    def __init__(self, plan: "_Plan", rest: Guards) -> None:
        self.rest = rest
        self._roots = tuple(plan.roots.items())
        self._globals, self._names = plan.globals, tuple(plan.global_names)
        self._global_values = tuple(plan.global_names.values())
        self._globals_version: int | None = None
        self._held = plan.held
        self.words = Words(plan.addresses)
        self._tensors = tuple(plan.tensors.values())
        self._check_tensors = _tensor_guards(self._tensors) if self._tensors else bool

    def is_unchanged(self, f_locals: dict[str, Any]) -> bool:
        for name, module in self._roots:
            if f_locals.get(name, UNKNOWN) is not module():
                return False
        return (
            self.words.are_unchanged()
            and self._globals_are_unchanged()
            and (not self._tensors or self._check_tensors(*self._tensors))
        )

    def _globals_are_unchanged(self) -> bool:
        # The globals of a script change all the time, those of a package hardly ever.
        version = dynamo_guards.dict_version(self._globals)
        if version != self._globals_version:
            if not all(map(operator.is_, map(self._globals.get, self._names), self._global_values)):
                return False
            self._globals_version = version
        return True


class _Plan:
    """Which words to read for a guard tree, found by following its paths through the user's objects."""

    def __init__(self, guards: Guards, f_locals: dict[str, Any], on_death: Callable[[object], None]) -> None:
        self._guards, self._f_locals, self._on_death = guards, f_locals, on_death
        self.globals = guards.globals
        self.addresses: set[int] = set()
        self.held: dict[int, Any] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        self.roots: dict[str, weakref.ref[nn.Module]] = {}
        self.global_names: dict[str, Any] = {}
        self._rest = {guards.root.get_source()}  # sources of guards that no word covers, and those on the way there
        for child, accessor in zip(guards.root.get_child_managers(), guards.root.get_accessors(), strict=True):
            self._walk(child, self._enter(accessor), (guards.root.get_source(),))

    def state(self) -> _State:
        return _State(self, self._guards.part(self._rest))

    def _enter(self, accessor: Any) -> Any:
        """The value that an accessor of the root reads: a module among the locals, or the globals."""
        kind = type(accessor).__name__
        if kind == "GlobalsGuardAccessor":
            return self.globals
        name = re.search(r"key='(\w+)'", accessor.repr()) if kind == "FrameLocalsGuardAccessor" else None
        value: Any = self._f_locals.get(name[1]) if name else None
        if not name or not _is_a(value, nn.Module):
            return UNKNOWN
        self.roots[name[1]] = weakref.ref(value, _forget(self._on_death))
        return value

    def _walk(self, node: Any, value: Any, above: tuple[str, ...]) -> None:
        path = (*above, node.get_source())
        # Without guards, a node on a value that is not known still checks that there is one.
        if value is UNKNOWN or not all(self._covers(leaf, value) for leaf in node.get_leaf_guards()):
            self._rest.update(path)
        for child, accessor in zip(node.get_child_managers(), node.get_accessors(), strict=True):
            self._walk(child, self._follow(accessor, value), path)
        pairs = _pairs_of(node)
        is_known = pairs is not None and self._dict(value)
        if pairs is not None and not is_known:  # it checks the type and the size of its dict
            self._rest.update(path)
        items = [*value.items()] if is_known else []
        for i, managers in (pairs or {}).items():
            for manager, one in zip(managers, items[i] if i < len(items) else (UNKNOWN, UNKNOWN), strict=True):
                if manager is not None:
                    self._walk(manager, one, path)

    def _follow(self, accessor: Any, value: Any) -> Any:
        """The value that an accessor reads from a value that is known; unknown if the words do not determine it."""
        kind = type(accessor).__name__
        if value is UNKNOWN or kind not in _FOLLOW:
            return UNKNOWN
        return _FOLLOW[kind](self, value, accessor)

    def _attribute(self, value: Any, name: str) -> Any:
        if type(value) is types.FunctionType:
            return self._slot(value, FUNCTION[name], getattr(value, name)) if name in FUNCTION else UNKNOWN
        if type(value) is types.CellType:
            return self._cell(value) if name == "cell_contents" else UNKNOWN
        if _is_a(value, type):
            return self._class_attribute(value, name)
        if _lookup(type(value), "__getattribute__") not in _PLAIN_LOOKUPS:
            return UNKNOWN
        attributes = self._attributes(value)
        if attributes is UNKNOWN or name not in attributes or not self._type(value) or not self._class(type(value)):
            return UNKNOWN
        # What the class has may be a property or another descriptor, which comes before the attributes.
        return attributes[name] if _lookup(type(value), name) is UNKNOWN else UNKNOWN

    def _class_attribute(self, cls: type, name: str) -> Any:
        # A data descriptor of `type`, such as `__name__`, comes before what the class has.
        if type(cls) is not type or hasattr(type(_lookup(type, name)), "__set__") or not self._class(cls):
            return UNKNOWN
        found = _lookup(cls, name)
        return found if type(found) in (types.FunctionType, type, *_CONSTANTS) else UNKNOWN

    def _cell(self, cell: types.CellType) -> Any:
        try:
            return self._slot(cell, CELL_CONTENTS, cell.cell_contents)
        except ValueError:  # it is empty
            return UNKNOWN

    def _item(self, value: Any, accessor: Any) -> Any:
        key = _key_of(accessor)
        if _is_a(value, _ClassDict):
            return vars(value.owner).get(key, UNKNOWN)
        if value is self.globals:
            return self._global(key)
        if isinstance(key, str):
            return value.get(key, UNKNOWN) if self._dict(value) else UNKNOWN
        is_item = type(value) is tuple and isinstance(key, int) and -len(value) <= key < len(value)
        return value[key] if is_item else UNKNOWN

    def _global(self, name: Any) -> Any:
        value = self.globals.get(name, UNKNOWN)
        if not isinstance(name, str) or not (type(value) in _OF_PYTHON or _is_constant(value)):
            return UNKNOWN
        self.global_names[name] = value
        return value

    # What a word covers. Each adds the word, and says whether it could.

    def _add(self, value: Any, offset: int) -> bool:
        self.held[id(value)] = value
        self.addresses.add(id(value) + offset)
        return True

    def _slot(self, value: Any, offset: int, content: Any) -> Any:
        """An object that another one points to; the word is that pointer. None is a null pointer in some slots."""
        word = read_word(id(value) + offset)
        if word != id(content) and (content is not None or word):
            return UNKNOWN
        self._add(value, offset)
        self.held[id(content)] = content  # otherwise another object could come to have its address
        return content

    def _type(self, value: Any) -> bool:
        if not _is_a(value, _ClassDict) and not _is_constant(value):
            self._slot(value, TYPE, type(value))
        return True

    def _dict(self, value: Any) -> bool:
        """Whether a value is a dict whose changes all have a version: a subclass may keep an order of its own."""
        return type(value) is dict and value is not self.globals and self._add(value, DICT_VERSION)

    def _class(self, cls: type) -> bool:
        """Whether a class has a version: it gets one when an attribute is looked up."""
        with contextlib.suppress(AttributeError):
            type.__getattribute__(cls, "__torchguard__")
        if not cls.__flags__ & HAS_VALID_VERSION:
            return False
        return self._add(cls, CLASS_VERSION)

    def _attributes(self, value: Any) -> Any:
        """The dict of an object: the word is the pointer to it, since it can be replaced as a whole."""
        cls = type(value)
        offset = cls.__dictoffset__ if cls.__dictoffset__ > 0 else MANAGED_DICT
        if offset < 0 and not cls.__flags__ & HAS_MANAGED_DICT:
            return UNKNOWN
        found = self._slot(value, offset, dict_of(value))
        return found if found is not UNKNOWN and self._dict(found) else UNKNOWN

    def _covers(self, leaf: Any, value: Any) -> bool:
        """Whether a guard on a value that is known holds as long as the words are the same."""
        kind = type(leaf).__name__
        if value is UNKNOWN or value is self.globals:
            return False
        if kind in ("ID_MATCH", "TRUE_MATCH", "FALSE_MATCH", "NONE_MATCH"):
            return not _is_a(value, _ClassDict)
        if kind == "TYPE_MATCH":
            return self._type(value)
        if kind == "EQUALS_MATCH":
            return _is_constant(value)
        if kind in ("DICT_CONTAINS", "DICT_LENGTH", "LENGTH_CHECK"):
            return _is_a(value, _ClassDict) or type(value) is tuple or self._dict(value)
        if kind == "NO_HASATTR":
            return self._lacks_attributes(value)
        if kind in ("TENSOR_MATCH", "DIMENSION_DYNAMIC_MARKING_GUARD") and type(value) in _TENSORS:
            if value.layout is not torch.strided or value.is_nested:  # it has no strides to compare
                return False
            self.tensors[id(value)] = value
            # Marks of dynamic dimensions are attributes.
            return self._class(type(value)) and self._attributes(value) is not UNKNOWN
        return False

    def _lacks_attributes(self, value: Any) -> bool:
        """Whether the words tell that an object gets no further attribute. A module has attributes in four dicts."""
        cls = type(value)
        if _lookup(cls, "__getattribute__") not in _PLAIN_LOOKUPS or not (self._type(value) and self._class(cls)):
            return False
        attributes, fallback = self._attributes(value), _lookup(cls, "__getattr__")
        if attributes is UNKNOWN or fallback is UNKNOWN:
            return attributes is not UNKNOWN
        own = [attributes.get(name) for name in ("_parameters", "_buffers", "_modules")]
        return fallback is vars(nn.Module)["__getattr__"] and all(map(self._dict, own))


_FOLLOW: dict[str, Callable[[_Plan, Any, Any], Any]] = {
    "DictGetItemGuardAccessor": lambda plan, value, accessor: plan._item(value, accessor),
    "TupleGetItemGuardAccessor": lambda plan, value, accessor: plan._item(value, accessor),
    "GetItemGuardAccessor": lambda plan, value, accessor: plan._item(value, accessor),
    "GetAttrGuardAccessor": lambda plan, value, accessor: plan._attribute(value, accessor.get_attr_name()),
    "GetGenericDictGuardAccessor": lambda plan, value, _: (
        UNKNOWN if _is_a(value, (type, _ClassDict)) else plan._attributes(value)
    ),
    "TypeGuardAccessor": lambda plan, value, _: (
        type(value) if not _is_a(value, _ClassDict) and plan._type(value) else UNKNOWN
    ),
    "TypeDictGuardAccessor": lambda plan, value, _: (
        _ClassDict(value) if _is_a(value, type) and plan._class(value) else UNKNOWN
    ),
    "TypeMROGuardAccessor": lambda plan, value, _: (
        value.__mro__ if _is_a(value, type) and plan._class(value) else UNKNOWN
    ),
    "CodeGuardAccessor": lambda plan, value, _: plan._attribute(value, "__code__"),
    "ClosureGuardAccessor": lambda plan, value, _: plan._attribute(value, "__closure__"),
    "FuncDefaultsGuardAccessor": lambda plan, value, _: plan._attribute(value, "__defaults__"),
    "FuncKwDefaultsGuardAccessor": lambda plan, value, _: plan._attribute(value, "__kwdefaults__"),
}


def _is_a(value: Any, kind: Any) -> bool:
    """`isinstance`, which asks the value's own `__class__` as well."""
    return issubclass(type(value), kind)


def _lookup(cls: type, name: str) -> Any:
    """What a class or its bases have under a name, as it is stored."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), UNKNOWN)


def _is_constant(value: Any) -> bool:
    if type(value) in (tuple, frozenset):
        return all(map(_is_constant, value))
    return type(value) in _CONSTANTS


def _pairs_of(node: Any) -> dict[int, tuple[Any, Any]] | None:
    """The nodes of the keys and values of a dict by position, where a node checks its dict like that."""
    return node.get_key_value_managers() if isinstance(node, dynamo_guards.DictGuardManager) else None


def _key_of(accessor: Any) -> Any:
    """The key or index that an accessor looks up, which only its text has; None where that is no literal."""
    text = accessor.repr()
    try:
        return ast.literal_eval(text[text.index("(") + 1 : -1])
    except (ValueError, SyntaxError):
        return None


def _tensor_guards(tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool]:
    sizes: Any = [[*one.size()] for one in tensors]
    strides: Any = [[*one.stride()] for one in tensors]
    return dynamo_guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def _forget(release: Callable[[object], None]) -> Callable[[object], None]:
    """The method, without keeping its object alive."""
    method = weakref.WeakMethod(release)

    def forget(dead: object) -> None:
        found = method()
        if found is not None:
            found(dead)

    return forget


_quick_checks: "weakref.WeakSet[QuickCheck]" = weakref.WeakSet()


def _release_before_collection(phase: str, info: dict[str, int], checks: Any = _quick_checks) -> None:
    if phase == "start" and info["generation"] == 2:
        for one in [*checks]:
            one.release()
