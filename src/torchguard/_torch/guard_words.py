"""Which words of memory the guards of a compilation depend on: see `quick_check`.

A guard tree is followed from the frame's modules, functions and globals through the user's objects, without running
their code. What cannot be followed is UNKNOWN, and the guards on it are left to the tree. Degraded where torch names
the class of a guard or accessor otherwise than torch 2.11 to 2.15 do: that guard is left to the tree, too.
"""

import ast
import contextlib
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
    dict_of,
    read_word,
)

_CONSTANTS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout)
_TENSORS = (torch.Tensor, nn.Parameter)
_OF_PYTHON = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, dict)


class _Unknown:
    """In place of a value that may be another one at the next check."""


class _ClassDict(NamedTuple):
    """In place of the read-only dict of a class, whose version covers it."""

    owner: type


UNKNOWN = _Unknown()
# How an object looks up its attributes, unless its class changes that.
_PLAIN_LOOKUPS = (vars(object)["__getattribute__"], vars(types.ModuleType)["__getattribute__"])


class Plan:
    """Which words to read for a guard tree, found by following its paths through the user's objects.

    The words are at `addresses`, in objects that `held` keeps alive. They do not cover `tensors`, the modules and
    functions among the frame's locals in `roots`, or the values of `global_names`: whoever reads the words checks these
    beside them.

    Args:
        guards: the guards of one compilation.
        f_locals: the locals of a call that satisfies them.
        on_death: called when one of the roots dies.
    """

    def __init__(self, guards: Guards, f_locals: dict[str, Any], on_death: Callable[[object], None]) -> None:
        self._guards, self._f_locals, self._on_death = guards, f_locals, on_death
        self.globals = guards.globals
        self.addresses: set[int] = set()
        self.held: dict[int, Any] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        self.roots: dict[str, weakref.ref[Any]] = {}
        self.global_names: dict[str, Any] = {}
        self._rest = {guards.root.get_source()}  # sources of guards that no word covers, and those on the way there
        for child, accessor in zip(guards.root.get_child_managers(), guards.root.get_accessors(), strict=True):
            self._walk(child, self._enter(accessor), (guards.root.get_source(),))

    @property
    def rest(self) -> Guards:
        """The guards that no word covers."""
        return self._guards.part(self._rest)

    def _enter(self, accessor: Any) -> Any:
        """The value that an accessor of the root reads: a module or a function among the locals, or the globals."""
        kind = type(accessor).__name__
        if kind == "GlobalsGuardAccessor":
            return self.globals
        name = re.search(r"key='(\w+)'", accessor.repr()) if kind == "FrameLocalsGuardAccessor" else None
        value: Any = self._f_locals.get(name[1]) if name else None
        if not name or not _is_a(value, (nn.Module, types.FunctionType)):
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
        if type(value) is property:
            return getattr(value, name) if name in ("fget", "fset", "fdel") else UNKNOWN
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
        # A data descriptor of the metaclass, such as `__name__`, comes before what the class has.
        meta = type(cls)
        if _lookup(meta, "__getattribute__") is not vars(type)["__getattribute__"] or not self._class(cls):
            return UNKNOWN
        if hasattr(type(_lookup(meta, name)), "__set__") or (meta is not type and not self._metaclass(cls)):
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

    def _metaclass(self, cls: type) -> bool:
        return self._type(cls) and self._class(type(cls))

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
        """Whether the words show that an object gets no further attribute. A module has attributes in four dicts."""
        cls = type(value)
        if _lookup(cls, "__getattribute__") not in _PLAIN_LOOKUPS or not (self._type(value) and self._class(cls)):
            return False
        attributes, fallback = self._attributes(value), _lookup(cls, "__getattr__")
        if attributes is UNKNOWN or fallback is UNKNOWN:
            return attributes is not UNKNOWN
        own = [attributes.get(name) for name in ("_parameters", "_buffers", "_modules")]
        return fallback is vars(nn.Module)["__getattr__"] and all(map(self._dict, own))


_FOLLOW: dict[str, Callable[[Plan, Any, Any], Any]] = {
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


def _forget(release: Callable[[object], None]) -> Callable[[object], None]:
    """The method, without keeping its object alive."""
    method = weakref.WeakMethod(release)

    def forget(dead: object) -> None:
        found = method()
        if found is not None:
            found(dead)

    return forget
