"""Derive the type of each node of a graph from its leaves, by rules of our own, and compare with what it records."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torchguard.compiled._nodes import attribute, op_name
from torchguard.compiled.certify._claims import Claim, Json, Verdict
from torchguard.compiled.certify.types import _elementwise, _layers, _shapes
from torchguard.compiled.certify.types._types import IllTypedError, Type, UncoveredError

RULES: dict[str, Callable[..., Any]] = {**_elementwise.RULES, **_shapes.RULES, **_layers.RULES}
COVERED = frozenset(RULES)


class LeafType(Protocol):
    """Anything with a shape and a dtype: a tensor will do."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> torch.dtype: ...


def check_types(gm: GraphModule, leaves: Sequence[LeafType], *, subject: str = "forward") -> Claim:
    """Whether each node of a graph has the type its leaves give it.

    Nothing is run, and torch is not asked. A node of an operator outside the table, and what is computed from it, keeps
    the type it records; the claim is then inconclusive, unless something else is wrong.
    """
    types: dict[Node, Any] = {}
    wrong: dict[str, str] = {}
    uncovered: set[str] = set()
    given = iter(leaves)
    taken = [node for node in gm.graph.nodes if node.op == "placeholder"]
    if len(taken) != len(leaves):
        return _claim(subject, Verdict.FAIL, f"It takes {len(taken)} tensors, not {len(leaves)}.")
    for node in gm.graph.nodes:
        if node.op == "output":
            continue
        recorded = _recorded(node.meta.get("val"))
        try:
            types[node] = _derived(gm, node, types, given)
            if not _agree(types[node], recorded):
                wrong[node.name] = f"{node.name} is {_shown(types[node])}, but records {_shown(recorded)}"
        except UncoveredError as error:
            uncovered.add(str(error))
            types[node] = recorded
        except IllTypedError as error:
            wrong[node.name] = f"{node.name} ({node.target}) cannot be: {error}"
            types[node] = recorded
        except (TypeError, IndexError, ValueError, AttributeError, ZeroDivisionError) as error:
            uncovered.add(f"{node.target} ({error})")
            types[node] = recorded
    count = len(types)
    if wrong:
        first = next(iter(wrong.values()))
        return _claim(subject, Verdict.FAIL, f"{first}.", wrong=dict(wrong), nodes=count)
    if uncovered:
        names = sorted(uncovered)
        says = f"There is no rule for {', '.join(names)}."
        return _claim(subject, Verdict.INCONCLUSIVE, says, unsupported=list(names), nodes=count)
    return _claim(subject, Verdict.PASS, f"All {count} nodes have the type their leaves give them.", nodes=count)


def _claim(subject: str, verdict: Verdict, says: str, **details: Json) -> Claim:
    return Claim("typed", subject, verdict, says, details)


def _derived(gm: GraphModule, node: Node, types: dict[Node, Any], leaves: Any) -> Any:
    if node.op == "placeholder":
        leaf = next(leaves)
        return Type(tuple(leaf.shape), leaf.dtype)
    if node.op == "get_attr":
        return _recorded(attribute(gm, node.target))
    args, options = (map_arg(a, lambda n: types[n]) for a in (node.args, node.kwargs))
    name = op_name(node)
    if name == "getitem":
        return args[0][args[1]]  # type: ignore[index]
    if node.op != "call_function" or name not in RULES:
        raise UncoveredError(str(node.target))
    return RULES[name](*args, **options)  # type: ignore[arg-type]


def _recorded(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Type(tuple(value.shape), value.dtype)
    return [_recorded(v) for v in value] if isinstance(value, list | tuple) else None


def _agree(derived: Any, recorded: Any) -> bool:
    if isinstance(derived, list | tuple):
        is_same = isinstance(recorded, list) and len(recorded) == len(derived)
        # Where a result is not asked for, torch records an empty tensor or none.
        return is_same and all(d is None or _agree(d, r) for d, r in zip(derived, recorded, strict=True))
    return derived == recorded


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_shown, value))})"
    return "no type" if value is None else str(value)
