"""Words in the memory of CPython's objects: versions of dicts and classes, and pointers from one object to another.

Only words of objects that are alive may be read: whoever reads them holds a reference to the object. Where objects are
not laid out as in CPython 3.11, or torch lacks a name that torch 2.11 to 2.15 have, `can_read_words` is False, and what
uses words is degraded: it reads the objects themselves. CPython 3.12 has versions of dicts, too, and 3.13 none.
"""

import ctypes
import functools
import itertools
import operator
import random
import struct
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch._C._dynamo import guards as dynamo_guards

# Offsets in CPython 3.11 of 64-bit builds, in bytes from an object's address.
TYPE, DICT_VERSION, CLASS_VERSION, CELL_CONTENTS, MANAGED_DICT = 8, 24, 384, 16, -24
FUNCTION = {"__code__": 48, "__defaults__": 56, "__kwdefaults__": 64, "__closure__": 72}
HAS_MANAGED_DICT, HAS_VALID_VERSION = 1 << 4, 1 << 19  # flags of a class

_FIRST = 4096  # the lowest address that is read
_CHUNK = 500  # the most elements for which numpy keeps the GIL
_get_dict = ctypes.pythonapi.PyObject_GenericGetDict
_get_dict.restype, _get_dict.argtypes = ctypes.py_object, [ctypes.py_object, ctypes.c_void_p]


def dict_of(value: Any) -> Any:
    """The dict of an object's attributes, as guards read it: without running code of the object's class."""
    return _get_dict(value, None)


class Words:
    """The words at some addresses, as they were when they were read first.

    The first addresses are in objects that the caller holds. Further ones can be added in stages: what is itself a word
    of an earlier stage is read only while that word is the same, so what it points to is alive. For that, no other
    thread may run while stages are read and compared: numpy keeps the GIL for up to 500 elements, `map` and `all` run
    no Python code, and nothing here is tracked by the garbage collector.
    """

    def __init__(self, addresses: set[int]) -> None:
        self._memories, self._index = [_memory()], [_index_of(sorted(addresses))]
        self._before = [*_read(self._memories, self._index)]

    def __len__(self) -> int:
        return sum(map(len, self._index))

    def add(self, addresses: set[int], in_pairs: bool) -> dict[int, int] | None:
        """Read further words.

        Args:
            in_pairs: also read the word after each, which takes no longer.

        Returns:
            All these words by their address; None, without reading any, if an earlier word has changed.
        """
        order = sorted(addresses)
        chunks = [_index_of(order[start : start + _CHUNK]) for start in range(0, len(order), _CHUNK)]
        memories, read = [_pairs() if in_pairs else _memory()] * len(chunks), list[bytes]()
        is_added = map(operator.is_, map(read.append, _read(memories, chunks)), itertools.repeat(None))
        if not all(itertools.chain(self._compare(), is_added)):
            return None
        self._memories += memories
        self._index += chunks
        self._before += read
        words = np.frombuffer(b"".join(read), np.uint64).tolist()
        if in_pairs:
            order = [one for first in order for one in (first, first + 8)]
        return dict(zip(order, words, strict=True))

    def are_unchanged(self) -> bool:
        return all(self._compare())

    def _compare(self) -> Iterator[bool]:
        return map(operator.eq, _read(self._memories, self._index), self._before)


def _index_of(addresses: Sequence[int]) -> Any:
    return np.array([(address - _FIRST) >> 3 for address in addresses], dtype=np.int64)


def _read(memories: Sequence[Any], chunks: Sequence[Any]) -> Iterator[bytes]:
    return map(np.ndarray.tobytes, map(operator.getitem, memories, chunks))


@functools.cache
def _memory() -> Any:
    """The memory of this process as an array of 64-bit words."""
    return np.ctypeslib.as_array((ctypes.c_uint64 * (1 << 44)).from_address(_FIRST))


