"""Derive the type of each node of a graph from its leaves, and compare it with the type the node records."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torchguard.compiled._nodes import attribute, op_name
from torchguard.compiled.certify._certificate import Claim, Json, Verdict
from torchguard.compiled.certify._decompose import decompose
from torchguard.compiled.certify._definitions import DEFINITIONS
from torchguard.compiled.certify.types import _layers, _matrices, _reductions, _shapes, _types
from torchguard.compiled.certify.types._types import IllTypedError, Type, UnsupportedTypeError

RULES: dict[str, Callable[..., Any]] = {
    **_types.RULES,
    **_shapes.RULES,
    **_reductions.RULES,
    **_matrices.RULES,
    **_layers.RULES,
}
# The definitions of operators without a rule.
DEFINED = {name: definition for name, definition in DEFINITIONS.items() if name not in RULES}
# The operators that have a rule or a definition.
TYPED_OPS = frozenset(RULES) | frozenset(DEFINED)


class HasType(Protocol):
    """Anything with a shape and a dtype, such as a tensor."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> torch.dtype: ...


def check_types(gm: GraphModule, leaves: Sequence[HasType], *, subject: str = "forward") -> Claim:
    """Whether each node of a graph records the type that follows from the leaves.

    Nothing is run, and torch derives nothing. A node whose operator has no rule keeps the type it records; the claim is
    then inconclusive, unless another node fails.
    """
    gm = decompose(gm, DEFINED, with_complex=True)
    types: dict[Node, Any] = {}
    wrong: dict[str, str] = {}
    unsupported: set[str] = set()
    count = len(gm.graph.find_nodes(op="placeholder"))
    if count != len(leaves):
        return _claim(subject, Verdict.FAIL, f"The graph takes {count} tensors, got {len(leaves)} leaves.")
    remaining = iter(leaves)
    for node in gm.graph.nodes:
        if node.op == "output":
            continue
        recorded = types[node] = _recorded_type(node.meta.get("val"))
        try:
            types[node] = _derived_type(gm, node, types, remaining)
            if not _agree(types[node], recorded):
                wrong[node.name] = f"{node.name} is {_format(types[node])}, but records {_format(recorded)}"
        except UnsupportedTypeError as error:
            unsupported.add(str(error))
        except IllTypedError as error:
            wrong[node.name] = f"{node.name} ({node.target}) is ill-typed: {error}"
        except (TypeError, IndexError, ValueError, AttributeError, ZeroDivisionError) as error:
            unsupported.add(f"{node.target} ({error})")
    if wrong:
        first = next(iter(wrong.values()))
        return _claim(subject, Verdict.FAIL, f"{first}.", wrong=dict(wrong), nodes=len(types))
    if unsupported:
        names = sorted(unsupported)
        message = f"There is no rule for {', '.join(names)}."
        return _claim(subject, Verdict.INCONCLUSIVE, message, unsupported=list(names), nodes=len(types))
    message = f"All {len(types)} nodes have the type that follows from the leaves."
    return _claim(subject, Verdict.PASS, message, nodes=len(types))


def _claim(subject: str, verdict: Verdict, message: str, **details: Json) -> Claim:
    return Claim("typed", subject, verdict, message, details)


def _derived_type(gm: GraphModule, node: Node, types: dict[Node, Any], leaves: Iterator[HasType]) -> Any:
    if node.op == "placeholder":
        leaf = next(leaves)
        return Type(tuple(leaf.shape), leaf.dtype)
    if node.op == "get_attr":
        return _recorded_type(attribute(gm, node.target))
    args, options = (map_arg(a, lambda n: types[n]) for a in (node.args, node.kwargs))
    name = op_name(node)
    if name == "getitem":
        return args[0][args[1]]  # type: ignore[index]
    if node.op != "call_function" or name not in RULES:
        raise UnsupportedTypeError(str(node.target))
    return RULES[name](*args, **options)  # type: ignore[arg-type]


def _recorded_type(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Type(tuple(value.shape), value.dtype)
    return [_recorded_type(v) for v in value] if isinstance(value, list | tuple) else None


def _agree(derived: Any, recorded: Any) -> bool:
    if isinstance(derived, list | tuple):
        is_same = isinstance(recorded, list) and len(recorded) == len(derived)
        # For a result that was not asked for, torch records an empty tensor or None.
        return is_same and all(d is None or _agree(d, r) for d, r in zip(derived, recorded, strict=True))
    return derived == recorded


def _format(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_format, value))})"
    return "no type" if value is None else str(value)
