"""`torchguard analyze`: guards, memory, ops or device support of an artifact, or of a model that a callable builds."""

import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from torchguard._progress import progress_line
from torchguard._sizes import format_size
from torchguard.cli import _targets, _views
from torchguard.cli._model_graphs import Pair, check, trace
from torchguard.cli._targets import AsJson, Directory, Target, complete_device, complete_id, find_artifact, open_store
from torchguard.cli._terminal import (
    CommandError,
    ExitCode,
    console,
    indent,
    one_line,
    plain,
    plural,
    print_json,
    print_message,
    source_line,
    table,
    truncation,
)
from torchguard.exceptions import TorchGuardError
from torchguard.report._text import bars

if TYPE_CHECKING:
    from torchguard.artifacts import Artifact
    from torchguard.device import Device

EXAMPLE = """
torchguard analyze --type guards

torchguard analyze --type memory mypackage.models:build

torchguard analyze --type device --device edge-npu mypackage.models:build
"""


class Kind(StrEnum):
    guards = "guards"
    device = "device"
    memory = "memory"
    graph = "graph"


Type = Annotated[Kind, typer.Option("--type", "-t", help="What to analyze.")]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="A TOML file, or the name of an example. Without it, what the variables MOCK_* describe.",
        show_default=False,
        autocompletion=complete_device,
    ),
]
TargetArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="TARGET",
        help="The id of an artifact, or package.module:callable that returns (model, args), (model, kwargs) or "
        "(model, args, kwargs). "
        "Without one, the newest artifact.",
        show_default=False,
        autocompletion=complete_id,
    ),
]


@dataclass(frozen=True)
class Analysis:
    """The result, as data for JSON and as text for the terminal."""

    data: dict[str, Any]
    views: Sequence[RenderableType]
    exit_code: ExitCode = ExitCode.OK


def analyze(
    kind: Type,
    target: TargetArgument = None,
    device: DeviceOption = None,
    directory: Directory = None,
    as_json: AsJson = False,
) -> int:
    """Analyze guards, memory, the graph, or which of its ops a device can run.

    With --type device it exits with 1 if a rule is broken.
    """
    loaded = _load_device(kind, device)
    if target is not None and _targets.is_target(target):
        analysis = _analyze_target(kind, _targets.load_target(target), loaded)
    elif target is None and kind is Kind.guards:
        found = _targets.artifacts_of_newest_run(open_store(directory))
        print_message(f"The newest run wrote {plural(len(found), 'artifact')}, the last of them {found[-1].id}.", "dim")
        analysis = _guards_of_artifacts(found)
    else:
        artifact = find_artifact(open_store(directory), target)
        if target is None:
            print_message(f"The newest artifact is {artifact.id}.", "dim")
        analysis = _analyze_artifact(kind, artifact, loaded)
    if as_json:
        print_json({"type": kind.value, **analysis.data})
    else:
        console().print(*analysis.views, sep="\n")
    return analysis.exit_code


def _load_device(kind: Kind, name: str | None) -> "Device | None":
    if kind is Kind.device and name is None:
        from torchguard.device import examples

        if (device := _targets.device_from_environment()) is not None:
            return device
        known = ", ".join(examples())
        raise CommandError(
            f"--type device needs --device, a TOML file or one of {known}; or variables such as MOCK_DENY.",
            ExitCode.USAGE,
        )
    if kind is not Kind.device and name is not None:
        raise CommandError(f"--device is for --type device, not for --type {kind}.", ExitCode.USAGE)
    return None if name is None else _targets.load_device(name)


def _analyze_target(kind: Kind, target: Target, device: "Device | None") -> Analysis:
    if kind is Kind.guards:
        return _guards_of_target(target)
    with trace(target) as (pairs, artifacts):
        return _analyze_graphs(kind, pairs, artifacts, device)


def _analyze_artifact(kind: Kind, artifact: "Artifact", device: "Device | None") -> Analysis:
    if kind is Kind.guards:
        return _guards_of_artifacts([artifact])
    pairs = [] if kind is Kind.graph else _pairs_in(artifact)
    return _analyze_graphs(kind, pairs, [artifact], device)


