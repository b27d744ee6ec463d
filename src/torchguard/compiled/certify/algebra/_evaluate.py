"""Run a graph of ATen operators in exact arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torchguard.compiled._nodes import attribute, op_name
from torchguard.compiled.certify.algebra._aiming import deciding_nodes
from torchguard.compiled.certify.algebra._field import Field, Journal, UnfitError, UnsupportedError
from torchguard.compiled.certify.algebra._reals import Reals
from torchguard.compiled.certify.algebra._rules import MAKING, NEEDS_LAYOUT, RULES
from torchguard.compiled.certify.algebra._values import UnknownDerivativeError, Value, exact


def unsupported_ops(*graphs: GraphModule) -> list[str]:
    """The operators of some graphs that have no rule."""
    names = {
        str(node.target)
        for gm in graphs
        for node in gm.graph.nodes
        if node.op not in ("placeholder", "output", "get_attr") and not _has_rule(node)
    }
    return sorted(names)


def _has_rule(node: Node) -> bool:
    name = op_name(node)
    return node.op == "call_function" and (name == "getitem" or name in RULES or name in MAKING)


def evaluate(gm: GraphModule, inputs: Sequence[Value], field: Field) -> list[Any]:
    """The outputs of a graph, each with the tangent our rules give it.

    It is evaluated in real numbers first, for the sake of its comparisons.
    """
    reals = rehearsed(gm, inputs, field)
    field.journal.sizes = reals.sizes
    field.journal.has_nan |= any(bool(size.isnan().any()) for size in reals.sizes.values())
    return _Run(gm, field).outputs(inputs)


def rehearsed(gm: GraphModule, inputs: Sequence[Value], field: Field) -> Journal:
    """What happens when a graph is evaluated in real numbers; nothing where they are not known of all inputs."""
    reals = Reals(0, field.key)
    known = [x.element if x.is_exact else x.real for x in inputs]
    if all(real is not None for real in known):
        pairs = zip(known, inputs, strict=True)
        _Run(gm, reals).outputs([Value(reals, real, is_exact=x.is_exact) for real, x in pairs if real is not None])
    return reals.journal


@dataclass(frozen=True)
class _Run:
    gm: GraphModule
    field: Field

    def outputs(self, inputs: Sequence[Value]) -> list[Any]:
        values: dict[Node, Any] = {}
        given, deciding = iter(inputs), deciding_nodes(self.gm, frozenset(MAKING))
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = self._lifted(attribute(self.gm, node.target))
            elif node.op == "output":
                results = map_arg(node.args[0], lambda n: values[n])
                return list(results) if isinstance(results, list | tuple) else [results]
            else:
                args, options = (map_arg(a, lambda n: values[n]) for a in (node.args, node.kwargs))
                # Nodes of several graphs may have one name.
                self.field.journal.begin(f"{id(self.gm)}:{node.name}", node in deciding)
                values[node] = self._called(node, args, options)
        return []

    def _called(self, node: Node, args: Any, options: Any) -> Any:
        name = op_name(node)
        try:
            if name == "getitem":
                return args[0][args[1]]
            if name in MAKING:
                return self._of_kind(node, MAKING[name](self.field, *args, **options))
            if name in NEEDS_LAYOUT:
                options = {**options, "is_contiguous": _is_contiguous(node)}
            return self._of_kind(node, RULES[name](*self._with_values(args), **options))
        except UnknownDerivativeError as error:
            raise UnsupportedError(f"the derivative of {error}") from error
        except (RuntimeError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise UnfitError(f"{node.name}: {node.target}: {error}") from error

    def _with_values(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # A number where an operand stands: in front of others it has to know what field it belongs to.
        if args and isinstance(args[0], bool | int | float):
            return self._number(args[0]), *args[1:]
        return args

    def _number(self, number: float) -> Value:
        if isinstance(number, int):
            return exact(self.field, torch.tensor(number))
        return Value(self.field, self.field.constant(number))

    def _lifted(self, tensor: Tensor) -> Value:
        if not tensor.is_floating_point():
            return exact(self.field, tensor)
        return Value(self.field, self.field.tensor(tensor))

    def _of_kind(self, node: Node, result: Any) -> Any:
        """A result as elements, integers or booleans, whichever the node is recorded to be."""
        recorded = node.meta.get("val")
        if not isinstance(result, Value) or not isinstance(recorded, Tensor):
            return result
        if recorded.is_complex():
            raise UnsupportedError(f"{node.target} of complex numbers")
        if recorded.is_floating_point():
            return result.as_elements()
        if recorded.dtype == torch.bool:
            is_true = result.element != 0
            self.field.journal.compared(is_true)
            return exact(self.field, is_true)
        if result.is_exact:
            # Narrow integers wrap around.
            return exact(self.field, result.element.to(recorded.dtype).to(torch.int64))
        if op_name(node) in MAKING:
            return exact(self.field, torch.zeros_like(result.element))
        # Where it rounds to is decided in the reals, like a comparison.
        rounded = result.sizes().to(torch.int64)
        if not torch.equal(rounded, rounded.to(recorded.dtype).to(torch.int64)):
            raise UnfitError(f"{node.name}: {node.target}: floats out of the range of {recorded.dtype}")
        return exact(self.field, rounded)


def _is_contiguous(node: Node) -> bool:
    first = node.args[0]
    recorded = first.meta.get("val") if isinstance(first, Node) else None
    if not isinstance(recorded, Tensor):
        raise UnsupportedError(f"{node.target} of a tensor whose layout is not recorded")
    return recorded.is_contiguous()
