"""Probes of compiled derivatives: identities that hold at every point, tried at one in random directions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchguard.compiled._executables import Code, Executables, Graphs
from torchguard.compiled._leaves import LeafType
from torchguard.compiled._trace import cotangent_types, tangent_types
from torchguard.exceptions import MissingRuleError


@dataclass(frozen=True)
class Gap:
    """Two numbers that ought to be equal, and by how much they may differ: `scale` is how large they usually are."""

    left: float
    right: float
    scale: float
    tolerance: float

    @property
    def relative(self) -> float:
        return abs(self.left - self.right) / self.scale if self.scale > 0 else abs(self.left - self.right)

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.left) and math.isfinite(self.right) and math.isfinite(self.scale)

    @property
    def tells(self) -> bool:
        """Whether anything was compared: of a point where all is zero, or not finite, nothing can be told."""
        return self.is_finite and self.scale > 0

    @property
    def is_small(self) -> bool:
        return self.relative <= self.tolerance


def random_like(types: Sequence[LeafType], seed: int) -> list[Tensor]:
    """Directions to probe in; the global generator is left alone."""
    directions = []
    for i, leaf in enumerate(types):
        generator = torch.Generator(device="cpu").manual_seed(seed * 1009 + i)
        drawn = torch.randn(leaf.shape, generator=generator, dtype=torch.float64, device="cpu")
        laid = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=leaf.device)
        directions.append(laid.copy_(drawn))
    return directions


def inner(left: Sequence[Tensor], right: Sequence[Tensor]) -> tuple[float, float]:
    """The inner product of two lists of tensors, and the root of the sum of its squared terms: its usual size."""
    terms = [(a.double() * b.double()).reshape(-1) for a, b in zip(left, right, strict=True)]
    total = sum(float(term.sum()) for term in terms)
    return total, math.sqrt(sum(float(term.square().sum()) for term in terms))


def adjoint_gap(tangents: Any, pushed: Any, seeds: Any, pulled: Any, tolerance: float) -> Gap:
    """<Jv, w> against <v, J'w>."""
    left, left_size = inner(pushed, seeds)
    right, right_size = inner(tangents, pulled)
    return Gap(left, right, max(left_size, right_size), tolerance)


def gap_at(graphs: Graphs, kind: str, code: Code, leaves: Sequence[Tensor], seed: int = 0) -> Gap:
    """How far a compiled derivative is from being the adjoint of the other one, which is run by eager mode.

    Where there is no other one, it is compared with itself as eager mode runs it.
    """
    v, w = random_like(tangent_types(graphs.program), seed), random_like(cotangent_types(graphs.outputs), seed + 1)
    base = kind.partition("_")[0]
    found = derivative_by(graphs, kind, code, leaves, v, w)
    eager = Executables(graphs, "eager")
    try:
        if base == "hvp":
            return _same(found, eager["hvp"]([*leaves, *v, *w]), v, graphs.tolerance)
        other = "jvp" if base == "vjp" else "vjp"
        dual = derivative_by(graphs, other, eager.code(other), leaves, v, w)
        pushed, pulled = (dual, found) if base == "vjp" else (found, dual)
        return adjoint_gap(v, pushed, w, pulled, graphs.tolerance)
    except MissingRuleError:
        again = derivative_by(graphs, base, eager.code(base), leaves, v, w)
        return _same(found, again, v if base == "vjp" else w, graphs.tolerance)


def _same(found: Sequence[Tensor], right: Sequence[Tensor], weights: Sequence[Tensor], tolerance: float) -> Gap:
    (left, left_size), (other, other_size) = inner(found, weights), inner(right, weights)
    return Gap(left, other, max(left_size, other_size), tolerance)


def derivative_by(
    graphs: Graphs, kind: str, code: Code, leaves: Sequence[Tensor], v: Sequence[Tensor], w: Sequence[Tensor]
) -> list[Tensor]:
    """The gradients or tangents that some code returns, in one part or two."""
    base = kind.partition("_")[0]
    count = len(graphs.outputs)
    directions = {"jvp": [*v], "vjp": [*w], "hvp": [*v, *w]}[base]
    if code.split is None:
        found = code.runs[0]([*leaves, *directions])
        return list(found if base == "hvp" else found[count:])
    first = code.runs[0]([*leaves])
    residuals = code.split.collect(leaves, first[:count], first[count:])
    return list(code.runs[1]([*residuals, *directions]))
