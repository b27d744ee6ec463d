"""A rule that a graph violates, as a value: which rule, which op, the user's source line, and a remedy."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import fx

from torchguard._graphs.source_lines import SourceLine

# Dynamo writes a module's path as L['self']._modules['layers']._modules['0'] or as L['self'].layers[0].
_ROOT = re.compile(r"^L\['\w+'\]")
_ITEM = re.compile(r"(?:\._modules)?\[(?:'|\")?(\w+)(?:'|\")?\]")


@dataclass(frozen=True)
class DeviceViolation:
    """A rule that a graph violates.

    Attributes:
        code: the code of the rule, such as `TGD301`.
        message: what the rule found, and what the device supports.
        graph: `forward`, `backward` or `inference`.
        op: the op that produces the tensor in question or takes it, such as `aten.mm.default`.
        source_line: the line in your code.
        remedy: what to do about it; empty if there is no simple remedy.
        condition: what symbolic sizes have to satisfy; empty if the rule is violated at every size.
        holds_now: whether the condition holds for the concrete sizes; later calls may bring others without a recompile.
        nodes: the nodes of the graph that cannot run because of it.
        tensors: the tensors that violate the rule, by their names in the program or in the graph; empty if the rule is
            not about tensors.
        modules: the paths of the modules that these nodes belong to; empty if they belong to none.
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
        tensors = f" ({abbreviated(self.tensors)})" if self.tensors else ""
        lines = [f"{self.code} {self.graph}: {self.op}: {self.message}{tensors}{needs}{times}"]
        where = [
            *([f"at {self.source_line}"] if self.source_line else []),
            *([f"in module {abbreviated(self.modules)}"] if self.modules else []),
        ]
        lines += [f"    {', '.join(where)}"] if where else []
        return "\n".join([*lines, f"    {self.remedy}"] if self.remedy else lines)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def merge_violations(violations: Iterable[DeviceViolation]) -> tuple[DeviceViolation, ...]:
    """Merge violations that differ only in nodes, tensors and modules: layers of a model share their source line."""
    groups: dict[DeviceViolation, list[DeviceViolation]] = {}
    for violation in violations:
        groups.setdefault(without_nodes(violation), []).append(violation)
    return tuple(
        replace(
            shared,
            nodes=tuple(dict.fromkeys(node for one in group for node in one.nodes)),
            tensors=tuple(dict.fromkeys(tensor for one in group for tensor in one.tensors)),
            modules=tuple(dict.fromkeys(module for one in group for module in one.modules)),
        )
        for shared, group in groups.items()
    )


def distinct(violations: Iterable[DeviceViolation]) -> list[tuple[DeviceViolation, int]]:
    """Violations that read alike once, with the number of graphs: a function that recompiles has each several times."""
    groups: dict[str, list[DeviceViolation]] = {}
    for violation in violations:
        groups.setdefault(str(violation), []).append(violation)
    return [(group[0], len(group)) for group in groups.values()]


def without_nodes(violation: DeviceViolation) -> DeviceViolation:
    """The violation without the nodes, tensors and modules that it was found at."""
    return replace(violation, nodes=(), tensors=(), modules=())


def abbreviated(names: tuple[str, ...]) -> str:
    """`weight and 5 more`."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def counted(count: int, noun: str) -> str:
    """`1 graph`, `2 graphs`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def module_path(node: fx.Node) -> str | None:
    """The path of the innermost module that a node belongs to; None if it belongs to none."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = _ROOT.sub("", str(next(reversed(stack.values()))[0])) if stack else ""
    return _ITEM.sub(r".\1", path).lstrip(".") or None
