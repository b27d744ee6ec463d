"""Compilations and device reports, as data for JSON and as text: what `run`, `show` and `analyze` print.

`run --watch` makes code of torchguard part of the program: it calls hooks inside the compiled graphs, and where a graph
breaks, Dynamo compiles these hooks as frames of their own. The user asked about the script. So frames and device
violations of torchguard's own code are left out here, with one exception: a watched model's `forward` is called by a
function `forward_of_<class>` in torchguard, and that frame stands for the model.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from torchguard._sizes import format_size
from torchguard.cli._terminal import WATCHED_FORWARD, indent, model_name, plain, plural, source_line, table, truncation

if TYPE_CHECKING:
    from torchguard.artifacts import Artifact
    from torchguard.device import DeviceReport, DeviceViolation
    from torchguard.guards import Cost

Data = Mapping[str, Any]

_PACKAGE = str(Path(__file__).parent.parent / "_")[:-1]
# Sources of guards on torchguard's state in a watched model.
_WATCH_SOURCE = re.compile(r"_hooks\[.*\.watch\b|\._watch\b|L\['call_record'\]|L\['watch'\]")

_LIMIT = 30  # compilations, recompiles, graph breaks and violations
_GUARD_TYPES, _COSTLIEST, _COUNTED = 8, 10, 10


# Data


def artifact_compilations(artifact: "Artifact") -> dict[str, Any]:
    """The one compilation of an artifact, in the form of `inspection_data`."""
    from torchguard.guards._guard_tree import Guard, GuardFailure
    from torchguard.guards._section import failed_entry

    def failure(entry: Data) -> GuardFailure:
        guard = {name: entry["guard"][name] for name in ("source", "type", "code", "line")}
        return GuardFailure(Guard(**guard), entry["now"], entry["why"])

    manifest = artifact.manifest()
    own = {name for name, entry in manifest["files"].items() if "attached_as" not in entry}
    # A compilation that failed has no guards, and it is not known how many it would have had.
    guards = artifact.read_json("guards.json") if "guards.json" in own else {"count": None, "guards": []}
    causes = artifact.read_json("recompiles.json") if "recompiles.json" in own else {}
    misses = causes.get("recompiled_for", ())
    frame = {
        **{name: manifest[name] for name in ("compile_id", "function", "file", "line")},
        "seconds": manifest.get("seconds"),
        "guard_count": guards["count"],
        "guards": guards["guards"],
        "recompiled_for": [failed_entry(miss["compile_id"], map(failure, miss["failures"])) for miss in misses],
    }
    return {
        "frames": [frame],
        "graph_breaks": causes.get("graph_breaks", []),
        "not_compiled": [],
        "guard_kinds": dict(Counter(guard["type"] for guard in guards["guards"])),
    }


def cost_data(cost: "Cost") -> dict[str, Any]:
    return {"hot_us": cost.hot, "profiled_us": cost.profiled, "by_source": cost.by_source()}


# Compilations as text. `data` is what `inspection_data` or `artifact_compilations` returns.


def compilation_views(data: Data, failed: int = 0) -> Iterator[RenderableType]:
    """What was compiled. `failed` is the number of compilations that failed, of which there are artifacts."""
    compiled = [frame for frame in _script_frames(data["frames"]) if frame["guard_count"] is not None]
    if compiled or not failed:
        yield compilations(data)
        which = plural(failed, "compilation") if failed else ""
    else:
        which = "The only compilation" if failed == 1 else f"All {failed} compilations"
    if failed:
        yield plain(f"{which} failed: torchguard show has the reason.", "yellow")
    yield from graph_breaks(data)
    yield from recompiles(data)
    unchecked = sum(len(frame.get("dropped", ())) for frame in compiled if not frame.get("is_audited"))
    if unchecked:
        what = f"A filter dropped {plural(unchecked, 'guard')}, and nothing checks them. Use guards.audit."
        yield plain(what, "yellow")


def script_data(data: Data) -> dict[str, Any]:
    """The data without frames of torchguard's own code, and without guards on its state."""
    frames, others = _script_frames(data["frames"]), _script_frames(data["not_compiled"])
    cleaned = [{**one, "recompiled_for": [*map(_of_script, one["recompiled_for"])]} for one in (*frames, *others)]
    return {**data, "frames": cleaned[: len(frames)], "not_compiled": cleaned[len(frames) :]}


