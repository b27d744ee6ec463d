"""Evaluate a graph of ATen operators in exact arithmetic, and in real numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torchguard._graphs.op_facts import facts_of
from torchguard.compiled._nodes import attribute, op_name
from torchguard.compiled.certify._decompose import decompose
from torchguard.compiled.certify.algebra._field import (
    EvaluationError,
    EvaluationTrace,
    PrimeField,
    Reals,
    UnsupportedError,
)
from torchguard.compiled.certify.algebra._rules import CREATION_RULES, DEFINED, NEEDS_LAYOUT, RULES
from torchguard.compiled.certify.algebra._rules.pointwise import power_of_number
from torchguard.compiled.certify.algebra._values import UnknownDerivativeError, Value, integers


def unsupported_ops(*graphs: GraphModule) -> list[str]:
    """The operators of some graphs that have no rule."""
    names = {
        str(node.target)
        for gm in graphs
        for node in gm.graph.nodes
        if node.op not in ("placeholder", "output", "get_attr") and not _has_rule(node)
    }
    return sorted(names)


def with_rules(gm: GraphModule) -> GraphModule:
    """The same graph, with definitions in place of operators that have no rule."""
    return decompose(gm, DEFINED, with_complex=True)


def _has_rule(node: Node) -> bool:
    name = op_name(node)
    return node.op == "call_function" and (name == "getitem" or name in RULES or name in CREATION_RULES)


def _input_dependent_nodes(gm: GraphModule) -> frozenset[Node]:
    """The nodes whose elements depend on those of a leaf."""
    found: set[Node] = set()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            found.add(node)
        elif node.op == "call_function":
            # An operator that creates a tensor reads the shape of its first operand alone.
            is_creation = op_name(node) in CREATION_RULES
            read = [n for n in node.all_input_nodes if not (is_creation and n is node.args[0])]
            if any(n in found for n in read):
                found.add(node)
    return frozenset(found)


def _finiteness_rule(node: Node) -> str:
    """The test for infinity or NaN that a comparison is; empty if it is none."""
    if op_name(node) not in ("eq", "ne"):
        return ""
    a, b = node.args
    if a is b:
        return "isnan"
    if isinstance(b, Node) and facts_of(op_name(b)).has_fill_value:
        b = next((n for n in b.args if isinstance(n, float)), b)
    positive = "isinf" if isinstance(a, Node) and op_name(a) == "abs" else "isposinf"
    return {math.inf: positive, -math.inf: "isneginf"}.get(b, "") if isinstance(b, float) else ""


def _is_part_of_test(node: Node) -> bool:
    """Whether a node is the absolute value in `abs(x) != inf`, where the sign of x does not matter."""
    return op_name(node) == "abs" and all(map(_finiteness_rule, node.users))


def evaluate(gm: GraphModule, inputs: Sequence[Value], field: PrimeField) -> list[Any]:
    """The outputs of a graph, each with the tangent that the rules give it.

    The graph is evaluated in real numbers first, to decide its comparisons.
    """
    reals = evaluate_in_reals(gm, inputs, field)
    field.trace.real_values = reals.real_values
    field.trace.has_nan |= any(bool(value.isnan().any()) for value in reals.real_values.values())
    return _Run(gm, field).outputs(inputs)


def evaluate_in_reals(gm: GraphModule, inputs: Sequence[Value], field: PrimeField) -> EvaluationTrace:
    """The trace of evaluating a graph in real numbers; it is empty if those of an input are not known."""
    reals = Reals(0, field.key, taken_for=field.taken_for)
    known = [x.element if x.is_integer else x.real for x in inputs]
    if all(real is not None for real in known):
        pairs = zip(known, inputs, strict=True)
        _Run(gm, reals).outputs([Value(reals, real, is_integer=x.is_integer) for real, x in pairs if real is not None])
    return reals.trace


def evaluate_in_float64(
    gm: GraphModule, inputs: Sequence[Value], tangents: Sequence[Value] = (), *, flipped: str = ""
) -> list[Any]:
    """The outputs of a graph in real numbers, with those tangents for the inputs that have one."""
    reals, remaining = Reals(0, 0, EvaluationTrace(flipped=flipped)), iter(tangents)
    known = []
    for x in inputs:
        tangent = next(remaining).real if x.tangent is not None else None
        known.append(Value(reals, x.element if x.real is None else x.real, tangent, is_integer=x.is_integer))
    return _Run(gm, reals).outputs(known)


@dataclass(frozen=True)
class _Run:
    gm: GraphModule
    field: PrimeField

    def outputs(self, inputs: Sequence[Value]) -> list[Any]:
        values: dict[Node, Any] = {}
        given, dependent = iter(inputs), _input_dependent_nodes(self.gm)
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
                if values[node].is_integer and values[node].element.dtype == torch.bool:
                    self.field.trace.enter_node(f"{id(self.gm)}:{node.name}")
                    self.field.trace.record_comparison(values[node].element)
            elif node.op == "get_attr":
                values[node] = self._lifted(attribute(self.gm, node.target))
            elif node.op == "output":
                results = map_arg(node.args[0], lambda n: values[n])
                return list(results) if isinstance(results, list | tuple) else [results]
            else:
                args, options = (map_arg(a, lambda n: values[n]) for a in (node.args, node.kwargs))
                # Nodes of two graphs may have the same name.
                is_recorded = node in dependent and not _is_part_of_test(node)
                self.field.trace.enter_node(f"{id(self.gm)}:{node.name}", is_recorded)
                values[node] = self._call(node, args, options)
        return []

    def _call(self, node: Node, args: Any, options: Any) -> Any:
        name = op_name(node)
        try:
            if name == "getitem":
                return args[0][args[1]]
            if name in CREATION_RULES:
                return self._converted(node, CREATION_RULES[name](self.field, *args, **options))
            if name == "pow" and isinstance(args[0], bool | int | float) and isinstance(args[1], Value):
                return self._converted(node, power_of_number(args[0], args[1]))
            if (test := _finiteness_rule(node)) and not args[0].is_integer:
                is_equal = RULES[test](args[0])
                is_inverted = (name == "ne") != (test == "isnan")
                return self._converted(node, is_equal.inverted() if is_inverted else is_equal)
            if name in NEEDS_LAYOUT:
                options = {**options, "is_contiguous": _is_contiguous(node)}
            return self._converted(node, RULES[name](*self._with_field(args), **options))
        except UnknownDerivativeError as error:
            raise UnsupportedError(f"the derivative of {error}") from error
        except (RuntimeError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise EvaluationError(f"{node.name}: {node.target}: {error}") from error

    def _with_field(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # A rule takes the field from its first operand, which therefore must not be a plain number.
        if args and isinstance(args[0], bool | int | float):
            return self._number(args[0]), *args[1:]
        return args

    def _number(self, number: float) -> Value:
        if isinstance(number, int):
            return integers(self.field, torch.tensor(number))
        return Value(self.field, self.field.constant(number))

    def _lifted(self, tensor: Tensor) -> Value:
        if not tensor.is_floating_point():
            return integers(self.field, tensor)
        return Value(self.field, self.field.tensor(tensor))

    def _converted(self, node: Node, result: Any) -> Any:
        """A result as elements, integers or booleans, as the node records it."""
        recorded = node.meta.get("val")
        if not isinstance(result, Value) or not isinstance(recorded, Tensor):
            return result
        if recorded.is_complex():
            raise UnsupportedError(f"{node.target} of complex numbers")
        if recorded.is_floating_point():
            return result.as_elements()
        if recorded.dtype == torch.bool:
            is_true = (result.element != 0) ^ (self.field.trace.node == self.field.trace.flipped)
            self.field.trace.record_comparison(is_true)
            return integers(self.field, is_true)
        if result.is_integer:
            # Narrow integers overflow and wrap around.
            return integers(self.field, result.element.to(recorded.dtype).to(torch.int64))
        if op_name(node) in CREATION_RULES:
            return integers(self.field, torch.zeros_like(result.element))
        # The integer it rounds to is decided in the real numbers, like a comparison.
        rounded = result.real_values().to(torch.int64)
        self.field.trace.record_step(rounded)
        if not torch.equal(rounded, rounded.to(recorded.dtype).to(torch.int64)):
            raise EvaluationError(f"{node.name}: {node.target}: floats out of range of {recorded.dtype}")
        return integers(self.field, rounded)


def _is_contiguous(node: Node) -> bool:
    first = node.args[0]
    recorded = first.meta.get("val") if isinstance(first, Node) else None
    if not isinstance(recorded, Tensor):
        raise UnsupportedError(f"{node.target} of a tensor without recorded strides")
    return recorded.is_contiguous()
