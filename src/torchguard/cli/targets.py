"""`package.module:callable`, which builds what is to be analyzed."""

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from torchguard.cli.exits import CommandError, ExitCode
from torchguard.cli.terminal import in_a_line

_WANTED = "It has to return (model, args) or (model, args, kwargs)"


@dataclass(frozen=True)
class Target:
    """Something to call, and what to call it with."""

    name: str
    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def is_compiled(self) -> bool:
        from torchguard.cli._torch import is_compiled_already, is_compiled_function

        return is_compiled_already(self.model) or is_compiled_function(self.model)

    def try_out(self) -> None:
        """Call the model as it is: what is wrong with it is told in plainer words than Dynamo has.

        What was compiled before, when the model was built say, is forgotten: it is to be seen when it is compiled.
        """
        import torch

        if not self.is_compiled:
            self.call(self.model)
        torch.compiler.reset()

    def call(self, compiled: Callable[..., Any]) -> Any:
        """Call what was made of the model, with the arguments."""
        try:
            return compiled(*self.args, **self.kwargs)
        except Exception as error:
            _refuse(f"{self.name}: calling the model failed", error, ExitCode.FOUND)


def is_target(text: str) -> bool:
    return ":" in text


def load(text: str) -> Target:
    """Import the module, with the current directory in reach, and call the callable."""
    module_name, _, attribute = text.partition(":")
    if not module_name or not attribute:
        raise CommandError(f"{text!r} is no target. Write package.module:callable.", ExitCode.USAGE)
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        _refuse(f"{text}: module {module_name!r} cannot be imported", error, ExitCode.USAGE)
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise CommandError(f"{text}: {module_name!r} has no {attribute!r}.", ExitCode.USAGE)
        found = getattr(found, name)
    if not callable(found):
        raise CommandError(f"{text}: this is a {type(found).__name__}, not a callable. {_WANTED}.", ExitCode.USAGE)
    try:
        built = found()
    except Exception as error:
        _refuse(f"{text}: calling it without arguments failed", error, ExitCode.FOUND)
    return _target(text, built)


def _target(text: str, built: Any) -> Target:
    if not isinstance(built, tuple) or len(built) not in (2, 3):
        got = f"a tuple of {len(built)}" if isinstance(built, tuple) else f"a {type(built).__name__}"
        raise CommandError(f"{text} returned {got}. {_WANTED}.", ExitCode.USAGE)
    model, args = built[:2]
    kwargs = built[2] if len(built) == 3 else {}
    wrong = [
        (not callable(model), "model", model, "a module or a function"),
        (not isinstance(args, (tuple, list)), "args", args, "a tuple: (x,) for one argument"),
        (not isinstance(kwargs, dict), "kwargs", kwargs, "a dict"),
    ]
    for is_wrong, what, got, wanted in wrong:
        if is_wrong:
            raise CommandError(f"{text}: {what} is a {type(got).__name__}. Return {wanted}.", ExitCode.USAGE)
    return Target(text, model, tuple(args), kwargs)


def _refuse(what: str, error: Exception, exit_code: ExitCode) -> NoReturn:
    """One sentence, with the line of the user's code that it comes from."""
    places = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    last = places[-1] if places and places[-1].filename != __file__ and "importlib" not in places[-1].filename else None
    where = f" ({last.filename}:{last.lineno})" if last else ""
    raise CommandError(f"{what}: {type(error).__name__}: {in_a_line(error)}{where}", exit_code) from error
