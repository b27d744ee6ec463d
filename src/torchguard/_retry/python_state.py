"""The Python state that a step may change: attributes, containers, cells, globals, NumPy arrays."""

import array
import functools
import itertools
import math
import operator
import queue
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from types import CellType, GeneratorType
from typing import Any

import numpy as np
import torch
from torch import nn

from torchguard._pytrees import tensors_in
from torchguard._retry.names import Names
from torchguard._retry.reach import MEMORY, SIMPLE, Reached, is_filled
from torchguard._retry.tensor_state import Replaced, can_be_saved, checksum
from torchguard._torch.tensors import mutation_count
from torchguard._torch.training import module_dicts, names_of_unsaved_buffers
from torchguard._torch.words import DICT_VERSION, Words, can_read_dict_versions

_MAX_CHANGES = 16  # a model that changes an attribute in every step is read in every step
_ARRAYS = (np.ndarray, array.array, bytearray)
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}


class PythonState:
    """Attributes, containers, cells and globals as they are before a step."""

    def __init__(self, reached: Reached) -> None:
        self._states: list[tuple[str, Any]] = []
        self._buffers: set[int] = set()  # ids of the dicts that hold the buffers of a module
        attributes: set[int] = set()  # numbers of the dicts of a module's attributes
        implied: set[int] = set()  # ids of sets that change with the buffers alone
        for name, module in reached.modules:
            if isinstance(module, nn.parallel.DistributedDataParallel):
                continue  # its attributes follow its communication
            attributes.add(len(self._states))
            self._states.append((name, vars(module)))
            self._states += [(name, one) for one in module_dicts(module) if isinstance(one, dict)]
            self._buffers.add(id(module_dicts(module)[1]))
            implied.add(id(names_of_unsaved_buffers(module)))
        of_modules = len(self._states)
        self._states += reached.states
        self._of_hooks = of_modules + reached.of_hooks  # what hooks keep may be activations: it is not checked
        self._arrays = [number for number, (_, state) in enumerate(self._states) if isinstance(state, _ARRAYS)]
        self._globals = reached.globals
        self._saved = [_copy(state) for _, state in self._states]
        self._words: Words | None = None  # the versions of all dicts, if they can be read
        self._changes = 0  # how often they were not as before
        self._watch(attributes, of_modules, implied)

    def _watch(self, attributes: set[int], of_modules: int, implied: set[int]) -> None:
        """Prepare to see whether states change, with as few operations as possible: it happens twice in every step.

        The values of all states are read one after the other into an array of objects. To compare the bytes of two such
        arrays is to ask whether they hold the same objects. nn.Module's own attributes are hooks and the dicts that are
        states by themselves: nobody replaces these, so they are not read.
        """
        self._sized: list[Any] = []  # whose lengths are compared
        self._read: list[Callable[[], Collection[Any]]] = []
        views, getters, viewed, got, read = [], [], [], [], []  # and the number of the state of each of them
        for number, (_, state) in enumerate(self._states):
            if isinstance(state, (Names, CellType)):
                self._read.append(functools.partial(_values, state))
                read.append(number)
            elif number in attributes:
                names = [name for name in state if name not in _OF_EVERY_MODULE]
                self._sized.append(state)
                if len(names) > 1:  # an itemgetter of one name returns no tuple
                    getters.append((operator.itemgetter(*names), state))
                    got.append(number)
                elif names:
                    views.append(dict.values(state))
                    viewed.append(number)
            elif not isinstance(state, _ARRAYS) and id(state) not in implied:
                of_state: list[Any] = [dict.values(state)] if isinstance(state, dict) else [state]
                if isinstance(state, dict) and number >= of_modules:
                    of_state.append(state)  # other keys may have the same values
                self._sized.append(state)
                views += of_state if len(state) else []
                viewed += [number] * len(of_state) if len(state) else []
        self._views, self._getters = views, getters
        self._numbers = viewed + got + read
        self._lengths = self._read_lengths()
        self._count = sum(map(len, self._parts()))
        values = self._read_values()
        assert values is not None
        self._values = values
        self._unread = [
            state
            for _, state in self._states
            if not isinstance(state, (dict, Names, CellType, *_ARRAYS)) and id(state) not in implied
        ]
        self._note_versions()

    def _note_versions(self) -> None:
        """Remember the versions of all dicts: while these are the same, none of the dicts has to be read.

        A dict has its version where its length is. To read its values as well takes several times as long where they
        are not in the processor's cache, as after a step. Lists, sets, cells and globals have no version.
        """
        self._rest = self._read_rest()
        if self._changes < _MAX_CHANGES and can_read_dict_versions():
            addresses = {id(state) + DICT_VERSION for _, state in self._states if isinstance(state, dict)}
            self._words = Words(addresses) if addresses else None

    def _read_rest(self) -> tuple[list[int], list[Any]]:
        """The values of the states that are no dicts, and how many each has."""
        parts = [*self._unread, *[read() for read in self._read]]
        return [*map(len, parts)], [*itertools.chain.from_iterable(parts)]

    def _is_unchanged(self) -> bool:
        """Whether the versions show that no state changed, NumPy arrays aside. False where they do not show it."""
        if self._words is None or not self._words.are_unchanged():
            return False
        lengths, values = self._read_rest()
        return lengths == self._rest[0] and all(map(operator.is_, values, self._rest[1]))

    def _read_lengths(self) -> list[int]:
        return [*map(len, self._sized), *[len(read()) for read in self._read]]

    def _parts(self) -> list[Collection[Any]]:
        return [*self._views, *[get(state) for get, state in self._getters], *[read() for read in self._read]]

    def _read_values(self) -> np.ndarray | None:
        """The values, if the lengths are as they were; None if attributes have other names."""
        try:
            return np.fromiter(itertools.chain.from_iterable(self._parts()), object, self._count)
        except KeyError:
            return None

    def _different(self) -> list[int]:
        """The numbers of the states that are not as they were, NumPy arrays aside."""
        if self._is_unchanged():
            return []
        now = self._read_values() if self._read_lengths() == self._lengths else None
        if now is None:
            others = set(self._arrays)
            return [n for n in range(len(self._states)) if n not in others and not self._is_same(n)]
        return [] if now.tobytes() == self._values.tobytes() else self._owners_of(now)

    def _owners_of(self, now: np.ndarray) -> list[int]:
        """The numbers of the states whose values are not these."""
        is_changed = np.frombuffer(now.tobytes(), np.intp) != np.frombuffer(self._values.tobytes(), np.intp)
        parts = np.searchsorted(np.cumsum([*map(len, self._parts())]), is_changed.nonzero()[0], side="right")
        return sorted({self._numbers[part] for part in parts})

    def _is_same(self, number: int) -> bool:
        return _is_same(self._states[number][1], self._saved[number])

    def update(self) -> bool:
        """Save the current state. False if it holds other objects than plain values that it did not hold before."""
        for namespace, name, value in self._globals:
            if namespace.get(name) is not value:
                return False
        if self._is_unchanged():
            for number in self._arrays:
                self._saved[number] = _copy(self._states[number][1])
            return True
        now = self._read_values() if self._read_lengths() == self._lengths else None
        if now is None:
            return False
        different = []
        if now.tobytes() != self._values.tobytes():
            pairs = zip(now, self._values, strict=True)
            if not all(isinstance(one, SIMPLE) for one, other in pairs if one is not other):
                return False
            different = self._owners_of(now)
            self._values = now
        for number in [*different, *self._arrays]:
            self._saved[number] = _copy(self._states[number][1])
        self._changes, self._words = self._changes + 1, None
        self._note_versions()
        return True

    def restore(self) -> None:
        for (_, state), before in zip(self._states, self._saved, strict=True):
            if not _is_same(state, before):
                _put_back(state, before)

    def changed(self) -> list[str]:
        """The names of what is not as it was."""
        numbers = self._different() + [number for number in self._arrays if not self._is_same(number)]
        return [self._states[number][0] for number in numbers]

    def replaced(self) -> list[Replaced]:
        """The tensors that were put in the place of others, or where there was none; and numbers that became NaN.

        Those that require a gradient are activations that somebody keeps, not state: nothing can be computed from them
        in the next step.
        """
        found = []
        for number in self._different():
            (name, state), before = self._states[number], self._saved[number]
            if number < self._of_hooks and not isinstance(state, set) and not _is_same(state, before):
                now = _copy(state)
                for key in now if isinstance(now, dict) else range(len(now)):
                    old = before.get(key) if isinstance(before, dict) else before[key] if key < len(before) else None
                    if now[key] is not old:
                        olds = dict(tensors_in(old))
                        if _is_nan(now[key]) and not _is_nan(old):
                            found.append(Replaced(f"{name}.{key}", None, torch.tensor(now[key]), False))
                        found += [
                            Replaced(f"{name}.{key}", olds.get(keys), tensor.detach(), id(state) in self._buffers)
                            for keys, tensor in tensors_in(now[key])
                            if tensor.is_floating_point()
                            and not tensor.requires_grad
                            and tensor.layout is torch.strided
                        ]
        return found


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


