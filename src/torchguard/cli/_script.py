"""Running a script or a module as Python runs it, with callbacks for `import torch` and the first `torch.compile`.

The command must not load torch before the script does: a script may set environment variables that torch reads when it
is imported. So torchguard's own imports of torch wait for the script's. `on_import` puts a finder in front of
`sys.meta_path`, which wraps `exec_module` of the module's loader; `on_first_compile` then replaces `torch.compile`.
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


def on_import(name: str, callback: Callable[[], None]) -> None:
    """Call `callback` once, after the module `name` was imported: now, if it is imported already."""
    if name in sys.modules:
        callback()
    else:
        sys.meta_path.insert(0, _ImportHook(name, callback))


def on_first_compile(callback: Callable[[], None]) -> None:
    """Call `callback` once, when `torch.compile` is first called. torch must be loaded.

    The import of Dynamo would be too early: its modules import each other, and are not complete at that point.
    """
    import torch

    compile = torch.compile
    is_first = True

    @functools.wraps(compile)
    def compile_after_callback(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            callback()
        return compile(*args, **kwargs)

    torch.compile = compile_after_callback


class _ImportHook(importlib.abc.MetaPathFinder):
    """A finder for one module that lets the other finders find it, and calls back after its loader has run it."""

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self._name, self._callback = name, callback
        self._searching = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name or getattr(self._searching, "active", False):
            return None
        self._searching.active = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.active = False
        if spec is not None and spec.loader is not None:
            # Not called back here, as many find a spec and never load the module.
            spec.loader.exec_module = self._calling_back(spec.loader.exec_module)  # pyright: ignore[reportAttributeAccessIssue]
        return spec

    def _calling_back(self, load: Callable[[types.ModuleType], None]) -> Callable[[types.ModuleType], None]:
        def exec_module(module: types.ModuleType) -> None:
            load(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._callback()

        return exec_module


@dataclass(frozen=True)
class Program:
    """Code to run as `__main__`, with its `sys.argv[0]`, `sys.path[0]` and module attributes."""

    code: types.CodeType
    argv0: str
    path0: str
    attributes: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    exit_code: int
    interrupted: bool = False


def load_file(path: str) -> Program:
    file = Path(path)
    if not file.is_file():
        what = "is a directory" if file.is_dir() else "does not exist"
        raise CommandError(f"run: {path!r} {what}. Give a Python file, or -m and the name of a module.", ExitCode.USAGE)
    full = os.path.abspath(path)
    with io.open_code(full) as source:
        code = _compile(source.read(), full)
    loader = importlib.machinery.SourceFileLoader("__main__", full)
    # With `__spec__` None, multiprocessing has a spawned process run `__file__`, which it needs to find functions.
    attributes = {"__file__": full, "__spec__": None, "__loader__": loader, "__package__": None, "__cached__": None}
    return Program(code, path, os.path.dirname(os.path.realpath(path)), attributes)


def load_module(name: str) -> Program:
    """The program that `python -m name` runs. As there, parent packages are imported."""
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
        raise CommandError(f"run: there is no module {name!r} that -m can run.", ExitCode.USAGE)
    attributes = {
        "__file__": spec.origin,
        "__spec__": spec,
        "__loader__": spec.loader,
        "__package__": spec.parent,
        "__cached__": spec.cached,
    }
    return Program(get_code(spec.name), spec.origin or name, here, attributes)


def run(program: Program, arguments: Sequence[str]) -> Outcome:
    """Run a program in this process, to its end. An exception is printed as Python prints it."""
    module = types.ModuleType("__main__")
    vars(module).update(program.attributes, __builtins__=builtins)
    sys.modules["__main__"] = module  # it stays there: functions registered with atexit may use it
    sys.argv[:] = [program.argv0, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = program.path0
    try:
        exec(program.code, vars(module))
    except SystemExit as error:
        return Outcome(_exit_code(error.code))
    except BaseException as error:
        own = error.__traceback__ and error.__traceback__.tb_next  # without the frame of this function
        sys.excepthook(type(error), error.with_traceback(own), own)
        return Outcome(1, interrupted=isinstance(error, KeyboardInterrupt))
    return Outcome(0)


def _compile(source: bytes, file: str) -> types.CodeType:
    try:
        return compile(source, file, "exec", dont_inherit=True)
    except SyntaxError as error:
        sys.excepthook(type(error), error.with_traceback(None), None)
        raise SystemExit(1) from None
    except ValueError as error:
        raise CommandError(f"run: {file!r} is not Python source: {error}.", ExitCode.USAGE) from None


def _exit_code(code: Any) -> int:
    """The exit code for the argument of `sys.exit`: None is 0, an int is itself, anything else is printed and is 1."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    if sys.stderr is not None:  # the script may have set it to None
        sys.stderr.write(f"{code}\n")
    return 1
