"""Bounds of all outputs of a graph over a box of inputs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torchguard._graphs.op_facts import FACTS, SHAPE_ONLY
from torchguard.compiled._nodes import attribute, on_the_cpu, op_name
from torchguard.compiled.certify._certificate import Claim, Verdict
from torchguard.compiled.certify._decompose import decompose
from torchguard.compiled.certify._definitions import DEFINITIONS
from torchguard.compiled.certify.enclosure import _elementary, _layers, _norms, _pointwise, _shapes, _softmax
from torchguard.compiled.certify.enclosure._intervals import Interval, UnboundedError, bounded, known
from torchguard.exceptions import BoxError

RULES = {
    **_pointwise.RULES,
    **_elementary.RULES,
    **_shapes.RULES,
    **_layers.RULES,
    **_norms.RULES,
    **_softmax.RULES,
}
# The results of these depend on no input: torch computes them.
_CREATION = frozenset(name for name, facts in FACTS.items() if facts.creates == "filled")
# What a rule raises on a call that it was not written for.
_RULE_ERRORS = (TypeError, RuntimeError, AttributeError, LookupError, ArithmeticError)
# The definitions of operators without a rule that torch rounds like their definition.
DEFINED = {
    name: definition for name, definition in DEFINITIONS.items() if definition.keeps_rounding and name not in RULES
}
# The operators that have a rule or such a definition.
ENCLOSURE_OPS = frozenset(RULES) | _CREATION | SHAPE_ONLY | frozenset(DEFINED)


@dataclass(frozen=True)
class Box:
    """All tensors with `low <= x <= high`."""

    low: Tensor
    high: Tensor

    def contains(self, x: Tensor) -> bool:
        """Whether every element of a tensor lies inside; NaN does not."""
        low, exact, high = (t.to(torch.float64) if t.is_floating_point() else t for t in (self.low, x, self.high))
        return bool(((low <= exact) & (exact <= high)).all())


@dataclass(frozen=True)
class Enclosure:
    """A box for each output; or None, and the operators or nodes that have no bounds in `unsupported`."""

    outputs: list[Box] | None
    unsupported: tuple[str, ...] = ()

    def to_claim(self, subject: str = "forward") -> Claim:
        """The enclosure as a claim: passed if there are bounds, inconclusive otherwise."""
        if self.outputs is None:
            message = f"There are no bounds for {', '.join(self.unsupported)}."
            return Claim("enclosure", subject, Verdict.INCONCLUSIVE, message, {"unsupported": list(self.unsupported)})
        bounds = [[float(box.low.min()), float(box.high.max())] for box in self.outputs if box.low.numel()]
        ranges = ", ".join(f"[{low:g}, {high:g}]" for low, high in bounds)
        message = f"For all inputs in the box the outputs lie in {ranges}."
        return Claim("enclosure", subject, Verdict.PASS, message, {"bounds": [list(pair) for pair in bounds]})


def enclose(gm: GraphModule, boxes: Sequence[Box]) -> Enclosure:
    """Bounds of what a graph of ATen operators computes in eager mode on the CPU, for all inputs in a box.

    They hold for what torch computes in float32 and float64, rounding included, if its elementary functions are
    accurate to 16 units in the last place. Arithmetic in other floating-point dtypes, integers that may overflow, and
    sums whose partial sums may overflow have no bounds.

    Raises:
        BoxError: the number of boxes or their shapes do not match the inputs of the graph, or a box is empty.
    """
    gm = decompose(gm, DEFINED)
    leaves = [node for node in gm.graph.nodes if node.op == "placeholder"]
    if len(leaves) != len(boxes):
        raise BoxError(
            f"enclose: the graph takes {len(leaves)} tensors, got {len(boxes)} boxes. Pass one box for each."
        )
    with on_the_cpu():
        return _enclose(gm, dict(zip(leaves, boxes, strict=True)))


def _enclose(gm: GraphModule, given: dict[Node, Box]) -> Enclosure:
    if _flushes_denormals():
        return Enclosure(None, ("denormal numbers, which torch.set_flush_denormal makes zero",))
    if names := _other_devices(gm, given.values()) or _unsupported_ops(gm):
        return Enclosure(None, names)
    values: dict[Node, Any] = {}
    for node in gm.graph.nodes:
        try:
            if node.op == "placeholder":
                values[node] = _leaf_interval(node, given[node])
            elif node.op == "get_attr":
                values[node] = known(attribute(gm, node.target))
            elif node.op == "call_function":
                values[node] = _node_interval(node, values)
        except UnboundedError as error:
            return Enclosure(None, (f"{node.name} ({node.target}): {error}",))
        except _RULE_ERRORS as error:
            return Enclosure(None, (f"{node.name} ({node.target}): this call has no rule: {error}",))
    (output,) = gm.graph.find_nodes(op="output")
    results = map_arg(output.args[0], lambda n: values[n])
    results = results if isinstance(results, list | tuple) else [results]
    if any(not isinstance(result, Interval) for result in results):
        return Enclosure(None, ("an output that has no bounds, such as the indices of a maximum",))
    return Enclosure([Box(result.low, result.high) for result in results])


def _flushes_denormals() -> bool:
    return bool(torch.tensor(5e-324, dtype=torch.float64) == 0)


def _other_devices(gm: GraphModule, boxes: Iterable[Box]) -> tuple[str, ...]:
    """The devices other than the CPU that the graph computes on: they may round differently."""
    recorded = [node.meta.get("val") for node in gm.graph.nodes if node.op != "output"]
    tensors = [*(value for value in recorded if isinstance(value, Tensor)), *(box.low for box in boxes)]
    return tuple(sorted({f"arithmetic on {t.device}" for t in tensors if t.device.type != "cpu"}))


def _unsupported_ops(gm: GraphModule) -> tuple[str, ...]:
    nodes = (node for node in gm.graph.nodes if node.op not in ("placeholder", "output", "get_attr"))
    return tuple(
        sorted({str(n.target) for n in nodes if op_name(n) not in (ENCLOSURE_OPS - DEFINED.keys()) | {"getitem"}})
    )


def _leaf_interval(node: Node, box: Box) -> Interval:
    recorded = node.meta.get("val")
    if box.low.shape != box.high.shape or (isinstance(recorded, Tensor) and recorded.shape != box.low.shape):
        expected = "" if recorded is None else f"expected shape {list(recorded.shape)}, "
        raise BoxError(
            f"enclose: {node.name}: {expected}got a box with low of shape {list(box.low.shape)} and high of shape "
            f"{list(box.high.shape)}."
        )
    leaf = bounded(box.low, box.high, recorded.dtype if isinstance(recorded, Tensor) else box.low.dtype)
    if not bool((leaf.low <= leaf.high).all()):
        raise BoxError(f"enclose: {node.name}: the box is empty or a bound is NaN: low has to be at most high.")
    return leaf


def _node_interval(node: Node, values: dict[Node, Any]) -> Any:
    args, options = (map_arg(a, lambda n: values[n]) for a in (node.args, node.kwargs))
    name, recorded = op_name(node), node.meta.get("val")
    if name == "getitem":
        return args[0][args[1]]  # type: ignore[index]
    if name in _CREATION:
        return known(node.target(*args, **options))  # type: ignore[operator]
    first = recorded[0] if isinstance(recorded, list | tuple) else recorded
    if not isinstance(first, Tensor):
        raise UnboundedError("a node without a recorded dtype")
    dtype = first.dtype
    if dtype.is_complex:
        raise UnboundedError("complex numbers")
    if name in SHAPE_ONLY:
        return _create_like(name, args, options, dtype)
    used = {k: v for k, v in options.items() if k not in ("dtype", "layout", "device", "pin_memory", "non_blocking")}  # type: ignore[union-attr]
    return RULES[name](*args, **used, dtype=dtype)  # type: ignore[misc]


def _create_like(name: str, args: Any, options: Any, dtype: torch.dtype) -> Interval:
    sizes = args[0].low.shape if name.endswith("_like") else args[1]
    numbers = [*args[2 if name.startswith("new") else 1 :], *(options[k] for k in ("fill_value",) if k in options)]
    fill = numbers[0] if "full" in name else int("ones" in name)
    return known(torch.full(tuple(sizes), fill, dtype=dtype))
