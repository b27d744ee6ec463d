"""Hooks of modules and parameters: those that take part in what a step computes, and those that only observe.

A hook that returns a value, changes a tensor, or sets something that the model uses is part of the model, and its state
is restored like that of the model. A hook that only observes (a metric, a logger, somebody who asks `is_retrying()`)
keeps what it has seen in every run. A hook observes only if its code shows it: `Observer` follows the code of the hook
and of the functions that it calls. Whatever it cannot follow takes part.
"""

import builtins
import collections
import dis
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from torchguard._retry.names import GlobalNames
from torchguard._retry.packages import is_foreign, is_own

_UNKNOWN = object()  # an argument, the result of a call, a local variable
_CONTAINERS = (dict, list, collections.deque, collections.defaultdict, collections.OrderedDict, collections.Counter)
_IMMUTABLE = (bool, int, float, complex, str, bytes, tuple, frozenset)
_IGNORED = ("CACHE", "NOP", "RESUME", "COPY_FREE_VARS", "MAKE_CELL", "PRECALL", "KW_NAMES")
# Two instructions in one, from Python 3.13 on.
_PAIRS = {f"{one}_FAST_{other}_FAST": (one, other) for one in ("LOAD", "STORE") for other in ("LOAD", "STORE")}
_IS_KNOWN_PYTHON = sys.version_info < (3, 14)  # whose instructions are those that are handled here
_LOADS = ("LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_CONST")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_BUILTINS = _names(
    "abs all any bool complex dict divmod enumerate filter float format frozenset hasattr hash id int isinstance "
    "issubclass len list map max min pow print range repr reversed round set sorted str sum tuple type zip"
)
# Methods that may be called on what is not known: of containers and modules, and of tensors those that read.
_READS = _names(
    "items keys values get format join split startswith endswith index count parameters named_parameters buffers "
    "named_buffers modules named_modules children named_children state_dict"
) | {name for name in dir(Tensor) if not name.startswith("register")}
# Functions that change what they are given although their names do not end in "_".
_WRITES = _names(
    "apply backward byteswap copyto delitem fill fill_diagonal itemset partition place put put_along_axis putmask "
    "resize seed setattr setflags setitem shuffle sort swap_tensors vector_to_parameters"
)
_NAMED = _names("__init__ __post_init__ __call__ __repr__ __str__ __len__ __eq__ __hash__ __getstate__ __setstate__")
# Functions and methods that return None: what a lambda that observes ends with.
_RETURN_NONE = _names(
    "add append appendleft extend insert update write writelines put debug info warning error log print add_scalar "
    "add_histogram"
)


