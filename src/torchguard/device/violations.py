"""What does not fit a device, as a value."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from torch import fx

from torchguard.guards.places import Place, own_place

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)')


@dataclass(frozen=True)
class Violation:
    """A rule that a graph breaks.

    Attributes:
        code: of the rule, such as `TGD301`.
        graph: `forward`, `backward` or `inference`.
        op: what computes the tensor in question or takes it, such as `aten.mm.default`.
        place: the line in your code.
        remedy: what to do about it; empty if there is nothing simple.
        condition: what sizes that are symbols have to fulfil; empty if it is broken whatever they are.
        holds_now: whether the condition holds for the sizes at hand; others may follow without being compiled again.
        nodes: the nodes of the graph that cannot run for it.
        tensors: what they take that does not fit, by the names of the program or of nodes; empty if that is not it.
    """

    code: str
    message: str
    graph: str
    op: str
    place: Place | None
    remedy: str = ""
    condition: str = ""
    holds_now: bool = False
    nodes: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        needs = f" (needs {self.condition})" if self.condition else ""
        times = f" [{len(self.nodes)} times]" if len(self.nodes) > 1 else ""
        more = f" and {len(self.tensors) - 1} more" if len(self.tensors) > 1 else ""
        what = f" ({self.tensors[0]}{more})" if self.tensors else ""
        lines = [f"{self.code} {self.graph}: {self.op}: {self.message}{what}{needs}{times}"]
        lines += [f"    at {self.place}"] if self.place else []
        return "\n".join([*lines, f"    {self.remedy}"] if self.remedy else lines)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def merged(violations: Iterable[Violation]) -> tuple[Violation, ...]:
    """One for all that differ in nodes and tensors alone: the layers of a model share their lines."""
    alike: dict[Violation, list[Violation]] = {}
    for violation in violations:
        alike.setdefault(replace(violation, nodes=(), tensors=()), []).append(violation)
    return tuple(
        replace(
            rest,
            nodes=tuple(dict.fromkeys(node for one in some for node in one.nodes)),
            tensors=tuple(dict.fromkeys(tensor for one in some for tensor in one.tensors)),
        )
        for rest, some in alike.items()
    )


def place_of(*nodes: fx.Node) -> Place | None:
    """The line in the user's code of the first of these nodes that has one."""
    return next((_place(trace) for node in nodes if (trace := node.meta.get("stack_trace"))), None)


@lru_cache(maxsize=4096)
def _place(stack_trace: str) -> Place | None:
    frames = tuple(Place(file, int(line), name, text) for file, line, name, text in _FRAME.findall(stack_trace))
    return own_place(frames) if frames else None
