"""How long guards take in a call, source by source."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torchguard._torch import dynamo
from torchguard._torch.events import GuardsBuiltEvent
from torchguard._torch.guards import Guards, children_of
from torchguard.exceptions import GuardError
from torchguard.guards._audit import audits_paused
from torchguard.report import Answer, FlameGraph, Frame, Section, Shown, Table, Text

_LOOKUP = "TorchDynamo Cache Lookup"
# A subtree that takes less than this share of the total is not decomposed any further.
_SMALLEST_SHARE = 0.02
_MOST_GRAPHS = 5  # of a section: of compilations whose guards take a tenth of the longest or more


class _Timing(NamedTuple):
    """How a tree is measured: checks in a round, rounds, and when to stop decomposing."""

    checks: int = 20
    rounds: int = 5
    deadline: float = math.inf


_THOROUGH = _Timing()


@dataclass(frozen=True)
class CostNode:
    """The time of a source, including all sources reached from it, which are its children."""

    source: str
    microseconds: float
    children: tuple["CostNode", ...]

    def subtrees(self) -> Iterator["CostNode"]:
        yield self
        for child in self.children:
            yield from child.subtrees()

    def self_times(self, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
        """The path of each source from the root, and its time without its children. They sum to the total."""
        path = (*above, self.source)
        yield path, max(0.0, self.microseconds - sum(child.microseconds for child in self.children))
        for child in self.children:
            yield from child.self_times(path)


@dataclass(frozen=True)
class Cost(Shown):
    """The time a call spends on guards, in microseconds.

    Attributes:
        hot: of checking, in a loop, the guards of the cached entry that matches the call's first frame.
        profiled: of a typical real call, as the profiler measures it: the entries checked before one matches, frames
            after graph breaks, cold memory, and some overhead of the profiler. None without a call, and while a
            profiler of yours runs: a second one would end it.
        tree: `hot` by source.
    """

    hot: float
    profiled: float | None
    tree: CostNode

    def by_source(self) -> list[tuple[str, float]]:
        """The most expensive sources first, each including all sources reached from it."""
        found: dict[str, float] = {}
        for node in self.tree.subtrees():
            found[node.source] = max(node.microseconds, found.get(node.source, 0.0))
        return sorted(found.items(), key=lambda one: -one[1])

    def to_flamegraph(self) -> str:
        """Folded stacks with nanoseconds, for flamegraph.pl, speedscope and similar tools."""
        lines = ((";".join(map(_without_separators, path)), round(own * 1e3)) for path, own in self.tree.self_times())
        return "\n".join(f"{path} {own}" for path, own in lines if own)

    def section(self) -> Section:
        """The time of guards as a flame graph, and the most expensive sources."""
        profiled = "" if self.profiled is None else f", {self.profiled:.1f} us in a typical real call"
        answer = Answer("ok", f"Guards take {self.hot:.1f} us in a loop{profiled}.")
        rows = tuple((source, took) for source, took in self.by_source())
        table = Table(("source and all below it", "us"), rows, "The most expensive sources")
        return Section(
            "Cost of guards", (answer, FlameGraph("Time of guards by source", "us", _frame(self.tree)), table)
        )

    def __str__(self) -> str:
        profiled = "" if self.profiled is None else f", {self.profiled:.1f} us profiled"
        largest = [f"  {took:8.2f} us  {source}" for source, took in self.by_source()[:10]]
        return "\n".join([f"guards: {self.hot:.1f} us hot{profiled}", *largest])


@dataclass(frozen=True)
class FrameCost:
    """The time of the guards of one compilation, measured in a loop when it was compiled."""

    compile_id: str
    function: str
    file: str
    line: int
    tree: CostNode


def frame_cost(built: GuardsBuiltEvent, seconds: float = 0.2) -> FrameCost | None:
    """What the guards of a compilation cost, with the locals it was compiled for; None where they do not hold.

    Args:
        seconds: about how long measuring may take; then the largest sources are not decomposed any further.
    """
    if built.f_locals is None:
        return None
    with audits_paused():
        guards = built.guards.copy()
        start = time.perf_counter()
        if not guards.check(built.f_locals):
            return None
        took = time.perf_counter() - start
        # A tenth of the checks of `cost`, or fewer: a script waits for this.
        timing = _Timing(checks=max(1, min(10, int(1e-3 / took))), rounds=2, deadline=start + seconds)
        tree = _cost_tree(guards, built.f_locals, timing)
    return FrameCost(built.compile_id, *built.where, tree)


def costs_section(
    costs: Sequence[FrameCost],
    *,
    name: Callable[[str], str] = str,
    where: Callable[[str, int], str] = "{}:{}".format,
    note: str = "",
) -> Section:
    """The time of the guards of many compilations, the most expensive first.

    Args:
        name, where: how a function and a source line are written.
        note: what else is to be known of the times.
    """
    ordered = sorted(costs, key=lambda one: -one.tree.microseconds)
    first = ordered[0]
    text = f"The guards of {name(first.function)} take {first.tree.microseconds:.1f} us a call, the most of all."
    rows = tuple(
        (one.compile_id, name(one.function), where(one.file, one.line), one.tree.microseconds) for one in ordered
    )
    graphs = (
        FlameGraph(f"Guards of {one.compile_id} {name(one.function)} by source", "us", _frame(one.tree))
        for one in ordered[:_MOST_GRAPHS]
        if one.tree.microseconds >= first.tree.microseconds / 10
    )
    how = f"Measured in a loop when each was compiled. In a real call memory is cold, and guards take longer.{note}"
    columns = ("id", "function", "where", "us of a check")
    return Section("Cost of guards", (Answer("ok", text), Text(how), Table(columns, rows), *graphs))


def _frame(node: CostNode) -> Frame:
    return Frame(node.source, node.microseconds, tuple(map(_frame, node.children)))


def _without_separators(source: str) -> str:
    return source.replace(" ", "").replace(";", ",")


def cost(compiled: Any, /, *args: Any, calls: int = 20, **kwargs: Any) -> Cost:
    """How long the guards of a call take.

    Args:
        calls: how many times to call it under the profiler, for `Cost.profiled`; 0 skips that.
    """
    if isinstance(calls, bool) or not isinstance(calls, int) or calls < 0:
        raise GuardError(f"cost: calls is {calls!r}. Give a number of calls, 0 or more.")
    try:
        frame = dynamo.frame_of(compiled, args, kwargs)
    except TypeError as error:
        raise GuardError(f"cost: the arguments do not match the signature: {error}.") from error
    if frame is None:
        raise GuardError(f"cost: this {type(compiled).__name__} is not compiled. Give what torch.compile returned.")
    with audits_paused():
        entries = dynamo.entries_of(frame.cache)
        matching = next((guards for _, guards in entries if guards.copy().check(frame.f_locals)), None)
        if matching is None:
            raise GuardError("cost: no cached entry matches this call. Call it once before.")
        tree = _cost_tree(matching, frame.f_locals)
    return Cost(tree.microseconds, _profile(compiled, args, kwargs, calls) if calls else None, tree)


def _cost_tree(guards: Guards, f_locals: dict[str, Any], timing: _Timing = _THOROUGH) -> CostNode:
    """Decompose the time of a tree. A subtree's time is what it adds to checking the path that leads to it."""
    total = _time(guards, f_locals, timing)
    longest = total * timing.checks * timing.rounds / 1e6  # seconds of one measurement

    def is_late(measurements: int) -> bool:
        return time.perf_counter() + measurements * longest > timing.deadline

    def decompose(manager: Any, path: frozenset[str], took: float) -> CostNode:
        source = manager.get_source()
        # Some managers have no source of their own: their time counts for the source they start from.
        named = [child for child in children_of(manager) if child.get_source() != source]
        if not named or took < total * _SMALLEST_SHARE or is_late(len(named) + 1):
            return CostNode(source, took, ())
        alone = _time(guards.part(path), f_locals, timing)
        added = [max(0.0, _time(guards.part(path | _sources(child)), f_locals, timing) - alone) for child in named]
        # Measurements are noisy: scale them so that children never take more than their parent.
        scale = min(1.0, took / (sum(added) or 1.0))
        children = zip(named, added, strict=True)
        return CostNode(
            source,
            took,
            tuple(decompose(child, path | {child.get_source()}, one * scale) for child, one in children),
        )

    return decompose(guards.root, frozenset({guards.root.get_source()}), total)


