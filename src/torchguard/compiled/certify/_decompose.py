"""Replace operators in a graph by those that define them, so that no layer needs a rule of its own.

`_definitions` and `_complex` hold what an operator stands for. Only the replaced nodes are traced; all others keep
their names and what they record.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from torchguard._torch import fakes
from torchguard.compiled._nodes import op_name
from torchguard.compiled.certify import _complex
from torchguard.compiled.certify._complex import Complex
from torchguard.compiled.certify._definitions import Definition, UndefinedCallError

# What torch raises on a call that a definition does not cover, such as one of other shapes.
_TRACE_ERRORS = (UndefinedCallError, RuntimeError, TypeError, ValueError, IndexError, AttributeError)
_CPU = torch.device("cpu")
Definitions = Mapping[str, Definition]


@fakes.with_tracing_lock
def decompose(gm: GraphModule, definitions: Definitions, *, with_complex: bool = False) -> GraphModule:
    """The same graph with the definitions of operators in their place. A call that has none stays as it is.

    Args:
        with_complex: whether complex numbers become pairs of real ones, if all operators on them can be replaced.
    """
    has_complex = with_complex and any(map(_is_complex, gm.graph.nodes))
    if not has_complex and not any(_is_defined(node, definitions) for node in gm.graph.nodes):
        return gm
    try:
        return _Decomposition(gm, definitions, has_complex).run()
    except UndefinedCallError:
        return _Decomposition(gm, definitions, False).run()


class _Decomposition:
    """One graph that is rewritten."""

    def __init__(self, gm: GraphModule, definitions: Definitions, with_complex: bool) -> None:
        self.gm, self.definitions, self.with_complex = gm, definitions, with_complex
        self.graph = Graph()
        # What stands for a node: a node, or a list of those of its results; of a complex one, a pair.
        self.made: dict[Node, Any] = {}

    def run(self) -> GraphModule:
        for node in self.gm.graph.nodes:
            parts = self._parts_of(node)
            if parts is not None:
                self.made[node] = self._inline(node, parts)
            elif op_name(node) == "getitem" and isinstance(self.made[node.args[0]], list | tuple):
                self.made[node] = self.made[node.args[0]][node.args[1]]
            else:
                self.made[node] = self.graph.node_copy(node, self.made.__getitem__)
        return GraphModule(self.gm, self.graph)

    def _parts_of(self, node: Node) -> GraphModule | None:
        """The graph of a definition, from the inputs of a node to its result; None if it stays as it is."""
        if self.with_complex and _is_complex(node) and op_name(node) != "getitem":
            if node.op != "call_function":
                raise UndefinedCallError
            call: Callable[..., Any] = lambda args, options: _complex.run(op_name(node), node.target, args, options)  # type: ignore[arg-type] # noqa: E731
            traced = _traced(node, call)
            if traced is None:
                raise UndefinedCallError
            return decompose(traced, self.definitions)
        if not _is_defined(node, self.definitions) or _is_complex(node):
            return None
        definition = self.definitions[op_name(node)]
        traced = _traced(node, lambda args, options: definition.function(*args, **options), definition.reads_layout)
        return None if traced is None else decompose(traced, self.definitions)

    def _inline(self, node: Node, parts: GraphModule) -> Any:
        """Copy the parts of a node into the graph. Returns what stands for the result of the node."""
        inner: dict[Node, Any] = {}
        given = iter([one for n in node.all_input_nodes for one in _as_list(self.made[n])])
        for part in parts.graph.nodes:
            if part.op == "placeholder":
                inner[part] = next(given)
            elif part.op == "output":
                return map_arg(part.args[0], inner.__getitem__)
            else:
                args, options = (map_arg(a, inner.__getitem__) for a in (part.args, part.kwargs))
                new = self.graph.create_node(part.op, part.target, args, options, f"{node.name}_{part.name}")  # type: ignore[arg-type]
                new.meta = dict(part.meta)
                inner[part] = new
        raise AssertionError("a graph has an output")


def _is_defined(node: Node, definitions: Definitions) -> bool:
    return node.op == "call_function" and op_name(node) in definitions


def _is_complex(node: Node) -> bool:
    """Whether a node takes or returns complex numbers."""
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    return any(isinstance(value, Tensor) and value.is_complex() for value in values)


def _traced(node: Node, call: Callable[..., Any], reads_layout: bool = False) -> GraphModule | None:
    """The graph of a call on the inputs of a node, whose result has the type that the node records."""
    values: list[Any] = [n.meta.get("val") for n in node.all_input_nodes]
    if not all(isinstance(value, Tensor) and _has_fixed_sizes(value) for value in values):
        return None
    if reads_layout and any(value.storage_offset() for value in values):
        return None

    def run(*given: Tensor) -> Any:
        remaining = iter(given)
        pairs = [Complex(next(remaining), next(remaining)) if v.is_complex() else next(remaining) for v in values]
        found: dict[Node, Any] = dict(zip(node.all_input_nodes, pairs, strict=True))
        args, options = (map_arg(a, found.__getitem__) for a in (node.args, node.kwargs))
        result = call(args, options)
        return (result.real, result.imag) if isinstance(result, Complex) else result

    try:
        traced = fakes.trace(run, [one for value in values for one in _fakes_of(value)])
    except _TRACE_ERRORS:
        return None
    (output,) = traced.graph.find_nodes(op="output")
    has_constants = bool(traced.graph.find_nodes(op="get_attr"))
    return None if has_constants or not _have_same_types(output.args[0], node.meta.get("val")) else traced


def _fakes_of(value: Tensor) -> list[Tensor]:
    """Fake tensors like the inputs of a node, on the CPU, where all layers check graphs."""
    dtype = value.dtype.to_real() if value.is_complex() else value.dtype
    return [fakes.fake(value.shape, value.stride(), dtype, _CPU) for _ in range(2 if value.is_complex() else 1)]


def _as_list(made: Any) -> list[Any]:
    return list(made) if isinstance(made, list | tuple) else [made]


def _has_fixed_sizes(value: Tensor) -> bool:
    return all(isinstance(size, int) for size in (*value.shape, *value.stride()))


def _have_same_types(made: Any, recorded: Any) -> bool:
    if isinstance(recorded, Tensor) and recorded.is_complex():
        parts = [] if isinstance(made, Node) else [n.meta["val"] for n in made]
        wanted = (tuple(recorded.shape), recorded.dtype.to_real())
        return len(parts) == 2 and all((tuple(part.shape), part.dtype) == wanted for part in parts)
    if isinstance(made, list | tuple):
        is_same = isinstance(recorded, list | tuple) and len(made) == len(recorded)
        return is_same and all(a is None or _have_same_types(a, b) for a, b in zip(made, recorded, strict=True))
    if not isinstance(made, Node) or not isinstance(recorded, Tensor):
        return False
    value = made.meta["val"]
    return (tuple(value.shape), value.dtype) == (tuple(recorded.shape), recorded.dtype)
