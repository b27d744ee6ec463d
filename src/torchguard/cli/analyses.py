"""What can be analyzed, of a target that is built now or of an artifact that was captured: data, and its view."""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from torchguard.cli import facts
from torchguard.cli.exits import CommandError, ExitCode
from torchguard.cli.targets import Target
from torchguard.cli.terminal import plain
from torchguard.cli.tracing import Pair, check_all, check_one, traced
from torchguard.cli.views import device as device_view
from torchguard.cli.views import graph as graph_view
from torchguard.cli.views import guards as guards_view
from torchguard.cli.views import memory as memory_view
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
    found = facts.of_inspection(seen, with_guards=True)
    try:
        found["cost"] = facts.of_cost(guards.cost(inspector.compiled, *target.args, **target.kwargs))
        dear = guards_view.cost(found["cost"])
    except TorchGuardError as error:  # Dynamo may have found nothing to guard
        found["cost"], dear = None, plain(f"What guards cost could not be measured: {error}", "yellow")
    return Analysis(found, (*_guards_shown(found), dear))


def guards_of_artifact(artifact: "Artifact") -> Analysis:
    found = facts.of_artifact(artifact)
    return Analysis(found, tuple(_guards_shown(found)))


def _guards_shown(found: facts.Facts) -> list[RenderableType]:
    kinds = [guards_view.guard_kinds(found)] if found["guard_kinds"] else []
    return [guards_view.compilations(found), *guards_view.graph_breaks(found), *guards_view.recompiles(found), *kinds]


def device_of_target(target: Target, device: "Device") -> Analysis:
    with traced(target) as (pairs, _):
        return _device(pairs, device)


def device_of_artifact(artifact: "Artifact", device: "Device") -> Analysis:
    return _device(_pairs_in(artifact), device)


def _device(pairs: Iterable[Pair], device: "Device") -> Analysis:
    pairs = list(pairs)
    report = check_all(pairs, device)
    sizes = {name: size for pair in pairs for name, size in pair.sizes.items() if name.isidentifier()}
    shown = [*device_view.sizes(sizes), *device_view.report(report)]
    exit_code = ExitCode.FOUND if report.violations else ExitCode.FINE
    return Analysis({**device_view.facts(report), "sizes": sizes}, tuple(shown), exit_code)


def memory_of_target(target: Target) -> Analysis:
    with traced(target) as (pairs, _):
        return _memory([_plans_of(one) for one in pairs])


def memory_of_artifact(artifact: "Artifact") -> Analysis:
    return _memory([_plans_of(one) for one in _pairs_in(artifact)])


def _pairs_in(artifact: "Artifact") -> list[Pair]:
    from torchguard.cli.rebuilding import pairs_in

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
        for view in memory_view.memory(plan, f"{one['compile_id']} {name}", sys.stdout.encoding or "ascii")
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
    return [{"artifact": artifact.id, **graph_view.facts(artifact.read_json(file))} for file in files if file]


def _graph(found: list[dict[str, Any]]) -> Analysis:
    return Analysis({"graphs": found}, tuple(view for one in found for view in graph_view.graph(one)))


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