class Unsaved:
    """What a step must not change, because saving it before every step would take too long, or cannot be done.

    Large containers and arrays, arrays of objects, iterators, tensors that are not dense, attributes of tensors, and
    attributes of objects of torch and the standard library that are not followed.
    They are looked at when a step was not finite: what the next run changes, the first one has changed as well.
    """

    def __init__(self, reached: Reached) -> None:
        tensors = [(name, one) for name, one in reached.tensors if not can_be_saved(one)]
        named = [(f"{path}.{name}", one) for path, module in reached.modules for name, one in _tensors_of(module)]
        tensors += [(name, one) for name, one in named if not can_be_saved(one)]
        self._values: list[tuple[str, Callable[[], Any]]] = [
            *((name, _reader(value)) for name, value in [*reached.unsaved, *tensors]),
            *((name, functools.partial(_attributes, one)) for name, one in [*reached.tensors, *named]),
        ]
        self._before = [read() for _, read in self._values]

    def changed(self) -> list[str]:
        """The names of what is not as it was."""
        pairs = zip(self._values, self._before, strict=True)
        return [name for (name, read), before in pairs if not _same(read(), before)]


def _tensors_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    parameters, buffers, _ = module_dicts(module)
    return [(name, one) for name, one in (*parameters.items(), *buffers.items()) if one is not None]