def _sources(manager: Any) -> frozenset[str]:
    below = (_sources(child) for child in children_of(manager))
    return frozenset({manager.get_source()}).union(*below)


def _time(guards: Guards, f_locals: dict[str, Any], timing: _Timing) -> float:
    """Microseconds of a check: the least of some rounds, since any disturbance only adds time."""
    check, rounds = guards.root.check, []
    for _ in range(timing.rounds):
        start = time.perf_counter()
        for _ in range(timing.checks):
            check(f_locals)
        rounds.append(time.perf_counter() - start)
    return min(rounds) / timing.checks * 1e6


def _profile(compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any], calls: int) -> float | None:
    """Microseconds of the median call; None where no cache lookup was recorded, or while a profiler runs already."""
    if dynamo.is_profiling():  # starting a second one would end the first
        return None
    # Without acc_events torch warns that events of earlier cycles are dropped; there is only one cycle.
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, acc_events=True) as profile:
        for _ in range(calls):
            compiled(*args, **kwargs)
    lookups = [event.cpu_time_total for event in profile.events() or () if event.name == _LOOKUP]
    frames, rest = divmod(len(lookups), calls)  # in each call
    if rest or not frames:  # events were lost, or a call took another way: the mean is what is left
        return sum(lookups) / calls if lookups else None
    return statistics.median(sum(lookups[i * frames : (i + 1) * frames]) for i in range(calls))