def _of_script(entry: Data) -> dict[str, Any]:
    kept = [one for one in entry["failures"] if not _WATCH_SOURCE.search(one["guard"]["source"])]
    return {**entry, "failures": kept}


def compilations(data: Data) -> RenderableType:
    """A table of what was compiled."""
    frames = _script_frames(data["frames"])
    if not frames:
        return plain("Nothing was compiled.")
    rows = [
        (one["compile_id"], model_name(one["function"]), _where(one), _guard_count(one), _seconds([one]))
        for one in frames[:_LIMIT]
    ]
    total = _seconds(frames)
    internal = len(data["frames"]) - len(frames)
    return Group(
        plain(plural(len(frames), "compilation") + (f", {total} in total" if total else ""), "bold"),
        table(("ID", "FUNCTION", "WHERE", "GUARDS", "TIME"), rows, right=("GUARDS", "TIME")),
        *truncation(len(frames), _LIMIT),
        *([plain(f"... and {internal} of torchguard's own functions, for --watch", "dim")] if internal else []),
    )


def recompiles(data: Data) -> Iterator[RenderableType]:
    """Each recompile, with every guard that failed and what to do about it."""
    recompiled = [frame for frame in _script_frames(data["frames"]) if frame["recompiled_for"]]
    if recompiled:
        yield plain(plural(len(recompiled), "recompile"), "bold yellow")
    for frame in recompiled[:_LIMIT]:
        yield plain(f"{frame['compile_id']}  {model_name(frame['function'])} ({_where(frame)})")
        yield from _misses(frame["recompiled_for"])
    yield from truncation(len(recompiled), _LIMIT)
    for frame in _script_frames(data["not_compiled"]):
        what = f"{frame['compile_id']}  {model_name(frame['function'])} ({_where(frame)})"
        yield plain(f"{what} was not compiled again:", "yellow")
        yield from _misses(frame["recompiled_for"])


def _misses(misses: Sequence[Data]) -> Iterator[RenderableType]:
    for miss in misses:
        yield indent(f"{miss['compile_id']} could not be reused, its guards failed:")
        for failure in miss["failures"]:
            # Guards on torchguard's own state fail as a consequence of the others.
            if not _WATCH_SOURCE.search(failure["guard"]["source"]):
                yield indent(f"- {failure['text']}", by=4)
                if failure["advice"]:
                    yield indent(failure["advice"], "green", by=6)


def graph_breaks(data: Data) -> Iterator[RenderableType]:
    """Each graph break, with its source line, the reason and torch's hints."""
    breaks = data["graph_breaks"]
    if breaks:
        yield plain(plural(len(breaks), "graph break"), "bold yellow")
    for one in breaks[:_LIMIT]:
        here = (one["file"], one["line"])
        text = next((frame["text"] for frame in reversed(one["stack"]) if (frame["file"], frame["line"]) == here), "")
        yield plain(source_line(*here) + (f"  {text}" if text else ""))
        yield indent(one["reason"])
        yield from (indent(hint, "dim") for hint in one["hints"])
    yield from truncation(len(breaks), _LIMIT)


def guard_kinds(data: Data) -> list[RenderableType]:
    """How many guards there are of each type."""
    kinds = Counter(data["guard_kinds"]).most_common()
    if not kinds:
        return []
    others = [("others", sum(number for _, number in kinds[_GUARD_TYPES:]))] if len(kinds) > _GUARD_TYPES else []
    rows = [*kinds[:_GUARD_TYPES], *others]
    return [plain("Guards by type", "bold"), table(("TYPE", "GUARDS"), rows, right=("GUARDS",))]


def cost(measured: Data) -> RenderableType:
    profiled = "" if measured["profiled_us"] is None else f", {measured['profiled_us']:.1f} us in a profile"
    rows = [(f"{us:.2f}", source) for source, us in measured["by_source"][:_COSTLIEST]]
    return Group(
        plain(f"Guards take {measured['hot_us']:.1f} us a call{profiled}. The most expensive:", "bold"),
        table(("US", "SOURCE AND ALL BELOW IT"), rows, right=("US",)),
    )


