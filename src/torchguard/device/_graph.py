"""A graph as the rules read it: its ops, and the tensors that they use, each with a role."""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, fx

from torchguard._torch import nodes
from torchguard._torch.nodes import GraphInput
from torchguard._torch.ops import (
    is_op,
    is_view,
)
from torchguard.device._memory import MemoryPlan, output_nodes
from torchguard.device._storages import tensors_of

_SIZE_OPS = frozenset({torch.ops.aten.sym_size.int, torch.ops.aten.sym_stride.int, torch.ops.aten.sym_numel.default})


@dataclass(frozen=True)
class Use:
    """A tensor that an op takes, or that the graph returns.

    Attributes:
        tensor: the fake tensor, as the consumer gets it.
        producer: the node that computed it, before any view of it.
        consumer: the node that takes it; the graph's `output` node if it is returned.
        role: `parameters`, `activations`, `indices` or `masks`.
    """

    tensor: Tensor
    producer: fx.Node
    consumer: fx.Node
    role: str


@dataclass(frozen=True)
class Graph:
    """One of the graphs that a region is compiled to.

    Attributes:
        name: `forward`, `backward` or `inference`.
        memory: its memory plan, with the tensors that live on from the forward into the backward graph.
        names: the names of placeholders in the program.
        state: the placeholders that are parameters and buffers.
        saved: the positions of outputs that are only saved for the backward graph.
    """

    name: str
    module: fx.GraphModule
    memory: MemoryPlan
    names: Mapping[fx.Node, str] = field(default_factory=dict)
    state: frozenset[fx.Node] = frozenset()
    saved: frozenset[int] = frozenset()

    @cached_property
    def calls(self) -> tuple[fx.Node, ...]:
        """The calls of ops, views included, arithmetic on sizes excluded."""
        return tuple(node for node in self.module.graph.nodes if node.op == "call_function" and _is_op_call(node))

    @cached_property
    def ops(self) -> tuple[fx.Node, ...]:
        """The calls that compute something: `calls` without views."""
        return tuple(node for node in self.calls if not is_view(node.target))

    @cached_property
    def uses(self) -> tuple[Use, ...]:
        """The tensors that ops take and that the graph returns."""
        return tuple(self._uses((node, node, consumer) for node, consumer in self._edges))

    @cached_property
    def bitcast_uses(self) -> tuple[Use, ...]:
        """The tensors that are used through a view of another dtype, in the dtype that they were computed in."""
        edges = ((node, viewed, consumer) for node, consumer in self._edges for viewed in _viewed(node))
        return tuple(self._uses(edge for edge in edges if _dtype(edge[0]) is not _dtype(edge[1])))

    @cached_property
    def _edges(self) -> tuple[tuple[fx.Node, fx.Node], ...]:
        """Nodes, each with an op that takes it, or with the output node that returns it."""
        returned = [(node, self.output) for node in self.output.all_input_nodes if node.op != "placeholder"]
        taken = [(node, consumer) for consumer in self.ops for node in consumer.all_input_nodes]
        return (*taken, *returned)

    @cached_property
    def output(self) -> fx.Node:
        return next(iter(self.module.graph.find_nodes(op="output")))

    @cached_property
    def returned(self) -> tuple[fx.Node, ...]:
        """What the graph computes and returns to the program: neither its inputs nor what is saved for backward."""
        nodes = (node for position, node in enumerate(output_nodes(self.module)) if position not in self.saved)
        return tuple(dict.fromkeys(node for node in nodes if node is not None and node.op != "placeholder"))

    def _uses(self, edges: Iterable[tuple[fx.Node, fx.Node, fx.Node]]) -> Iterator[Use]:
        for node, viewed, consumer in edges:
            producer = producer_of(node)
            for tensor in tensors_of(viewed.meta.get("val")):
                yield Use(tensor, producer, consumer, _role(tensor, producer in self.state))

    def name_of(self, node: fx.Node) -> str:
        """The name of a node in the program, or else in the graph."""
        return self.names.get(node, node.name)


def op_name(node: fx.Node) -> str:
    """`aten.mm.default`, `higher_order.cond`, or the node's name if it calls no op."""
    while node.target is operator.getitem:  # part of a tuple that an op returned
        node = node.all_input_nodes[0]
    if node.op != "call_function":
        return node.name
    return f"higher_order.{node.target}" if "." not in str(node.target) else str(node.target)


def placeholder_names(
    module: fx.GraphModule, inputs: Sequence[GraphInput], retraced: fx.GraphModule
) -> tuple[dict[fx.Node, str], frozenset[fx.Node]]:
    """The names in the program of a retraced graph's placeholders, and which of them are parameters and buffers."""
    names, state = {}, []
    placeholders = (graph.graph.find_nodes(op="placeholder") for graph in (module, retraced))
    for before, after in zip(*placeholders, strict=True):
        position = nodes.position_of(before)
        known = inputs[position] if position is not None and position < len(inputs) else None
        names[after] = known.name if known is not None else before.name
        if (known is not None and known.is_state) or nodes.is_lifted_state(before):
            state.append(after)
    return names, frozenset(state)


def _role(tensor: Tensor, is_state: bool) -> str:
    if tensor.dtype is torch.bool:
        return "masks"
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return "indices"
    return "parameters" if is_state else "activations"


def _is_op_call(node: fx.Node) -> bool:
    return is_op(node.target) and node.target not in _SIZE_OPS


def producer_of(node: fx.Node) -> fx.Node:
    """The node that computed the tensor that a node is a view of, or the node itself if it is no view."""
    return [node, *_viewed(node)][-1]


def _viewed(node: fx.Node) -> Iterator[fx.Node]:
    """The node that a view was taken of, then what that one is a view of, down to the node that computed the tensor."""
    while is_view(node.target) or (node.target is operator.getitem and is_view(node.all_input_nodes[0].target)):
        node = node.all_input_nodes[0]
        yield node


def _dtype(node: fx.Node) -> torch.dtype | None:
    return next((tensor.dtype for tensor in tensors_of(node.meta.get("val"))), None)
