"""The enclosure layer of a certificate: a box around the point, its proven image, and values computed in it."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchguard.compiled.certify._claims import Claim, Verdict

if TYPE_CHECKING:
    from torchguard.compiled._functions import CompiledOut
    from torchguard.compiled.certify.enclosure import Box

_RADIUS = 2.0**-10
# Both ends of the box, some of its other corners, points inside, and the middle.
_CORNERS, _INSIDE = 4, 3
_SAMPLES = 2 + _CORNERS + _INSIDE + 1
# The bounds are proven for eager mode. Compiled code may round otherwise: by so many units of the largest bound.
_COMPILED_SLACK = 64


def enclosure_claims(made: "CompiledOut", point: tuple[Tensor, ...], seed: int) -> Iterator[Claim]:
    """Whether values at points of a small box stay within proven bounds: eager ones exactly, compiled ones nearly."""
    from torchguard.compiled.certify.enclosure import Box, enclose

    radii = [
        _RADIUS * (1 + x.abs()) if leaf.differentiable else torch.zeros_like(x)
        for x, leaf in zip(point, made.leaves, strict=True)
    ]
    boxes = [Box(x - r, x + r) if x.is_floating_point() else Box(x, x) for x, r in zip(point, radii, strict=True)]
    if reason := _out_of_reach(boxes):
        yield Claim("enclosure", "forward", Verdict.INCONCLUSIVE, f"There are no bounds {reason}.", {})
        return
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
    eager, compiled = 0, 0
    for x in samples(boxes, point, seed):
        with torch.no_grad():
            eager += outside(made.graphs.forward(*x), found.outputs, slack=0)
        compiled += outside(made.value_at(x), found.outputs, slack=_COMPILED_SLACK)
    widest = max(
        (float((box.high.double() - box.low.double()).max()) for box in found.outputs if box.low.numel()), default=0.0
    )
    says = (
        f"At {_SAMPLES} points of a box of relative radius {_RADIUS:.0e} {eager} eager values are out of the bounds "
        f"proven for it, and {compiled} compiled values by more than {_COMPILED_SLACK} roundings."
    )
    is_out = eager + compiled > 0
    verdict = Verdict.FAIL if is_out else Verdict.PASS if math.isfinite(widest) else Verdict.INCONCLUSIVE
    details = {"radius": _RADIUS, "widest": widest if math.isfinite(widest) else "inf"}
    yield Claim("enclosure", "forward", verdict, says, details)


def _out_of_reach(boxes: Sequence["Box"]) -> str:
    """Why nothing can be said of boxes, if so."""
    if not all(bool((box.low.isfinite() & box.high.isfinite()).all()) for box in boxes):
        return "around a point that is not finite"
    return ""


def samples(boxes: Sequence["Box"], point: Sequence[Tensor], seed: int) -> Iterator[list[Tensor]]:
    """Points of a box: the ends of all its sides, other corners, some inside, and the middle."""
    generator = torch.Generator().manual_seed(seed * 7919)
    exact: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    drawn = lambda: [torch.rand(x.shape, generator=generator, **exact) for x in point]  # noqa: E731
    shares = [
        [torch.zeros(x.shape, **exact) for x in point],
        [torch.ones(x.shape, **exact) for x in point],
        *([(share < 0.5).double() for share in drawn()] for _ in range(_CORNERS)),
        *(drawn() for _ in range(_INSIDE)),
    ]
    for share in shares:
        yield [
            _within(box, s, x) if x.is_floating_point() else x for box, s, x in zip(boxes, share, point, strict=True)
        ]
    yield [*point]


def _within(box: "Box", share: Tensor, x: Tensor) -> Tensor:
    """A point between two ends, in the dtype and layout of x; rounding may not carry it out."""
    between = box.low.double() + share * (box.high.double() - box.low.double())
    laid = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return laid.copy_(torch.minimum(torch.maximum(between.to(x.dtype), box.low.to(x.dtype)), box.high.to(x.dtype)))


def outside(values: Sequence[Tensor], boxes: Sequence["Box"], slack: int) -> int:
    """How many values lie out of bounds by more than so many units in the last place of the largest of them."""
    count = 0
    for value, box in zip(values, boxes, strict=True):
        allowed = slack * _unit_of(box, value.dtype) if slack else 0.0
        inside = (value.double() >= box.low - allowed) & (value.double() <= box.high + allowed)
        count += int((~inside).sum())
    return count


def _unit_of(box: "Box", dtype: torch.dtype) -> float:
    ends = torch.cat([box.low.flatten(), box.high.flatten()]).abs()
    finite = ends[ends.isfinite()]
    return torch.finfo(dtype).eps * float(finite.max()) if dtype.is_floating_point and finite.numel() else 0.0
