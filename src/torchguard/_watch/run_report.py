"""A run in words: the history of a watched model by origin, and the parameters that are not finite."""

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torchguard._channel.codes import ErrorCode
from torchguard._health import check_params
from torchguard._watch.history import Entry, History
from torchguard._watch.history_table import NO_ID
from torchguard._watch.report import Incident, Labels
from torchguard._watch.section import Fault, values_section
from torchguard.report import Section, Shown, Status


@dataclass(frozen=True)
class OriginCount:
    """How many samples went bad at one origin, and when.

    Attributes:
        where: the origin in words.
        code: an `ErrorCode`.
        count: of samples, as far as they were kept.
        first: the first step.
        last: the last step.
        ids: of the samples, without repetition, if they were given.
    """

    where: str
    code: int
    count: int
    first: int
    last: int
    ids: tuple[int, ...]

    def __str__(self) -> str:
        steps = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        shown = ", ".join(map(str, self.ids[:10]))
        ids = f" (ids {shown}{', ...' if len(self.ids) > 10 else ''})" if self.ids else ""
        return f"{ErrorCode.name(self.code)} at {self.where}: {_samples(self.count)} in {steps}{ids}"


@dataclass(frozen=True)
class RunReport(Shown):
    """What happened in all calls of a watched model. `save("run.html")` writes a page of it.

    Attributes:
        calls: how many there were.
        total: how many faults there were: samples that went bad, in all calls.
        lost: how many of them were not kept, from the middle of the run.
        origins: where they went bad, in the order of their first steps.
        since: the step since which every sample of every call was bad; None if the last call had a good one.
        parameters: those that are not finite now, with "NaN" or "Inf", and those that went bad first in front.
        bad_since: for the latter the step since which every sample is bad at their module.
        incidents: the faults that were kept, as in `history`.
        locations: the watched locations, in the order of the model.
    """

    calls: int
    total: int
    lost: int
    origins: tuple[OriginCount, ...]
    since: int | None
    parameters: dict[str, str]
    incidents: tuple[Incident, ...] = field(default=(), repr=False)
    locations: tuple[str, ...] = field(default=(), repr=False)
    bad_since: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not (self.total or self.parameters)

    def __str__(self) -> str:
        lines = [f"{self.calls} calls, {_samples(self.total)} bad"]
        lines += [f"  {origin}" for origin in self.origins]
        if self.lost:
            lines.append(f"  not kept: {_samples(self.lost)} of the middle of the run")
        if self.since is not None:
            lines.append(f"  every sample is bad since step {self.since}")
        lines += [f"  parameter {self._told(name)}" for name in [*self.parameters][:5]]
        if len(self.parameters) > 5:
            lines.append(f"  {len(self.parameters) - 5} more parameters are not finite")
        return "\n".join(lines)

    def _told(self, name: str) -> str:
        return _told(name, self.parameters, self.bad_since)

    def section(self) -> Section:
        """When samples went bad, where they first did, and each incident."""
        notes: list[tuple[Status, str]] = []
        if self.since is not None:
            notes.append(("bad", f"Every sample is bad since step {self.since}."))
        if self.parameters:
            named = ", ".join(self._told(name) for name in [*self.parameters][:5])
            more = f" and {len(self.parameters) - 5} more" if len(self.parameters) > 5 else ""
            notes.append(("bad", f"Parameters that are not finite: {named}{more}."))
        if self.lost:
            notes.append(("warning", f"Not kept: {_samples(self.lost)} of the middle of the run."))
        faults = [fault_of(one, self.locations) for one in self.incidents]
        return values_section("Values", self.calls, faults, total=self.total, notes=notes)


def fault_of(incident: Incident, locations: tuple[str, ...], step: int | None = None) -> Fault:
    """An incident as a report has it. `step` replaces that of the incident."""
    return Fault(
        incident.step if step is None else step,
        incident.sample,
        ErrorCode.name(incident.code),
        incident.where,
        str(incident),
        incident.id,
        incident.position,
        incident.times - 1,
        incident.cause,
        incident.locations or _path(incident, locations),
        bool(incident.locations),
    )


def _path(incident: Incident, locations: tuple[str, ...]) -> tuple[str, ...]:
    """The locations from the origin of an incident on, as the model defines them.

    Empty for warnings, and where the origin is no location.
    """
    if incident.position is None:
        return ()
    if incident.path == "input":
        return (incident.where, *locations)
    if incident.path not in locations:
        return ()
    at = locations.index(incident.path)
    return locations[at:] if incident.argument is None else (incident.where, *locations[at:])


