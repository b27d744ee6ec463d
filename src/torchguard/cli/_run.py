"""`torchguard run`: run a script, and report when it has ended.

Threads of the script and its own `atexit` functions may compile after its last line. So the report is made by an
`atexit` function that is registered before the script runs, and thereby called last. By then only `os._exit` can still
change the exit code.
"""

import atexit
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from torchguard._files import write_whole
from torchguard._progress import progress_line
from torchguard._sizes import format_size
from torchguard.cli import _script, _script_options, _views
from torchguard.cli._observe import Observation, Options
from torchguard.cli._run_report import run_report
from torchguard.cli._targets import Directory, complete_device, load_device
from torchguard.cli._terminal import (
    CommandError,
    ExitCode,
    console,
    indent,
    plain,
    plural,
    print_message,
    truncation,
)
from torchguard.report import Report as Page

if TYPE_CHECKING:
    from torchguard.cli._watched import CallLog
    from torchguard.guards import Inspection

EXAMPLE = """
torchguard run train.py --epochs 3

torchguard run --watch --html report.html train.py

torchguard run --watch --device edge-npu --strict train.py

torchguard run -m mypackage.train --epochs 3
"""

_LIMIT = 10  # how many incidents, artifacts and violations the report has

Script = Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file, or with -m a module.")]
Arguments = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Its arguments.", show_default=False)]
AsModule = Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as for python -m.")]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="Check what is compiled against this device: a TOML file, or the name of an example.",
        autocompletion=complete_device,
    ),
]
Watch = Annotated[
    bool, typer.Option("--watch", help="Watch every model that is compiled, and report which samples went bad.")
]
Quarantine = Annotated[
    bool,
    typer.Option(
        "--quarantine",
        help="Watch, replace what is non-finite by zeros, and report what the backward pass creates, too.",
    ),
]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with 4 if a rule is broken or a sample went bad.")]
NoCapture = Annotated[bool, typer.Option("--no-capture", help="Write no artifacts.")]
Report = Annotated[Path | None, typer.Option("--report", help="Write the report to this file, as JSON.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write the report to this file, as one HTML page.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no report.")]


def run(
    context: typer.Context,
    name: Script,
    arguments: Arguments = None,
    as_module: AsModule = False,
    device: DeviceOption = None,
    watch: Watch = False,
    quarantine: Quarantine = False,
    strict: Strict = False,
    no_capture: NoCapture = False,
    directory: Directory = None,
    report: Report = None,
    html: Html = None,
    quiet: Quiet = False,
) -> int:
    """Run an unmodified script, and report what was compiled, why it recompiled, and where graphs break.

    The exit code is the script's. The report goes to stderr. Options behind SCRIPT are the script's.
    """
    passed = _script_options.check(context, name, arguments or [], as_module)
    watch = watch or quarantine
    if strict and device is None and not watch:
        raise CommandError("--strict needs --device or --watch, whose findings it acts on.", ExitCode.USAGE)
    options = Options(
        capture=not no_capture,
        directory=directory,
        device=load_device(device) if device is not None else None,
        watch=watch,
        quarantine=quarantine,
        progress=not quiet,
        guard_costs=report is not None or html is not None,
    )
    # The script may change the directory.
    files = {form: file.absolute() for form, file in (("json", report), ("html", html)) if file is not None}
    program = _script.load_module(name) if as_module else _script.load_file(name)
    observation = Observation(options)
    title = f"torchguard run {'-m ' if as_module else ''}{' '.join([name, *(arguments or [])])}"
    at_exit = _ReportAtExit(observation, files, quiet, strict, passed.hint, title)
    atexit.register(at_exit)
    if passed.note and not quiet:
        print_message(passed.note, "yellow")
    observation.start()
    outcome = _script.run(program, arguments or [])
    at_exit.exit_code = outcome.exit_code
    if outcome.interrupted:
        raise Interrupted
    return outcome.exit_code


class Interrupted(BaseException):
    """The script ended with KeyboardInterrupt, and the command must end the same way."""