def _guards_of_artifacts(artifacts: Sequence["Artifact"]) -> Analysis:
    every = [_views.artifact_compilations(artifact) for artifact in artifacts]
    data: dict[str, Any] = {
        name: [entry for one in every for entry in one[name]] for name in ("frames", "graph_breaks", "not_compiled")
    }
    kinds = sum((Counter(one["guard_kinds"]) for one in every), Counter())
    data["guard_kinds"] = dict(kinds)
    failed = sum(bool(_views.failure_of(one)) for one in artifacts)
    return Analysis(data, [*_views.compilation_views(data, failed), *_views.guard_kinds(data)])


def _pairs_in(artifact: "Artifact") -> list[Pair]:
    from torchguard.cli._rebuild import pairs_in

    if not (pairs := pairs_in(artifact)):
        manifest = artifact.manifest()
        why = _views.failure_of(artifact) or f"its backend, {manifest['backend']}, made none"
        raise CommandError(f"{artifact.id} has no graph of AOTAutograd: {one_line(why)}.", ExitCode.NOT_FOUND)
    return pairs


def _analyze_graphs(
    kind: Kind, pairs: Sequence[Pair], artifacts: Iterable["Artifact"], device: "Device | None"
) -> Analysis:
    if kind is Kind.graph:
        return _graphs(artifacts)
    return _memory(pairs) if device is None else _device(pairs, device)


def _guards_of_target(target: Target) -> Analysis:
    """Compile the model and call it twice: a recompile for the same arguments shows that something is wrong."""
    from torchguard import guards
    from torchguard.guards._section import inspection_data

    target.prepare()
    inspector = guards.GuardInspector(target.model)
    with progress_line() as show, guards.inspect() as inspection:
        show(f"torchguard: compiling {target.name}")
        for _ in range(2):
            target.call(inspector.compiled)
    data = inspection_data(inspection, with_guards=True)
    try:
        with progress_line() as show:
            show("torchguard: measuring its guards")
            data["cost"] = _views.cost_data(guards.cost(inspector.compiled, *target.args, **target.kwargs))
        cost = _views.cost(data["cost"])
    except TorchGuardError as error:  # Dynamo may have found nothing to guard
        data["cost"], cost = None, plain(f"The cost of guards could not be measured: {error}", "yellow")
    return Analysis(data, [*_views.compilation_views(data), *_views.guard_kinds(data), cost])


def _device(pairs: Sequence[Pair], device: "Device") -> Analysis:
    from torchguard.device import DeviceReport

    report = sum((check(pair, device) for pair in pairs), start=DeviceReport())
    if any(pair.sizes for pair in pairs):
        from torchguard.cli._rebuild import with_symbols

        report = with_symbols(report)
    sizes = {name: size for pair in pairs for name, size in pair.sizes.items() if name.isidentifier()}
    at_sizes = f"at sizes {', '.join(f'{name}={size}' for name, size in sizes.items())}"
    verdict, *rest = _views.device_report(report)
    views = [verdict, *([plain(at_sizes, "bold")] if sizes else []), *rest]
    exit_code = ExitCode.FAILURE if report.violations or report.failures else ExitCode.OK
    return Analysis({**report.to_dict(), "sizes": sizes}, views, exit_code)


# Memory

_LARGEST = 10


def _memory(pairs: Iterable[Pair]) -> Analysis:
    from torchguard.device import Device

    compilations, views = [], []
    for pair in pairs:
        # Checked together, as the backward graph starts with the tensors that the forward graph saved.
        graphs = check(pair, Device(name="any")).graphs
        plans = {one.name: one.memory.to_dict() for one in graphs}
        compilations.append({"compile_id": pair.compile_id, "graphs": plans})
        for name, plan in plans.items():
            views += _memory_views(plan, f"{pair.compile_id} {name}", sys.stdout.encoding or "ascii")
    return Analysis({"compilations": compilations}, views)


