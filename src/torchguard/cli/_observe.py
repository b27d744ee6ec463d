"""Looks on while a script runs: what is compiled, guarded, captured, checked against a device, and watched.

A line on the terminal while something is compiled.
"""

import contextlib
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from torchguard.cli._script import before_compiling, when_loaded
from torchguard.cli._targets import root_of
from torchguard.cli._terminal import in_a_line
from torchguard.cli._trace import Collected, check_one
from torchguard.cli._views import without_ours
from torchguard.exceptions import TorchGuardError

if TYPE_CHECKING:
    from torchguard.artifacts import Artifact, Captured
    from torchguard.cli._watched import Watcher
    from torchguard.device import Device, DeviceReport
    from torchguard.guards import Inspection


class CompilingLine:
    """`compiling 0/0 ... 3 s`, on stderr, gone when it is done; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        self._live: Live | None = None
        self._compile_id, self._started = "", 0.0

    def install(self) -> None:
        from torchguard._torch.events import on_compile_start_and_end  # loads torch

        if sys.stderr.isatty():
            on_compile_start_and_end(self._start, self._end)

    def _start(self, compile_id: str) -> None:
        self._compile_id, self._started = compile_id, time.monotonic()
        # The script's own stdout and stderr stay as they are.
        self._live = Live(
            console=Console(stderr=True),
            get_renderable=self._line,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def _end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self) -> Text:
        return Text(f"torchguard: compiling {self._compile_id}, {time.monotonic() - self._started:.0f} s", style="dim")


@dataclass(frozen=True)
class Wanted:
    """What to do beside running the script."""

    capture: bool = True
    directory: Path | None = None
    device: "Device | None" = None
    watch: bool = False
    progress: bool = True


class Observation:
    """What was seen of a run. Nothing is loaded until the script loads torch, and nothing it does is changed."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._directory = root_of(wanted.directory)  # now, as the script may go elsewhere
        self._open = contextlib.ExitStack()
        self._pairs = Collected()
        self._captured: Captured | None = None
        self.inspection: Inspection | None = None
        self.watcher: Watcher | None = None
        self.device_report: DeviceReport | None = None
        self.artifacts: list[Artifact] = []
        self.problems: list[str] = []

    def start(self) -> None:
        when_loaded("torch", self._attach)

    def finish(self) -> None:
        if self.watcher is not None:
            self.watcher.finish()
        self.device_report = self._checked()
        try:
            self._open.close()
        except (TorchGuardError, OSError) as error:
            self.problems.append(str(error))
        if self._captured is not None:
            self.problems += self._captured.problems
            self.artifacts = self._captured.artifacts if self._wanted.capture else []

    @property
    def has_findings(self) -> bool:
        """Whether a rule of the device was broken, or a sample went bad."""
        violations = self.device_report.violations if self.device_report is not None else ()
        return bool(violations) or any(log.bad_calls for log in (self.watcher.logs if self.watcher is not None else ()))

    def _attach(self) -> None:
        before_compiling(self._listen)
        if self._wanted.watch:
            from torchguard.cli._watched import Watcher

            self.watcher = Watcher()
            self.watcher.install()

    def _listen(self) -> None:
        try:
            from torchguard import guards

            if self._wanted.progress:
                CompilingLine().install()
            self.inspection = self._open.enter_context(guards.inspect())
            if self._wanted.capture or self._wanted.device is not None:
                self._capture()
        except Exception as error:  # whatever keeps us from looking, the script goes on
            self.problems.append(in_a_line(f"This run could not be looked at: {error}"))

    def _capture(self) -> None:
        from torchguard import artifacts

        directory = self._directory
        if not self._wanted.capture:  # graphs are seen while they are captured, and only then
            directory = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="torchguard-")))
        on_graphs: Any = None if self._wanted.device is None else self._pairs
        self._captured = self._open.enter_context(artifacts.capture(directory, on_graphs=on_graphs))

    def _checked(self) -> "DeviceReport | None":
        """All graphs against the device. What cannot be checked is a problem, and no more."""
        if self._wanted.device is None:
            return None
        reports = []
        for pair in self._pairs:
            try:
                report = without_ours(check_one(pair, self._wanted.device))
                reports.append(report)
                if self._wanted.capture:
                    pair.attach("device.json", report.to_json())
            except Exception as error:  # of a look at what was compiled, which is over
                self.problems.append(in_a_line(f"{pair.compile_id} could not be checked: {error!r}"))
        return sum(reports[1:], start=reports[0]) if reports else None
