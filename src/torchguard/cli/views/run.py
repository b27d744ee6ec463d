"""What happened in a run."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.padding import Padding

from torchguard.cli import facts
from torchguard.cli.terminal import bytes_shown, count_shown, plain
from torchguard.cli.views import device as device_view
from torchguard.cli.views import guards as guards_view

if TYPE_CHECKING:
    from torchguard.cli.observing import Observation
    from torchguard.cli.sightings import Log

_INCIDENTS, _ARTIFACTS, _VIOLATIONS = 10, 10, 10


def data(seen: "Observation", exit_code: int) -> dict[str, Any]:
    """All of it, as JSON can hold it."""
    watcher = seen.watcher
    return {
        "exit_code": exit_code,
        "compiled": None if seen.inspection is None else facts.of_inspection(seen.inspection),
        "artifacts": [{"id": one.id, "path": str(one.path), "size": one.size} for one in seen.artifacts],
        "device": None if seen.device_report is None else device_view.facts(seen.device_report),
        "watched": None if watcher is None else [log.to_dict() for log in watcher.logs],
        "unwatched": {} if watcher is None else watcher.unwatched,
        "problems": seen.problems,
    }


def report(seen: "Observation") -> Iterator[RenderableType]:
    yield plain("torchguard", "bold reverse")
    if seen.inspection is None:
        yield plain("Nothing was compiled: torch.compile was never used.")
    else:
        compiled = facts.of_inspection(seen.inspection)
        yield guards_view.compilations(compiled)
        yield from guards_view.graph_breaks(compiled)
        yield from guards_view.recompiles(compiled)
    if seen.device_report is not None:
        yield from device_view.report(seen.device_report, limit=_VIOLATIONS)
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
