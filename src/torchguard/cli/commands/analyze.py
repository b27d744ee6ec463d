"""`torchguard analyze`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import torchguard
from torchguard.cli import analyses, targets
from torchguard.cli.analyses import Analysis, Kind
from torchguard.cli.exits import CommandError, ExitCode
from torchguard.cli.stored import AsJson, Directory, complete_id, find, open_store
from torchguard.cli.terminal import console, emit_json, say
from torchguard.exceptions import TorchGuardError

if TYPE_CHECKING:
    from torchguard.device import Device

EXAMPLE = """
torchguard analyze --type guards

torchguard analyze --type memory mypackage.models:build

torchguard analyze --type device --device edge-npu mypackage.models:build
"""


def complete_device(ctx: typer.Context) -> list[str]:
    """The names that a shell may offer, those of `device.examples()`; without torch, which that package loads."""
    if ctx.params.get("name"):  # behind the script of `run`: the script's own --device
        return []
    examples = Path(torchguard.__file__).parent / "device" / "examples"
    return sorted(path.stem for path in examples.glob("*.toml"))


Type = Annotated[Kind, typer.Option("--type", "-t", help="What to look at.")]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="A TOML file, or the name of an example.",
        show_default=False,
        autocompletion=complete_device,
    ),
]
TargetArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="TARGET",
        help="The id of an artifact, or package.module:callable that returns (model, args) or (model, args, kwargs). "
        "Without one, the newest artifact.",
        show_default=False,
        autocompletion=complete_id,
    ),
]


def analyze(
    kind: Type,
    target: TargetArgument = None,
    device: DeviceOption = None,
    directory: Directory = None,
    as_json: AsJson = False,
) -> int:
    """Look into guards, memory, the graph, or what a device can run of it.

    With --type device it ends with 1 where a rule is broken.
    """
    if kind is not Kind.device and device is not None:
        raise CommandError(f"--device goes with --type device, not with {kind}.", ExitCode.USAGE)
    analysis = _analysis(kind, target, device, directory)
    if as_json:
        emit_json({"type": kind.value, **analysis.data})
    else:
        console().print(*analysis.shown, sep="\n")
    return analysis.exit_code


def _analysis(kind: Kind, target: str | None, device: str | None, directory: Directory) -> Analysis:
    if target is not None and targets.is_target(target):
        if kind is Kind.device:
            return analyses.device_of_target(targets.load(target), load_device(device))
        return analyses.OF_TARGET[kind](targets.load(target))
    artifact = find(open_store(directory), target)
    if target is None:
        say(f"The newest artifact is {artifact.id}.", "dim")
    if kind is Kind.device:
        return analyses.device_of_artifact(artifact, load_device(device))
    return analyses.OF_ARTIFACT[kind](artifact)


def load_device(name: str | None) -> "Device":
    from torchguard.device import Device, examples

    if name is None:
        known = ", ".join(examples())
        raise CommandError(f"--type device needs --device: a TOML file, or one of {known}.", ExitCode.USAGE)
    try:
        return Device.from_toml(name)
    except TorchGuardError as error:
        raise CommandError(str(error), ExitCode.USAGE) from error