def run_report(history: History, labels: Labels, model: Any) -> RunReport:
    """The report of a run. Waits for the device."""
    entries, lost = history.entries()
    groups: dict[tuple[str, int], list[Incident]] = {}
    incidents = [incident_of(entry, labels) for entry in entries]
    for incident in incidents:
        groups.setdefault((incident.where, incident.code), []).append(incident)
    origins = [_count(where, code, found) for (where, code), found in groups.items()]
    origins.sort(key=lambda one: one.first)
    since = _all_bad_since(entries, history.calls, lost)
    bad, bad_since = _bad_parameters(model, entries, since, labels)
    counts = (history.calls, history.total, lost)
    return RunReport(*counts, tuple(origins), since, bad, tuple(incidents), locations_of(labels), bad_since)


def locations_of(labels: Labels) -> tuple[str, ...]:
    """The watched modules in the order of the model, and its output last."""
    outputs = [path for path, argument in zip(labels.paths, labels.arguments, strict=True) if argument is None]
    return tuple(outputs[1:])  # the first is the input


def _count(where: str, code: int, found: list[Incident]) -> OriginCount:
    steps = [one.step for one in found if one.step is not None]
    ids = tuple(dict.fromkeys(one.id for one in found if one.id is not None))
    return OriginCount(where, code, len(found), min(steps), max(steps), ids)


def incident_of(entry: Entry, labels: Labels) -> Incident:
    """An entry of a history with names in place of numbers."""
    return Incident(
        entry.sample,
        entry.code,
        labels.paths[entry.origin],
        entry.position,
        entry.further + 1,
        argument=labels.arguments[entry.origin],
        id=None if entry.id == NO_ID else entry.id,
        step=entry.step,
        locations=labels.in_words(entry.path),
    )


def _all_bad_since(entries: list[Entry], calls: int, lost: int) -> int | None:
    """The first of the last steps in which every sample was bad. Steps that were not kept count as the ones after."""
    bad = Counter(entry.step for entry in entries)
    sizes = {entry.step: entry.size for entry in entries}
    full = {step for step, count in bad.items() if count == sizes[step]}
    missing: range = range(0)
    if lost:  # the steps around the gap may be in it in part
        half = len(entries) // 2
        missing = range(entries[half - 1].step, entries[half].step + 1)
    since = None
    for step in range(calls - 1, -1, -1):
        if step not in full and step not in missing:
            break
        since = step if step in full else since
    return since


def _bad_parameters(
    model: Any, entries: list[Entry], since: int | None, labels: Labels
) -> tuple[dict[str, str], dict[str, int]]:
    """The parameters that are not finite now, and the step since which those of the first bad module are not."""
    bad = check_params(model).bad
    origins = {entry.origin for entry in entries if entry.step == since}
    if since is None or len(origins) != 1 or labels.arguments[(origin := origins.pop())] is not None:
        return bad, {}
    first = [name for name in bad if name.startswith(_prefix(labels.paths[origin], model))]
    return {name: bad[name] for name in dict.fromkeys([*first, *bad])}, dict.fromkeys(first, since)


def _prefix(path: str, model: Any) -> str:
    return "" if path == type(model).__name__ else f"{path}."


def _told(name: str, bad: dict[str, str], since: dict[str, int], now: str = "") -> str:
    """A parameter in words: "layer1.weight is NaN since step 7"."""
    return f"{name} is {bad[name]}{f' since step {since[name]}' if name in since else now}"


def with_causes(incidents: list[Incident], size: int, model: Any, history: History, labels: Labels) -> list[Incident]:
    """The incidents of a call. Where all samples went bad at one module, with its parameters that are not finite.

    Parameters are read now, and may have become so after the call: hence "now", unless the history tells since when.
    """
    bad = Counter((one.path, one.argument) for one in incidents if one.position is not None)
    everywhere = [path for (path, argument), count in bad.items() if argument is None and count == size]
    if not everywhere:
        return incidents
    (path,) = everywhere
    entries, lost = history.entries()
    bad, since = _bad_parameters(model, entries, _all_bad_since(entries, history.calls, lost), labels)
    names = [name for name in bad if name.startswith(_prefix(path, model))]
    if not names:
        return incidents
    more = f" and {len(names) - 1} more parameters are not finite" if len(names) > 1 else ""
    cause = f"parameter {_told(names[0], bad, since, ' now')}{more}"
    return [dataclasses.replace(one, cause=cause) if one.path == path else one for one in incidents]


def _samples(count: int) -> str:
    return f"{count} sample{'' if count == 1 else 's'}"
