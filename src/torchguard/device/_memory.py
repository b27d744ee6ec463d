"""The memory plan of a graph: the bytes of the storages that are live while each node runs."""

from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import fx

from torchguard._graphs.source_lines import SourceLine, source_line_of
from torchguard._torch import tensors
from torchguard._torch.nodes import hint
from torchguard.device._storages import Keys, Size, storage_keys, tensors_of, value_of


@dataclass(frozen=True)
class LiveTensor:
    """A live storage: its name, its bytes, and the line in your code that allocates it."""

    name: str
    bytes: int
    source_line: SourceLine | None


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a graph at concrete sizes.

    Attributes:
        peak: the most bytes that are live at any time.
        peak_node: the node that runs at that time.
        expression: the peak as an expression of the symbolic sizes, or the number.
        curve: the bytes that are live while each node runs, by the names of the nodes.
        at_peak: what is live at the peak, the largest first.
        saved: the bytes that the forward graph saves for the backward graph, beside what the caller holds anyway.
        unknown: nodes whose sizes are unknown before they run: they count as 0.
        symbolic: the different numbers of bytes that are live at nodes, as far as they depend on symbolic sizes.
    """

    peak: int
    peak_node: str
    expression: str
    curve: Mapping[str, int]
    at_peak: tuple[LiveTensor, ...]
    saved: int = 0
    unknown: tuple[str, ...] = ()
    symbolic: tuple[Size, ...] = field(default=(), repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """All but `symbolic`, which has no meaning outside of this process."""
        return {name: value for name, value in asdict(replace(self, symbolic=())).items() if name != "symbolic"}

    def __str__(self) -> str:
        saved = f", {self.saved:,} bytes saved for backward" if self.saved else ""
        unknown = f", not counting {', '.join(self.unknown)}" if self.unknown else ""
        live = (
            f"  {one.bytes:>15,}  {one.name}" + (f"  {one.source_line}" if one.source_line else "")
            for one in self.at_peak[:5]
        )
        return "\n".join([f"peak {self.peak:,} bytes at {self.peak_node}{saved}{unknown}", *live])


@dataclass
class _Storage:
    """A storage: the node that allocates it, and the positions of the first and last node at which it is live."""

    node: fx.Node
    size: Size
    first: int
    last: int
    label: str = ""

    @property
    def bytes(self) -> int:
        return hint(self.size) or 0


_Storages = dict[int | str, _Storage]


def plan_memory(module: fx.GraphModule, *, names: Mapping[fx.Node, str] | None = None) -> MemoryPlan:
    """Plan the memory of one graph: inputs and outputs stay live, everything else is freed at its last use.

    Args:
        names: names of nodes in the program, where they differ from those in the graph.
    """
    storages = _storages_of(module, storage_keys(module))
    return _plan(module, _with_live_throughout(storages, _inputs(storages), module), names or {})


def plan_step(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    saved: Mapping[int, int],
    *,
    names: Mapping[fx.Node, str] | None = None,
) -> tuple[MemoryPlan, MemoryPlan]:
    """Plan a forward graph and its backward graph, which starts with the inputs and outputs of the forward graph.

    What is saved for the backward graph alone is freed at its last use. Everything else belongs to the caller, who may
    hold it, and stays live.

    Args:
        saved: positions of placeholders of the backward graph, each with the position of the forward output it gets.
    """
    forward_keys = storage_keys(forward)
    outputs = [forward_keys[node] if node is not None else () for node in output_nodes(forward)]
    placeholders = backward.graph.find_nodes(op="placeholder")
    # A saved tensor is one storage in both graphs, whatever the fake tensors of either graph say.
    backward_keys = storage_keys(backward, {placeholders[i]: outputs[o] for i, o in saved.items()})
    before, after = _storages_of(forward, forward_keys), _storages_of(backward, backward_keys)
    returned = (_present(keys) for o, keys in enumerate(outputs) if o not in saved.values())
    of_caller = _inputs(before).union(*returned)
    for_backward = set[int | str]().union(*(_present(outputs[o]) for o in saved.values())) - of_caller
    during_backward = {
        **_with_live_throughout(after, _inputs(after) - for_backward, backward),
        **{key: _live_throughout(before[key], backward) for key in of_caller - after.keys()},
    }
    forward_plan = _plan(forward, _with_live_throughout(before, _inputs(before), forward), names or {})
    saved_bytes = sum(before[key].bytes for key in for_backward)
    return replace(forward_plan, saved=saved_bytes), _plan(backward, during_backward, names or {})


@dataclass(frozen=True)
class TrainingMemory:
    """The bytes that a training step needs.

    Attributes:
        peak: the larger peak of the forward and the backward graph. It counts parameters, buffers, inputs, what is
            saved for backward, gradients, and outputs until the backward pass has ended: a program that drops its
            outputs earlier needs less.
        gradients: the bytes of the gradients of parameters, which are part of the peak.
        adam_state: the bytes of the two tensors for each of these parameters that Adam and AdamW keep, which are not.
    """

    peak: int
    gradients: int
    adam_state: int

    @property
    def with_adam(self) -> int:
        return self.peak + self.adam_state

    def __str__(self) -> str:
        return (
            f"training step: peak {self.peak:,} bytes with {self.gradients:,} of gradients, outputs held to the end; "
            f"with the state of Adam {self.with_adam:,}, with momentum {self.peak + self.adam_state // 2:,}"
        )


def gradient_bytes(forward: fx.GraphModule, backward: fx.GraphModule, state: Set[fx.Node]) -> int:
    """The bytes of the gradients of parameters: a backward graph returns one for each input of its forward graph."""
    inputs = forward.graph.find_nodes(op="placeholder")
    pairs = zip(inputs, output_nodes(backward), strict=False)
    gradients = [gradient for node, gradient in pairs if gradient is not None and node in state]
    return sum(hint(tensors.storage_bytes(one)) or 0 for node in gradients for one in tensors_of(value_of(node)))


def output_nodes(module: fx.GraphModule) -> list[fx.Node | None]:
    """The nodes that a graph returns, in order; None for an output that is a constant."""
    (returned,) = next(iter(module.graph.find_nodes(op="output"))).args
    parts = returned if isinstance(returned, (tuple, list)) else [returned]
    return [part if isinstance(part, fx.Node) else None for part in parts]


def saved_between(forward: fx.GraphModule, backward: fx.GraphModule) -> dict[int, int]:
    """Which placeholder of a backward graph gets which output of its forward; AOTAutograd gives both the same name."""
    # Of two outputs with one name the last one is saved; the one before is returned to the program.
    positions = {node.name: position for position, node in enumerate(output_nodes(forward)) if node is not None}
    placeholders = backward.graph.find_nodes(op="placeholder")
    return {i: positions[node.name] for i, node in enumerate(placeholders) if node.name in positions}


def _storages_of(module: fx.GraphModule, keys: Mapping[fx.Node, Keys]) -> _Storages:
    storages: _Storages = {}
    for position, node in enumerate(module.graph.nodes):
        allocated = 0
        for key, tensor in zip(keys[node], tensors_of(value_of(node)), strict=True):
            if key is not None and key not in storages:
                first = 0 if _is_input(node) else position
                storages[key] = _Storage(node, tensors.storage_bytes(tensor), first, position)
                allocated += storages[key].bytes
        for one in (node, *node.all_input_nodes):
            for key in _present(keys[one]):
                storages[key].last = position
        # The results of an op such as `cond` are among what its inner graph holds at its end: do not count them twice.
        if (inside := _bytes_inside(node) - allocated) > 0:
            storages[f"inside {node.name}"] = _Storage(node, inside, position, position, f"inside {node.name}")
    return storages


def _bytes_inside(node: fx.Node) -> int:
    """The peak of the graphs that an op such as `cond` calls, without their inputs."""
    called = (value_of(one) for one in node.all_input_nodes if one.op == "get_attr" and node.op == "call_function")
    most = 0
    for module in called:
        if isinstance(module, fx.GraphModule):
            storages = _storages_of(module, storage_keys(module))
            plan = _plan(module, _with_live_throughout(storages, _inputs(storages), module), {})
            most = max(most, plan.peak - sum(storages[key].bytes for key in _inputs(storages)))
    return most


def _with_live_throughout(storages: _Storages, keys: set[int | str], module: fx.GraphModule) -> _Storages:
    """The storages, with those of `keys` live from the first node to the last. Outputs are live at the end anyway."""
    return {key: _live_throughout(one, module) if key in keys else one for key, one in storages.items()}


def _live_throughout(storage: _Storage, module: fx.GraphModule) -> _Storage:
    return replace(storage, first=0, last=len(module.graph.nodes))


def _plan(module: fx.GraphModule, storages: _Storages, names: Mapping[fx.Node, str]) -> MemoryPlan:
    nodes = list(module.graph.nodes)
    changes = [0] * (len(nodes) + 2)
    for storage in storages.values():
        changes[storage.first] += storage.bytes
        changes[storage.last + 1] -= storage.bytes
    live_bytes, curve = 0, {}
    for node, change in zip(nodes, changes, strict=False):
        live_bytes += change
        curve[node.name] = live_bytes
    peak_node = max(curve, key=lambda name: curve[name])
    at = [node.name for node in nodes].index(peak_node)
    live = [one for one in storages.values() if one.first <= at <= one.last]
    named = (
        LiveTensor(one.label or names.get(one.node, one.node.name), one.bytes, source_line_of(one.node))
        for one in live
        if one.bytes
    )
    return MemoryPlan(
        curve[peak_node],
        peak_node,
        str(sum(one.size for one in live)),
        curve,
        tuple(sorted(named, key=lambda one: -one.bytes)),
        unknown=tuple(one.node.name for one in storages.values() if hint(one.size) is None),
        symbolic=_symbolic_sums(len(nodes), storages),
    )


def _symbolic_sums(positions: int, storages: _Storages) -> tuple[Size, ...]:
    """The sums of live sizes at each position that depend on symbols, each once."""
    if all(isinstance(one.size, int) for one in storages.values()):
        return ()
    changes: list[list[Size]] = [[] for _ in range(positions + 2)]
    for one in storages.values():
        changes[one.first].append(one.size)
        changes[one.last + 1].append(-one.size)
    total: Size = 0
    found: dict[str, Size] = {}
    for at in changes:
        total = sum(at, total)
        if not isinstance(total, int):
            found.setdefault(str(total), total)
    return tuple(found.values())


def _inputs(storages: _Storages) -> set[int | str]:
    return {key for key, one in storages.items() if _is_input(one.node)}


def _is_input(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr")


def _present(keys: Keys) -> set[int | str]:
    return {key for key in keys if key is not None}
