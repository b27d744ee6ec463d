"""The graphs that AOTAutograd makes of a target, forward and backward."""

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from torchguard.cli._targets import Target
from torchguard.cli._terminal import CommandError

if TYPE_CHECKING:
    from torch import fx

    from torchguard.artifacts import Artifact, Graphs
    from torchguard.device import Device, DeviceReport


class Pair(NamedTuple):
    """A forward graph of AOTAutograd, its backward if it has one, and the graph of Dynamo's they were made from.

    `sizes` are those that stand in the graphs for symbols, and `attach` adds a file to the artifact they are in.
    """

    compile_id: str
    forward: "fx.GraphModule"
    backward: "fx.GraphModule | None" = None
    dynamo: "fx.GraphModule | None" = None
    sizes: Mapping[str, int] = MappingProxyType({})
    attach: Callable[[str, str], None] = lambda name, content: None


class Collected:
    """The newest word on each pair of graphs: it is told once with the forward, and again with the backward."""

    def __init__(self) -> None:
        self._by_forward: dict[int, Pair] = {}

    def __call__(self, graphs: "Graphs") -> None:
        if graphs.forward is not None:  # as long as it is kept, its id is nobody else's
            pair = Pair(graphs.compile_id, graphs.forward, graphs.backward, graphs.dynamo, attach=graphs.attach)
            self._by_forward[id(graphs.forward)] = pair

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._by_forward.values())


@contextlib.contextmanager
def traced(target: Target) -> Iterator[tuple[list[Pair], list["Artifact"]]]:
    """Compile the target's model, run it forward and, where it has gradients, backward; all that was captured of it."""
    import torch

    from torchguard import artifacts

    target.try_out()
    collected = Collected()
    with tempfile.TemporaryDirectory(prefix="torchguard-") as directory:
        with artifacts.capture(Path(directory), on_graphs=collected) as captured:
            model = target.model if target.is_compiled else torch.compile(target.model, backend="aot_eager")
            _backward(target.call(model))
        if not (graphs := list(collected)):
            raise CommandError(f"{target.name}: no graph came of it. Dynamo found nothing to compile in this call.")
        yield graphs, list(captured.artifacts)


def _backward(output: Any) -> None:
    """Run the backward pass, whose graphs are compiled no earlier."""
    from torchguard._pytrees import tensors_in

    with_grad = [z for _, z in tensors_in(output) if z.requires_grad and z.dtype.is_floating_point]
    if with_grad:
        sum(z.float().sum() for z in with_grad).backward()  # pyright: ignore[reportAttributeAccessIssue]


def check_all(pairs: Iterable[Pair], device: "Device") -> "DeviceReport":
    """The rules of a device over all graphs."""
    from torchguard.device import DeviceReport

    return sum((check_one(pair, device) for pair in pairs), start=DeviceReport())


def check_one(pair: Pair, device: "Device") -> "DeviceReport":
    from torchguard.device import check

    values = (node.meta.get("val") for node in pair.forward.graph.find_nodes(op="placeholder"))
    modes = (mode for value in values if (mode := getattr(value, "fake_mode", None)) is not None)
    with next(modes, contextlib.nullcontext()):  # what is taken apart may make constants, of the same kind
        report = check(pair.forward, pair.backward, device=device, dynamo=pair.dynamo)
    if not pair.sizes:
        return report
    from torchguard.cli._symbols import with_symbols

    return with_symbols(report)
