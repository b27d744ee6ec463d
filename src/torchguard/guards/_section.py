"""Compilations as data, and as a section of a report: a timeline, recompiles with all reasons, graph breaks."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torchguard.guards._why import advice_for
from torchguard.report import Answer, Section, Span, Status, Table, Timeline

if TYPE_CHECKING:
    from torchguard.guards._inspect import Inspection

Data = Mapping[str, Any]
_MOST_DROPPED = 20  # of a compilation, named in a table


def inspection_data(inspection: "Inspection", with_guards: bool = False) -> dict[str, Any]:
    """What was compiled during an inspection; each guard too, if asked for."""
    data = inspection.to_dict()
    for entry, frame in zip(data["frames"], inspection.frames, strict=True):
        entry["guards"] = [asdict(guard) for guard in frame.guards.all_guards()] if with_guards else None
        entry["recompiled_for"] = [failed_entry(one.compile_id, one.failures) for one in frame.recompiled_for]
    for entry, not_compiled in zip(data["not_compiled"], inspection.not_compiled, strict=True):
        entry["recompiled_for"] = [failed_entry(one.compile_id, one.failures) for one in not_compiled.recompiled_for]
    kinds = Counter(guard.type for frame in inspection.frames for guard in frame.guards.all_guards())
    return {**data, "guard_kinds": dict(kinds)}


def failed_entry(compile_id: str, failures: Iterable[Any]) -> dict[str, Any]:
    """A cached entry whose guards failed, and each failed guard with advice."""
    failed = [{**asdict(one), "text": str(one), "advice": _advice(one)} for one in failures]
    return {"compile_id": compile_id, "failures": failed}


def _advice(failure: Any) -> str:
    # Code for another backend was never meant to be reused: nothing can be done about it.
    return "" if failure.guard.type == "BACKEND_MATCH" else advice_for(failure)


def compile_section(
    data: Data, *, name: Callable[[str], str] = str, where: Callable[[str, int], str] = "{}:{}".format
) -> Section:
    """What was compiled.

    Args:
        data: what `inspection_data` returned.
        name, where: how a function and a source line are written.
    """
    frames, breaks, not_compiled = data["frames"], data["graph_breaks"], data["not_compiled"]
    recompiled = [one for one in frames if one["recompiled_for"]]
    blocks = [Answer(*_answer(frames, recompiled, breaks, not_compiled)), *_timeline(data, name, where)]
    if frames:
        columns = ("id", "function", "where", "guards", "seconds")
        rows = tuple(
            (
                one["compile_id"],
                name(one["function"]),
                where(one["file"], one["line"]),
                one["guard_count"],
                one["seconds"],
            )
            for one in frames
        )
        blocks.append(Table(columns, rows, "Compilations"))
    reasons = tuple(_reasons([*recompiled, *not_compiled], name))
    if reasons:
        columns = ("id", "function", "could not reuse", "guard that failed", "what to do")
        blocks.append(Table(columns, reasons, "Why it recompiled: all reasons"))
    if breaks:
        rows = tuple(
            (where(one["file"], one["line"]), _text(one), one["reason"], "\n".join(one["hints"])) for one in breaks
        )
        blocks.append(Table(("where", "source", "reason", "what torch proposes"), rows, "Graph breaks"))
    if dropped := tuple(_dropped(frames, name)):
        count, unchecked = sum(row[2] for row in dropped), sum(row[2] for row in dropped if row[3] == "no")
        left = f"{unchecked:,} of them unchecked: where one no longer holds, stale code runs, and nothing tells. "
        remedy = f"{left}Check them: filter=guards.audit(...)." if unchecked else "An audit checks all of them."
        blocks.append(Answer("unknown" if unchecked else "ok", f"{count:,} guards were dropped by a filter. {remedy}"))
        blocks.append(Table(("id", "function", "dropped", "checked", "which"), dropped, "Dropped guards"))
    if data["guard_kinds"]:
        rows = tuple(Counter(data["guard_kinds"]).most_common())
        blocks.append(Table(("type", "guards"), rows, "Guards by type"))
    return Section("Compile", tuple(blocks))


def _answer(
    frames: Sequence[Data], recompiled: Sequence[Data], breaks: Sequence[Data], not_compiled: Sequence[Data]
) -> tuple[Status, str]:
    counts = {
        "compilation": len(frames),
        "recompile": len(recompiled),
        "graph break": len(breaks),
    }
    took = sum(one["seconds"] or 0.0 for one in frames)
    text = ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for noun, count in counts.items())
    text += f", {took:.1f} s of compiling" if took else ""
    text += f"; {len(not_compiled)} calls were not compiled again and ran eagerly" if not_compiled else ""
    return ("bad" if not_compiled else "warning" if recompiled or breaks else "ok"), f"{text}."


def _reasons(frames: Sequence[Data], name: Callable[[str], str]) -> Iterable[tuple[str, ...]]:
    for frame in frames:
        for entry in frame["recompiled_for"]:
            for failure in entry["failures"]:
                function = name(frame["function"])
                yield frame["compile_id"], function, entry["compile_id"], failure["text"], failure["advice"]


def _dropped(frames: Sequence[Data], name: Callable[[str], str]) -> Iterable[tuple[str, str, int, str, str]]:
    """The guards of each compilation that a filter dropped: how many, whether an audit checks them, and which."""
    for frame in frames:
        if dropped := frame.get("dropped"):
            which = "\n".join(dict.fromkeys(dropped[:_MOST_DROPPED]))
            more = f"\n... and {len(dropped) - _MOST_DROPPED:,} more" if len(dropped) > _MOST_DROPPED else ""
            checked = "by an audit" if frame["is_audited"] else "no"
            yield frame["compile_id"], name(frame["function"]), len(dropped), checked, which + more


def _timeline(data: Data, name: Callable[[str], str], where: Callable[[str, int], str]) -> list[Timeline]:
    """Compilations when they ran, and graph breaks at the start of the compilation that met them."""
    started = {one["compile_id"]: one["started"] for one in data["frames"] if one.get("started") is not None}
    if not started:
        return []
    zero = min(started.values())
    spans = []
    for one in data["frames"]:
        if one["compile_id"] not in started:
            continue
        failures = [failure for entry in one["recompiled_for"] for failure in entry["failures"]]
        details = tuple(f"{failure['text']}\n{failure['advice']}" for failure in failures)
        label = f"{one['compile_id']} {name(one['function'])}{' (recompile)' if failures else ''}"
        status: Status = "warning" if failures else "ok"
        at = started[one["compile_id"]] - zero
        spans.append(Span(name(one["function"]), at, one["seconds"] or 0.0, label, status, details))
    for one in data["graph_breaks"]:
        times = [started[id] - zero for id in one.get("compile_ids", ()) if id in started]
        # A compilation that ends in a break is started anew: the break is at one that is known, or at none.
        if times:
            at = f"{where(one['file'], one['line'])} {_text(one)}"
            spans.append(Span("graph breaks", min(times), 0.0, at, "bad", (one["reason"], *one["hints"])))
    return [Timeline("Compilations, recompiles and graph breaks", tuple(spans))]


def _text(graph_break: Data) -> str:
    """The source line of a graph break."""
    here = graph_break["file"], graph_break["line"]
    lines = reversed(graph_break["stack"])
    return next((one["text"] for one in lines if (one["file"], one["line"]) == here), "")