def _script_frames(frames: Sequence[Data]) -> list[Data]:
    return [frame for frame in frames if not is_internal(frame["file"], frame["function"])]


def _where(frame: Data) -> str:
    return where(frame["file"], frame["line"])


def where(file: str, line: int) -> str:
    """The source line of a frame; "watched" for the frame that stands for a watched model."""
    return "watched" if _is_in_package(file) else source_line(file, line)


def _guard_count(frame: Data) -> str:
    return "" if frame["guard_count"] is None else str(frame["guard_count"])


def failure_of(artifact: "Artifact") -> str:
    """Why the compilation of an artifact failed; empty if it did not."""
    return next((note for note in artifact.manifest()["notes"] if note.startswith("the backend failed")), "")


def _seconds(frames: Sequence[Data]) -> str:
    known = [frame["seconds"] for frame in frames if frame["seconds"] is not None]
    return f"{sum(known):.2f} s" if known else ""  # an artifact may lack it


def _is_in_package(file: str) -> bool:
    return file.startswith(_PACKAGE)


def is_internal(file: str, function: str) -> bool:
    """Whether this is code of torchguard, other than the frame that stands for a watched model."""
    return _is_in_package(file) and not function.startswith(WATCHED_FORWARD)


# Device reports


def without_internal_violations(report: "DeviceReport") -> "DeviceReport":
    """The report without violations of the ops that watching adds to a graph: these ops count as supported."""
    graphs = [replace(graph, violations=(*_script_violations(graph.violations),)) for graph in report.graphs]
    return replace(report, graphs=tuple(graphs))


def _script_violations(violations: Iterable["DeviceViolation"]) -> Iterator["DeviceViolation"]:
    for one in violations:
        if one.source_line is None or not _is_in_package(one.source_line.file):
            yield one
        elif not is_internal(one.source_line.file, one.source_line.function):
            # The watched model is a module of torch, such as a bare Sequential: no line of the user's calls this op.
            yield replace(one, source_line=None)


def device_report(report: "DeviceReport", limit: int = _LIMIT) -> Iterator[RenderableType]:
    """Whether it fits, coverage, violations by rule, op and line, then each violation with what to do about it."""
    from torchguard.device._violations import distinct

    style = "bold red" if report.violations else "bold yellow" if report.failures else "bold green"
    yield plain(report.verdict, style)
    names = ", ".join(dict.fromkeys(one.device.name for one in report.graphs))
    head = f"{plural(len(report.graphs), 'graph')} on {names}: {report.coverage}"
    yield plain(f"{head}; {plural(len(report.violations), 'violation')}")
    moved = f"{format_size(report.transfer_bytes)} transferred for fallbacks"
    yield plain(f"peak memory {format_size(report.peak_memory)}, {moved}")
    yield from (plain(str(one)) for one in report.training)
    for title, counted in (("RULE", report.by_rule()), ("OP", report.by_op()), ("LINE", report.by_line())):
        if counted:
            yield table((title, "NODES"), [*counted.items()][:_COUNTED], right=("NODES",))
    found = distinct(report.violations)
    for one, graphs in found[:limit]:
        yield from _violation(one, graphs)
    yield from truncation(len(found), limit)


def _violation(one: "DeviceViolation", graphs: int) -> Iterator[RenderableType]:
    from torchguard.device._violations import abbreviated

    times = f" [{len(one.nodes)} times]" if len(one.nodes) > 1 else ""
    times += f" [in {graphs} graphs]" if graphs > 1 else ""
    tensors = f" ({abbreviated(one.tensors)})" if one.tensors else ""
    line = plain(f"{one.graph}: {one.op}: {one.message}{tensors}{times}", "default")
    yield plain(f"{one.code} ", "red").append_text(line)
    if one.condition:
        yield indent(f"needs {one.condition}")
    if one.source_line:
        yield indent(f"{source_line(one.source_line.file, one.source_line.line)}  {one.source_line.text}", "dim")
    elif one.modules:
        yield indent(f"in module {abbreviated(one.modules)}", "dim")
    if one.remedy:
        yield indent(one.remedy, "green")
