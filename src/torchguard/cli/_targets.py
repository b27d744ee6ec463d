"""What a verb works on: an artifact, named by its id; a model, built by `package.module:callable`; a device."""

import difflib
import importlib
import itertools
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

import torchguard
from torchguard.cli._terminal import CommandError, ExitCode, one_line
from torchguard.exceptions import NoSuchArtifactError, TorchGuardError

if TYPE_CHECKING:
    from torchguard.artifacts import Artifact, Store
    from torchguard.device import Device


HOW_TO_CAPTURE = "Capture some: torchguard run SCRIPT, or artifacts.capture() around what you compile."

Directory = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        "-d",
        help="The directory of artifacts [TORCHGUARD_ARTIFACTS, else debug_artifacts].",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON to stdout, and nothing else.")]


def artifact_root(given: Path | None) -> Path:
    """The directory of artifacts, as in `artifacts.Store`, but without loading torch."""
    return Path.cwd() / (given or os.environ.get("TORCHGUARD_ARTIFACTS") or "debug_artifacts")


def complete_id(ctx: typer.Context) -> list[str]:
    """The ids that a shell may offer, newest first. `Store` is not used, as it loads torch."""
    found = artifact_root(ctx.params.get("directory")).glob("*/manifest.json")
    return sorted((path.parent.name for path in found), reverse=True)


def open_store(directory: Path | None) -> "Store":
    from torchguard.artifacts import Store

    return Store(directory)


def own_artifacts(store: "Store") -> list["Artifact"]:
    """The artifacts that torchguard wrote."""
    return [artifact for artifact in store if artifact.state != "foreign"]


def foreign_entries(store: "Store") -> int:
    """How many entries of the directory torchguard did not write, files included."""
    own = {artifact.path.name for artifact in own_artifacts(store)}
    return len({*os.listdir(store.root)} - own) if store.root.is_dir() else 0


def artifacts_of_newest_run(store: "Store") -> list["Artifact"]:
    """The whole artifacts of the process that wrote the newest one, oldest first."""
    newest = find_artifact(store, None)
    whole = [artifact for artifact in own_artifacts(store) if artifact.state == "whole"]
    of_run = itertools.takewhile(lambda one: _process(one) == _process(newest), whole[whole.index(newest) :])
    return [*of_run][::-1]


def _process(artifact: "Artifact") -> int | None:
    manifest = read_manifest(artifact)
    return manifest["pid"] if manifest else None


def find_artifact(store: "Store", id: str | None) -> "Artifact":
    """The artifact with this id, or the only one whose id starts with it; without an id, the newest complete one."""
    artifacts = own_artifacts(store)
    if not artifacts:
        raise CommandError(f"There are no artifacts in {store.root} yet. {HOW_TO_CAPTURE}", ExitCode.NOT_FOUND)
    if id is not None and not any(artifact.id.startswith(id) for artifact in artifacts):
        close = difflib.get_close_matches(id, [artifact.id for artifact in artifacts], n=3, cutoff=0.5)
        instead = f"Did you mean {' or '.join(close)}?" if close else "torchguard list shows all ids."
        raise CommandError(f"There is no artifact {id!r} in {store.root}. {instead}", ExitCode.NOT_FOUND)
    try:
        return store.find(id)
    except NoSuchArtifactError as error:  # all are partly written, or several start with this id
        raise CommandError(str(error), ExitCode.NOT_FOUND) from error


_FROM_MANIFEST = ("compile_id", "function", "file", "line", "backend", "graphs", "waiting_for", "notes")


def artifact_data(artifact: "Artifact") -> dict[str, Any]:
    """An artifact for JSON; if its manifest cannot be read, only what is known without it."""
    known = {
        "id": artifact.id,
        "path": str(artifact.path),
        "created": artifact.created.isoformat(),
        "state": artifact.state,
        "problem": artifact.problem,
        "size": artifact.size,
    }
    manifest = read_manifest(artifact)
    return known | ({name: manifest[name] for name in _FROM_MANIFEST} if manifest else {})


def read_manifest(artifact: "Artifact") -> dict[str, Any] | None:
    """The manifest, or None if the artifact is incomplete or corrupt."""
    if artifact.state != "whole":
        return None
    try:
        return artifact.manifest()
    except TorchGuardError:  # it changed since it was listed
        return None


_RETURN = "It must return (model, args), (model, kwargs) or (model, args, kwargs)"