class _ReportAtExit:
    """Finishes the observation, writes and prints the report, and applies `--strict`."""

    def __init__(
        self, observation: Observation, files: dict[str, Path], quiet: bool, strict: bool, hint: str, title: str
    ) -> None:
        self._observation, self._files, self._quiet, self._strict = observation, files, quiet, strict
        self._hint, self._title = hint, title
        self._process = os.getpid()
        self.exit_code = 0

    def __call__(self) -> None:
        if os.getpid() != self._process:  # a child that the script forked
            return
        try:
            self._report()
        except KeyboardInterrupt:
            self._print(plain("torchguard: interrupted, so there is no report.", "yellow"))
            _flush()
            os._exit(ExitCode.INTERRUPTED)

    def _report(self) -> None:
        self._observation.finish()
        with progress_line(False if self._quiet else None) as show:
            show("torchguard: writing the report")
            written = self._write()
        if not self._quiet:
            self._print(*_report_views(self._observation))
            self._print(*(plain(f"{file} has the report.", "bold") for file in written), soft_wrap=True)
            if self._hint and self.exit_code == ExitCode.USAGE:
                self._print(plain(self._hint, "yellow"), soft_wrap=True)
        if self._strict and self.exit_code == 0 and self._observation.has_findings:
            _flush()
            os._exit(ExitCode.STRICT)

    def _write(self) -> list[Path]:
        """Write the files that were asked for. Returns those that were written."""
        if not self._files:
            return []
        page = run_report(self._observation, self._title, self.exit_code)
        contents = {"json": self._json, "html": Page.to_html}
        written = []
        for form, file in self._files.items():
            try:
                write_whole(file, contents[form](page))
                written.append(file)
            except OSError as error:
                self._print(plain(f"torchguard: {file} cannot be written: {error.strerror}.", "yellow"))
        return written

    def _json(self, page: Page) -> str:
        data = {**_report_data(self._observation, self.exit_code), "report": page.to_dict()}
        return json.dumps(data, indent=2, default=str)

    def _print(self, *views: RenderableType, soft_wrap: bool = False) -> None:
        # The script may have replaced `sys.stderr`, or closed it.
        if sys.__stderr__ is not None and not sys.__stderr__.closed:
            console(sys.__stderr__).print(*views, sep="\n", soft_wrap=soft_wrap)


def _flush() -> None:
    """Flush what the script wrote, as `os._exit` does not."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        # Any of them may be None, closed, or an object of the script's without `flush`.
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.flush()  # pyright: ignore[reportOptionalMemberAccess]


def _report_data(observation: Observation, exit_code: int) -> dict[str, Any]:
    inspection, device, watcher = observation.inspection, observation.device_report, observation.watcher
    return {
        "exit_code": exit_code,
        "compiled": None if inspection is None else _compiled(inspection),
        "artifacts": [{"id": one.id, "path": str(one.path), "size": one.size} for one in observation.artifacts],
        "device": None if device is None else device.to_dict(),
        "watched": None if watcher is None else [log.to_dict() for log in watcher.logs],
        "unwatched": {} if watcher is None else watcher.unwatched,
        "problems": observation.problems,
    }


def _compiled(inspection: "Inspection") -> dict[str, Any]:
    from torchguard.guards._section import inspection_data  # loads torch

    return inspection_data(inspection)


def _report_views(observation: Observation) -> Iterator[RenderableType]:
    watcher, artifacts = observation.watcher, observation.artifacts
    yield plain("torchguard", "bold reverse")
    if observation.inspection is None:
        yield plain("Nothing was compiled: torch.compile was never called.")
    else:
        data = _compiled(observation.inspection)
        yield from _views.compilation_views(data, failed=sum(bool(_views.failure_of(one)) for one in artifacts))
    yield from (plain(f"Audit of dropped guards: {audit.report()}") for audit in observation.audits)
    if observation.device_report is not None:
        yield from _views.device_report(observation.device_report, limit=_LIMIT)
        if watcher is not None:
            yield plain("The ops that --watch adds to the graphs count as supported by the device.", "dim")
    if watcher is not None:
        for log in watcher.logs:
            yield from _incidents(log)
        yield from (plain(f"{name} is not watched: {why}", "yellow") for name, why in watcher.unwatched.items())
    if artifacts:
        total = format_size(sum(one.size for one in artifacts))
        yield plain(f"{plural(len(artifacts), 'artifact')} in {artifacts[0].path.parent}, {total}", "bold")
        yield from (plain(f"  {one.id}") for one in artifacts[-_LIMIT:])
        yield plain("torchguard show ID shows one.", "dim")
    yield from (plain(problem, "yellow") for problem in observation.problems)


def _incidents(log: "CallLog") -> Iterator[RenderableType]:
    calls = plural(log.calls, "call") if log.calls else "its last call"
    if log.problem:
        yield plain(f"{log.name}: {log.problem}", "yellow")
    if not log.bad_calls:
        yield plain(f"{log.name}: no sample went bad in {calls}.", "green")
        return
    yield plain(f"{log.name}: samples went bad in {log.bad_calls} of {calls}.", "bold red")
    for one in log.incidents[:_LIMIT]:
        yield indent(f"call {one.call}: {one.incident}" if one.call else str(one.incident))
    yield from map(indent, truncation(log.total_incidents, _LIMIT))
