"""The values of a run as a section of a report: when samples went bad, where they first did, and each incident."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchguard.report import Answer, Cell, Facts, HeatMap, LineChart, Section, Series, Status, Table, Text

_PAGES = 100  # incidents that get a page of their own
_MOST_STEPS = 100_000  # of a curve and a heat map
_UNKNOWN = "(origin not recorded)"
_INFERRED = Text(
    "Inferred: in some calls the locations after an origin were not recorded. They are shown where the sample was bad "
    "at as many checks as there are locations that the model defines after its origin; otherwise only the origin is."
)


@dataclass(frozen=True)
class Fault:
    """One incident as text and numbers.

    Attributes:
        step: the number of the call; None where it is not known.
        where: the origin in words.
        further: at how many checks the sample was bad after that.
        path: where the sample was bad, in the order in which the modules ran, if that was recorded. Otherwise the
            watched locations from the origin on, in the order in which the model defines them. Empty if neither is
            known.
        is_recorded: which of the two it is.
        text: the incident in one line.
        retry: what `Retry` did about it.
    """

    step: int | None
    sample: int | None
    code: str
    where: str
    text: str
    id: int | None = None
    position: int | None = None
    further: int = 0
    cause: str = ""
    path: tuple[str, ...] = ()
    is_recorded: bool = False
    retry: str = ""

    @property
    def after(self) -> tuple[str, ...]:
        """Where the sample was bad after its origin: recorded, or inferred where all locations must have been."""
        is_known = self.is_recorded or self.further == len(self.path) - 1
        return self.path[1:] if is_known else ()


def values_section(
    title: str,
    calls: int,
    faults: Sequence[Fault],
    *,
    total: int | None = None,
    counts: Mapping[int, int] | None = None,
    notes: Sequence[tuple[Status, str]] = (),
    unit: str = "step",
) -> Section:
    """The section of one model.

    Args:
        unit: what `Fault.step` counts: steps from 0, or calls from 1.
        calls: how many there were; 0 if it is not known.
        faults: those that were kept, in the order of their steps.
        total: how many there were, if not all were kept.
        counts: how many samples were bad in each step that had some, if more is known of that than the faults say.
        notes: what else is known, such as parameters that are not finite.
    """
    total = len(faults) if total is None else total
    samples = sum(counts.values()) if counts else total
    if not counts:
        counts = Counter(one.step for one in faults if one.step is not None)
    answers = [Answer(*_answer(calls, faults, samples, counts)), *(Answer(*note) for note in notes)]
    if not samples:
        return Section(title, tuple(answers))
    blocks = [*([_origins(faults, unit)] if faults else []), *_over_steps(calls, faults, counts, unit)]
    if faults:
        blocks.append(_incidents(faults, total, unit))
    pages = (_page(number, fault, unit) for number, fault in enumerate(faults[:_PAGES]))
    return Section(title, (*answers, *blocks), tuple(pages))


def _answer(calls: int, faults: Sequence[Fault], samples: int, counts: Mapping[int, int]) -> tuple[Status, str]:
    in_calls = f"{calls:,} call{'' if calls == 1 else 's'}" if calls else "its calls"
    if not samples:
        return "ok", f"No sample went bad in {in_calls}."
    of = f"{len(counts):,} of {in_calls}" if calls and samples == sum(counts.values()) else in_calls
    first = f" First {faults[0].code} at {faults[0].where}." if faults else ""
    return "bad", f"{samples:,} sample{' was' if samples == 1 else 's were'} bad in {of}.{first}"


def _origins(faults: Sequence[Fault], unit: str) -> Table:
    """Where samples first went bad, the earliest first."""
    groups: dict[tuple[str, str], list[Fault]] = {}
    for one in faults:
        groups.setdefault((one.where, one.code), []).append(one)
    rows = []
    for (where, code), found in groups.items():
        steps = [one.step for one in found if one.step is not None]
        ids = [*dict.fromkeys(one.id for one in found if one.id is not None)]
        shown = ", ".join(map(str, ids[:10])) + (", ..." if len(ids) > 10 else "")
        rows.append((where, code, len(found), min(steps, default=None), max(steps, default=None), shown))
    columns = ["origin", "code", "samples", f"first {unit}", f"last {unit}", "dataset ids"]
    if not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return Table(tuple(columns), tuple(rows), "Where samples first went bad")


def _over_steps(
    calls: int, faults: Sequence[Fault], counts: Mapping[int, int], unit: str
) -> list[LineChart | HeatMap | Text]:
    """Bad samples in each step, and where; nothing where steps are not known or there is only one."""
    known = [(one.step, one) for one in faults if one.step is not None]
    steps = min(max([calls + (unit == "call"), *(step + 1 for step in counts)]), _MOST_STEPS)
    if len(known) < len(faults) or steps < 2:
        return []
    known = [(step, one) for step, one in known if step < steps]
    numbers = range(unit == "call", steps)  # calls count from 1
    values = tuple(float(counts.get(step, 0)) for step in numbers)
    curve = LineChart(f"Bad samples in each {unit}", unit, "samples", tuple(numbers), (Series("bad", values),))
    cells: Counter[tuple[str, int]] = Counter()
    origins = dict.fromkeys(one.where for _, one in known)
    affected: dict[str, None] = {}
    for step, one in known:
        cells[one.where, step] += 1
        for path in dict.fromkeys(one.after):
            if path not in origins:
                affected[path] = None
                cells[path, step] += 1
    kept = Counter(step for step, _ in known)
    for step, count in counts.items():
        if (left := count - kept[step]) > 0 and step < steps:
            origins[_UNKNOWN] = None
            cells[_UNKNOWN, step] += left
    rows = (*origins, *affected)
    number = {name: i for i, name in enumerate(rows)}
    names = (*origins, *(f"{name} (after an origin)" for name in affected))
    found = tuple((number[name], step, count) for (name, step), count in cells.items())
    map_title = "Where samples were bad, origins first"
    return [
        curve,
        HeatMap(map_title, "module", unit, names, steps, found, "samples", numbers.start),
        *([_INFERRED] if any(not one.is_recorded and one.path for _, one in known) else []),
    ]


def _incidents(faults: Sequence[Fault], total: int, unit: str) -> Table:
    names = ("incident", unit, "sample", "dataset id", "code", "origin", "further locations", "cause")
    found: list[tuple[Cell, ...]] = [
        (i, one.step, one.sample, one.id, one.code, one.where, one.further, one.cause) for i, one in enumerate(faults)
    ]
    shown = [at for at in range(len(names)) if any(row[at] not in (None, "") for row in found)]
    columns, rows = tuple(names[at] for at in shown), tuple(tuple(row[at] for at in shown) for row in found)
    links = tuple(f"incident-{i}" if i < _PAGES else "" for i in range(len(faults)))
    return Table(columns, rows, "Incidents", links, total if total > len(faults) else None)


def _path_text(fault: Fault) -> str:
    """What of the path is recorded, and what is inferred."""
    if fault.is_recorded:
        text = (
            "Recorded: where the sample was bad, in the order in which the modules ran. Where it was finite, or where "
            "quarantine had replaced its values before, a location is not listed. A fault in a tensor whose rows "
            "belong to no known sample counts for every sample."
        )
        is_shorter = len(fault.path) <= fault.further
        return text + (" Successive checks of one location are listed once." if is_shorter else "")
    after = len(fault.path) - 1
    checks = f"{fault.further} check{'' if fault.further == 1 else 's'}"
    recorded = f"Recorded: the origin, and that the sample was bad at {checks} after it."
    if fault.further == after:
        return f"{recorded} Inferred: these are all {after} locations that the model defines after the origin."
    return (
        f"{recorded} The model defines {after} locations after the origin. At which of them the sample was bad is not "
        "known: a module may run in another order, several times, or on a path that the sample did not take."
    )


def _path_table(fault: Fault) -> Table:
    after = "bad, recorded" if fault.is_recorded else "bad, inferred" if fault.after else "not known"
    rows = tuple((i, name, after if i else "origin, recorded") for i, name in enumerate(fault.path))
    return Table(("", "location", "the sample there"), rows, "Its path through the model")


def _page(number: int, fault: Fault, unit: str) -> Section:
    facts: list[tuple[str, Cell]] = [
        (unit.capitalize(), fault.step),
        ("Sample", fault.sample),
        ("Dataset id", fault.id),
        ("Origin", fault.where),
        ("Code", fault.code),
        ("Position", fault.position),
        ("Cause", fault.cause or None),
        ("Retry", fault.retry or None),
    ]
    blocks = [Facts(tuple((name, value) for name, value in facts if value is not None)), Text(fault.text)]
    if fault.path:
        blocks += [Text(_path_text(fault)), _path_table(fault)]
    return Section(f"Incident {number}: {fault.text}", tuple(blocks), id=f"incident-{number}", collapsed=True)
