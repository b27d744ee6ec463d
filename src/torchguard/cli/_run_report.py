"""The report of a run: what each part found, as sections."""

import importlib.metadata
from collections import Counter
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
    from torchguard.cli._watched import ParameterIncident

    locations = locations_of(log.labels)
    of_parameters = [one for one in log.incidents if isinstance(one.incident, ParameterIncident)]
    numbers = [i for i, one in enumerate(log.incidents) if not isinstance(one.incident, ParameterIncident)]
    faults = [_fault(log, number, locations) for number in numbers]
    notes: list[tuple[Status, str]] = [("unknown", f"{log.name}: {log.problem}")] if log.problem else []
    notes.extend(("bad", f"Call {one.call}: {one.incident}") for one in of_parameters)
    seen = {one.step for one in faults}.union(log.bad_samples)
    if log.bad_calls > len(seen):
        missed = log.bad_calls - len(seen)
        text = f"Samples went bad in {log.bad_calls} calls. {missed} of them are not shown: a GPU was not waited for."
        notes.append(("bad", text))
    title, total = f"Values of {log.name}", log.total_incidents - len(of_parameters)
    counts = _counts(log, faults)
    return values_section(title, log.calls, faults, total=total, counts=counts, notes=notes, unit="call")


def _counts(log: "CallLog", faults: list["Fault"]) -> dict[int, int]:
    """The bad samples of each call: as counted, or as many as there are faults where these are not counted."""
    kept = Counter(call for call, _ in {(one.step, one.sample) for one in faults} if call is not None)
    return {call: max(kept[call], log.bad_samples.get(call, 0)) for call in sorted({*kept, *log.bad_samples})}


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
    code, cause = ErrorCode.name(found.code), "created in backward"
    return Fault(call, found.sample, code, found.path, str(found), cause=cause, retry=retry)
