"""The graphs of an artifact, rebuilt with fake tensors for device rules and memory plans."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import fx

import torchguard._watch  # noqa: F401  # registers its operators, which occur in graphs of watched models
from torchguard._graphs.codec import decode_graph, decode_inputs
from torchguard._torch.fakes import fake_tensors
from torchguard.cli._terminal import CommandError
from torchguard.cli._trace import Pair
from torchguard.exceptions import SavedGraphError

if TYPE_CHECKING:
    from torchguard.artifacts import Artifact


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
