"""Memory of a graph over its nodes, as a chart.

What in a run is torchguard's own: `--watch` adds to the graphs of a script.

Lines of code, as short as they can be told.

Artifacts: a list of them, one of them, what is to be removed.

What of a model a device can run, and what breaks its rules.

A graph: how often it has which op, and its outline by module.

What was compiled, why again, and where graphs break.
"""

import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from torchguard.cli._terminal import ago, bytes_shown, count_shown, plain, table
from torchguard.exceptions import TorchGuardError

if TYPE_CHECKING:
    from torchguard.artifacts import Artifact, Removal
    from torchguard.device import DeviceReport, Violation


_PACKAGE = str(Path(__file__).parent.parent / "_")[:-1]


def is_in_package(file: str) -> bool:
    return file.startswith(_PACKAGE)


def is_ours(file: str, function: str) -> bool:
    """Whether a line is in torchguard itself, and not where a watched model calls its own `forward`."""
    return is_in_package(file) and not function.startswith("forward_of_")


def without_ours(report: "DeviceReport") -> "DeviceReport":
    """A report in which what watching adds counts as running anywhere."""
    graphs = [replace(graph, violations=(*_theirs(graph.violations),)) for graph in report.graphs]
    return replace(report, graphs=tuple(graphs))


def _theirs(violations: Iterable["Violation"]) -> Iterator["Violation"]:
    for one in violations:
        if one.place is None or not is_in_package(one.place.file):
            yield one
        elif not is_ours(one.place.file, one.place.function):
            # An op of torch's own modules, as in a bare Sequential: no line of the user's leads to it.
            yield replace(one, place=None)


_HOME = os.getcwd()  # where the command was started: a script may go elsewhere


def place(file: str, line: int) -> str:
    """`src/model.py:12`, from the current directory where the file lies below it."""
    below = os.path.relpath(file, _HOME) if os.path.isabs(file) else file
    return f"{file if below.startswith('..') else below}:{line}"


_OF_MANIFEST = ("compile_id", "function", "file", "line", "backend", "graphs", "waiting_for", "notes")


def summary(artifact: "Artifact") -> dict[str, Any]:
    """An artifact as data; of one that cannot be read, what is known without reading it."""
    known = {
        "id": artifact.id,
        "path": str(artifact.path),
        "created": artifact.created.isoformat(),
        "state": artifact.state,
        "problem": artifact.problem,
        "size": artifact.size,
    }
    manifest = _manifest(artifact)
    return known | ({name: manifest[name] for name in _OF_MANIFEST} if manifest else {})


def listing(artifacts: Sequence["Artifact"]) -> RenderableType:
    rows = ((one.id, ago(one.created), bytes_shown(one.size), _about(one)) for one in artifacts)
    return table(("ID", "AGE", "SIZE", "COMPILED"), rows, right=("AGE", "SIZE"), whole=("ID", "AGE", "SIZE"))


def details(artifact: "Artifact") -> Iterator[RenderableType]:
    """What an artifact has in it, apart from its guards."""
    manifest = artifact.manifest()
    where = place(manifest["file"], manifest["line"])
    yield plain(f"{manifest['function']} ({where}), {manifest['compile_id']}, for {manifest['backend']}", "bold")
    yield plain(f"{artifact.path}, {bytes_shown(artifact.size)}, {artifact.created.astimezone():%Y-%m-%d %H:%M:%S}")
    yield table(
        ("GRAPH", "KIND", "NODES", "FILES"),
        [(g["name"], g["kind"], g["nodes"], ", ".join(g["files"].values())) for g in manifest["graphs"]],
        right=("NODES",),
    )
    named = {file for graph in manifest["graphs"] for file in graph["files"].values()}
    if others := [name for name in manifest["files"] if name not in named]:
        yield plain(f"Also: {', '.join(others)}")
    yield from (plain(f"Still to come: {one}", "yellow") for one in manifest["waiting_for"])
    yield from (plain(note, "yellow") for note in manifest["notes"])


def removals(found: Sequence["Removal"], is_done: bool) -> Iterator[RenderableType]:
    rows = ((one.artifact.id, bytes_shown(one.artifact.size), one.why) for one in found)
    yield table(("ID", "SIZE", "WHY"), rows, right=("SIZE",), whole=("ID", "SIZE"))
    total = bytes_shown(sum(one.artifact.size for one in found))
    yield plain(f"{count_shown(len(found), 'artifact')}, {total}{' removed' if is_done else ''}.", "bold")


