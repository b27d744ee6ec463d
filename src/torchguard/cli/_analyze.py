"""`torchguard analyze`.

What can be analyzed, of a target that is built now or of an artifact that was captured: data, and its view.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

import torchguard
from torchguard.cli import _facts, _targets, _views
from torchguard.cli._targets import AsJson, Directory, Target, complete_id, find, open_store
from torchguard.cli._terminal import CommandError, ExitCode, console, emit_json, plain, say
from torchguard.cli._trace import Pair, check_all, check_one, traced
from torchguard.exceptions import TorchGuardError

if TYPE_CHECKING:
    from torchguard.artifacts import Artifact
    from torchguard.device import Device


class Kind(StrEnum):
    guards = "guards"
    device = "device"
    memory = "memory"
    graph = "graph"


@dataclass(frozen=True)
class Analysis:
    data: dict[str, Any]
    shown: tuple[RenderableType, ...]
    exit_code: ExitCode = ExitCode.FINE


def guards_of_target(target: Target) -> Analysis:
    """It is called twice: what is compiled again for the same arguments is compiled for nothing."""
    from torchguard import guards

    target.try_out()
    inspector = guards.GuardInspector(target.model)
    with guards.inspect() as seen:
        for _ in range(2):
            target.call(inspector.compiled)
    found = _facts.of_inspection(seen, with_guards=True)
    try:
        found["cost"] = _facts.of_cost(guards.cost(inspector.compiled, *target.args, **target.kwargs))
        dear = _views.cost(found["cost"])
    except TorchGuardError as error:  # Dynamo may have found nothing to guard
        found["cost"], dear = None, plain(f"What guards cost could not be measured: {error}", "yellow")
    return Analysis(found, (*_guards_shown(found), dear))


def guards_of_artifact(artifact: "Artifact") -> Analysis:
    found = _facts.of_artifact(artifact)
    return Analysis(found, tuple(_guards_shown(found)))


def _guards_shown(found: _facts.Facts) -> list[RenderableType]:
    kinds = [_views.guard_kinds(found)] if found["guard_kinds"] else []
    return [_views.compilations(found), *_views.graph_breaks(found), *_views.recompiles(found), *kinds]


def device_of_target(target: Target, device: "Device") -> Analysis:
    with traced(target) as (pairs, _):
        return _device(pairs, device)


def device_of_artifact(artifact: "Artifact", device: "Device") -> Analysis:
    return _device(_pairs_in(artifact), device)


def _device(pairs: Iterable[Pair], device: "Device") -> Analysis:
    pairs = list(pairs)
    report = check_all(pairs, device)
    sizes = {name: size for pair in pairs for name, size in pair.sizes.items() if name.isidentifier()}
    shown = [*_views.sizes(sizes), *_views.device_report(report)]
    exit_code = ExitCode.FOUND if report.violations else ExitCode.FINE
    return Analysis({**_views.device_facts(report), "sizes": sizes}, tuple(shown), exit_code)


def memory_of_target(target: Target) -> Analysis:
    with traced(target) as (pairs, _):
        return _memory([_plans_of(one) for one in pairs])


def memory_of_artifact(artifact: "Artifact") -> Analysis:
    return _memory([_plans_of(one) for one in _pairs_in(artifact)])


def _pairs_in(artifact: "Artifact") -> list[Pair]:
    from torchguard.cli._rebuild import pairs_in

    if not (pairs := pairs_in(artifact)):
        raise CommandError(
            f"{artifact.id} has no graph of AOTAutograd: its backend, {artifact.manifest()['backend']}, does without.",
            ExitCode.NOTHING,
        )
    return pairs


def _plans_of(pair: Pair) -> dict[str, Any]:
    """The memory of a pair of graphs: the backward starts with what the forward left."""
    from torchguard.device import Device

    graphs = check_one(pair, Device(name="any")).graphs
    return {"compile_id": pair.compile_id, "graphs": {one.name: one.memory.to_dict() for one in graphs}}


def _memory(plans: Iterable[Mapping[str, Any]]) -> Analysis:
    plans = list(plans)
    shown = [
        view
        for one in plans
        for name, plan in one["graphs"].items()
        for view in _views.memory(plan, f"{one['compile_id']} {name}", sys.stdout.encoding or "ascii")
    ]
    return Analysis({"compilations": plans}, tuple(shown))


def graph_of_target(target: Target) -> Analysis:
    with traced(target) as (_, artifacts):
        found = [one for artifact in artifacts for one in _graphs_in(artifact)]
    return _graph(found)


def graph_of_artifact(artifact: "Artifact") -> Analysis:
    return _graph(_graphs_in(artifact))


def _graphs_in(artifact: "Artifact") -> list[dict[str, Any]]:
    files = [graph["files"].get("json") for graph in artifact.manifest()["graphs"]]
    return [{"artifact": artifact.id, **_views.graph_facts(artifact.read_json(file))} for file in files if file]


def _graph(found: list[dict[str, Any]]) -> Analysis:
    return Analysis({"graphs": found}, tuple(view for one in found for view in _views.graph(one)))


OF_TARGET: Mapping[Kind, Callable[[Target], Analysis]] = {
    Kind.guards: guards_of_target,
    Kind.memory: memory_of_target,
    Kind.graph: graph_of_target,
}
OF_ARTIFACT: Mapping[Kind, Callable[["Artifact"], Analysis]] = {
    Kind.guards: guards_of_artifact,
    Kind.memory: memory_of_artifact,
    Kind.graph: graph_of_artifact,
}


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
    if target is not None and _targets.is_target(target):
        if kind is Kind.device:
            return device_of_target(_targets.load(target), load_device(device))
        return OF_TARGET[kind](_targets.load(target))
    artifact = find(open_store(directory), target)
    if target is None:
        say(f"The newest artifact is {artifact.id}.", "dim")
    if kind is Kind.device:
        return device_of_artifact(artifact, load_device(device))
    return OF_ARTIFACT[kind](artifact)


def load_device(name: str | None) -> "Device":
    from torchguard.device import Device, examples

    if name is None:
        known = ", ".join(examples())
        raise CommandError(f"--type device needs --device: a TOML file, or one of {known}.", ExitCode.USAGE)
    try:
        return Device.from_toml(name)
    except TorchGuardError as error:
        raise CommandError(str(error), ExitCode.USAGE) from error
