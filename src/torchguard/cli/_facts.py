"""What is known about compilations, from a run or from an artifact, in one form: plain data, ready for JSON."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchguard.artifacts import Artifact
    from torchguard.guards import Cost, Inspection

Facts = dict[str, Any]


def of_inspection(seen: "Inspection", with_guards: bool = False) -> Facts:
    """What was compiled in a block; each guard of it, too, if they are asked for."""
    found = seen.to_dict()
    kinds = Counter(guard.type for frame in seen.frames for guard in frame.guards.all_guards())
    for told, frame in zip(found["frames"], seen.frames, strict=True):
        told["guards"] = [asdict(guard) for guard in frame.guards.all_guards()] if with_guards else None
        told["recompiled_for"] = [_miss(miss.compile_id, miss.failures) for miss in frame.recompiled_for]
    for told, not_compiled in zip(found["not_compiled"], seen.not_compiled, strict=True):
        told["recompiled_for"] = [_miss(miss.compile_id, miss.failures) for miss in not_compiled.recompiled_for]
    return {**found, "guard_kinds": dict(kinds)}


def of_artifact(artifact: "Artifact") -> Facts:
    """The one compilation that an artifact is about."""
    from torchguard.guards._tree import Guard, GuardFailure

    manifest = artifact.manifest()
    own = {name for name, about in manifest["files"].items() if "attached_as" not in about}
    guards = artifact.read_json("guards.json") if "guards.json" in own else {"count": 0, "guards": []}
    again = artifact.read_json("recompiles.json") if "recompiles.json" in own else {}
    misses = [
        _miss(
            miss["compile_id"], [GuardFailure(Guard(**_told(f["guard"])), f["now"], f["why"]) for f in miss["failures"]]
        )
        for miss in again.get("recompiled_for", ())
    ]
    frame = {
        **{name: manifest[name] for name in ("compile_id", "function", "file", "line")},
        "seconds": manifest.get("seconds"),
        "guard_count": guards["count"],
        "guards": guards["guards"],
        "recompiled_for": misses,
    }
    kinds = Counter(guard["type"] for guard in guards["guards"])
    return {
        "frames": [frame],
        "graph_breaks": again.get("graph_breaks", []),
        "not_compiled": [],
        "guard_kinds": dict(kinds),
    }


def of_cost(cost: "Cost") -> Facts:
    return {"hot_us": cost.hot, "in_place_us": cost.profiled, "by_source": cost.by_source()}


def _told(guard: Mapping[str, Any]) -> dict[str, Any]:
    return {name: guard[name] for name in ("source", "type", "code", "line")}


def _advice(failure: Any) -> str:
    from torchguard.guards._why import advice_for

    # What another torch.compile made of the function was never meant to fit.
    return "" if failure.guard.type == "BACKEND_MATCH" else advice_for(failure)


def _miss(compile_id: str, failures: Iterable[Any]) -> Facts:
    told = [{**asdict(one), "text": str(one), "advice": _advice(one)} for one in failures]
    return {"compile_id": compile_id, "failures": told}
