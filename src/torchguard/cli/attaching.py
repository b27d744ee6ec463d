"""Calls back when torch is loaded, and when it is about to compile: nothing is loaded before the script wants it."""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any


def when_loaded(name: str, callback: Callable[[], None]) -> None:
    """Call `callback` once, when the module `name` has been loaded: now, if it is there."""
    if name in sys.modules:
        callback()
    else:
        sys.meta_path.insert(0, _Waiting(name, callback))


def before_compiling(callback: Callable[[], None]) -> None:
    """Call `callback` once, when `torch.compile` is first called; torch has to be loaded.

    Not when Dynamo is loaded: its modules are then half-way through loading each other.
    """
    import torch

    compile = torch.compile
    is_due = True

    @functools.wraps(compile)
    def announced(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_due
        if is_due:
            is_due = False
            callback()
        return compile(*args, **kwargs)

    torch.compile = announced


class _Waiting(importlib.abc.MetaPathFinder):
    """Stands before the finders of one module, and gives its loader a word at the end."""

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self._name, self._callback = name, callback
        self._asking = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name or getattr(self._asking, "now", False):
            return None
        self._asking.now = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking.now = False
        if spec is not None and spec.loader is not None:
            # Finding is not loading: many look for a module and leave it at that.
            spec.loader.exec_module = self._then_called(spec.loader.exec_module)  # pyright: ignore[reportAttributeAccessIssue]
        return spec

    def _then_called(self, load: Callable[[types.ModuleType], None]) -> Callable[[types.ModuleType], None]:
        def exec_module(module: types.ModuleType) -> None:
            load(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._callback()

        return exec_module
