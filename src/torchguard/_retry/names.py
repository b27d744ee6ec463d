"""Values by name that have no dict of their own, read and written one by one."""

import abc
import contextvars
import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from torchguard._torch.modules import script_attributes
from torchguard.exceptions import RetryError


class Names(abc.ABC):
    """Values by name that have no dict of their own: globals that a function assigns, slots, attributes of a class."""

    @abc.abstractmethod
    def read(self) -> dict[str, Any]: ...

    @abc.abstractmethod
    def write(self, name: str, value: Any) -> None: ...

    @abc.abstractmethod
    def delete(self, name: str) -> None: ...


class GlobalNames(Names):
    def __init__(self, namespace: dict[str, Any], names: tuple[str, ...]) -> None:
        self.namespace, self.names = namespace, names

    def read(self) -> dict[str, Any]:
        return {name: self.namespace[name] for name in self.names if name in self.namespace}

    def write(self, name: str, value: Any) -> None:
        self.namespace[name] = value

    def delete(self, name: str) -> None:
        del self.namespace[name]


class Slots(Names):
    def __init__(self, owner: Any) -> None:
        self.owner, self.names = owner, slots_of(type(owner))

    def read(self) -> dict[str, Any]:
        return {name: getattr(self.owner, name) for name in self.names if hasattr(self.owner, name)}

    def write(self, name: str, value: Any) -> None:
        object.__setattr__(self.owner, name, value)

    def delete(self, name: str) -> None:
        object.__delattr__(self.owner, name)


class ClassNames(Names):
    def __init__(self, owner: type) -> None:
        self.owner = owner

    def read(self) -> dict[str, Any]:
        return dict(vars(self.owner))

    def write(self, name: str, value: Any) -> None:
        setattr(self.owner, name, value)

    def delete(self, name: str) -> None:
        delattr(self.owner, name)


class Variable(Names):
    """The value of a context variable."""

    def __init__(self, owner: contextvars.ContextVar[Any]) -> None:
        self.owner = owner

    def read(self) -> dict[str, Any]:
        return {"value": value} if (value := self.owner.get(self)) is not self else {}

    def write(self, name: str, value: Any) -> None:
        self.owner.set(value)

    def delete(self, name: str) -> None:
        raise RetryError(
            f"Retry: the closure sets the context variable {self.owner.name}, which had no value before the step. That "
            "cannot be undone. Set it before the first step."
        )


class Length(Names):
    """How many items a large list or dict has. What a step adds to it is taken away again."""

    def __init__(self, owner: Any) -> None:
        self.owner, self._length = owner, len(owner)

    def read(self) -> dict[str, Any]:
        if len(self.owner) != self._length:  # the same number is the same object
            self._length = len(self.owner)
        return {"length": self._length}

    def write(self, name: str, value: Any) -> None:
        if isinstance(self.owner, list):
            del self.owner[value:]
        else:
            for key in [*itertools.islice(self.owner, value, None)]:
                del self.owner[key]

    def delete(self, name: str) -> None:
        raise AssertionError("A container always has a length.")


class ScriptAttributes(Names):
    """The attributes of a TorchScript module, which are values of C++. Reading one makes a new object of Python."""

    def __init__(self, owner: torch.jit.ScriptModule) -> None:
        self.owner, self.names = owner, script_attributes(owner)
        self._last: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        for name in self.names:
            now = getattr(self.owner, name)
            if name not in self._last or not _is_equal(now, self._last[name]):
                self._last[name] = now  # the same value is the same object
        return dict(self._last)

    def write(self, name: str, value: Any) -> None:
        setattr(self.owner, name, value)

    def delete(self, name: str) -> None:
        raise AssertionError("TorchScript adds no attributes.")


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two values of TorchScript are the same: tensors are if they are one object."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    if isinstance(one, dict):
        return [*one] == [*other] and all(map(_is_equal, one.values(), other.values()))
    return one == other


@functools.lru_cache(maxsize=4096)
def slots_of(cls: type) -> tuple[str, ...]:
    found: list[str] = []
    for one in cls.__mro__:
        slots = vars(one).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")  # Python has the class in its name
            found.append(f"_{one.__name__.lstrip('_')}{name}" if is_private else name)
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))
