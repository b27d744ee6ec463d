"""The enclosure layer of a certificate: values in a small box around a point, against the bounds proven for the box."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchguard.compiled.certify._certificate import Claim, Verdict
from torchguard.compiled.certify._taylor import overlaps
from torchguard.compiled.certify.enclosure._enclose import Box, enclose

if TYPE_CHECKING:
    from torchguard.compiled._functions import CompiledOut

_RADIUS = 2.0**-10
# Both ends of the box, some of its other corners, points inside, and the middle.
_CORNERS, _INSIDE = 4, 3
_SAMPLES = 2 + _CORNERS + _INSIDE + 1
# The bounds are proven for eager mode. Compiled code may round differently: by this many units of the largest bound.
_COMPILED_SLACK = 64


def enclosure_claims(compiled: "CompiledOut", point: tuple[Tensor, ...], seed: int) -> Iterator[Claim]:
    """Whether values in a small box lie within the bounds proven for it: eager ones exactly, compiled ones nearly."""
    if any(map(overlaps, point)):
        message = "A leaf has elements that share memory, so that a box around it holds no other point."
        yield Claim("enclosure", "forward", Verdict.INCONCLUSIVE, message)
        return
    radii = [
        _RADIUS * (1 + x.abs()) if leaf.differentiable else torch.zeros_like(x)
        for x, leaf in zip(point, compiled.leaves, strict=True)
    ]
    boxes = [Box(x - r, x + r) if x.is_floating_point() else Box(x, x) for x, r in zip(point, radii, strict=True)]
    if not all(bool((box.low.isfinite() & box.high.isfinite()).all()) for box in boxes):
        message = "There are no bounds around a point that is not finite."
        yield Claim("enclosure", "forward", Verdict.INCONCLUSIVE, message)
        return
    enclosure = enclose(compiled.graphs.forward, boxes)
    if enclosure.outputs is None:
        yield enclosure.to_claim()
        return
    eager_outside, compiled_outside = 0, 0
    for x in samples(boxes, point, seed):
        with torch.no_grad():
            eager_outside += count_outside(compiled.graphs.forward(*x), enclosure.outputs, slack=0)
        compiled_outside += count_outside(compiled.value_at(x), enclosure.outputs, slack=_COMPILED_SLACK)
    widths = [box.high.double() - box.low.double() for box in enclosure.outputs if box.low.numel()]
    widest = max((float(width.max()) for width in widths), default=0.0)
    message = (
        f"At {_SAMPLES} points of a box of relative radius {_RADIUS:.0e}, {eager_outside} eager values are outside the "
        f"bounds proven for it, and {compiled_outside} compiled values by more than {_COMPILED_SLACK} units in the "
        "last place."
    )
    is_outside = eager_outside + compiled_outside > 0
    verdict = Verdict.FAIL if is_outside else Verdict.PASS if math.isfinite(widest) else Verdict.INCONCLUSIVE
    details = {"radius": _RADIUS, "widest": widest if math.isfinite(widest) else "inf"}
    yield Claim("enclosure", "forward", verdict, message, details)


def samples(boxes: Sequence[Box], point: Sequence[Tensor], seed: int) -> Iterator[list[Tensor]]:
    """Points of a box: its lowest and highest corner, other corners, some inside, and the middle."""
    generator = torch.Generator().manual_seed(seed * 7919)
    exact: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    random = lambda: [torch.rand(x.shape, generator=generator, **exact) for x in point]  # noqa: E731
    fractions = [
        [torch.zeros(x.shape, **exact) for x in point],
        [torch.ones(x.shape, **exact) for x in point],
        *([(fraction < 0.5).double() for fraction in random()] for _ in range(_CORNERS)),
        *(random() for _ in range(_INSIDE)),
    ]
    for fraction in fractions:
        triples = zip(boxes, fraction, point, strict=True)
        yield [_interpolate(box, part, x) if x.is_floating_point() else x for box, part, x in triples]
    yield [*point]


def _interpolate(box: Box, fraction: Tensor, x: Tensor) -> Tensor:
    """The point at a fraction of the way from low to high, in the dtype and strides of x, rounded to lie inside."""
    between = box.low.double() + fraction * (box.high.double() - box.low.double())
    laid_out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return laid_out.copy_(torch.minimum(torch.maximum(between.to(x.dtype), box.low.to(x.dtype)), box.high.to(x.dtype)))


def count_outside(values: Sequence[Tensor], boxes: Sequence[Box], slack: int) -> int:
    """The number of values out of bounds by more than `slack` units in the last place of the largest bound."""
    count = 0
    for value, box in zip(values, boxes, strict=True):
        allowed = slack * _last_place(box, value.dtype) if slack else 0.0
        inside = (value.double() >= box.low - allowed) & (value.double() <= box.high + allowed)
        count += int((~inside).sum())
    return count


def _last_place(box: Box, dtype: torch.dtype) -> float:
    ends = torch.cat([box.low.flatten(), box.high.flatten()]).abs()
    finite = ends[ends.isfinite()]
    return torch.finfo(dtype).eps * float(finite.max()) if dtype.is_floating_point and finite.numel() else 0.0