@functools.cache
def _pairs() -> Any:
    """Each word of memory together with the next one."""
    return np.ndarray((len(_memory()) - 1,), np.complex128, buffer=_memory().data, strides=(8,))


def read_word(address: int) -> int:
    """The word at an address, which must be in an object that is alive."""
    return ctypes.c_uint64.from_address(address).value


@functools.cache
def can_read_dict_versions() -> bool:
    """Whether a dict of this Python has a version, and each kind of change changes it."""
    if sys.implementation.name != "cpython" or not (3, 11) <= sys.version_info[:2] <= (3, 12):
        return False
    if sys.maxsize != 2**63 - 1 or hasattr(sys, "gettotalrefcount"):
        return False
    sample: dict[str, Any] = {"a": 0, "b": 0}
    changes = [
        lambda: sample.update(a=object()),
        lambda: sample.__setitem__("a", object()),
        lambda: sample.pop("b"),
        lambda: sample.setdefault("c", 0),
        lambda: sample.popitem(),
        lambda: sample.clear(),
    ]
    versions = [read_word(id(sample) + DICT_VERSION)]
    for change in changes:
        change()
        versions.append(read_word(id(sample) + DICT_VERSION))
    return len({*versions}) == len(versions)


_TWISTER = struct.Struct("625I")  # of a `random.Random`, behind its type: position, and 624 words of key
_TWISTER_OFFSET = 16


@functools.cache
def can_read_twister() -> bool:
    """Whether the Mersenne twister of Python's `random` is where `twister_words` reads it."""
    if sys.implementation.name != "cpython" or hasattr(sys, "gettotalrefcount"):
        return False
    one = random.Random(0)
    if type(one).__basicsize__ < _TWISTER_OFFSET + _TWISTER.size:
        return False
    position, *key = _TWISTER.unpack(twister_words(one))
    return (*key, position) == one.getstate()[1]


def twister_words(generator: random.Random) -> bytes:
    """The words of a Mersenne twister. To make the tuple of `getstate` of them takes ten times as long."""
    return ctypes.string_at(id(generator) + _TWISTER_OFFSET, _TWISTER.size)


@functools.cache
def can_read_words() -> bool:
    """Whether objects of this Python are laid out as expected, and changes to them change the words."""
    is_known = sys.implementation.name == "cpython" and sys.version_info[:2] == (3, 11) and sys.maxsize == 2**63 - 1
    has_names = all(hasattr(dynamo_guards, name) for name in ("TensorGuards", "dict_version", "DictGuardManager"))
    return is_known and has_names and not hasattr(sys, "gettotalrefcount") and _words_are_as_expected()


def _words_are_as_expected() -> bool:
    class Sample:
        pass

    content = object()

    def function(x: Any = content, *, y: Any = content) -> Any:
        return content

    one, attributes = Sample(), {"a": 1}
    slots: list[tuple[Any, int, Any]] = [
        (function, offset, getattr(function, name)) for name, offset in FUNCTION.items()
    ]
    slots += [(function.__closure__[0], CELL_CONTENTS, content), (one, TYPE, Sample)]  # pyright: ignore[reportOptionalSubscript]
    slots.append((one, MANAGED_DICT, one.__dict__))
    if not Sample.__flags__ & HAS_MANAGED_DICT or any(read_word(id(a) + at) != id(b) for a, at, b in slots):
        return False
    hasattr(Sample, "a")
    before = (read_word(id(attributes) + DICT_VERSION), read_word(id(Sample) + CLASS_VERSION))
    is_version = before[0] == dynamo_guards.dict_version(attributes) and bool(Sample.__flags__ & HAS_VALID_VERSION)
    attributes["a"] = 2
    setattr(Sample, "a", 1)  # noqa: B010
    after = (read_word(id(attributes) + DICT_VERSION), read_word(id(Sample) + CLASS_VERSION))
    return is_version and before[0] != after[0] and before[1] != after[1]