@dataclass(frozen=True)
class Target:
    """A model, and the arguments to call it with."""

    name: str
    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def is_compiled(self) -> bool:
        from torchguard._torch.modules import is_compiled_function, is_compiled_module

        return is_compiled_module(self.model) or is_compiled_function(self.model)

    def prepare(self) -> None:
        """Call the model in eager mode, whose errors are plainer than Dynamo's, and clear what was compiled so far.

        The callable may have compiled and called the model already: after the reset it compiles again, observed.
        """
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler would log that it starts and stops
        import torch

        if not self.is_compiled:
            self.call(self.model)
        torch.compiler.reset()

    def call(self, model: Callable[..., Any]) -> Any:
        """Call the model, or a compiled form of it, with the arguments."""
        try:
            return model(*self.args, **self.kwargs)
        except Exception as error:
            _fail(f"{self.name}: calling the model failed", error, ExitCode.FAILURE)


def is_target(text: str) -> bool:
    return ":" in text


def load_target(text: str) -> Target:
    """Import the module, with the current directory on `sys.path`, and call the callable."""
    module_name, _, attribute = text.partition(":")
    if not module_name or not attribute:
        raise CommandError(f"{text!r} is not a target. Write package.module:callable.", ExitCode.USAGE)
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        _fail(f"{text}: module {module_name!r} cannot be imported", error, ExitCode.USAGE)
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise CommandError(f"{text}: {module_name!r} has no {attribute!r}.", ExitCode.USAGE)
        found = getattr(found, name)
    if not callable(found):
        raise CommandError(f"{text}: expected a callable, got {_type(found)}. {_RETURN}.", ExitCode.USAGE)
    try:
        built = found()
    except Exception as error:
        _fail(f"{text}: calling it without arguments failed", error, ExitCode.FAILURE)
    return _check_target(text, built)


def _check_target(text: str, built: Any) -> Target:
    if not isinstance(built, tuple) or len(built) not in (2, 3):
        got = f"a tuple of {len(built)}" if isinstance(built, tuple) else _type(built)
        raise CommandError(f"{text} returned {got}. {_RETURN}.", ExitCode.USAGE)
    model, args = built[:2]
    kwargs = built[2] if len(built) == 3 else {}
    if len(built) == 2 and isinstance(args, dict):
        args, kwargs = (), args
    requirements = [
        (callable(model), "model", model, "a module or a function"),
        (isinstance(args, (tuple, list)), "args", args, "a tuple, (x,) for one argument, or a dict of named ones"),
        (isinstance(kwargs, dict), "kwargs", kwargs, "a dict"),
    ]
    for is_met, what, got, expected in requirements:
        if not is_met:
            raise CommandError(f"{text}: {what}: expected {expected}, got {_type(got)}.", ExitCode.USAGE)
    return Target(text, model, tuple(args), kwargs)


def _type(value: object) -> str:
    return f"a value of type {type(value).__name__}"


def _fail(what: str, error: Exception, exit_code: ExitCode) -> NoReturn:
    """Raise a CommandError of one sentence, with the line of the user's code that raised."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    last = frames[-1] if frames and frames[-1].filename != __file__ and "importlib" not in frames[-1].filename else None
    where = f" ({last.filename}:{last.lineno})" if last else ""
    raise CommandError(f"{what}: {type(error).__name__}: {one_line(error)}{where}", exit_code) from error


def complete_device(ctx: typer.Context) -> list[str]:
    """The names of `device.examples()` that a shell may offer. The package is not imported, as it loads torch."""
    if ctx.params.get("name"):  # the word is behind the script of `run`, and so is the script's own --device
        return []
    examples = Path(torchguard.__file__).parent / "device" / "examples"
    return sorted(path.stem for path in examples.glob("*.toml"))


def load_device(name: str) -> "Device":
    from torchguard.device import Device

    try:
        return Device.from_toml(name)
    except TorchGuardError as error:
        raise CommandError(str(error), ExitCode.USAGE) from error


def device_from_environment() -> "Device | None":
    """The device that `MOCK_*` variables describe; None if there is none."""
    if not any(name.startswith("MOCK_") for name in os.environ):
        return None
    from torchguard.device import Device

    try:
        return Device.from_environment()
    except TorchGuardError as error:
        raise CommandError(str(error), ExitCode.USAGE) from error
