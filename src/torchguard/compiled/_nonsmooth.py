"""Nonsmooth points of a graph: operations whose derivative is a convention somewhere, and which one torch uses."""

from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from torchguard.compiled._nodes import op_name


@dataclass(frozen=True)
class NonsmoothPoint:
    """An operation that is not differentiable everywhere, and the derivative that torch returns where it is not."""

    op: str
    convention: str
    source: str

    def __str__(self) -> str:
        return f"{self.op}: {self.convention}" + (f" ({self.source})" if self.source else "")


_STEPS = "0 everywhere, also at the steps"
_MEET = "smooth, and the second derivative jumps where the parts meet"
_TIES = "at ties the derivative is shared evenly"
_FIRST = "at ties one of the largest is taken, by index"
# By operation, without overload, following torch's derivative formulas. The tests compare most of them with what is
# returned.
CONVENTIONS = {
    "relu": "relu'(0) = 0",
    "abs": "abs'(0) = 0",
    "leaky_relu": "leaky_relu'(0) = negative_slope",
    "threshold": "0 at the threshold",
    "hardtanh": "0 at both ends",
    "hardsigmoid": "0 at both ends",
    "hardshrink": "0 at both ends",
    "softshrink": "0 at both ends",
    "hardswish": "0 at the lower end, 1 at the upper",
    "elu": "elu'(0) = the slope from the left",
    "huber_loss": _MEET,
    "smooth_l1_loss": _MEET,
    "frac": "1, also at the steps",
    "clamp": "1 at both ends",
    "clamp_min": "1 at the end",
    "clamp_max": "1 at the end",
    "sign": _STEPS,
    "sgn": _STEPS,
    "floor": _STEPS,
    "ceil": _STEPS,
    "round": _STEPS,
    "trunc": _STEPS,
    "heaviside": _STEPS,
    "remainder": "1 in the first argument, also at the steps",
    "fmod": "1 in the first argument, also at the steps",
    "amax": _TIES,
    "amin": _TIES,
    "maximum": _TIES,
    "minimum": _TIES,
    "max": "over a dim: " + _FIRST + "; over all: " + _TIES,
    "min": "over a dim: " + _FIRST + "; over all: " + _TIES,
    "max_pool2d_with_indices": _FIRST,
    "max_pool3d_with_indices": _FIRST,
    "adaptive_max_pool2d": _FIRST,
    "sort": _FIRST,
    "topk": _FIRST,
    "kthvalue": _FIRST,
    "median": _FIRST,
    "cummax": _FIRST,
    "cummin": _FIRST,
    "linalg_vector_norm": "0 at the zero vector",
    "sqrt": "inf at 0",
    "prelu": "prelu'(0) = weight",
    "_prelu_kernel": "prelu'(0) = weight",
    "copysign": "0 at 0",
}
# Not smooth only if they depend on a floating point leaf: a mask that is itself a leaf is constant.
SWITCHES = {
    **dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne", "signbit", "argmax", "argmin", "argsort"), _STEPS),
    **dict.fromkeys(("bucketize", "searchsorted", "_to_copy"), _STEPS),
    "where": "the derivative of the branch that is taken",
    "masked_fill": "the derivative of what is taken",
}
_MASK = {"where": 0, "masked_fill": 1}  # the position of the mask among the arguments


def nonsmooth_points_of(graph: GraphModule) -> tuple[NonsmoothPoint, ...]:
    """The operations of a graph whose derivative is a convention somewhere, once for each source line."""
    found: dict[tuple[str, str | None], NonsmoothPoint] = {}
    varying: set[Node] = set()
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        is_leaf = node.op == "placeholder" and value.is_floating_point()
        if is_leaf or any(source in varying for source in node.all_input_nodes):
            varying.add(node)
        convention = _convention(node, varying) if node.op == "call_function" else None
        if convention is not None:
            name = op_name(node)
            found[name, node.stack_trace] = NonsmoothPoint(f"aten.{name}", convention, node.stack_trace or "")
    return tuple(found.values())


def _convention(node: Node, varying: set[Node]) -> str | None:
    """The derivative that torch returns for an operation where it has none; None if the operation is smooth."""
    name = op_name(node)
    if name == "elu":
        given: tuple[Any, ...] = (*node.args, 1, 1, 1)
        _, alpha, _, input_scale = given[:4]
        return CONVENTIONS[name] if alpha * input_scale != 1 else None
    if name not in SWITCHES:
        return CONVENTIONS.get(name)
    is_varying = (node.args[_MASK[name]] if name in _MASK else node) in varying
    if name == "_to_copy":
        before, after = node.all_input_nodes[0].meta["val"], node.meta["val"]
        is_varying = is_varying and before.is_floating_point() and not after.is_floating_point()
    return SWITCHES[name] if is_varying else None
