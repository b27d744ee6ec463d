"""A graph: how often it has which op, and its outline by module."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding

from torchguard.cli.terminal import count_shown, plain, table

_GETITEM = "_operator.getitem"
_OPS_SHOWN, _OUTLINE_SHOWN = 20, 60

Node = Mapping[str, Any]


def facts(graph: Mapping[str, Any]) -> dict[str, Any]:
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
