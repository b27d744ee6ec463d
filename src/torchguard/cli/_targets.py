"""`package.module:callable`, which builds what is to be analyzed.

Artifacts by the id that a user typed.
"""

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from torchguard.cli._terminal import CommandError, ExitCode, in_a_line
from torchguard.exceptions import NoSuchArtifactError

if TYPE_CHECKING:
    from torchguard.artifacts import Artifact, Store


HOW_TO_MAKE_SOME = "Make some: torchguard run SCRIPT, or artifacts.capture() around what you compile."

Directory = Annotated[
    Path | None,
    typer.Option(
        "--dir", "-d", help="Where artifacts are [TORCHGUARD_ARTIFACTS, else debug_artifacts].", show_default=False
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout, and nothing else.")]


def root_of(given: Path | None) -> Path:
    """Where artifacts are, as `artifacts.Store` has it, without torch."""
    return Path.cwd() / (given or os.environ.get("TORCHGUARD_ARTIFACTS") or "debug_artifacts")


def complete_id(ctx: typer.Context) -> list[str]:
    """The ids that a shell may offer, the newest first; without torch, which `Store` loads."""
    found = root_of(ctx.params.get("directory")).glob("*/manifest.json")
    return sorted((path.parent.name for path in found), reverse=True)


def open_store(directory: Path | None) -> "Store":
    from torchguard.artifacts import Store

    return Store(directory)


def own_artifacts(store: "Store") -> list["Artifact"]:
    return [artifact for artifact in store if artifact.state != "foreign"]


def find(store: "Store", id: str | None) -> "Artifact":
    """The artifact meant by an id or the start of one; the newest whole one if there is none."""
    artifacts = own_artifacts(store)
    if not artifacts:
        raise CommandError(f"There are no artifacts in {store.root} yet. {HOW_TO_MAKE_SOME}", ExitCode.NOTHING)
    if id is not None and not any(artifact.id.startswith(id) for artifact in artifacts):
        close = difflib.get_close_matches(id, [artifact.id for artifact in artifacts], n=3, cutoff=0.5)
        instead = f"Did you mean {' or '.join(close)}?" if close else "torchguard list shows what there is."
        raise CommandError(f"There is no artifact {id!r} in {store.root}. {instead}", ExitCode.NOTHING)
    try:
        return store.find(id)
    except NoSuchArtifactError as error:  # all are half-written, or several are meant
        raise CommandError(str(error), ExitCode.NOTHING) from error


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
        from torchguard._torch.modules import is_compiled_function, is_compiled_module

        return is_compiled_module(self.model) or is_compiled_function(self.model)

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
