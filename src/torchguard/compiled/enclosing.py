"""The enclosure layer of a certificate: a box around the point, and whether compiled values stay in its image."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchguard.compiled.claims import Claim, Verdict

if TYPE_CHECKING:
    from torchguard.compiled.functions import CompiledOut

_RADIUS = 2.0**-10
_SAMPLES = 8


def enclosure_claims(made: "CompiledOut", point: tuple[Tensor, ...], seed: int) -> Iterator[Claim]:
    """Whether the compiled code stays within proven bounds at points drawn from a small box around the point."""
    from torchguard.compiled.enclosure import Box, enclose

    radii = [
        _RADIUS * (1 + x.abs()) if leaf.differentiable else torch.zeros_like(x)
        for x, leaf in zip(point, made.leaves, strict=True)
    ]
    boxes = [Box(x - r, x + r) if x.is_floating_point() else Box(x, x) for x, r in zip(point, radii, strict=True)]
    found = enclose(made.graphs.forward, boxes)
    if found.outputs is None:
        missing = ", ".join(found.unsupported)
        yield Claim(
            "enclosure",
            "forward",
            Verdict.INCONCLUSIVE,
            f"There are no bounds for {missing}.",
            {"unsupported": list(found.unsupported)},
        )
        return
    outside = sum(_outside(made, x, found.outputs) for x in _samples(boxes, point, seed))
    widest = max(
        (float((box.high.double() - box.low.double()).max()) for box in found.outputs if box.low.numel()), default=0.0
    )
    says = f"{outside} values at {_SAMPLES} points of a box of relative radius {_RADIUS:.0e} are out of its bounds."
    verdict = Verdict.FAIL if outside else Verdict.PASS if math.isfinite(widest) else Verdict.INCONCLUSIVE
    yield Claim(
        "enclosure", "forward", verdict, says, {"radius": _RADIUS, "widest": widest if math.isfinite(widest) else "inf"}
    )


def _samples(boxes: Sequence, point: Sequence[Tensor], seed: int) -> Iterator[list[Tensor]]:
    """Points of a box; the last is the middle."""
    for i in range(_SAMPLES - 1):
        generator = torch.Generator().manual_seed(seed * 7919 + i)
        drawn = [torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x.device) for x in point]
        yield [
            _within(box, d, x) if x.is_floating_point() else x for box, d, x in zip(boxes, drawn, point, strict=True)
        ]
    yield [*point]


def _within(box, share: Tensor, x: Tensor) -> Tensor:
    """A point between two ends, in the dtype and layout of x; rounding may not carry it out."""
    between = box.low.double() + share * (box.high.double() - box.low.double())
    laid = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return laid.copy_(torch.minimum(torch.maximum(between.to(x.dtype), box.low.to(x.dtype)), box.high.to(x.dtype)))


def _outside(made: "CompiledOut", x: list[Tensor], boxes: Sequence) -> int:
    """How many values of the compiled code lie out of bounds. It rounds, and the bounds need not allow for that."""
    count = 0
    for value, box in zip(made._executables["forward"]([*x]), boxes, strict=True):
        slack = 64 * torch.finfo(value.dtype).eps * (1 + value.double().abs()) if value.is_floating_point() else 0.0
        inside = (value.double() >= box.low.double() - slack) & (value.double() <= box.high.double() + slack)
        count += int((~inside).sum())
    return count
