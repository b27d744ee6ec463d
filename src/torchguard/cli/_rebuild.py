"""The graphs of an artifact, rebuilt with fake tensors for device rules and memory plans.

This module imports torch, so `analyze` imports it only when it needs a graph.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import fx

import torchguard._watch  # noqa: F401  # registers its operators, which occur in graphs of watched models
from torchguard._graphs.codec import decode_graph, decode_inputs, symbols_of
from torchguard._torch.fakes import fake_tensors
from torchguard.cli._model_graphs import Pair
from torchguard.cli._terminal import CommandError
from torchguard.device._rules.base import Constraint
from torchguard.device._violations import merge_violations
from torchguard.exceptions import SavedGraphError

if TYPE_CHECKING:
    from torchguard.artifacts import Artifact
    from torchguard.device import Device, DeviceReport, DeviceViolation
    from torchguard.device._graph import Graph


def pairs_in(artifact: "Artifact") -> list[Pair]:
    """The graphs of AOTAutograd in an artifact, each forward with its backward."""
    manifest = artifact.manifest()
    files = {one["name"]: one["files"]["json"] for one in manifest["graphs"] if "json" in one["files"]}
    dynamo = decode_inputs(artifact.read_json(files.pop("dynamo"))) if "dynamo" in files else None
    data = {name: artifact.read_json(file) for name, file in files.items()}
    with fake_tensors():
        rebuilt = {name: _rebuilt(one) for name, one in data.items()}
    return [
        Pair(
            manifest["compile_id"],
            graph,
            rebuilt.get(f"backward{name.removeprefix('forward')}") if name.startswith("forward") else None,
            dynamo,
            data[name]["sizes"],
        )
        for name, graph in rebuilt.items()
        if name.startswith(("forward", "inference"))
    ]


def _rebuilt(data: Mapping[str, Any]) -> fx.GraphModule:
    try:
        return decode_graph(data)
    except SavedGraphError as error:
        raise CommandError(
            f"The {data['name']} graph cannot be rebuilt from the artifact: node {error} "
            "Give package.module:callable instead."
        ) from error


def with_symbols(report: "DeviceReport") -> "DeviceReport":
    """The report with violations for ops that had symbolic sizes, where the device needs static ones.

    In a rebuilt graph a number stands for every symbol, so the rule of `device` finds none. This one reads the names of
    the symbols, which the codec notes on the nodes.
    """
    graphs = []
    for one in report.graphs:
        found = _Symbols().check(one.graph, one.device)
        graphs.append(replace(one, violations=merge_violations([*one.violations, *found])))
    return replace(report, graphs=tuple(graphs))


class _Symbols(Constraint):
    """TGD304 of `device`, over the symbols that the codec noted."""

    code = "TGD304"

    def check(self, graph: "Graph", device: "Device") -> Iterable["DeviceViolation"]:
        for node in () if device.dynamic_shapes else graph.ops:
            symbols = sorted({name for near in (node, *node.all_input_nodes) for name in symbols_of(near)})
            if symbols:
                message = f"sizes {', '.join(symbols)} are symbolic, {device.name} needs static shapes"
                yield self.violation(graph, message, node=node, remedy="compile with dynamic=False")
