"""How much of a graph a device can run."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from torchguard._torch import nodes
from torchguard.device._graph import Graph
from torchguard.device._values import counted


@dataclass(frozen=True)
class Coverage:
    """Ops and floating point operations, in all and of those supported.

    Views are no work, and count only where a device does not have them.
    """

    ops: int
    supported_ops: int
    flops: int
    supported_flops: int

    @property
    def by_count(self) -> float:
        """Per cent of the ops."""
        return _per_cent(self.supported_ops, self.ops)

    @property
    def by_flops(self) -> float:
        """Per cent of the floating point operations."""
        return _per_cent(self.supported_flops, self.flops)

    def __add__(self, other: "Coverage") -> "Coverage":
        return Coverage(
            self.ops + other.ops,
            self.supported_ops + other.supported_ops,
            self.flops + other.flops,
            self.supported_flops + other.supported_flops,
        )

    def __str__(self) -> str:
        flops = f"{self.by_flops:.1f} % of {counted(self.flops, 'FLOP')}" if self.flops else "no FLOPs counted"
        return f"{self.by_count:.1f} % of {counted(self.ops, 'op')}, {flops}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "by_count": self.by_count, "by_flops": self.by_flops}


def coverage_of(graph: Graph, unsupported: frozenset[str]) -> Coverage:
    ops = set(graph.ops)
    flops = {node.name: flops_of(node) for node in graph.calls if node in ops or node.name in unsupported}
    supported = [name for name in flops if name not in unsupported]
    return Coverage(len(flops), len(supported), sum(flops.values()), sum(flops[name] for name in supported))


def flops_of(node: fx.Node) -> int:
    """What torch counts for an op at the sizes at hand: products, convolutions and attention; nothing for others."""
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0
    args, kwargs, out = fx.map_arg((node.args, dict(node.kwargs), node), _shape_alone)
    return int(count(*args, **kwargs, out_val=out))


def _shape_alone(node: fx.Node) -> Any:
    return _plain(node.meta.get("val"))


def _plain(value: Any) -> Any:
    """A value with numbers for its symbols: what counts compares sizes, which would add guards."""
    if isinstance(value, Tensor):
        return torch.empty([nodes.hint(size) or 0 for size in value.shape], dtype=value.dtype, device="meta")
    if isinstance(value, torch.SymInt):
        return nodes.hint(value) or 0
    if isinstance(value, (tuple, list)):
        return type(value)(map(_plain, value))
    return value


def _per_cent(part: int, whole: int) -> float:
    return 100.0 * part / whole if whole else 100.0
