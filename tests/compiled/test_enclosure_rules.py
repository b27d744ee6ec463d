"""Bounds of single operators hold at sampled points: in boxes of all sizes, around tiny, huge and shifted numbers."""

import random

import pytest
import torch
import torch.nn.functional as F
from tests.breadth import breadth
from tests.compiled.zoo import traced

from torchguard.compiled.certify import Box, enclose

SHAPE = (4, 5)
UNARY = {
    "var": lambda x: x.var(1),
    "var of all": lambda x: x.var((0, 1), correction=0),
    "std": lambda x: x.std(0),
    "var_mean": lambda x: torch.var_mean(x, 1)[0],
    "prod": lambda x: x.prod(1),
    "cumprod": lambda x: x.cumprod(0),
    "sort": lambda x: x.sort(0, descending=True).values,
    "topk": lambda x: x.topk(2, 1, largest=False).values,
    "kthvalue": lambda x: x.kthvalue(2, 1).values,
    "median": lambda x: x.median(1).values,
    "median of all": lambda x: x.median(),
    "cummax": lambda x: x.cummax(1).values,
    "max": lambda x: x.max(1).values + x.min(1).values,
    "entr": lambda x: torch.special.entr(x.abs() + 1e-6),
    "remainder by a number": lambda x: torch.remainder(x, 0.3),
    "fmod by a number": lambda x: torch.fmod(x, -1.3),
    "logit": lambda x: torch.logit(x.sigmoid() * 0.98 + 0.01),
    "celu": lambda x: F.celu(x, alpha=2.3),
    "selu": F.selu,
    "elu": lambda x: F.elu(x, 0.4),
    "negative power": lambda x: x**-3,
    "power of two": lambda x: 2.0**x,
    "sign": torch.sign,
    "trace": torch.trace,
    "unfold": lambda x: x.unfold(1, 2, 1).prod(-1),
    "ldexp": lambda x: torch.ldexp(x, torch.tensor([-3, 2, 0, 1, 5])),
    "reflection": lambda x: F.pad(x[None], (2, 1), mode="reflect"),
}
BINARY = {
    "hypot": torch.hypot,
    "xlogy": lambda x, y: torch.xlogy(x, y.abs() + 1e-3),
    "remainder": lambda x, y: torch.remainder(x, y.abs() + 0.1),
    "fmod": lambda x, y: torch.fmod(x, y.abs() + 0.1),
    "huber": lambda x, y: F.huber_loss(x, y, delta=0.7, reduction="none"),
    "smooth_l1": lambda x, y: F.smooth_l1_loss(x, y, beta=0.3, reduction="none"),
    "prelu": lambda x, y: F.prelu(x, y[0]),
    "power": lambda x, y: (x.abs() + 0.01) ** y,
    "equal": lambda x, y: torch.where(x == y, 1.0, 2.0) + torch.where(x != y, 1.0, 5.0),
    "index_add": lambda x, y: x.index_add(0, torch.tensor([0, 2, 2]), y[:3], alpha=1.7),
    "cross": lambda x, y: torch.linalg.cross(x[:, :3], y[:, :3]),
    "block_diag": lambda x, y: torch.block_diag(x, y),
    "slice_scatter": lambda x, y: x.slice_scatter(y[:2], 0, 1, 3),
}
OPERATORS = {**dict.fromkeys(UNARY, 1), **dict.fromkeys(BINARY, 2)}


def drawn(rng, generator, dtype):
    """A centre and a radius for each number."""
    scale = 10.0 ** rng.choice([-30, -8, -3, -1, 0, 0, 1, 2, 4])
    x = torch.randn(SHAPE, generator=generator, dtype=torch.float64) * scale
    x = (x + rng.choice([0, 0, 0, 1, 100, -1000, 1e5]) * scale).to(dtype)
    if rng.random() < 0.2:
        x = x.round()
    if rng.random() < 0.2:
        x = torch.where(torch.rand(SHAPE, generator=generator) < 0.3, torch.zeros((), dtype=dtype), x)
    return x, x.abs() * rng.choice([0, 0, 1e-7, 1e-3, 0.3, 2])


def points(boxes, generator):
    yield [box.low for box in boxes]
    yield [box.high for box in boxes]
    for _ in range(3):
        parts = [torch.rand(SHAPE, generator=generator, dtype=box.low.dtype) for box in boxes]
        inside = [box.low + part * (box.high - box.low) for box, part in zip(boxes, parts, strict=True)]
        yield [x.maximum(box.low).minimum(box.high) for x, box in zip(inside, boxes, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", breadth(OPERATORS, "var", "fmod", "cumprod", "hypot", "power"))
def test_values_lie_inside(name, dtype):
    fn, rng = {**UNARY, **BINARY}[name], random.Random(name)
    generator, found = torch.Generator().manual_seed(1), 0
    example = [torch.ones(SHAPE, dtype=dtype) for _ in range(OPERATORS[name])]
    gm = traced(lambda *xs: [fn(*xs)], example, functional=False)
    for _ in range(40):
        pairs = [drawn(rng, generator, dtype) for _ in range(OPERATORS[name])]
        boxes = [Box(x - radius, x + radius) for x, radius in pairs]
        bounds = enclose(gm, boxes).outputs
        for x in points(boxes, generator) if bounds else ():
            assert bounds[0].contains(fn(*x))
        found += bounds is not None
    assert found
