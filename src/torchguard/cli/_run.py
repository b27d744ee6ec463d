"""`torchguard run`.

What happened in a run.
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
from rich.padding import Padding

from torchguard.cli import _facts, _misplaced_options, _script, _views
from torchguard.cli._analyze import complete_device, load_device
from torchguard.cli._observe import Observation, Wanted
from torchguard.cli._targets import Directory
from torchguard.cli._terminal import CommandError, ExitCode, bytes_shown, console, count_shown, plain, say

if TYPE_CHECKING:
    from torchguard.cli._observe import Observation
    from torchguard.cli._watched import Log


_INCIDENTS, _ARTIFACTS, _VIOLATIONS = 10, 10, 10


def data(seen: "Observation", exit_code: int) -> dict[str, Any]:
    """All of it, as JSON can hold it."""
    watcher = seen.watcher
    return {
        "exit_code": exit_code,
        "compiled": None if seen.inspection is None else _facts.of_inspection(seen.inspection),
        "artifacts": [{"id": one.id, "path": str(one.path), "size": one.size} for one in seen.artifacts],
        "device": None if seen.device_report is None else _views.device_facts(seen.device_report),
        "watched": None if watcher is None else [log.to_dict() for log in watcher.logs],
        "unwatched": {} if watcher is None else watcher.unwatched,
        "problems": seen.problems,
    }


def report(seen: "Observation") -> Iterator[RenderableType]:
    yield plain("torchguard", "bold reverse")
    if seen.inspection is None:
        yield plain("Nothing was compiled: torch.compile was never used.")
    else:
        compiled = _facts.of_inspection(seen.inspection)
        yield _views.compilations(compiled)
        yield from _views.graph_breaks(compiled)
        yield from _views.recompiles(compiled)
    if seen.device_report is not None:
        yield from _views.device_report(seen.device_report, limit=_VIOLATIONS)
        if seen.watcher is not None:
            yield plain("What --watch adds to the graphs counts as running anywhere.", "dim")
    if seen.watcher is not None:
        for log in seen.watcher.logs:
            yield from _incidents(log)
        yield from (plain(f"{name} is not watched: {why}", "yellow") for name, why in seen.watcher.unwatched.items())
    if seen.artifacts:
        total = bytes_shown(sum(one.size for one in seen.artifacts))
        where = seen.artifacts[0].path.parent
        yield plain(f"{count_shown(len(seen.artifacts), 'artifact')} in {where}, {total}", "bold")
        yield from (plain(f"  {one.id}") for one in seen.artifacts[-_ARTIFACTS:])
        yield plain("torchguard show ID tells more.", "dim")
    yield from (plain(problem, "yellow") for problem in seen.problems)


def _incidents(log: "Log") -> Iterator[RenderableType]:
    calls = count_shown(log.calls, "call") if log.calls else "its last call"
    if log.problem:
        yield plain(f"{log.name}: {log.problem}", "yellow")
    if not log.bad_calls:
        yield plain(f"{log.name}: nothing went bad in {calls}.", "green")
        return
    yield plain(f"{log.name}: something went bad in {log.bad_calls} of {calls}.", "bold red")
    for one in log.seen[:_INCIDENTS]:
        yield Padding(
            plain(f"call {one.call}: {one.incident}" if one.call else one.incident), (0, 0, 0, 2), expand=False
        )
    if log.total > _INCIDENTS:
        yield Padding(plain(f"... and {log.total - _INCIDENTS} more", "dim"), (0, 0, 0, 2), expand=False)


EXAMPLE = """
torchguard run train.py --epochs 3

torchguard run --watch --device edge-npu --strict train.py

