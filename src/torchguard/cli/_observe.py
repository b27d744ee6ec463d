"""Observing a run: inspecting what is compiled, capturing artifacts, checking graphs against a device, watching models.

Nothing is loaded before the script imports torch, and nothing is hooked before it first calls `torch.compile`. An
exception in here becomes a line in `Observation.problems`, and the script continues.
"""

import contextlib
import logging
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from torchguard.cli._model_graphs import GraphCollector, check
from torchguard.cli._script import on_first_compile, on_import
from torchguard.cli._targets import artifact_root
from torchguard.cli._terminal import one_line
from torchguard.cli._views import without_internal_violations
from torchguard.exceptions import TorchGuardError

if TYPE_CHECKING:
    from torchguard._retry import RetryReport
    from torchguard.artifacts import Artifact, Captured
    from torchguard.cli._watched import Watcher
    from torchguard.device import Device, DeviceReport
    from torchguard.guards import Audit, Inspection
    from torchguard.guards._cost import FrameCost


_MOST_RETRIES = 10_000
_MOST_COSTS = 100  # compilations whose guards are measured
_NOT_WATCHED = (
    "No model was watched. --watch watches modules with parameters: those that are compiled, and those that are called "
    "before anything is compiled, in scripts without Retry. Others: torchguard.watch(model) in the script."
)
_NOT_CHECKED = (
    "The device was not checked: --device checks the graphs of AOTAutograd, and there was none. Nothing was compiled, "
    "or by a backend without such graphs ('eager'). For a model that is not compiled: torchguard analyze --type device "
    "--device FILE mypackage.models:build."
)


class ProgressLine:
    """`torchguard: compiling 0/0, 3 s` on stderr while torch compiles; nothing if stderr is no terminal."""

    def __init__(self) -> None:
        self._live: Live | None = None
        self._compile_id, self._started = "", 0.0

    def install(self) -> None:
        from torchguard._torch.compilations import on_compile_start_and_end  # loads torch

        if sys.stderr.isatty():
            on_compile_start_and_end(self._start, self._end)

    def _start(self, compile_id: str) -> None:
        self._compile_id, self._started = compile_id, time.monotonic()
        # rich must not redirect the script's stdout and stderr.
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
class Options:
    """What to do while the script runs: the options of `run`."""

    capture: bool = True
    directory: Path | None = None
    device: "Device | None" = None
    watch: bool = False
    quarantine: bool = False
    progress: bool = True
    guard_costs: bool = False


def _is_violation(record: logging.LogRecord) -> bool:
    from torchguard.device import DeviceViolation

    return isinstance(record.args, tuple) and any(isinstance(one, DeviceViolation) for one in record.args)


