"""`torchguard report`: one report of what a run left, of certificates, of models and of source files."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from torchguard._files import write_whole
from torchguard._progress import progress_line
from torchguard.cli import _targets, _views
from torchguard.cli._model_graphs import check, trace
from torchguard.cli._run_report import compilations_section
from torchguard.cli._targets import Directory, Target, complete_device, open_store
from torchguard.cli._terminal import CommandError, ExitCode, console, model_name, print_message
from torchguard.exceptions import TorchGuardError
from torchguard.report import Answer, Report, Section

EXAMPLE = """
torchguard report --html report.html

torchguard report run.json certificate.json --html report.html

torchguard report mypackage.models:build --device edge-npu --html report.html

torchguard report --lint src --html report.html
"""

Sources = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SOURCE...",
        help="Files that run --report, Report.save or Certificate.to_json wrote; ids of artifacts; or models to trace, "
        "as MODULE:CALLABLE. Without any, the artifacts of the newest run.",
        show_default=False,
    ),
]
Html = Annotated[Path | None, typer.Option("--html", help="Write one HTML page to this file.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write JSON to this file.")]
Lint = Annotated[list[Path] | None, typer.Option("--lint", help="Add what the linter finds in these paths.")]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", help="Check the graphs of models against this device.", autocompletion=complete_device),
]


@dataclass(frozen=True)
class _Options:
    directory: Path | None
    device: str | None


_SOURCES = 'Give a file that run --report or save("x.json") of a report or certificate wrote.'


def report(
    sources: Sources = None,
    html: Html = None,
    as_json: Json = None,
    lint: Lint = None,
    device: DeviceOption = None,
    directory: Directory = None,
) -> int:
    """Show what was found as one report: in the terminal, as JSON, or as one HTML page.

    Exits with 1 if the report has a problem in it.
    """
    options = _Options(directory, device)
    sections = [section for source in sources or () for section in _sections(source, options)]
    if lint:
        sections.append(_lint(lint))
    if not sources and not lint:
        with progress_line() as show:
            show("torchguard: reading the artifacts of the newest run")
            sections += _of_artifacts(_targets.artifacts_of_newest_run(open_store(directory)))
    made = Report(f"torchguard report {' '.join(sources or ())}".strip(), tuple(sections))
    files = [file for file in (html, as_json) if file is not None]
    for file, content in ((html, made.to_html), (as_json, made.to_json)):
        if file is not None:
            write_whole(file, content())
            print_message(f"{file} has the report.")
    if not files:
        console().print(made)
    return ExitCode.FAILURE if made.status == "bad" else ExitCode.OK


def _sections(source: str, options: _Options) -> list[Section]:
    if Path(source).is_file():
        return _of_file(Path(source))
    if _targets.is_target(source):
        return [*_of_target(_targets.load_target(source), options.device)]
    artifact = _targets.find_artifact(open_store(options.directory), source)
    return _of_artifacts([artifact])


def _of_file(file: Path) -> list[Section]:
    """The sections of a file, by what it is."""
    from torchguard.report._json import MARKER

    try:
        data: Any = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{file} is not JSON: {error}. {_SOURCES}", ExitCode.USAGE) from None
    if isinstance(data, dict) and isinstance(data.get("report"), dict):  # what `run --report` wrote
        data = data["report"]
    if isinstance(data, dict) and data.get("marker") == MARKER:
        return [*Report.from_dict(data).sections]
    if isinstance(data, dict) and "claims" in data:
        from torchguard.compiled.certify import Certificate

        return [Certificate.from_json(json.dumps(data)).section()]
    raise CommandError(f"{file} is no report of torchguard, and no certificate. {_SOURCES}", ExitCode.USAGE)


def _of_artifacts(artifacts: list[Any]) -> list[Section]:
    """Compilations, device reports, and graphs beside the source."""
    from torchguard.artifacts._section import artifacts_section

    every = [_views.artifact_compilations(one) for one in artifacts if one.state == "whole"]
    data = {
        name: [entry for one in every for entry in one[name]] for name in ("frames", "graph_breaks", "not_compiled")
    }
    kinds: dict[str, int] = {}
    for one in every:
        for kind, count in one["guard_kinds"].items():
            kinds[kind] = kinds.get(kind, 0) + count
    return [compilations_section({**data, "guard_kinds": kinds}), artifacts_section(artifacts, model_name)]


def _of_target(target: Target, device: str | None) -> Iterator[Section]:
    """A model: what is compiled, what its guards cost, its graphs, and whether they fit a device."""
    from torchguard import guards
    from torchguard.artifacts._section import artifacts_section
    from torchguard.device import Device, DeviceReport
    from torchguard.guards._section import inspection_data

    target.prepare()
    inspector = guards.GuardInspector(target.model)
    with progress_line() as show, guards.inspect() as inspection:
        show(f"torchguard: compiling {target.name}")
        for _ in range(2):
            target.call(inspector.compiled)
    yield compilations_section(inspection_data(inspection))
    try:
        with progress_line() as show:
            show("torchguard: measuring its guards")
            cost = guards.cost(inspector.compiled, *target.args, **target.kwargs)
        yield cost.section()
    except TorchGuardError as error:  # Dynamo may have found nothing to guard
        yield Section("Cost of guards", (Answer("unknown", f"It could not be measured: {error}"),))
    checked = _targets.load_device(device) if device is not None else Device(name="a device without limits")
    with trace(target) as (pairs, artifacts):
        yield sum((check(pair, checked) for pair in pairs), start=DeviceReport()).section()
        yield artifacts_section(artifacts, model_name)


def _lint(paths: list[Path]) -> Section:
    from torchguard.lint import check_paths

    with progress_line() as show:
        result = check_paths(paths, progress=lambda done, total: show(f"torchguard: checked {done} of {total} files"))
    return result.section()