torchguard run -m mypackage.train --epochs 3
"""

Script = Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file, or with -m a module.")]
Arguments = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="What it is given.", show_default=False)]
AsModule = Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as for python -m.")]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="Check what is compiled against this device: a TOML file, or an example.",
        autocompletion=complete_device,
    ),
]
Watch = Annotated[
    bool, typer.Option("--watch", help="Watch every model that is compiled, and tell which samples went bad.")
]
Strict = Annotated[bool, typer.Option("--strict", help="End with 4 if a rule is broken or a sample went bad.")]
NoCapture = Annotated[bool, typer.Option("--no-capture", help="Write no artifacts.")]
Report = Annotated[Path | None, typer.Option("--report", help="Write what happened into this file, as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show nothing of what happened.")]


def run(
    context: typer.Context,
    name: Script,
    arguments: Arguments = None,
    as_module: AsModule = False,
    device: DeviceOption = None,
    watch: Watch = False,
    strict: Strict = False,
    no_capture: NoCapture = False,
    directory: Directory = None,
    report: Report = None,
    quiet: Quiet = False,
) -> int:
    """Run a script that knows nothing of torchguard, and show what was compiled, why again, and where graphs break.

    It ends as the script does. What torchguard has to say goes to stderr. Options behind SCRIPT are the script's.
    """
    let_through = _misplaced_options.check(context, name, arguments or [], as_module)
    if strict and device is None and not watch:
        raise CommandError("--strict needs something to be strict about: --device or --watch.", ExitCode.USAGE)
    wanted = Wanted(
        capture=not no_capture,
        directory=directory,
        device=load_device(device) if device is not None else None,
        watch=watch,
        progress=not quiet,
    )
    report = report and report.absolute()  # the script may go elsewhere
    program = _script.program_of_module(name) if as_module else _script.program_of_file(name)
    seen = Observation(wanted)
    conclusion = Conclusion(seen, report, quiet, strict, let_through.hint)
    atexit.register(conclusion)  # what was registered first runs last, when all threads have ended
    if let_through.note and not quiet:
        say(let_through.note, "yellow")
    seen.start()
    ending = _script.run(program, arguments or [])
    conclusion.exit_code = ending.exit_code
    if ending.interrupted:
        raise Interrupted
    return ending.exit_code


class Interrupted(BaseException):
    """The script was interrupted, and the command ends the same way."""


class Conclusion:
    """What is left to do when the script, its threads, and all that it wanted to do at exit have ended."""

    def __init__(self, seen: Observation, report: Path | None, quiet: bool, strict: bool, hint: str) -> None:
        self._seen, self._report, self._quiet, self._strict, self._hint = seen, report, quiet, strict, hint
        self._process = os.getpid()
        self.exit_code = 0

    def __call__(self) -> None:
        if os.getpid() != self._process:  # a child that the script forked
            return
        self._seen.finish()
        self._write()
        if not self._quiet:
            self._say(*report(self._seen))
            if self._hint and self.exit_code == ExitCode.USAGE:
                self._say(plain(self._hint, "yellow"), soft_wrap=True)
        if self._strict and self.exit_code == 0 and self._seen.has_findings:
            _flush()
            os._exit(ExitCode.FLAGGED)  # at exit there is no other way to end with another code

    def _write(self) -> None:
        if self._report is None:
            return
        told = json.dumps(data(self._seen, self.exit_code), indent=2, default=str)
        try:
            self._report.write_text(told, encoding="utf-8")
        except OSError as error:
            self._say(plain(f"torchguard: {self._report} cannot be written: {error.strerror}.", "yellow"))

    def _say(self, *shown: RenderableType, soft_wrap: bool = False) -> None:
        # The script may have put anything in the place of `sys.stderr`, or closed it.
        if sys.__stderr__ is not None and not sys.__stderr__.closed:
            console(sys.__stderr__).print(*shown, sep="\n", soft_wrap=soft_wrap)


def _flush() -> None:
    """Let out what the script wrote, wherever it wrote to."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        # Any of them may be none, closed, or something of the script's own that knows nothing of flushing.
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.flush()  # pyright: ignore[reportOptionalMemberAccess]
