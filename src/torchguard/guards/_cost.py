"""What guards cost a call, source by source."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torchguard._torch import dynamo
from torchguard._torch.guards import Guards, children_of
from torchguard.exceptions import GuardError
from torchguard.guards._audit import unobserved

_LOOKUP = "TorchDynamo Cache Lookup"
# A subtree that takes less than this share of the whole is not taken apart.
_WORTH_A_LOOK = 0.02


@dataclass(frozen=True)
class Share:
    """The time of a source and all that starts from it, and its parts."""

    source: str
    microseconds: float
    parts: tuple["Share", ...]

    def subtrees(self) -> Iterator["Share"]:
        yield self
        for part in self.parts:
            yield from part.subtrees()

    def lines(self, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
        """Each source with its way from the root, and the time that is its own. They sum up to the whole."""
        path = (*above, self.source)
        yield path, max(0.0, self.microseconds - sum(part.microseconds for part in self.parts))
        for part in self.parts:
            yield from part.lines(path)


@dataclass(frozen=True)
class Cost:
    """Time a call spends on guards, in microseconds.

    `hot` is that of checking the guards that fit, of its first frame, again and again. `in_place` is what the profiler
    saw of a typical real call: all that is compiled for a frame until one fits, frames after graph breaks, memory that
    is cold, and some of the profiler's own; None without a call.
    """

    hot: float
    in_place: float | None
    tree: Share

    def by_source(self) -> list[tuple[str, float]]:
        """The dearest sources first, each with all that starts from it."""
        found: dict[str, float] = {}
        for share in self.tree.subtrees():
            found[share.source] = max(share.microseconds, found.get(share.source, 0.0))
        return sorted(found.items(), key=lambda one: -one[1])

    def to_flamegraph(self) -> str:
        """Folded stacks, with nanoseconds: for flamegraph.pl, speedscope and the like."""
        lines = ((";".join(map(_without_separators, path)), round(own * 1e3)) for path, own in self.tree.lines())
        return "\n".join(f"{path} {own}" for path, own in lines if own)

    def __str__(self) -> str:
        in_place = "" if self.in_place is None else f", {self.in_place:.1f} us in place"
        dearest = [f"  {took:8.2f} us  {source}" for source, took in self.by_source()[:10]]
        return "\n".join([f"guards: {self.hot:.1f} us hot{in_place}", *dearest])


def _without_separators(source: str) -> str:
    return source.replace(" ", "").replace(";", ",")


def cost(compiled: Any, /, *args: Any, calls: int = 20, **kwargs: Any) -> Cost:
    """What guards cost in a call like this. It is called `calls` times, to see them in place; 0 does without."""
    if isinstance(calls, bool) or not isinstance(calls, int) or calls < 0:
        raise GuardError(f"cost: calls is {calls!r}. Give a number of calls, 0 or more.")
    try:
        frame = dynamo.frame_of(compiled, args, kwargs)
    except TypeError as error:
        raise GuardError(f"cost: these arguments do not fit: {error}.") from error
    if frame is None:
        raise GuardError(f"cost: this {type(compiled).__name__} is not compiled. Give what torch.compile returned.")
    with unobserved():
        entries = dynamo.entries_of(frame.cache)
        fitting = next((guards for _, guards in entries if guards.check(frame.f_locals)), None)
        if fitting is None:
            raise GuardError("cost: nothing compiled fits this call. Call it once before.")
        tree = _share(fitting, frame.f_locals)
    return Cost(tree.microseconds, _in_place(compiled, args, kwargs, calls) if calls else None, tree)


def _share(guards: Guards, f_locals: dict[str, Any]) -> Share:
    """The tree, taken apart: a subtree's time is what checking it adds to checking the way to it."""
    whole = _time(guards, f_locals)

    def taken_apart(manager: Any, way: frozenset[str], took: float) -> Share:
        source = manager.get_source()
        # Some ways to a value have no name of their own: what they take is counted with where they start.
        named = [child for child in children_of(manager) if child.get_source() != source]
        if not named or took < whole * _WORTH_A_LOOK:
            return Share(source, took, ())
        alone = _time(guards.part(way), f_locals)
        added = [max(0.0, _time(guards.part(way | _sources(child)), f_locals) - alone) for child in named]
        # Clocks are not exact: parts never take more than the whole.
        scale = min(1.0, took / (sum(added) or 1.0))
        parts = zip(named, added, strict=True)
        return Share(
            source,
            took,
            tuple(taken_apart(child, way | {child.get_source()}, one * scale) for child, one in parts),
        )

    return taken_apart(guards.root, frozenset({guards.root.get_source()}), whole)


def _sources(manager: Any) -> frozenset[str]:
    below = (_sources(child) for child in children_of(manager))
    return frozenset({manager.get_source()}).union(*below)


def _time(guards: Guards, f_locals: dict[str, Any]) -> float:
    """Microseconds of a check: the least of some rounds, since anything else can only add to it."""
    check, rounds = guards.root.check, []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(20):
            check(f_locals)
        rounds.append(time.perf_counter() - start)
    return min(rounds) / 20 * 1e6


def _in_place(compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any], calls: int) -> float | None:
    # All events of one cycle are wanted anyway; torch warns where it is not said.
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, acc_events=True) as profile:
        for _ in range(calls):
            compiled(*args, **kwargs)
    seen = [event.cpu_time_total for event in profile.events() or () if event.name == _LOOKUP]
    frames = len(seen) // calls  # in each call
    each = [sum(seen[i * frames : (i + 1) * frames]) for i in range(calls)]
    return statistics.median(each) if frames else None
