"""Bounds of all outputs of a graph, over a box of inputs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torchguard.compiled._nodes import attribute, on_the_cpu, op_name
from torchguard.compiled.certify._claims import Claim, Verdict
from torchguard.compiled.certify.enclosure import _functions, _layers, _moving, _pointwise
from torchguard.compiled.certify.enclosure._intervals import Interval, UnboundedError, bounded, known
from torchguard.exceptions import BoxError

RULES = {**_pointwise.RULES, **_functions.RULES, **_moving.RULES, **_layers.RULES}
# What depends on no input is computed as it is.
_MAKING = frozenset({"full", "zeros", "ones", "scalar_tensor", "arange", "eye"})
_MAKING_LIKE = frozenset({"full_like", "zeros_like", "ones_like", "new_zeros", "new_ones", "new_full"})
# How a rule fails on a call it was not written for.
_NO_RULE = (TypeError, RuntimeError, AttributeError, LookupError, ArithmeticError)
COVERED = frozenset(RULES) | _MAKING | _MAKING_LIKE


@dataclass(frozen=True)
class Box:
    """All tensors with `low <= x <= high`."""

    low: Tensor
    high: Tensor

    def contains(self, x: Tensor) -> bool:
        """Whether a tensor lies inside; NaN lies nowhere."""
        low, exact, high = (t.to(torch.float64) if t.is_floating_point() else t for t in (self.low, x, self.high))
        return bool(((low <= exact) & (exact <= high)).all())


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
    """Bounds of what a graph of ATen operators computes in eager mode on the CPU, for all inputs in a box.

    They hold for the numbers torch computes in float32 and float64, rounding included, as far as its elementary
    functions are accurate to 16 units in the last place. Arithmetic in other floats, integers that may wrap around, and
    sums that may overflow on the way have no bounds.

    Raises:
        BoxError: the boxes do not fit the graph.
    """
    leaves = [node for node in gm.graph.nodes if node.op == "placeholder"]
    if len(leaves) != len(boxes):
        raise BoxError(f"enclose: the graph takes {len(leaves)} tensors, and {len(boxes)} boxes were given.")
    with on_the_cpu():
        return _enclosed(gm, dict(zip(leaves, boxes, strict=True)))


def _enclosed(gm: GraphModule, given: dict[Node, Box]) -> Enclosure:
    if _are_flushed():
        return Enclosure(None, ("numbers that torch.set_flush_denormal makes zero",))
    if names := _elsewhere(gm, given.values()) or _unsupported(gm):
        return Enclosure(None, names)
    values: dict[Node, Any] = {}
    for node in gm.graph.nodes:
        try:
            if node.op == "placeholder":
                values[node] = _leaf(node, given[node])
            elif node.op == "get_attr":
                values[node] = known(attribute(gm, node.target))
            elif node.op == "call_function":
                values[node] = _computed(node, values)
        except UnboundedError as error:
            return Enclosure(None, (f"{node.name} ({node.target}): {error}",))
        except _NO_RULE as error:
            return Enclosure(None, (f"{node.name} ({node.target}): there is no rule for this call: {error}",))
    (output,) = gm.graph.find_nodes(op="output")
    results = map_arg(output.args[0], lambda n: values[n])
    results = results if isinstance(results, list | tuple) else [results]
    if any(not isinstance(result, Interval) for result in results):
        return Enclosure(None, ("an output that has no bounds, such as the places of a maximum",))
    return Enclosure([Box(result.low, result.high) for result in results])


def _are_flushed() -> bool:
    return bool(torch.tensor(5e-324, dtype=torch.float64) == 0)


def _elsewhere(gm: GraphModule, boxes: Iterable[Box]) -> tuple[str, ...]:
    """What is computed on other devices than the CPU, which may round otherwise."""
    recorded = [node.meta.get("val") for node in gm.graph.nodes if node.op != "output"]
    tensors = [*(value for value in recorded if isinstance(value, Tensor)), *(box.low for box in boxes)]
    return tuple(sorted({f"arithmetic on {t.device}" for t in tensors if t.device.type != "cpu"}))


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
    leaf = bounded(box.low, box.high, recorded.dtype if isinstance(recorded, Tensor) else box.low.dtype)
    if not bool((leaf.low <= leaf.high).all()):
        raise BoxError(f"enclose: {node.name}: the box is empty, or has a bound that is NaN.")
    return leaf


def _computed(node: Node, values: dict[Node, Any]) -> Any:
    args, options = (map_arg(a, lambda n: values[n]) for a in (node.args, node.kwargs))
    name, recorded = op_name(node), node.meta.get("val")
    if name == "getitem":
        return args[0][args[1]]  # type: ignore[index]
    if name in _MAKING:
        return known(node.target(*args, **options))  # type: ignore[operator]
    first = recorded[0] if isinstance(recorded, list | tuple) else recorded
    if not isinstance(first, Tensor):
        raise UnboundedError("a node that records no dtype")
    dtype = first.dtype
    if dtype.is_complex:
        raise UnboundedError("complex numbers")
    if name in _MAKING_LIKE:
        return _made_like(name, args, options, dtype)
    kept = {k: v for k, v in options.items() if k not in ("dtype", "layout", "device", "pin_memory", "non_blocking")}  # type: ignore[union-attr]
    return RULES[name](*args, **kept, dtype=dtype)  # type: ignore[misc]


def _made_like(name: str, args: Any, options: Any, dtype: torch.dtype) -> Interval:
    sizes = args[0].low.shape if name.endswith("_like") else args[1]
    numbers = [*args[2 if name.startswith("new") else 1 :], *(options[k] for k in ("fill_value",) if k in options)]
    fill = numbers[0] if "full" in name else int("ones" in name)
    return known(torch.full(tuple(sizes), fill, dtype=dtype))