def _about(artifact: "Artifact") -> Text:
    manifest = _manifest(artifact)
    if artifact.state != "whole" or manifest is None:
        return plain(f"{artifact.state}: {artifact.problem}" if artifact.problem else artifact.state, "red")
    what = plain(f"{manifest['function']} ({place(manifest['file'], manifest['line'])}) ")
    return what.append_text(plain(", ".join(graph["kind"] for graph in manifest["graphs"]), "dim"))


def _manifest(artifact: "Artifact") -> dict[str, Any] | None:
    if artifact.state != "whole":
        return None
    try:
        return artifact.manifest()
    except TorchGuardError:  # it changed since it was listed, and is shown as what cannot be read
        return None


_SHOWN, _COUNTED = 30, 10


def device_facts(found: "DeviceReport") -> dict[str, Any]:
    """The report as JSON can hold it."""
    told = found.to_json()
    return json.loads(told) if isinstance(told, str) else told


def sizes(at_hand: Mapping[str, int]) -> Iterator[RenderableType]:
    """The numbers that stand for symbols."""
    if at_hand:
        yield plain(f"at sizes {', '.join(f'{name}={size}' for name, size in at_hand.items())}", "bold")


def device_report(found: "DeviceReport", limit: int = _SHOWN) -> Iterator[RenderableType]:
    """Coverage, then violations by rule, op and line, each with what to do about it."""
    style = "bold red" if found.violations else "bold green"
    names = ", ".join(dict.fromkeys(one.device.name for one in found.graphs))
    head = f"{count_shown(len(found.graphs), 'graph')} on {names}: {found.coverage}"
    yield plain(f"{head}; {count_shown(len(found.violations), 'violation')}", style)
    yield plain(
        f"peak memory {bytes_shown(found.peak_memory)}, {bytes_shown(found.transfer_bytes)} to move for fallbacks"
    )
    for title, counted in (("RULE", found.by_rule()), ("OP", found.by_op()), ("LINE", found.by_line())):
        if counted:
            yield table((title, "NODES"), list(counted.items())[:_COUNTED], right=("NODES",))
    for one in found.violations[:limit]:
        yield from violation(one)
    if len(found.violations) > limit:
        yield plain(f"... and {len(found.violations) - limit} more", "dim")


def violation(one: "Violation") -> Iterator[RenderableType]:
    from torchguard.device._violations import some

    times = f" [{len(one.nodes)} times]" if len(one.nodes) > 1 else ""
    what = f" ({some(one.tensors)})" if one.tensors else ""
    line = plain(f"{one.graph}: {one.op}: {one.message}{what}{times}", "default")
    yield plain(f"{one.code} ", "red").append_text(line)
    if one.condition:
        yield _under(f"needs {one.condition}")
    if one.place:
        yield _under(f"{place(one.place.file, one.place.line)}  {one.place.text}", "dim")
    elif one.modules:
        yield _under(f"in module {some(one.modules)}", "dim")
    if one.remedy:
        yield _under(one.remedy, "green")


_GETITEM = "_operator.getitem"
_OPS_SHOWN, _OUTLINE_SHOWN = 20, 60

Node = Mapping[str, Any]


def graph_facts(graph: Mapping[str, Any]) -> dict[str, Any]:
    """What is told of a graph, as an artifact has it."""
    nodes = graph["nodes"]
    calls = [node for node in nodes if node["op"].startswith("call_")]
    return {
        "name": graph["name"],
        "kind": graph["kind"],
        "nodes": len(nodes),
        "inputs": [_shown(node) for node in nodes if node["op"] == "placeholder"],
        "ops": dict(Counter(node["target"] for node in calls).most_common()),
        "outline": [{"module": module, "ops": ops} for module, ops in _outline(calls)],
    }


def graph(told: Mapping[str, Any]) -> Iterator[RenderableType]:
    counts = f"{count_shown(told['nodes'], 'node')}, {count_shown(len(told['inputs']), 'input')}"
    yield plain(f"{told['name']} ({told['kind']}): {counts}", "bold")
    ops = list(told["ops"].items())
    yield table(("OP", "TIMES"), ops[:_OPS_SHOWN], right=("TIMES",))
    if len(ops) > _OPS_SHOWN:
        yield plain(f"... and {len(ops) - _OPS_SHOWN} more", "dim")
    yield plain("Outline", "bold")
    for part in told["outline"][:_OUTLINE_SHOWN]:
        line = plain(f"{part['module'] or '(no module)'}: ", "cyan")
        yield Padding(line.append_text(plain(_in_order(part["ops"]), "default")), (0, 0, 0, 2), expand=False)
    if len(told["outline"]) > _OUTLINE_SHOWN:
        yield plain(f"... and {len(told['outline']) - _OUTLINE_SHOWN} more", "dim")


