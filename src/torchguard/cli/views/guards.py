"""What was compiled, why again, and where graphs break."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from torchguard.cli.ours import is_in_package, is_ours
from torchguard.cli.terminal import count_shown, plain, table
from torchguard.cli.views.places import place

Facts = Mapping[str, Any]
# Of a guard tree, so many of the commonest kinds are named.
_KINDS = 8
_OF_WATCHING = re.compile(r"_hooks\[.*\.watch\b|\._watch\b|L\['journal'\]|L\['watch'\]")


def compilations(facts: Facts, limit: int = 30) -> RenderableType:
    """A table of what was compiled. `facts` is what `facts.of_inspection` or `facts.of_artifact` gives."""
    frames = _of_script(facts["frames"])
    if not frames:
        return plain("Nothing was compiled.")
    ours = len(facts["frames"]) - len(frames)
    rows = [
        (
            frame["compile_id"],
            frame["function"],
            _where(frame),
            frame["guard_count"],
            _took(frame),
        )
        for frame in frames[:limit]
    ]
    columns = ("ID", "FUNCTION", "WHERE", "GUARDS", "TIME")
    return Group(
        plain(f"{count_shown(len(frames), 'compilation')}{_total(frames)}", "bold"),
        table(columns, rows, right=("GUARDS", "TIME")),
        *_left_out(frames, limit),
        *([plain(f"... and {ours} of torchguard's own, which watch", "dim")] if ours else []),
    )


def recompiles(facts: Facts, limit: int = 30) -> Iterator[RenderableType]:
    """Each compilation for which something compiled before did not fit, with all reasons and what to do."""
    again = [frame for frame in _of_script(facts["frames"]) if frame["recompiled_for"]]
    if again:
        yield plain(count_shown(len(again), "recompile"), "bold yellow")
    for frame in again[:limit]:
        yield plain(f"{frame['compile_id']}  {frame['function']} ({_where(frame)})")
        yield from _misses(frame["recompiled_for"])
    yield from _left_out(again, limit)
    for frame in _of_script(facts["given_up"]):
        yield plain(
            f"{frame['compile_id']}  {frame['function']} ({_where(frame)}) was not compiled any more:", "yellow"
        )
        yield from _misses(frame["recompiled_for"])


def graph_breaks(facts: Facts, limit: int = 30) -> Iterator[RenderableType]:
    breaks = facts["graph_breaks"]
    if breaks:
        yield plain(count_shown(len(breaks), "graph break"), "bold yellow")
    for one in breaks[:limit]:
        text = next(
            (p["text"] for p in reversed(one["stack"]) if (p["file"], p["line"]) == (one["file"], one["line"])), ""
        )
        yield plain(place(one["file"], one["line"]) + (f"  {text}" if text else ""))
        yield _under(one["reason"])
        yield from (_under(hint, "dim") for hint in one["hints"])
    yield from _left_out(breaks, limit)


def guard_kinds(facts: Facts) -> RenderableType:
    """How many guards there are of each type."""
    kinds = sorted(facts["guard_kinds"].items(), key=lambda one: -one[1])
    more = [("...", sum(number for _, number in kinds[_KINDS:]))] if len(kinds) > _KINDS else []
    return Group(
        plain("Guards by type", "bold"), table(("TYPE", "GUARDS"), [*kinds[:_KINDS], *more], right=("GUARDS",))
    )


def cost(measured: Mapping[str, Any]) -> RenderableType:
    in_place = "" if measured["in_place_us"] is None else f", {measured['in_place_us']:.1f} us in place"
    rows = [(f"{took:.2f}", source) for source, took in measured["by_source"][:10]]
    return Group(
        plain(f"Guards take {measured['hot_us']:.1f} us a call{in_place}. The dearest:", "bold"),
        table(("US", "SOURCE AND ALL BELOW IT"), rows, right=("US",)),
    )


def _of_script(frames: Sequence[Facts]) -> list[Facts]:
    """Those that are not torchguard's: where graphs break, Dynamo compiles what watches by itself.

    A watched model as a whole is the script's, though its frame starts in torchguard.
    """
    return [frame for frame in frames if not is_ours(frame["file"], frame["function"])]


def _where(frame: Facts) -> str:
    is_watched_model = is_in_package(frame["file"]) and not is_ours(frame["file"], frame["function"])
    return "watched" if is_watched_model else place(frame["file"], frame["line"])


def _misses(misses: Sequence[Facts]) -> Iterator[RenderableType]:
    for miss in misses:
        yield _under(f"{miss['compile_id']} did not fit:")
        for failure in miss["failures"]:
            if _OF_WATCHING.search(failure["guard"]["source"]):
                continue  # a consequence: what watches has seen other places before
            yield Padding(plain(f"- {failure['text']}"), (0, 0, 0, 4), expand=False)
            if failure["advice"]:
                yield Padding(plain(failure["advice"], "green"), (0, 0, 0, 6), expand=False)


def _under(text: str, style: str = "") -> RenderableType:
    return Padding(plain(text, style), (0, 0, 0, 2), expand=False)


def _left_out(all_of: Sequence[object], limit: int) -> list[Text]:
    return [plain(f"... and {len(all_of) - limit} more", "dim")] if len(all_of) > limit else []


def _took(frame: Facts) -> str:
    return "" if frame["seconds"] is None else f"{frame['seconds']:.2f} s"


def _total(frames: Sequence[Facts]) -> str:
    known = [frame["seconds"] for frame in frames if frame["seconds"] is not None]
    return f", {sum(known):.2f} s in all" if known else ""  # an artifact does not know
