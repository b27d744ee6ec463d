"""Bounds of all outputs of a graph, over a box of inputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torchguard.compiled.claims import Claim, Verdict
from torchguard.compiled.enclosure import layers, pointwise
from torchguard.compiled.enclosure.intervals import Interval, UnboundedError, known
from torchguard.compiled.nodes import attribute, op_name
from torchguard.exceptions import BoxError

RULES = {**pointwise.RULES, **layers.RULES}
# What depends on no input is computed as it is.
_MAKING = frozenset({"full", "zeros", "ones", "scalar_tensor", "arange", "eye"})
_MAKING_LIKE = frozenset({"full_like", "zeros_like", "ones_like", "new_zeros", "new_ones", "new_full"})
COVERED = frozenset(RULES) | _MAKING | _MAKING_LIKE


@dataclass(frozen=True)
class Box:
    """All tensors with `low <= x <= high`."""

    low: Tensor
    high: Tensor

    def contains(self, x: Tensor) -> bool:
        """Whether a tensor lies inside; NaN lies nowhere."""
        exact = x.to(torch.float64)
        return bool(((self.low.to(torch.float64) <= exact) & (exact <= self.high.to(torch.float64))).all())


@dataclass(frozen=True)
class Enclosure:
    """A box for each output, or none and why: the operators or places that have no bounds."""

    outputs: list[Box] | None
    unsupported: tuple[str, ...] = ()

    def to_claim(self, subject: str = "forward") -> Claim:
        if self.outputs is None:
            says = f"No bounds follow from {', '.join(self.unsupported)}."
            return Claim("enclosure", subject, Verdict.INCONCLUSIVE, says, {"unsupported": list(self.unsupported)})
        bounds = [[float(box.low.min()), float(box.high.max())] for box in self.outputs if box.low.numel()]
        says = "For all inputs in the box the outputs lie in " + ", ".join(f"[{a:g}, {b:g}]" for a, b in bounds) + "."
        return Claim("enclosure", subject, Verdict.PASS, says, {"bounds": [list(pair) for pair in bounds]})


def enclose(gm: GraphModule, boxes: Sequence[Box]) -> Enclosure:
    """Bounds of what a graph of ATen operators computes on the CPU, for all inputs in a box.

    They hold for the numbers torch computes, rounding included, as far as its elementary functions are accurate to 16
    units in the last place. Integer inputs have to be known: `low` equal to `high`.

    Raises:
        BoxError: the boxes do not fit the graph.
    """
    leaves = [node for node in gm.graph.nodes if node.op == "placeholder"]
    if len(leaves) != len(boxes):
        raise BoxError(f"enclose: the graph takes {len(leaves)} tensors, and {len(boxes)} boxes were given.")
    if names := _unsupported(gm):
        return Enclosure(None, names)
    values: dict[Node, Any] = {node: _leaf(node, box) for node, box in zip(leaves, boxes, strict=True)}
    for node in gm.graph.nodes:
        try:
            if node.op == "get_attr":
                values[node] = known(attribute(gm, node.target))
            elif node.op == "call_function":
                values[node] = _computed(node, values)
        except UnboundedError as error:
            return Enclosure(None, (f"{node.name} ({node.target}): {error}",))
        except (TypeError, RuntimeError, AttributeError) as error:
            return Enclosure(None, (f"{node.name} ({node.target}): there is no rule for this call: {error}",))
    (output,) = gm.graph.find_nodes(op="output")
    results = map_arg(output.args[0], lambda n: values[n])
    results = results if isinstance(results, list | tuple) else [results]
    if any(not isinstance(result, Interval) for result in results):
        return Enclosure(None, ("an output that has no bounds, such as the places of a maximum",))
    return Enclosure([Box(result.low, result.high) for result in results])


def _unsupported(gm: GraphModule) -> tuple[str, ...]:
    nodes = (node for node in gm.graph.nodes if node.op not in ("placeholder", "output", "get_attr"))
    return tuple(sorted({str(n.target) for n in nodes if op_name(n) not in COVERED | {"getitem"}}))


def _leaf(node: Node, box: Box) -> Interval:
    recorded = node.meta.get("val")
    if box.low.shape != box.high.shape or (isinstance(recorded, Tensor) and recorded.shape != box.low.shape):
        expected = "" if recorded is None else f", the graph takes {list(recorded.shape)}"
        raise BoxError(
            f"enclose: {node.name}: the box goes from {list(box.low.shape)} to {list(box.high.shape)}{expected}."
        )
    low, high = box.low.to(torch.float64), box.high.to(torch.float64)
    if not bool((low <= high).all()):
        raise BoxError(f"enclose: {node.name}: the box is empty, or has a bound that is NaN.")
    dtype = recorded.dtype if isinstance(recorded, Tensor) else box.low.dtype
    return Interval(low, high, dtype)


def _computed(node: Node, values: dict[Node, Any]) -> Any:
    args, options = (map_arg(a, lambda n: values[n]) for a in (node.args, node.kwargs))
    name, recorded = op_name(node), node.meta.get("val")
    if name == "getitem":
        return args[0][args[1]]  # type: ignore[index]
    if name in _MAKING:
        return known(node.target(*args, **options))  # type: ignore[operator]
    if name in _MAKING_LIKE:
        return _made_like(node, args, options, recorded)
    dtype = recorded.dtype if isinstance(recorded, Tensor) else torch.float32
    if isinstance(recorded, Tensor) and recorded.is_complex():
        raise UnboundedError("complex numbers")
    if isinstance(recorded, list | tuple) and isinstance(recorded[0], Tensor):
        dtype = recorded[0].dtype
    kept = {k: v for k, v in options.items() if k not in ("dtype", "layout", "device", "pin_memory", "non_blocking")}  # type: ignore[union-attr]
    return RULES[name](*args, **kept, dtype=dtype)  # type: ignore[misc]


def _made_like(node: Node, args: Any, options: Any, recorded: Any) -> Interval:
    numbers = [a for a in args[1:] if isinstance(a, bool | int | float)]
    fill = numbers[0] if numbers else float("ones" in op_name(node))
    return known(torch.full(tuple(recorded.shape), fill, dtype=recorded.dtype))