def _outline(calls: Sequence[Node]) -> list[tuple[str, list[str]]]:
    """Runs of ops that belong to the same module, in the order in which they run."""
    runs = itertools.groupby((call for call in calls if call["target"] != _GETITEM), key=_module_of)
    return [(module, [_short(node["target"]) for node in run]) for module, run in runs]


def _module_of(node: Node) -> str:
    path = node["modules"][-1]["path"] if node.get("modules") else ""
    return path.removeprefix("L['self']").removeprefix(".")


def _short(target: str) -> str:
    """`aten.mm.default` as `mm`."""
    return target.removeprefix("aten.").removesuffix(".default")


def _in_order(ops: Sequence[str]) -> str:
    runs = ((op, sum(1 for _ in run)) for op, run in itertools.groupby(ops))
    return ", ".join(f"{op} x{times}" if times > 1 else op for op, times in runs)


def _shown(node: Node) -> str:
    value = node["values"][0] if node["values"] else {}
    tensor = value.get("tensor")
    if tensor is None:
        return f"{node['name']}: {value.get('symbol', value.get('value', ''))}"
    return f"{node['name']}: {tensor['dtype']}{tensor['shape']}"


Facts = Mapping[str, Any]
# Of a guard tree, so many of the commonest kinds are named.
_KINDS = 8
_OF_WATCHING = re.compile(r"_hooks\[.*\.watch\b|\._watch\b|L\['call_record'\]|L\['watch'\]")


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


_EIGHTHS = " ▁▂▃▄▅▆▇█"
_HEIGHT, _WIDTH = 8, 60
_LARGEST = 10


def memory(plan: Mapping[str, Any], graph: str, encoding: str = "utf-8") -> Iterator[RenderableType]:
    """The peak, the curve, and what is alive at the peak. `plan` is what `MemoryPlan.to_dict` gives."""
    saved = f", {bytes_shown(plan['saved'])} saved for backward" if plan["saved"] else ""
    yield plain(f"{graph}: peak {bytes_shown(plan['peak'])} at {plan['peak_node']}{saved}", "bold")
    lines = chart(list(plan["curve"].values()), ascii_only="utf" not in encoding.lower())
    yield Padding(plain("\n".join(lines)), (0, 0, 0, 2), expand=False)
    alive = plan["at_peak"][:_LARGEST]
    rows = [(bytes_shown(one["bytes"]), one["name"], _line_of(one["place"])) for one in alive]
    yield table(("ALIVE", "TENSOR", "WHERE"), rows, right=("ALIVE",))
    if rest := plan["at_peak"][_LARGEST:]:
        yield plain(f"... and {len(rest)} more, {bytes_shown(sum(one['bytes'] for one in rest))}", "dim")
    if plan["unknown"]:
        yield plain(f"Not counted, of unknown size: {', '.join(plan['unknown'])}", "yellow")


def chart(curve: Sequence[int], width: int = _WIDTH, height: int = _HEIGHT, ascii_only: bool = False) -> list[str]:
    """Rows of a bar chart, the highest first; each column is the most that is alive in its share of the curve."""
    if not curve or max(curve) <= 0:
        return ["(nothing)"]
    columns = min(width, len(curve))
    ends = [len(curve) * i // columns for i in range(columns + 1)]
    heights = [max(curve[a:b]) / max(curve) * height for a, b in itertools.pairwise(ends)]
    rows = []
    for row in range(height - 1, -1, -1):
        eighths = (round(min(max(tall - row, 0.0), 1.0) * 8) for tall in heights)
        cells = "".join(("#" if part >= 4 else " ") if ascii_only else _EIGHTHS[part] for part in eighths)
        label = bytes_shown(max(curve)) if row == height - 1 else "0 B" if row == 0 else ""
        rows.append(f"{label:>10} |{cells}".rstrip())
    return rows


def _line_of(found: Mapping[str, Any] | None) -> str:
    return place(found["file"], found["line"]) if found else ""
