"""The Python state that a step may change: attributes, containers, cells, globals, NumPy arrays."""

import itertools
import operator
from types import CellType
from typing import Any

import numpy as np
import torch
from torch import nn

from torchguard._pytrees import tensors_in
from torchguard._retry.reach import SIMPLE, Names, Reached, is_filled
from torchguard._retry.tensor_state import Replaced
from torchguard._torch.training import module_dicts


class PythonState:
    """Attributes, containers, cells and globals as they are before a step."""

    def __init__(self, reached: Reached) -> None:
        states: list[tuple[str, Any]] = []
        self._buffers: set[int] = set()  # ids of the dicts that hold the buffers of a module
        for name, module in reached.modules:
            if isinstance(module, nn.parallel.DistributedDataParallel):
                continue  # its attributes follow its communication
            dicts = (vars(module), *(one for one in module_dicts(module) if isinstance(one, dict)))
            states += [(name, one) for one in dicts]
            self._buffers.add(id(module_dicts(module)[1]))
        self._states = states + reached.states
        kinds = [state for _, state in self._states]
        self._dicts = [state for state in kinds if isinstance(state, dict)]
        self._keyed = [state for _, state in reached.states if isinstance(state, dict)]  # no module's attributes
        self._names = [state for state in kinds if isinstance(state, Names)]
        self._cells = [state for state in kinds if isinstance(state, CellType)]
        self._arrays = any(isinstance(state, np.ndarray) for state in kinds)
        special = (dict, Names, CellType, np.ndarray)
        self._sequences = [state for state in kinds if not isinstance(state, special)]
        self._globals = reached.globals
        self._save()

    def _save(self) -> None:
        self._saved = [(name, state, _copy(state)) for name, state in self._states]
        self._lengths, self._values = self._flat()

    def _flat(self) -> tuple[list[int], list[Any]]:
        """All lengths, and all values one after the other: to compare them at once takes a tenth of a loop's time."""
        parts = [*map(dict.values, self._dicts), *self._keyed, *self._sequences, *map(_contents, self._cells)]
        parts += [state.read().values() for state in self._names]
        return [*map(len, parts)], [*itertools.chain.from_iterable(parts)]

    def update(self) -> bool:
        """Save the current state. False if it holds other objects than plain values that it did not hold before."""
        if any(namespace.get(name) is not value for namespace, name, value in self._globals):
            return False
        lengths, now = self._flat()
        if lengths != self._lengths:
            return False
        if all(map(operator.is_, now, self._values)):
            if self._arrays:
                self._save()
            return True
        pairs = zip(now, self._values, strict=True)
        if not all(isinstance(one, SIMPLE) for one, other in pairs if one is not other):
            return False
        self._save()
        return True

    def is_same(self) -> bool:
        """Whether all is as it was, NumPy arrays aside."""
        lengths, now = self._flat()
        return lengths == self._lengths and all(map(operator.is_, now, self._values))

    def restore(self) -> None:
        for _, state, before in self._saved:
            if not _is_same(state, before):
                _put_back(state, before)

    def changed(self) -> list[str]:
        """The names of what is not as it was."""
        return [name for name, state, before in self._saved if not _is_same(state, before)]

    def replaced(self) -> list[Replaced]:
        """The tensors that were put in the place of others, or where there was none.

        Those that require a gradient are activations that somebody keeps, not state: nothing can be computed from them
        in the next step.
        """
        found = []
        for name, state, before in () if self.is_same() else self._saved:
            if not isinstance(state, (np.ndarray, set)) and not _is_same(state, before):
                now = _copy(state)
                for key in now if isinstance(now, dict) else range(len(now)):
                    old = before.get(key) if isinstance(before, dict) else before[key] if key < len(before) else None
                    if now[key] is not old:
                        olds = dict(tensors_in(old))
                        found += [
                            Replaced(f"{name}.{key}", olds.get(keys), tensor.detach(), id(state) in self._buffers)
                            for keys, tensor in tensors_in(now[key])
                            if tensor.is_floating_point()
                            and not tensor.requires_grad
                            and tensor.layout is torch.strided
                        ]
        return found


def _copy(state: Any) -> Any:
    if isinstance(state, (dict, np.ndarray)):
        return state.copy()
    if isinstance(state, Names):
        return state.read()
    return _contents(state) if isinstance(state, CellType) else [*state]


def _contents(cell: CellType) -> list[Any]:
    return [cell.cell_contents] if is_filled(cell) else []


def _is_same(state: Any, before: Any) -> bool:
    """Whether a state holds the same objects as its copy."""
    if isinstance(state, np.ndarray):
        return state.shape == before.shape and state.tobytes() == before.tobytes()
    now = state if isinstance(state, (dict, list)) else _copy(state)
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return all(map(operator.is_, now.values(), before.values())) and now.keys() == before.keys()
    return all(map(operator.is_, now, before))


def _put_back(state: Any, before: Any) -> None:
    if isinstance(state, np.ndarray):
        state.resize(before.shape, refcheck=False)
        state[...] = before
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
    else:
        state.clear()
        state.update(before) if isinstance(state, (dict, set)) else state.extend(before)
