"""The report of a run: what each part found, as sections."""

import importlib.metadata
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torchguard import __version__
from torchguard.cli import _views
from torchguard.cli._observe import Observation
from torchguard.cli._terminal import model_name
from torchguard.report import Answer, Report, Section, Status

if TYPE_CHECKING:
    from torchguard._watch.section import Fault
    from torchguard.cli._watched import CallLog


def run_report(observation: Observation, title: str, exit_code: int) -> Report:
    """The report of a run that has ended."""
    facts = (
        ("Exit code", exit_code),
        ("torchguard", __version__),
        ("torch", importlib.metadata.version("torch")),
    )
    return Report(title, (*_sections(observation),), facts)


def _sections(observation: Observation) -> Iterator[Section]:
    watcher = observation.watcher
    for log in watcher.logs if watcher else ():
        yield values_of(log)
    if observation.retries:
        from torchguard._retry.report import retry_section

        yield retry_section(observation.retries)
    if observation.inspection is not None:
        from torchguard.guards._section import inspection_data

        yield compilations_section(inspection_data(observation.inspection))
        yield from (audit.report().section() for audit in observation.audits)
        if costs := [one for one in observation.guard_costs if not _views.is_internal(one.file, one.function)]:
            from torchguard.guards._cost import costs_section

            note = " Guards on what --watch adds count, too." if watcher else ""
            yield costs_section(costs, name=model_name, where=_views.where, note=note)
    else:
        yield Section("Compile", (Answer("ok", "Nothing was compiled: torch.compile was never called."),))
    if observation.device_report is not None:
        yield observation.device_report.section()
    if observation.artifacts:
        from torchguard.artifacts._section import artifacts_section

        yield artifacts_section(observation.artifacts, model_name)
    unwatched = watcher.unwatched if watcher else {}
    problems = [*observation.problems, *(f"{name} is not watched: {why}" for name, why in unwatched.items())]
    if problems:
        yield Section("Not observed", tuple(Answer("unknown", one) for one in problems))


def compilations_section(data: dict[str, Any]) -> Section:
    """Compilations of the script, without torchguard's own."""
    from torchguard.guards._section import compile_section

    return compile_section(_views.script_data(data), name=model_name, where=_views.where)


def values_of(log: "CallLog") -> Section:
    """What went bad in the calls of a watched model."""
    from torchguard._watch.run_report import locations_of
    from torchguard._watch.section import values_section

    locations = locations_of(log.watched._watch.labels)
    faults = [_fault(log, number, locations) for number in range(len(log.incidents))]
    notes: list[tuple[Status, str]] = [("unknown", f"{log.name}: {log.problem}")] if log.problem else []
    if log.bad_calls and not faults:
        notes.append(("bad", f"Samples went bad in {log.bad_calls} calls; the incidents were not kept."))
    title = f"Values of {log.name}"
    return values_section(title, log.calls, faults, total=log.total_incidents, notes=notes, unit="call")


def _fault(log: "CallLog", number: int, locations: tuple[str, ...]) -> "Fault":
    from dataclasses import replace

    from torchguard._channel.codes import ErrorCode
    from torchguard._watch import Incident
    from torchguard._watch.run_report import fault_of
    from torchguard._watch.section import Fault

    call, found = log.incidents[number].call, log.incidents[number].incident
    retry = log.retries.get(number, "")
    if isinstance(found, Incident):
        return replace(fault_of(found, locations, call), retry=retry)
    code = ErrorCode.name(found.code) if hasattr(found, "code") else "not finite"
    where = getattr(found, "path", "") or f"parameter {found.parameters[0]}"
    cause = "created in backward" if hasattr(found, "path") else "parameters that were not finite before the call"
    return Fault(call, getattr(found, "sample", None), code, where, str(found), cause=cause, retry=retry)