class Observer:
    """Follows the code of a hook, as long as it shows that the hook only observes.

    Attributes:
        only_observes: whether it does, as far as its own code shows.
        changed: the objects that it changes.
        assigned, relied_on: where it stores something, and where it expects what was found there when it was followed.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.changed: list[Any] = []
        self.assigned: set[Any] = set()
        self.relied_on: set[Any] = set()
        self._followed: set[Any] = set()
        self.only_observes = self.follows(hook, is_hook=True)

    def takes_part(self, is_reached: Callable[[Any], bool], assigned: set[Any]) -> bool:
        """Whether the hook may influence what a step computes.

        Args:
            is_reached: whether the model or the closure reaches an object. A hook that changes one of these takes part.
            assigned: where any hook stores something.
        """
        return not self.only_observes or bool(self.relied_on & assigned) or any(map(is_reached, self.changed))

    def follows(self, function: Any, is_hook: bool = False) -> bool:
        """Whether a function changes nothing but objects that it has by itself, and as a hook returns None."""
        owner = _UNKNOWN
        while not isinstance(function, types.FunctionType) or _is_wrapper_of_torch(function):
            if isinstance(function, functools.partial):
                function = function.func
            elif isinstance(function, types.MethodType):
                owner, function = function.__self__, function.__func__
            elif isinstance(function, types.FunctionType):
                function = inspect.unwrap(function)
            elif isinstance(call := inspect.getattr_static(type(function), "__call__", None), types.FunctionType):
                owner, function = function, call
            else:
                return function is print
        if function.__code__ in self._followed:
            return True
        self._followed.add(function.__code__)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        walk = Walk(self, function.__code__, function.__globals__, dict(cells), owner)
        return walk.only_observes() and not (is_hook and walk.returns_a_value())

    def may_load(self, value: Any, name: str) -> bool:
        """Whether code may load this value, and call it if it can be called."""
        name = getattr(value, "__name__", name) if callable(value) else name  # not that of an import
        if isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)):
            owner = value.__self__
            if isinstance(owner, types.ModuleType):
                is_allowed = owner.__name__ not in ("_operator", "_ctypes", "gc") and _is_harmless(name)
                return name in _BUILTINS if owner is builtins else is_allowed
            if name not in _READS:
                self.changed.append(owner)
                self.assigned.add((id(owner), None))
            return _is_harmless(name) and not isinstance(owner, (Tensor, np.ndarray, type))
        if isinstance(value, type):
            if is_own(value.__module__):
                made = [inspect.getattr_static(value, one, None) for one in ("__new__", "__init__", "__post_init__")]
                return type(value) is type and all(
                    self.follows(one) for one in made if isinstance(one, types.FunctionType)
                )
            return value.__module__ != "builtins" or name in _BUILTINS or issubclass(value, Exception)
        if isinstance(value, (types.FunctionType, types.MethodType)):
            if is_own(_home(value)):
                return self.follows(value)
            owner = getattr(value, "__self__", None)
            self.changed += [] if is_foreign(type(owner).__module__) else [owner]
            return _is_harmless(name)
        if type(value).__module__.startswith("numpy"):
            return _is_harmless(name)
        if is_own(type(value).__module__) and _has_operators(type(value)):
            return False
        return not callable(value) or isinstance(value, nn.Module)  # a module is not called: see `Walk`


class Expression(NamedTuple):
    """An expression in the code of a hook.

    Args:
        value: the object that it names, or `_UNKNOWN`.
        first, last: its instructions.
        place: where the object was found: an owner and a name.
    """

    value: Any
    first: int
    last: int
    place: Any = None


class Walk:
    """One pass over the instructions of a function.

    Of each expression that names an object (`seen`, `self.counts`, `torch.norm`) the object is known. All else that the
    code handles is unknown: it may be an argument of the hook, and is only read.
    """

    def __init__(
        self, observer: Observer, code: types.CodeType, namespace: dict[str, Any], cells: dict[str, Any], owner: Any
    ) -> None:
        self.observer, self.code, self.namespace, self.cells, self.owner = observer, code, namespace, cells, owner
        self.steps = [*_instructions(code)]
        self.expressions: list[Expression] = []
        self.copies: list[Expression] = []  # targets of `x += 1` whose value is being computed

    def only_observes(self) -> bool:
        constants = [one for one in self.code.co_consts if isinstance(one, tuple)]
        is_generator = self.code.co_flags & inspect.CO_GENERATOR
        if not _IS_KNOWN_PYTHON or is_generator or any("out" in one for one in constants):
            return False
        inner = [one for one in self.code.co_consts if isinstance(one, types.CodeType)]
        return all(self._may_run(number, step) for number, step in enumerate(self.steps)) and all(
            Walk(self.observer, one, self.namespace, self.cells, _UNKNOWN).only_observes() for one in inner
        )

    def _may_run(self, number: int, step: dis.Instruction) -> bool:
        name = step.opname
        if name in _LOADS or name.startswith("LOAD_FAST"):
            return self._load(number, step)
        if name in ("LOAD_ATTR", "LOAD_METHOD"):
            return self._attribute(number, step)
        if name == "PUSH_NULL":
            return self._is_callable_known(number)
        if name in ("STORE_ATTR", "DELETE_ATTR"):
            is_update = self.steps[number - 1].opname == "SWAP"
            return self._store(self._pop() if is_update else self._ended(number - 1), step.argval, is_update)
        if name in ("STORE_SUBSCR", "DELETE_SUBSCR"):
            is_update = self.steps[number - 1].opname == "SWAP"
            return self._store(self._pop() if is_update else self._container(number - 1), None, is_update)
        if name == "COPY":
            if self.steps[number - 1].opname != "COPY":
                self.copies.append(self._ended(number - 1) if step.arg == 1 else self._container(number - 1))
            return True
        if name in ("STORE_DEREF", "STORE_GLOBAL"):
            target = self.cells.get(step.argval, _UNKNOWN) if name == "STORE_DEREF" else self.namespace
            is_update = self._is_update(number - 1)
            if target is _UNKNOWN:  # a variable of this function that an inner one uses
                return not is_update
            return self._store(Expression(target, number, number), step.argval, is_update)
        if name.startswith("STORE_FAST"):
            return step.argval != self._self_name() and not self._is_update(number - 1)
        if name == "BINARY_OP" and step.argrepr.endswith("="):
            after = self.steps[number + 1].opname
            self.expressions.append(Expression(_UNKNOWN, number, number))
            return after in ("SWAP", "STORE_DEREF", "STORE_GLOBAL")
        if name in ("STORE_SLICE", "CALL_FUNCTION_EX", "IMPORT_NAME", "STORE_NAME", "DELETE_DEREF", "DELETE_GLOBAL"):
            return False
        self.expressions.append(Expression(_UNKNOWN, number, number))
        return True

    def returns_a_value(self) -> bool:
        """Whether the function may return something other than None. A lambda may end in `seen.append(x)`."""
        returned = [number for number, one in enumerate(self.steps) if one.opname == "RETURN_VALUE"]
        if any(one.opname == "RETURN_CONST" and one.argval is not None for one in self.steps):
            return True
        before = [self.steps[number - 1] for number in returned]
        if all(one.opname == "LOAD_CONST" and one.argval is None for one in before):
            return False
        is_call = len(before) == 1 and before[0].opname.startswith("CALL")
        return not is_call or not self._first_call_returns_none()

    def _first_call_returns_none(self) -> bool:
        """Whether the first function that is loaded returns None. As None cannot be called, it is called last."""
        jumps = [one.opname for one in self.steps if "JUMP" in one.opname]
        if not self.expressions or {*jumps} - {"JUMP_BACKWARD"}:  # which is that of a comprehension
            return False
        first = [one for one in self.expressions if one.first == self.expressions[0].first][-1].value
        if isinstance(first, (types.FunctionType, types.MethodType)) and is_own(_home(first)):
            function: Any = getattr(first, "__func__", first)
            return not Walk(self.observer, function.__code__, {}, {}, _UNKNOWN).returns_a_value()
        return getattr(first, "__name__", "") in _RETURN_NONE

    def _self_name(self) -> str | None:
        return self.code.co_varnames[0] if self.owner is not _UNKNOWN and self.code.co_argcount else None

    def _is_update(self, number: int) -> bool:
        step = self.steps[number]
        return step.opname == "BINARY_OP" and step.argrepr.endswith("=")

    def _load(self, number: int, step: dis.Instruction) -> bool:
        name, value, place = step.argval, _UNKNOWN, None
        if step.opname == "LOAD_CONST":
            value = None
        elif step.opname.startswith("LOAD_FAST"):
            value = self.owner if name == self._self_name() else _UNKNOWN
        elif step.opname == "LOAD_DEREF":
            cell = self.cells.get(name)
            value, place = _content(cell), (id(cell), None)
        else:
            found = self.namespace.get(name, getattr(builtins, name, _UNKNOWN))
            if found is _UNKNOWN:
                return False
            value, place = found, (id(self.namespace), name)
            if "NULL" in step.argrepr and not self._is_called(number, value):
                return False
        self.expressions.append(Expression(value, number, number, place))
        if value is self.owner:
            return not _has_operators(type(value))
        return value is _UNKNOWN or self.observer.may_load(value, str(name))

    def _attribute(self, number: int, step: dis.Instruction) -> bool:
        name, (owner, first, _, place) = str(step.argval), self._ended(number - 1)
        if owner is _UNKNOWN or isinstance(owner, (Tensor, nn.Module, np.ndarray)):
            is_called = step.opname == "LOAD_METHOD" or "NULL" in step.argrepr
            self.expressions.append(Expression(_UNKNOWN, first, number))
            return _is_harmless(name) and (not is_called or name in _READS)
        self.observer.relied_on.add(place)
        value = inspect.getattr_static(owner, name, _UNKNOWN)
        if isinstance(value, types.FunctionType) and not isinstance(owner, (type, types.ModuleType)):
            value = types.MethodType(value, owner) if name not in getattr(owner, "__dict__", ()) else value
        elif isinstance(value, (staticmethod, classmethod)):
            value = getattr(owner, name)
        elif isinstance(value, types.MethodDescriptorType) and not isinstance(owner, type):
            value = getattr(owner, name)  # of a list, say
        elif hasattr(type(value), "__get__") and not isinstance(value, (types.FunctionType, types.MethodType)):
            return False  # a property or a slot
        if value is _UNKNOWN:
            return False
        self.expressions.append(Expression(value, first, number, (id(owner), name)))
        return self.observer.may_load(value, name)

    def _is_callable_known(self, number: int) -> bool:
        """Whether what this instruction prepares to call is a name whose value is checked when it is loaded."""
        after = self.steps[number + 1]
        if sys.version_info >= (3, 13):  # the function is loaded before
            return _is_function(self._ended(number - 1).value)
        if after.opname not in ("LOAD_DEREF", "LOAD_GLOBAL"):
            return False
        if "NULL" in after.argrepr:  # of `f(x)(y)`
            return False
        cell = self.cells.get(after.argval)
        return self._is_called(number + 1, self.namespace.get(after.argval) if cell is None else _content(cell))

    def _is_called(self, number: int, value: Any) -> bool:
        """Whether the function that is loaded here, or of a module, is called itself, not something of it."""
        while isinstance(value, types.ModuleType) and self.steps[number + 1].opname == "LOAD_ATTR":
            number, value = number + 1, getattr(value, self.steps[number + 1].argval, None)
        return _is_function(value) and self.steps[number + 1].opname not in ("LOAD_ATTR", "LOAD_METHOD", "COPY")

    def _ended(self, number: int) -> Expression:
        """The expression that ends here."""
        last = self.expressions[-1] if self.expressions else None
        if last is None or last.last != number or self._has_jumps(last.first, number):
            return Expression(_UNKNOWN, number + 1, number)
        return last

    def _container(self, number: int) -> Expression:
        """The container, where its index ends here: two expressions, one right behind the other."""
        index = self._ended(number)
        before = [one for one in self.expressions if one.last == index.first - 1]
        if not before or self._has_jumps(before[-1].first, number):
            return Expression(_UNKNOWN, number, number)
        return before[-1]

    def _has_jumps(self, first: int, last: int) -> bool:
        """Whether the value may be that of another expression: `(one if flag else other).x`."""
        return any(step.is_jump_target for step in self.steps[first + 1 : last + 2])

    def _pop(self) -> Expression:
        return self.copies.pop() if self.copies else Expression(_UNKNOWN, 0, 0)

    def _store(self, stored_in: Expression, name: Any, is_update: bool) -> bool:
        """Note that the code changes an object; False if that may be one of the model."""
        target = stored_in.value
        if target is _UNKNOWN or isinstance(target, (Tensor, nn.Module, np.ndarray, type, types.ModuleType)):
            return False
        is_subscript = name is None and not isinstance(target, types.CellType)
        if isinstance(type(target).__setattr__, types.FunctionType) or (
            is_subscript and type(target) not in _CONTAINERS
        ):
            return False  # its class may have code that runs now
        place = id(target), None if isinstance(target, types.CellType) else name
        self.observer.relied_on.add(stored_in.place)
        if not is_update:
            self.observer.assigned.add(place)
        else:  # which may change a tensor in place
            self.observer.relied_on.add(place)
            if not all(isinstance(one, _IMMUTABLE) for one in _contents(target, name)):
                return False
        is_global = target is self.namespace
        self.observer.changed.append(GlobalNames(self.namespace, (str(name),)) if is_global else target)
        return True


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    """The instructions of code that do something, one by one."""
    for one in dis.get_instructions(code):
        if one.opname in _PAIRS:
            for kind, name in zip(_PAIRS[one.opname], one.argval, strict=True):
                yield one._replace(opname=f"{kind}_FAST", argval=name, argrepr=name)
        elif one.opname not in _IGNORED:
            yield one


def _has_operators(kind: type) -> bool:
    """Whether a class has code that runs without being named: `self << x`, `self[x]`, `with self`, `self.x = y`."""
    own = [one for one in kind.__mro__ if is_own(one.__module__)]
    names = {name for one in own for name, value in vars(one).items() if isinstance(value, types.FunctionType)}
    return any(name.startswith("__") and name.endswith("__") and name not in _NAMED for name in names)


def _is_function(value: Any) -> bool:
    is_function = isinstance(value, (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type))
    return is_function or (callable(value) and type(value).__module__.startswith("numpy"))


def _content(cell: types.CellType | None) -> Any:
    try:
        return _UNKNOWN if cell is None else cell.cell_contents
    except ValueError:  # empty
        return _UNKNOWN


def _home(function: Any) -> str:
    return getattr(function, "__globals__", {}).get("__name__", "")


def _is_wrapper_of_torch(function: types.FunctionType) -> bool:
    """Whether a decorator of torch made this, such as `torch.no_grad()`."""
    return hasattr(function, "__wrapped__") and is_foreign(_home(function))


def _contents(target: Any, name: Any) -> list[Any]:
    """What `+=` would change: the value of a cell, an attribute, a global, or any item of a container."""
    if isinstance(target, types.CellType):
        return [_content(target)]
    if name is None:
        return [*target.values()] if isinstance(target, dict) else [*target] if isinstance(target, list) else [target]
    return [target.get(name)] if isinstance(target, dict) else [getattr(target, name, None)]


def _is_harmless(name: str) -> bool:
    """Whether the name of a function or method says that it changes nothing that it is given."""
    is_dunder = name.startswith("__")
    return (
        not name.endswith("_") and not is_dunder and name not in _WRITES and not name.startswith(("set_", "_foreach"))
    )
