"""What does not fit a device, as a value."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import fx

from torchguard._graphs.source_lines import SourceLine

# How Dynamo writes a path: L['self']._modules['layers']._modules['0'], or L['self'].layers[0].
_ROOT = re.compile(r"^L\['\w+'\]")
_ITEM = re.compile(r"(?:\._modules)?\[(?:'|\")?(\w+)(?:'|\")?\]")


@dataclass(frozen=True)
class Violation:
    """A rule that a graph breaks.

    Attributes:
        code: of the rule, such as `TGD301`.
        graph: `forward`, `backward` or `inference`.
        op: what computes the tensor in question or takes it, such as `aten.mm.default`.
        source_line: the line in your code.
        remedy: what to do about it; empty if there is nothing simple.
        condition: what sizes that are symbols have to fulfil; empty if it is broken whatever they are.
        holds_now: whether the condition holds for the sizes at hand; others may follow without being compiled again.
        nodes: the nodes of the graph that cannot run for it.
        tensors: what they take that does not fit, by the names of the program or of nodes; empty if that is not it.
        modules: the modules in which these nodes are, as far as they are in any.
    """

    code: str
    message: str
    graph: str
    op: str
    source_line: SourceLine | None
    remedy: str = ""
    condition: str = ""
    holds_now: bool = False
    nodes: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()

    def __str__(self) -> str:
        needs = f" (needs {self.condition})" if self.condition else ""
        times = f" [{len(self.nodes)} times]" if len(self.nodes) > 1 else ""
        what = f" ({some(self.tensors)})" if self.tensors else ""
        lines = [f"{self.code} {self.graph}: {self.op}: {self.message}{what}{needs}{times}"]
        where = [
            *([f"at {self.source_line}"] if self.source_line else []),
            *([f"in module {some(self.modules)}"] if self.modules else []),
        ]
        lines += [f"    {', '.join(where)}"] if where else []
        return "\n".join([*lines, f"    {self.remedy}"] if self.remedy else lines)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def merged(violations: Iterable[Violation]) -> tuple[Violation, ...]:
    """One for all that differ in nodes, tensors and modules alone: the layers of a model share their lines."""
    alike: dict[Violation, list[Violation]] = {}
    for violation in violations:
        alike.setdefault(without_nodes(violation), []).append(violation)
    return tuple(
        replace(
            rest,
            nodes=tuple(dict.fromkeys(node for one in all_of_it for node in one.nodes)),
            tensors=tuple(dict.fromkeys(tensor for one in all_of_it for tensor in one.tensors)),
            modules=tuple(dict.fromkeys(module for one in all_of_it for module in one.modules)),
        )
        for rest, all_of_it in alike.items()
    )


def without_nodes(violation: Violation) -> Violation:
    """What is said of a rule, and not of which nodes."""
    return replace(violation, nodes=(), tensors=(), modules=())


def some(names: tuple[str, ...]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def module_of(node: fx.Node) -> str | None:
    """The path of the innermost module that a node is of, None if there is none."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = _ROOT.sub("", str(next(reversed(stack.values()))[0])) if stack else ""
    return _ITEM.sub(r".\1", path).lstrip(".") or None
