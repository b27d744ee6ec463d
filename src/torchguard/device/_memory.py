"""How much memory a graph takes while each of its nodes runs, by the storages that are alive."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import fx

from torchguard._graphs.source_lines import Place
from torchguard._torch import tensors
from torchguard._torch.nodes import hint
from torchguard.device._values import Keys, Size, storage_keys, tensors_of, value_of
from torchguard.device._violations import place_of


@dataclass(frozen=True)
class LiveTensor:
    """A storage that is alive: what it is called, its bytes, and the line in your code that made it."""

    name: str
    bytes: int
    place: Place | None


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a graph at the sizes at hand.

    Attributes:
        peak: the most bytes alive at any time.
        peak_node: the node that runs then.
        expression: the peak in terms of the symbols in sizes, or the number.
        curve: the bytes alive while each node runs, by the names of the nodes.
        at_peak: what is alive at the peak, the largest first.
        saved: bytes kept from the forward for the backward graph, beside what the caller has anyway.
        unknown: nodes whose sizes are not known before they run: they count as nothing.
    """

    peak: int
    peak_node: str
    expression: str
    curve: Mapping[str, int]
    at_peak: tuple[LiveTensor, ...]
    saved: int = 0
    unknown: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        saved = f", {self.saved:,} bytes saved for backward" if self.saved else ""
        unknown = f", not counting {', '.join(self.unknown)}" if self.unknown else ""
        live = (f"  {one.bytes:>15,}  {one.name}" + (f"  {one.place}" if one.place else "") for one in self.at_peak[:5])
        return "\n".join([f"peak {self.peak:,} bytes at {self.peak_node}{saved}{unknown}", *live])


@dataclass
class _Storage:
    """A storage: the node that made it, and the positions of the nodes between which it is alive."""

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
    """The memory of a graph alone: what it is given and what it returns is kept, all else freed at its last use.

    Args:
        names: what to call nodes that are not to go by the names they have in the graph.
    """
    storages = _storages_of(module, storage_keys(module))
    return _plan(module, _kept(storages, _inputs(storages), module), names or {})


def plan_step(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    saved: Mapping[int, int],
    *,
    names: Mapping[fx.Node, str] | None = None,
) -> tuple[MemoryPlan, MemoryPlan]:
    """The memory of a forward graph, and of its backward, which starts with what the forward was given and returned.

    What was saved for it alone is freed at its last use; all else is the caller's, who may hold it.

    Args:
        saved: positions of placeholders of the backward graph, each with that of the output which fills it.
    """
    keys = storage_keys(forward)
    outputs = [keys[node] if node is not None else () for node in output_nodes(forward)]
    placeholders = backward.graph.find_nodes(op="placeholder")
    # What is saved is one storage to both, whatever the fake tensors on either side say.
    keys_behind = storage_keys(backward, {placeholders[i]: outputs[o] for i, o in saved.items()})
    ahead, behind = _storages_of(forward, keys), _storages_of(backward, keys_behind)
    of_caller = _inputs(ahead).union(*(_set(given) for o, given in enumerate(outputs) if o not in saved.values()))
    for_backward = set[int | str]().union(*(_set(outputs[o]) for o in saved.values())) - of_caller
    later = {
        **_kept(behind, _inputs(behind) - for_backward, backward),
        **{key: _whole(ahead[key], backward) for key in of_caller - behind.keys()},
    }
    before = _plan(forward, _kept(ahead, _inputs(ahead), forward), names or {})
    saved_bytes = sum(ahead[key].bytes for key in for_backward)
    return replace(before, saved=saved_bytes), _plan(backward, later, names or {})


def output_nodes(module: fx.GraphModule) -> list[fx.Node | None]:
    """What a graph returns, in order; None for what is no node."""
    (returned,) = next(iter(module.graph.find_nodes(op="output"))).args
    parts = returned if isinstance(returned, (tuple, list)) else [returned]
    return [part if isinstance(part, fx.Node) else None for part in parts]


def saved_between(forward: fx.GraphModule, backward: fx.GraphModule) -> dict[int, int]:
    """Which placeholder of a backward graph is which output of its forward, as AOTAutograd names them."""
    # The last one of a name: what the program gets too stands before.
    positions = {node.name: position for position, node in enumerate(output_nodes(forward)) if node is not None}
    placeholders = backward.graph.find_nodes(op="placeholder")
    return {i: positions[node.name] for i, node in enumerate(placeholders) if node.name in positions}


def _storages_of(module: fx.GraphModule, keys: Mapping[fx.Node, Keys]) -> _Storages:
    found: _Storages = {}
    for position, node in enumerate(module.graph.nodes):
        made = 0
        for key, tensor in zip(keys[node], tensors_of(value_of(node)), strict=True):
            if key is not None and key not in found:
                first = 0 if _is_input(node) else position
                found[key] = _Storage(node, tensors.storage_bytes(tensor), first, position)
                made += found[key].bytes
        for one in (node, *node.all_input_nodes):
            for key in _set(keys[one]):
                found[key].last = position
        # While it runs, what it returns is a part of what the graph that it calls holds at its end.
        if (inside := _bytes_inside(node) - made) > 0:
            found[f"inside {node.name}"] = _Storage(node, inside, position, position, f"inside {node.name}")
    return found


def _bytes_inside(node: fx.Node) -> int:
    """The most that a graph which an op such as `cond` calls holds, beside what it is given."""
    called = (value_of(one) for one in node.all_input_nodes if one.op == "get_attr" and node.op == "call_function")
    most = 0
    for module in called:
        if isinstance(module, fx.GraphModule):
            storages = _storages_of(module, storage_keys(module))
            plan = _plan(module, _kept(storages, _inputs(storages), module), {})
            most = max(most, plan.peak - sum(storages[key].bytes for key in _inputs(storages)))
    return most


def _kept(storages: _Storages, throughout: set[int | str], module: fx.GraphModule) -> _Storages:
    """The storages with those given alive to the end; what is returned is anyway, by the node that returns it."""
    return {key: _whole(one, module) if key in throughout else one for key, one in storages.items()}


def _whole(storage: _Storage, module: fx.GraphModule) -> _Storage:
    return replace(storage, first=0, last=len(module.graph.nodes))


def _plan(module: fx.GraphModule, storages: _Storages, names: Mapping[fx.Node, str]) -> MemoryPlan:
    nodes = list(module.graph.nodes)
    changes = [0] * (len(nodes) + 2)
    for storage in storages.values():
        changes[storage.first] += storage.bytes
        changes[storage.last + 1] -= storage.bytes
    alive, curve = 0, {}
    for node, change in zip(nodes, changes, strict=False):
        alive += change
        curve[node.name] = alive
    peak_node = max(curve, key=lambda name: curve[name])
    at = [node.name for node in nodes].index(peak_node)
    live = [one for one in storages.values() if one.first <= at <= one.last]
    shown = (LiveTensor(one.label or names.get(one.node, one.node.name), one.bytes, place_of(one.node)) for one in live)
    return MemoryPlan(
        curve[peak_node],
        peak_node,
        str(sum(one.size for one in live)),
        curve,
        tuple(sorted((one for one in shown if one.bytes), key=lambda one: -one.bytes)),
        unknown=tuple(one.node.name for one in storages.values() if hint(one.size) is None),
    )


def _inputs(storages: _Storages) -> set[int | str]:
    return {key for key, one in storages.items() if _is_input(one.node)}


def _is_input(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr")


def _set(keys: Keys) -> set[int | str]:
    return {key for key in keys if key is not None}