def _memory_views(plan: Mapping[str, Any], graph: str, encoding: str) -> Iterator[RenderableType]:
    """The peak, the curve, and the tensors alive at the peak. `plan` is what `MemoryPlan.to_dict` returns."""
    saved = f", {format_size(plan['saved'])} saved for backward" if plan["saved"] else ""
    yield plain(f"{graph}: peak {format_size(plan['peak'])} at {plan['peak_node']}{saved}", "bold")
    yield indent(
        "\n".join(bars([*plan["curve"].values()], ascii_only="utf" not in encoding.lower(), label=format_size))
    )
    alive, rest = plan["at_peak"][:_LARGEST], plan["at_peak"][_LARGEST:]
    rows = [(format_size(one["bytes"]), one["name"], _line_of(one["source_line"])) for one in alive]
    yield table(("ALIVE", "TENSOR", "WHERE"), rows, right=("ALIVE",))
    if rest:
        yield plain(f"... and {len(rest)} more, {format_size(sum(one['bytes'] for one in rest))}", "dim")
    if plan["unknown"]:
        yield plain(f"Not counted, as their size is unknown: {', '.join(plan['unknown'])}", "yellow")


def _line_of(line: Mapping[str, Any] | None) -> str:
    return source_line(line["file"], line["line"]) if line else ""


# Graphs

_OPS, _OUTLINE = 20, 60  # how many of each are printed

Node = Mapping[str, Any]


def _graphs(artifacts: Iterable["Artifact"]) -> Analysis:
    graphs = []
    for artifact in artifacts:
        files = [graph["files"].get("json") for graph in artifact.manifest()["graphs"]]
        graphs += [{"artifact": artifact.id, **_graph_data(artifact.read_json(file))} for file in files if file]
    return Analysis({"graphs": graphs}, [view for graph in graphs for view in _graph_views(graph)])


def _graph_data(graph: Mapping[str, Any]) -> dict[str, Any]:
    """How often a graph has which op, and an outline by module. `graph` is a JSON file of an artifact."""
    nodes = graph["nodes"]
    calls = [node for node in nodes if node["op"].startswith("call_")]
    runs = itertools.groupby((call for call in calls if call["target"] != "getitem"), key=_module_of)
    return {
        "name": graph["name"],
        "kind": graph["kind"],
        "nodes": len(nodes),
        "inputs": [_signature(node) for node in nodes if node["op"] == "placeholder"],
        "ops": dict(Counter(node["target"] for node in calls).most_common()),
        "outline": [{"module": module, "ops": [_short_name(node) for node in run]} for module, run in runs],
    }


def _graph_views(graph: Mapping[str, Any]) -> Iterator[RenderableType]:
    counts = f"{plural(graph['nodes'], 'node')}, {plural(len(graph['inputs']), 'input')}"
    yield plain(f"{graph['name']} ({graph['kind']}): {counts}", "bold")
    ops, outline = [*graph["ops"].items()], graph["outline"]
    yield table(("OP", "TIMES"), ops[:_OPS], right=("TIMES",))
    yield from truncation(len(ops), _OPS)
    yield plain("Outline", "bold")
    for part in outline[:_OUTLINE]:
        module = plain(f"{part['module'] or '(no module)'}: ", "cyan")
        yield indent(module.append_text(plain(_run_lengths(part["ops"]), "default")))
    yield from truncation(len(outline), _OUTLINE)


def _module_of(node: Node) -> str:
    path = node["modules"][-1]["path"] if node.get("modules") else ""
    return re.sub(r"^L\['\w+'\]\.?", "", path)  # a method may call `self` by another name


def _short_name(node: Node) -> str:
    """`mm` for `aten.mm.default`."""
    return node["target"].removeprefix("aten.").removesuffix(".default")


def _run_lengths(ops: Sequence[str]) -> str:
    """`mm, relu x2` for mm, relu, relu."""
    runs = ((op, sum(1 for _ in run)) for op, run in itertools.groupby(ops))
    return ", ".join(f"{op} x{times}" if times > 1 else op for op, times in runs)


def _signature(node: Node) -> str:
    """`x: f32[16, 4]`."""
    from torchguard._graphs.listing import value_text  # loads torch

    return f"{node['name']}: {value_text(node['values'][0]) if node['values'] else ''}"