def _attributes(tensor: torch.Tensor) -> list[Any]:
    """The attributes that somebody gave a tensor, but torch's own."""
    return [item for pair in vars(tensor).items() if not pair[0].startswith("_") for item in pair]


def _reader(value: Any) -> Callable[[], Any]:
    if isinstance(value, (dict, list)):  # what is added to them is taken away again
        return functools.partial(_first, value, len(value))
    return functools.partial(_fingerprint, value)


def _first(value: Any, count: int) -> list[Any]:
    items = value.items() if isinstance(value, dict) else ((one,) for one in value)
    return [*itertools.chain.from_iterable(itertools.islice(items, count))]


def _fingerprint(value: Any) -> Any:
    """Something that is the same as long as a value is."""
    if isinstance(value, torch.Tensor):
        return _tensor_fingerprint(value)
    if isinstance(value, np.ndarray):
        return [*value.flat] if value.dtype.hasobject else zlib.crc32(value.tobytes())
    if isinstance(value, (array.array, bytearray)):
        return zlib.crc32(value)
    if isinstance(value, MEMORY):
        return bytes(value)
    if isinstance(value, GeneratorType):
        return value.gi_frame and [value.gi_frame.f_lasti, *value.gi_frame.f_locals.values()]
    if isinstance(value, np.random.SeedSequence):
        return value.n_children_spawned
    if isinstance(value, queue.SimpleQueue):
        return value.qsize()
    if isinstance(value, (set, frozenset, deque)):
        return [*value]
    return [*vars(value).values()] if hasattr(value, "__dict__") else repr(value.__reduce__())


def _tensor_fingerprint(tensor: torch.Tensor) -> Any:
    if tensor.is_nested or tensor.is_meta or tensor.layout not in (torch.strided, torch.sparse_coo):
        return mutation_count(tensor)
    if tensor.layout is torch.strided:
        return checksum(tensor).tolist()
    joined = tensor.detach().coalesce()
    return [*joined.shape, *checksum(joined.values()).tolist(), *checksum(joined.indices()).tolist()]


def _same(now: Any, before: Any) -> bool:
    """Whether two fingerprints are equal: lists hold the same objects."""
    if not isinstance(now, list) or not isinstance(before, list):
        return now == before
    return len(now) == len(before) and all(
        one is other or (isinstance(one, (int, float, str)) and one == other)
        for one, other in zip(now, before, strict=True)
    )


def _copy(state: Any) -> Any:
    if isinstance(state, dict):
        return dict(OrderedDict.items(state) if isinstance(state, OrderedDict) else dict.items(state))
    if isinstance(state, np.ndarray):
        return state.copy()
    if isinstance(state, (array.array, bytearray)):
        return state[:]
    if isinstance(state, Names):
        return state.read()
    return _contents(state) if isinstance(state, CellType) else [*state]


def _values(state: Names | CellType) -> Collection[Any]:
    return _contents(state) if isinstance(state, CellType) else state.read().values()


def _contents(cell: CellType) -> list[Any]:
    return [cell.cell_contents] if is_filled(cell) else []


def _is_same(state: Any, before: Any) -> bool:
    """Whether a state holds the same objects as its copy."""
    if isinstance(state, np.ndarray):
        return state.shape == before.shape and state.tobytes() == before.tobytes()
    if isinstance(state, (array.array, bytearray)):
        return bytes(state) == bytes(before)
    now = state if isinstance(state, (dict, list)) else _copy(state)
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return all(map(operator.is_, now.values(), before.values())) and now.keys() == before.keys()
    return all(map(operator.is_, now, before))


def _put_back(state: Any, before: Any) -> None:
    """Have a state hold what its copy holds, by no method of a user's subclass."""
    if isinstance(state, np.ndarray):
        state.resize(before.shape, refcheck=False)
        state[...] = before
    elif isinstance(state, (array.array, bytearray)):
        state[:] = before
    elif isinstance(state, Names):
        now = state.read()
        for name in now.keys() - before.keys():
            state.delete(name)
        for name, value in before.items():
            if name not in now or now[name] is not value:
                state.write(name, value)
    elif isinstance(state, CellType):
        if before:
            state.cell_contents = before[0]
        else:
            del state.cell_contents
    elif isinstance(state, OrderedDict):
        OrderedDict.clear(state)
        for key, value in before.items():
            OrderedDict.__setitem__(state, key, value)
    elif isinstance(state, dict):
        dict.clear(state)
        dict.update(state, before)
    elif isinstance(state, set):
        set.clear(state)
        set.update(state, before)
    else:
        kind: Any = list if isinstance(state, list) else deque
        kind.clear(state)
        kind.extend(state, before)
