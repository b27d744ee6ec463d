"""Runs a script or a module as Python would run it.

Calls back when torch is loaded, and when it is about to compile: nothing is loaded before the script wants it.
"""

import builtins
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import sys
import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchguard.cli._terminal import CommandError, ExitCode


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


@dataclass(frozen=True)
class Program:
    """Code to be run as `__main__`, and how the process looks to it."""

    code: types.CodeType
    argv0: str
    path0: str
    attributes: dict[str, Any]


@dataclass(frozen=True)
class Ending:
    """How a program ended."""

    exit_code: int
    interrupted: bool = False


def program_of_file(path: str) -> Program:
    file = Path(path)
    if not file.is_file():
        what = "is a directory" if file.is_dir() else "does not exist"
        raise CommandError(f"run: {path!r} {what}. Give a Python file, or -m and a module.", ExitCode.USAGE)
    full = os.path.abspath(path)
    with io.open_code(full) as source:
        code = _compiled(source.read(), full)
    loader = importlib.machinery.SourceFileLoader("__main__", full)
    # Where `__spec__` is None, a process that is spawned starts from `__file__`.
    attributes = {"__file__": full, "__spec__": None, "__loader__": loader, "__package__": None, "__cached__": None}
    return Program(code, path, os.path.dirname(os.path.realpath(path)), attributes)


def program_of_module(name: str) -> Program:
    """What `python -m name` runs. Packages above it are imported, as there."""
    here = os.getcwd()
    if not sys.flags.safe_path and here not in sys.path:
        sys.path.insert(0, here)
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError) as error:
        raise CommandError(f"run: module {name!r} cannot be imported: {error}.", ExitCode.USAGE) from error
    get_code = getattr(spec.loader, "get_code", None) if spec is not None else None
    if spec is None or get_code is None:
        raise CommandError(f"run: no module {name!r}, or none that can be run by -m.", ExitCode.USAGE)
    attributes = {
        "__file__": spec.origin,
        "__spec__": spec,
        "__loader__": spec.loader,
        "__package__": spec.parent,
        "__cached__": spec.cached,
    }
    return Program(get_code(spec.name), spec.origin or name, here, attributes)


def run(program: Program, arguments: Sequence[str]) -> Ending:
    """Run it in this process, to its last line. What it raises is shown as Python shows it."""
    module = types.ModuleType("__main__")
    vars(module).update(program.attributes, __builtins__=builtins)
    sys.modules["__main__"] = module  # and there it stays: what runs at exit may still look for it
    sys.argv[:] = [program.argv0, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = program.path0
    return _ended(lambda: exec(program.code, vars(module)))


def _compiled(source: bytes, file: str) -> types.CodeType:
    try:
        return compile(source, file, "exec", dont_inherit=True)
    except SyntaxError as error:
        sys.excepthook(type(error), error.with_traceback(None), None)
        raise SystemExit(1) from None
    except ValueError as error:
        raise CommandError(f"run: {file!r} is no Python source: {error}.", ExitCode.USAGE) from None


def _ended(go: Callable[[], None]) -> Ending:
    try:
        go()
    except SystemExit as error:
        return Ending(_exit_code(error.code))
    except BaseException as error:
        traceback = error.__traceback__
        own = traceback and traceback.tb_next and traceback.tb_next.tb_next  # below `_ended` and the lambda
        sys.excepthook(type(error), error.with_traceback(own), own)
        return Ending(1, interrupted=isinstance(error, KeyboardInterrupt))
    return Ending(0)


def _exit_code(code: Any) -> int:
    """As Python reads what `sys.exit` was given: nothing is 0, a number is itself, anything else a message."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    if sys.stderr is not None:  # the script may have done away with it
        sys.stderr.write(f"{code}\n")
    return 1
