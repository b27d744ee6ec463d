"""The Taylor remainder: whether compiled code follows its derivative, at one point, for smaller and smaller steps.

It is tested for a value and its JVP, for <w, value> and its VJP where there is no JVP, and for gradients and their HVP.
Where a function changes too quickly for the steps of its own dtype, or rounding hides the change, the test is repeated
in float64, if the compiled derivative is near to that of float64.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from torchguard.compiled._executables import Executables, ProgramGraphs
from torchguard.compiled._nodes import op_name
from torchguard.compiled.certify._certificate import Claim, Verdict
from torchguard.exceptions import CompileError

if TYPE_CHECKING:
    from torchguard.compiled._functions import CompiledOut

_STEPS = [2.0**-k for k in range(2, 13)]
# In float64 steps can be small enough for functions that oscillate 1e4 times within a unit.
_SMALLER_STEPS = [2.0**-k for k in range(2, 41)]
_NOISE_FACTOR = 8
ALLOWED_ROUNDING = 16  # times the rounding error of eager mode


@dataclass(frozen=True)
class Derivative:
    """A function of a point, its derivative along v, and what both are called; each is computed by given code.

    Args:
        run: from a kind of graph and its inputs to its results.
    """

    subject: str
    what: str
    value: Callable[["_Runs", Sequence[Tensor], "Directions"], list[Tensor]]
    along: Callable[["_Runs", Sequence[Tensor], "Directions"], list[Tensor]]


# From a kind of graph to code for it, which maps leaves, and tangents and cotangents, to the results after the outputs.
_Runs = Callable[[str, Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class Directions:
    """Tangents and cotangents, and which outputs have cotangents."""

    v: Sequence[Tensor]
    w: Sequence[Tensor]
    is_smooth: Sequence[bool]

    def double(self) -> "Directions":
        return Directions([v.double() for v in self.v], [w.double() for w in self.w], self.is_smooth)

    def smooth(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        return [out for out, chosen in zip(outputs, self.is_smooth, strict=True) if chosen]


def _weighted(left: Sequence[Tensor], right: Sequence[Tensor]) -> list[Tensor]:
    """An inner product as a list of one tensor."""
    terms = ((a.double() * b.double()).sum() for a, b in zip(left, right, strict=True))
    return [torch.stack(list(terms)).sum()]


JVP = Derivative(
    "jvp", "value", lambda run, x, d: d.smooth(run("forward", x)), lambda run, x, d: [*run("jvp", [*x, *d.v])]
)
# A VJP without a JVP beside it: the derivative of <w, f> along v.
VJP = Derivative(
    "vjp",
    "value",
    lambda run, x, d: _weighted(d.w, d.smooth(run("forward", x))),
    lambda run, x, d: _weighted(d.v, run("vjp", [*x, *d.w])),
)
HVP = Derivative(
    "hvp",
    "gradient",
    lambda run, x, d: [*run("vjp", [*x, *d.w])],
    lambda run, x, d: [*run("hvp", [*x, *d.v, *d.w])],
)


@dataclass(frozen=True)
class _TaylorTest:
    """A function near a point, and its derivative there. Remainders up to `noise` are rounding errors.

    Args:
        noise_steps: the number of last steps that are so small that their remainders are nothing but rounding.
    """

    derivative: "Derivative"
    function: Callable[[Sequence[Tensor]], list[Tensor]]
    point: tuple[Tensor, ...]
    tangents: tuple[Tensor | None, ...]
    along: Sequence[Tensor]
    steps: Sequence[float]
    noise: float
    noise_steps: int = 0

    def remainders(self) -> list[tuple[float, float]]:
        """Steps and their remainders, as far as these exceed the noise; only (0, inf) if one is not finite."""
        value = self.function(self.point)
        pairs = []
        for h in self.steps:
            step = h / self._length
            moved = self.function(self._moved(step))
            triples = zip(moved, value, self.along, strict=True)
            pairs.append((h, norm([a.double() - b.double() - step * d.double() for a, b, d in triples])))
        if not all(math.isfinite(r) for _, r in pairs):
            return [(0.0, math.inf)]
        noise = max([self.noise, *(_NOISE_FACTOR * r for _, r in pairs[len(pairs) - self.noise_steps :])])
        return [(h, r) for h, r in pairs if r > noise]

    def is_hidden_by_rounding(self) -> bool:
        """Whether the noise is as large as the change, even at the largest step, unless nothing changes at all."""
        step = self.steps[0] / self._length
        if step * norm(self.along) > _NOISE_FACTOR * self.noise:
            return False
        moved = self.function(self._moved(step))
        return norm(self.along) > 0 or not all(map(torch.equal, moved, self.function(self.point)))

    def _moved(self, step: float) -> list[Tensor]:
        arguments = zip(self.point, self.tangents, strict=True)
        return [x if v is None else _with_strides_of(x, x + step * v) for x, v in arguments]

    @property
    def _length(self) -> float:
        return norm([v for v in self.tangents if v is not None]) or 1.0


def taylor_claim(derivative: Derivative, compiled: "CompiledOut", point: tuple[Tensor, ...], d: Directions) -> Claim:
    """The Taylor test on compiled code; where it fails or rounding hides the change, in float64."""
    if any(map(overlaps, point)):
        message = "A leaf has elements that share memory, so that they cannot change one by one. Pass it contiguous."
        return Claim("probe", derivative.subject, Verdict.INCONCLUSIVE, message)
    run = _runs(compiled.graphs, lambda kind: compiled.code_at(kind, point))
    queue = iter(d.v)
    tangents = tuple(next(queue) if leaf.differentiable else None for leaf in compiled.leaves)
    function = lambda x: derivative.value(run, x, d)  # noqa: E731
    along = derivative.along(run, point, d)
    noise = 64 * compiled.graphs.eps * (1 + norm(function(point)))
    test = _TaylorTest(derivative, function, point, tangents, along, _STEPS, noise)
    is_value = derivative.what == "value"
    graph, inputs = (compiled.graphs.forward, point) if is_value else (compiled.graphs["vjp"], [*point, *d.w])
    claim = _slope_claim(test, lambda: known_cause(compiled) or _rounding_cause(test, graph, inputs))
    if claim.verdict is not Verdict.FAIL and not claim.details.get("is_hidden"):
        return claim
    widened = in_float64(compiled, point)
    return claim if widened is None else _claim_in_float64(compiled, widened, test, d) or claim


def _runs(graphs: ProgramGraphs, code: Callable[[str], Any]) -> _Runs:
    """Results after the outputs, for a derivative; the outputs for the value."""

    def run(kind: str, values: Sequence[Tensor]) -> Sequence[Tensor]:
        results = code(kind)([*values])
        return results if kind in ("forward", "hvp") else results[len(graphs.outputs) :]

    return run


def _claim_in_float64(
    compiled: "CompiledOut", widened: tuple[ProgramGraphs, list[Tensor]], test: _TaylorTest, d: Directions
) -> Claim | None:
    """The same with smaller steps; None unless compiled code is as near to float64 as eager mode."""
    graphs, point = widened
    if graphs.eps > torch.finfo(torch.float64).eps:
        return None  # the function rounds to another dtype itself
    derivative, wide = test.derivative, d.double()
    run = _runs(graphs, Executables(graphs, "eager").__getitem__)
    exact = derivative.along(run, point, wide)
    own = derivative.along(_runs(compiled.graphs, Executables(compiled.graphs, "eager").__getitem__), test.point, d)
    gap, eager_gap = distance(test.along, exact), distance(own, exact)
    allowed = max(ALLOWED_ROUNDING * eager_gap, compiled.graphs.tolerance**2)
    if gap > allowed or not all(tangent.dtype == torch.float64 for tangent in exact):
        return None
    if gap > compiled.graphs.tolerance:
        message = (
            f"The derivative differs from float64 by {gap:.1e}, that of eager mode by {eager_gap:.1e}: rounding is too "
            "large to tell whether it is right."
        )
        details = as_json({"gap": gap, "eager_gap": eager_gap})
        return Claim("probe", derivative.subject, Verdict.INCONCLUSIVE, message, details)
    function = lambda x: derivative.value(run, x, wide)  # noqa: E731
    noise = graphs.eps * (1 + norm(function(point)))
    tangents = tuple(None if tangent is None else tangent.double() for tangent in test.tangents)
    again = _TaylorTest(derivative, function, tuple(point), tangents, exact, _SMALLER_STEPS, noise, noise_steps=4)
    graph, inputs = (graphs.forward, point) if derivative.what == "value" else (graphs["vjp"], [*point, *wide.w])
    claim = _slope_claim(again, lambda: known_cause(compiled) or _rounding_cause(again, graph, inputs))
    return replace(claim, message=f"In float64: {claim.message}")


def _slope_claim(test: _TaylorTest, cause_of: Callable[[], str]) -> Claim:
    def claim(verdict: Verdict, message: str, **details: Any) -> Claim:
        return Claim("probe", test.derivative.subject, verdict, message, details)

    remainders, what = test.remainders(), test.derivative.what
    if any(math.isinf(r) for _, r in remainders):
        return claim(Verdict.INCONCLUSIVE, f"The {what} is not finite nearby.")
    if len(remainders) < 3 and test.is_hidden_by_rounding():
        message = f"Rounding hides whether the {what} follows its derivative."
        return claim(Verdict.INCONCLUSIVE, message, is_hidden=True)
    if len(remainders) < 3:
        return claim(Verdict.PASS, f"The Taylor remainder of the {what} is within rounding.", slope=None)
    slope, cause = _slope(remainders), cause_of()
    verdict = Verdict.PASS if slope >= 1.7 else Verdict.FAIL if slope <= 1.3 and not cause else Verdict.INCONCLUSIVE
    message = f"The Taylor remainder of the {what} shrinks with slope {slope:.2f}; expected 2{cause}."
    return claim(verdict, message, slope=slope)


def _slope(remainders: Sequence[tuple[float, float]]) -> float:
    """The slope of the line through the logarithms of the five smallest steps and their remainders."""
    pairs = [(math.log(h), math.log(r)) for h, r in remainders][-5:]
    x, y = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    return sum((a - x) * (b - y) for a, b in pairs) / sum((a - x) ** 2 for a, _ in pairs)


def known_cause(compiled: "CompiledOut") -> str:
    """Why an identity may not hold although the derivative is right; empty if there is no such reason."""
    if compiled.nonsmooth_points:
        return ", but nonsmooth points may lower it"
    if any(op_name(node) == "detach" for node in compiled.graph.nodes):
        return ", but detached values change with the point as well"
    return ""


def _rounding_cause(test: _TaylorTest, graph: GraphModule, inputs: Sequence[Tensor]) -> str:
    """The reason, if the remainders are of the size of the rounding error that an intermediate value may have."""
    interpreter = _RoundingInterpreter(graph)
    with torch.no_grad():
        interpreter.run(*inputs)
    is_larger = sum(r > 64 * interpreter.largest for _, r in test.remainders()) >= 3
    return "" if is_larger else ", but rounding inside the function is as large"


class _RoundingInterpreter(Interpreter):
    largest = 0.0

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and value.is_floating_point():
            size = torch.finfo(value.dtype).eps * norm([value])
            self.largest = max(self.largest, size if math.isfinite(size) else 0.0)
        return value


def overlaps(x: Tensor) -> bool:
    """Whether elements of a tensor share memory, as those of an expanded one."""
    return x.numel() > 0 and any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True))


def _with_strides_of(old: Tensor, new: Tensor) -> Tensor:
    if new.stride() == old.stride():
        return new
    return torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=old.device).copy_(new)


def norm(values: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in values))


def distance(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The distance of two lists of tensors relative to the second; non-finite elements have to be the same."""
    total, size = 0.0, 0.0
    for a, b in zip((t.double().reshape(-1) for t in got), (t.double().reshape(-1) for t in expected), strict=True):
        same = (a == b) | (a.isnan() & b.isnan())
        total += float(torch.where(same, 0.0, a - b).square().sum())
        size += float(torch.where(b.isfinite(), b, 0.0).square().sum())
    gap = math.sqrt(total) / math.sqrt(size) if size > 0 else math.sqrt(total)
    return gap if math.isfinite(gap) else math.inf


def in_float64(compiled: "CompiledOut", point: tuple[Tensor, ...]) -> tuple[ProgramGraphs, list[Tensor]] | None:
    """The graphs and the point with every floating-point leaf in float64; None if the function fixes its dtypes."""
    wide = [leaf.double() if leaf.is_floating_point() else leaf for leaf in point]
    pairs = zip(compiled.leaves, wide, strict=True)
    types = [replace(t, dtype=leaf.dtype, stride=tuple(leaf.stride())) for t, leaf in pairs]
    try:
        return ProgramGraphs(replace(compiled.program, leaves=tuple(types))), wide
    except (CompileError, RuntimeError):
        return None


def as_json(details: dict[str, float]) -> dict[str, Any]:
    """JSON has no infinity and no NaN."""
    return {key: value if math.isfinite(value) else str(value) for key, value in details.items()}
