"""Probes of compiled derivatives: identities that hold at every point, tried at one in random directions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchguard.compiled.executables import Executables, Graphs, Run
from torchguard.compiled.leaves import LeafType
from torchguard.compiled.tracing import seed_types, tangent_types
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
    def is_small(self) -> bool:
        return self.relative <= self.tolerance


def tolerance_of(values: Sequence[Tensor | LeafType]) -> float:
    """What rounding may make of an identity: some square roots of the coarsest precision at hand."""
    coarsest = max((torch.finfo(v.dtype).eps for v in values if v.dtype.is_floating_point), default=0.0)
    return 8 * math.sqrt(coarsest)


def random_like(types: Sequence[LeafType], seed: int) -> list[Tensor]:
    """Directions to probe in; the global generator is left alone."""
    directions = []
    for i, leaf in enumerate(types):
        generator = torch.Generator(device="cpu").manual_seed(seed * 1009 + i)
        drawn = torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
        laid = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=leaf.device)
        directions.append(laid.copy_(drawn))
    return directions


def inner(left: Sequence[Tensor], right: Sequence[Tensor]) -> tuple[float, float]:
    """The inner product of two lists of tensors, and the root of the sum of its squared terms: its usual size."""
    terms = [(a.double() * b.double()).reshape(-1) for a, b in zip(left, right, strict=True)]
    total = sum(float(term.sum()) for term in terms)
    return total, math.sqrt(sum(float(term.square().sum()) for term in terms))


def adjoint_gap(tangents: Any, pushed: Any, seeds: Any, pulled: Any) -> Gap:
    """<Jv, w> against <v, J'w>."""
    left, left_size = inner(pushed, seeds)
    right, right_size = inner(tangents, pulled)
    return Gap(left, right, max(left_size, right_size), tolerance_of([*pushed, *pulled]))


def gap_at(graphs: Graphs, kind: str, runs: tuple[Run, ...], leaves: Sequence[Tensor], seed: int = 0) -> Gap | None:
    """How far a compiled derivative is from being the adjoint of the other one, which is run by eager mode.

    None if it cannot be told: something is not finite, or there is no other one.
    """
    v, w = random_like(tangent_types(graphs.program), seed), random_like(seed_types(graphs.forward), seed + 1)
    base = kind.partition("_")[0]
    found = derivative_by(graphs, kind, runs, leaves, v, w)
    eager = Executables(graphs, "eager")
    if base == "hvp":
        reference = eager["hvp"]([*leaves, *v, *w])
        (left, size), (right, _) = inner(found, v), inner(reference, v)
        gap = Gap(left, right, size, tolerance_of(found))
    else:
        try:
            other = "jvp" if base == "vjp" else "vjp"
            dual = derivative_by(graphs, other, (eager[other],), leaves, v, w)
            gap = adjoint_gap(v, dual, w, found) if base == "vjp" else adjoint_gap(v, found, w, dual)
        except MissingRuleError:
            same = derivative_by(graphs, base, (eager[base],), leaves, v, w)
            (left, size), (right, _) = inner(found, v if base == "vjp" else w), inner(same, v if base == "vjp" else w)
            gap = Gap(left, right, size, tolerance_of(found))
    return gap if gap.is_finite else None


def derivative_by(
    graphs: Graphs, kind: str, runs: tuple[Run, ...], leaves: Sequence[Tensor], v: Sequence[Tensor], w: Sequence[Tensor]
) -> list[Tensor]:
    """The gradients or tangents that some code returns, in one part or two."""
    base, _, parted = kind.partition("_")
    count = len(graphs.outputs)
    directions = {"jvp": [*v], "vjp": [*w], "hvp": [*v, *w]}[base]
    if not parted:
        found = runs[0]([*leaves, *directions])
        return list(found if base == "hvp" else found[count:])
    first = runs[0]([*leaves])
    places = {"leaf": leaves, "output": first[:count], "private": first[count:]}
    residuals = [places[where][i] for where, i in graphs.split_of(base).residuals]
    return list(runs[1]([*residuals, *directions]))
