"""The graphs that AOTAutograd makes of a model, forward and backward: collected while it compiles, and checked."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from torchguard._progress import progress_line
from torchguard.cli._targets import Target
from torchguard.cli._terminal import CommandError

if TYPE_CHECKING:
    from torch import fx

    from torchguard.artifacts import Artifact, Graphs
    from torchguard.device import Device, DeviceReport


class Pair(NamedTuple):
    """A forward graph of AOTAutograd and its backward graph, if it has one.

    Attributes:
        dynamo: the graph of Dynamo that both were made from.
        sizes: the number for each symbol, if numbers replaced symbols in the graphs.
        attach: adds a file, by name and content, to the artifact that has the graphs.
    """

    compile_id: str
    forward: "fx.GraphModule"
    backward: "fx.GraphModule | None" = None
    dynamo: "fx.GraphModule | None" = None
    sizes: Mapping[str, int] = MappingProxyType({})
    attach: Callable[[str, str], None] = lambda name, content: None


class GraphCollector:
    """The pairs of graphs that were compiled, for `artifacts.capture(on_graphs=...)`.

    Capturing calls it with the forward graph alone, and again when the backward graph is compiled.
    """

    def __init__(self) -> None:
        self._by_forward: dict[int, Pair] = {}

    def __call__(self, graphs: "Graphs") -> None:
        if graphs.forward is not None:  # the pair keeps it alive, so that its id stays unique
            pair = Pair(graphs.compile_id, graphs.forward, graphs.backward, graphs.dynamo, attach=graphs.attach)
            self._by_forward[id(graphs.forward)] = pair

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._by_forward.values())


@contextlib.contextmanager
def trace(target: Target) -> Iterator[tuple[list[Pair], list["Artifact"]]]:
    """Compile the target's model and run it forward and, if its output has gradients, backward.

    Yields its graphs, and its artifacts, which are removed at the end of the block.
    """
    import torch

    from torchguard import artifacts

    target.prepare()
    collector = GraphCollector()
    with tempfile.TemporaryDirectory(prefix="torchguard-") as directory:
        with progress_line() as show, artifacts.capture(Path(directory), on_graphs=collector) as captured:
            show(f"torchguard: compiling {target.name}")
            model = target.model if target.is_compiled else torch.compile(target.model, backend="aot_eager")
            _run_backward(target.call(model))
        if not (pairs := [*collector]):
            raise CommandError(f"{target.name}: no graph was compiled. Dynamo found nothing to compile in this call.")
        yield pairs, [*captured.artifacts]


def _run_backward(output: Any) -> None:
    """Run the backward pass, as AOTAutograd compiles the backward graph only then."""
    from torchguard._pytrees import tensors_in

    with_grad = [z for _, z in tensors_in(output) if z.requires_grad and z.dtype.is_floating_point]
    if with_grad:
        sum(z.float().sum() for z in with_grad).backward()  # pyright: ignore[reportAttributeAccessIssue]


def check(pair: Pair, device: "Device") -> "DeviceReport":
    """Check both graphs against the rules of a device."""
    from torchguard import device as devices

    values = (node.meta.get("val") for node in pair.forward.graph.find_nodes(op="placeholder"))
    modes = (mode for value in values if (mode := getattr(value, "fake_mode", None)) is not None)
    # Decomposing an op may create constants: under the graph's own fake mode these are fake tensors too.
    with progress_line() as show, next(modes, contextlib.nullcontext()):
        show(f"torchguard: checking {pair.compile_id} against {device.name}")
        return devices.check(pair.forward, pair.backward, device=device, dynamo=pair.dynamo)