class Observation:
    """What was observed of a run.

    Attributes:
        inspection: what was compiled; None if `torch.compile` was never called.
        watcher: the watched models; None without `--watch`, or if the script never imported torch.
        device_report: None without `--device`, or if there was no graph to check.
        artifacts: those that were written.
        retries: the reports of the guarded steps of `Retry`, as far as the script used it.
        audits: those of dropped guards that the script made.
        guard_costs: what the guards of each compilation take, if a report is written.
        problems: what could not be observed, one sentence each.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._directory = artifact_root(options.directory)  # resolved now, as the script may change the directory
        self._contexts = contextlib.ExitStack()
        self._graphs = GraphCollector()
        self._captured: Captured | None = None
        self.inspection: Inspection | None = None
        self.watcher: Watcher | None = None
        self.device_report: DeviceReport | None = None
        self.artifacts: list[Artifact] = []
        self.retries: list[RetryReport] = []
        self.audits: list[Audit] = []
        self.guard_costs: list[FrameCost] = []
        self.problems: list[str] = []
        self._is_unchecked = False  # whether something that was asked for could not be checked

    def start(self) -> None:
        on_import("torch", self._attach)
        on_import("torchguard._retry", self._observe_retries)
        on_import("torchguard.guards._audit", self._observe_audits)

    def finish(self) -> None:
        if self.watcher is not None:
            self.watcher.finish()
            if not self.watcher.logs and not self.watcher.unwatched:
                self._note_unchecked(_NOT_WATCHED)
        self.device_report = self._check_graphs()
        if self._options.device is not None and not [*self._graphs]:
            self._note_unchecked(_NOT_CHECKED)
        try:
            self._contexts.close()
        except (TorchGuardError, OSError) as error:
            self.problems.append(str(error))
        if self._captured is not None:
            self.problems += self._captured.problems
            self.artifacts = self._captured.artifacts if self._options.capture else []

    @property
    def has_findings(self) -> bool:
        """What `--strict` is about: a rule of the device is broken, a sample went bad, or something was not checked."""
        report = self.device_report
        is_refused = report is not None and bool(report.violations or report.failures)
        return (
            self._is_unchecked
            or is_refused
            or any(log.bad_calls for log in (self.watcher.logs if self.watcher else ()))
        )

    def _note_unchecked(self, problem: str) -> None:
        self.problems.append(problem)
        self._is_unchecked = True

    def _attach(self) -> None:
        on_first_compile(self._observe)
        if self._options.watch:
            from torchguard.cli._watched import Watcher

            self.watcher = Watcher(self._options.quarantine)
            self.watcher.install()
            self.watcher.eager_models.install()

    def _observe_retries(self) -> None:
        from torchguard._retry.report import OBSERVERS

        OBSERVERS.append(self._record_retry)
        if self.watcher is not None:
            self.watcher.eager_models.remove()  # a step that restores its model must not find it changed

    def _observe_audits(self) -> None:
        from torchguard.guards._audit import OBSERVERS

        OBSERVERS.append(self.audits.append)

    def _record_cost(self, built: Any) -> None:
        from torchguard.guards._cost import frame_cost

        try:
            if len(self.guard_costs) < _MOST_COSTS and (found := frame_cost(built)) is not None:
                self.guard_costs.append(found)
        except Exception as error:  # a failure here must not end the compilation
            self.problems.append(one_line(f"The guards of {built.compile_id} could not be measured: {error!r}"))

    def _record_retry(self, report: "RetryReport") -> None:
        """Keep a report, and note what was done in the incidents of its step: those since the report before."""
        if len(self.retries) < _MOST_RETRIES:
            self.retries.append(report)
        for log in self.watcher.logs if self.watcher else ():
            log.note_retry(f"step {report.step}: {report.outcome}")

    def _observe(self) -> None:
        try:
            from torchguard import guards
            from torchguard._torch.events import GuardsBuiltEvent, add_listener, remove_listener

            if self._options.progress:
                ProgressLine().install()
            if self.watcher is not None:
                self.watcher.eager_models.remove_before_compilations()
            self.inspection = self._contexts.enter_context(guards.inspect())
            if self._options.guard_costs:
                add_listener(GuardsBuiltEvent, self._record_cost)
                self._contexts.callback(remove_listener, self._record_cost)
            if self._options.capture or self._options.device is not None:
                self._capture()
            # The report prints problems of the capture and violations of the device: do not log them as well.
            logging.getLogger("torchguard.artifacts").addFilter(lambda record: False)
            if self._options.device is not None:
                logging.getLogger("torchguard.device").addFilter(lambda record: not _is_violation(record))
        except Exception as error:
            self.problems.append(one_line(f"This run could not be observed: {error}"))

    def _capture(self) -> None:
        from torchguard import artifacts

        directory = self._directory
        if not self._options.capture:  # the device check needs the graphs, which only capturing provides
            directory = Path(self._contexts.enter_context(tempfile.TemporaryDirectory(prefix="torchguard-")))
        on_graphs: Any = None if self._options.device is None else self._graphs
        self._captured = self._contexts.enter_context(artifacts.capture(directory, on_graphs=on_graphs))

    def _check_graphs(self) -> "DeviceReport | None":
        """Check all graphs against the device."""
        if self._options.device is None:
            return None
        reports = []
        for pair in self._graphs:
            try:  # on a terminal, each shows its progress
                report = without_internal_violations(check(pair, self._options.device))
                reports.append(report)
                if self._options.capture:
                    pair.attach("device.json", report.to_json())
            except Exception as error:
                self._note_unchecked(one_line(f"{pair.compile_id} could not be checked: {error!r}"))
        return sum(reports[1:], start=reports[0]) if reports else None
