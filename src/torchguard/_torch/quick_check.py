"""A check of all guards that is quick while nothing has changed since they last held.

A check of all guards of a large model reads thousands of objects in C++, which takes 0.1 ms when they are cached and
three times that when they are not. An audit that finds nothing has read the same state as before. CPython 3.11 numbers
states: a dict has a version that every change to it replaces, a class has one that a change to it or to its bases
replaces, and what an object or a function refers to are pointers at known offsets. So once a whole check has passed,
those words are read in one gather (`numpy.take` over the process's memory). While they are the same, the guards that
depend on them alone hold: those on attributes, dicts, types, classes and functions that are reached from a module of
the frame, or from a module of Python. Tensors have no version: what guards compare is itself read as words
(`tensor_words`). What no word covers, such as lists, arguments and the state of torch, is checked by a smaller tree.

Memory is safe, since every object whose memory is read is held by a strong reference. These must not keep a model
alive: the collector cannot see them, because C++ owns the callback that leads here. So they are dropped when a module
of the frame dies, and before each full collection of garbage; the next checks read the tree, and then collect them
anew. Meanwhile a submodule that the user replaced can live until the next check.

Degraded where Python is not CPython 3.11, its objects are not laid out as expected, or torch has no `TensorGuards` or
`dict_version` (`can_read_words`): every check is one of the tree. torch 2.11 to 2.15 have both. Python 3.12
removed the public versions of dicts.
"""

import gc
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._dynamo import guards as dynamo_guards

from torchguard._torch.guard_words import UNKNOWN, Plan
from torchguard._torch.guards import Guards
from torchguard._torch.tensor_words import add_tensors
from torchguard._torch.words import Words, can_read_words

# Checks of the tree before the words are read for the first time, and the least number before they are read again.
_FIRST_WAIT, _NEXT_WAIT = 1, 32


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
        plan = Plan(self._guards, f_locals, self.release)
        words = Words(plan.addresses)
        tensors = add_tensors(words, [*plan.tensors.values()])
        if not plan.roots or tensors is None:
            return
        state = _State(plan, words, tensors)
        if self._guards.check(f_locals) and state.is_unchanged(f_locals):
            self._state = state


class _State:
    """The words behind guards that hold, the objects they were read from, and the tensors checked beside them."""

    def __init__(self, plan: Plan, words: Words, tensors: Sequence[torch.Tensor]) -> None:
        self.rest = plan.rest
        self._roots = tuple(plan.roots.items())
        self._globals, self._names = plan.globals, tuple(plan.global_names)
        self._global_values = tuple(plan.global_names.values())
        self._globals_version: int | None = None
        self._held = plan.held, plan.tensors
        self.words, self._tensors = words, tuple(tensors)
        self._check_tensors = _tensor_guards(self._tensors)

    def is_unchanged(self, f_locals: dict[str, Any]) -> bool:
        for name, module in self._roots:
            if f_locals.get(name, UNKNOWN) is not module():
                return False
        return self.words.are_unchanged() and self._globals_are_unchanged() and self._check_tensors(*self._tensors)

    def _globals_are_unchanged(self) -> bool:
        # The globals of a script change all the time, those of a package hardly ever.
        version = dynamo_guards.dict_version(self._globals)
        if version != self._globals_version:
            if not all(map(operator.is_, map(self._globals.get, self._names), self._global_values)):
                return False
            self._globals_version = version
        return True


def _tensor_guards(tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool]:
    sizes: Any = [[*one.size()] for one in tensors]
    strides: Any = [[*one.stride()] for one in tensors]
    return dynamo_guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


_quick_checks: "weakref.WeakSet[QuickCheck]" = weakref.WeakSet()


def _release_before_collection(phase: str, info: dict[str, int], checks: Any = _quick_checks) -> None:
    if phase == "start" and info["generation"] == 2:
        for one in [*checks]:
            one.release()
