"""A graph as rules see it: its ops, and the tensors they take, each with a role."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, fx

from torchguard._torch import nodes
from torchguard._torch.nodes import GraphInput
from torchguard._torch.ops import is_op, is_view
from torchguard.device._memory import MemoryPlan
from torchguard.device._values import tensors_of

_SIZE_OPS = frozenset({torch.ops.aten.sym_size.int, torch.ops.aten.sym_stride.int, torch.ops.aten.sym_numel.default})


@dataclass(frozen=True)
class Use:
    """A tensor that an op takes, or that the graph returns.

    `source` is the node that made it, before views of it were taken; `by` takes it, `output` if it is returned.
    """

    tensor: Tensor
    source: fx.Node
    by: fx.Node
    role: str


@dataclass(frozen=True)
class Graph:
    """One graph of those a region is compiled to.

    Attributes:
        name: `forward`, `backward` or `inference`.
        memory: what it takes, with what lives on from the forward into the backward graph.
        names: what placeholders are called in the program.
        state: the placeholders that are parameters and buffers.
    """

    name: str
    module: fx.GraphModule
    memory: MemoryPlan
    names: Mapping[fx.Node, str] = field(default_factory=dict)
    state: frozenset[fx.Node] = frozenset()

    @cached_property
    def calls(self) -> tuple[fx.Node, ...]:
        """The calls of ops, views among them; not arithmetic on sizes."""
        return tuple(node for node in self.module.graph.nodes if node.op == "call_function" and _is_call(node))

    @cached_property
    def ops(self) -> tuple[fx.Node, ...]:
        """The calls that compute something."""
        return tuple(node for node in self.calls if not is_view(node.target))

    @cached_property
    def uses(self) -> tuple[Use, ...]:
        return tuple(self._uses_of((node, node, by) for node, by in self._taken))

    @cached_property
    def seen_otherwise(self) -> tuple[Use, ...]:
        """What is taken through a view of another dtype, in the dtype that it was made in."""
        pairs = ((node, before, by) for node, by in self._taken for before in _before_views(node))
        return tuple(self._uses_of(one for one in pairs if _dtype(one[0]) is not _dtype(one[1])))

    @cached_property
    def _taken(self) -> tuple[tuple[fx.Node, fx.Node], ...]:
        """Nodes with tensors, each with a node that takes them, or that returns them."""
        output = next(iter(self.module.graph.find_nodes(op="output")), None)
        returned = [(node, output) for node in output.all_input_nodes if node.op != "placeholder"] if output else []
        taken = [(node, by) for by in self.ops for node in by.all_input_nodes]
        return (*taken, *returned)

    def _uses_of(self, taken: Iterable[tuple[fx.Node, fx.Node, fx.Node]]) -> Iterable[Use]:
        for node, shown, by in taken:
            source = _source_of(node)
            for tensor in tensors_of(shown.meta.get("val")):
                yield Use(tensor, source, by, role_of(tensor, source in self.state))

    def name_of(self, node: fx.Node) -> str:
        return self.names.get(node, node.name)


def role_of(tensor: Tensor, is_state: bool) -> str:
    if tensor.dtype is torch.bool:
        return "masks"
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return "indices"
    return "parameters" if is_state else "activations"


def op_name(node: fx.Node) -> str:
    """`aten.mm.default`, `higher_order.cond`, or the name of what is no op."""
    while node.target is operator.getitem:  # what a result was taken out of
        node = node.all_input_nodes[0]
    if node.op != "call_function":
        return node.name
    return f"higher_order.{node.target}" if "." not in str(node.target) else str(node.target)


def labels_of(
    module: fx.GraphModule, inputs: Sequence[GraphInput], traced_again: fx.GraphModule
) -> tuple[dict[fx.Node, str], frozenset[fx.Node]]:
    """What the placeholders of a graph traced again are called, and which of them are parameters and buffers."""
    names, state = {}, []
    placeholders = (graph.graph.find_nodes(op="placeholder") for graph in (module, traced_again))
    for node, again in zip(*placeholders, strict=True):
        position = nodes.position_of(node)
        known = inputs[position] if position is not None and position < len(inputs) else None
        names[again] = known.name if known is not None else node.name
        if (known is not None and known.is_state) or nodes.is_lifted_state(node):
            state.append(again)
    return names, frozenset(state)


def _is_call(node: fx.Node) -> bool:
    return is_op(node.target) and node.target not in _SIZE_OPS


def _source_of(node: fx.Node) -> fx.Node:
    """The node whose tensor this one is a view of, or a part of views such as `split` makes."""
    return [node, *_before_views(node)][-1]


def _before_views(node: fx.Node) -> Iterable[fx.Node]:
    """What a node is a view of, and what that is a view of, down to what was made."""
    while is_view(node.target) or (node.target is operator.getitem and is_view(node.all_input_nodes[0].target)):
        node = node.all_input_nodes[0]
        yield node


def _dtype(node: fx.Node) -> torch.dtype | None:
    return next((tensor.dtype for tensor in tensors_of(node.meta.get("val"))), None)
