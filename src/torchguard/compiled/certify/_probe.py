"""The probe layer: identities that hold for every function, tested on the compiled code at one point.

- The value is that of eager mode, and as near to float64 as eager mode is.
- A JVP is linear in its tangent, and a VJP in its cotangent.
- The adjoint identity <Jv, w> = <v, J'w> holds for random v and w. `CompiledOut` also tests it when a derivative is
  first used.
- The Taylor remainder f(x + hv) - f(x) - h Jv shrinks with the square of h.
- Code that runs in two parts (`vjp`, `linearize`) gives what code in one part does.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Interpreter, Node

from torchguard.compiled._executables import Code, Executables, Graphs
from torchguard.compiled._leaves import LeafType
from torchguard.compiled._nodes import op_name
from torchguard.compiled._trace import cotangent_types, tangent_types
from torchguard.compiled.certify._certificate import Claim, Verdict
from torchguard.exceptions import CompileError, MissingRuleError

if TYPE_CHECKING:
    from torchguard.compiled._functions import CompiledOut

_STEPS = [2.0**-k for k in range(2, 13)]
# In float64 steps can be small enough for functions that oscillate 1e4 times within a unit.
_SMALLER_STEPS = [2.0**-k for k in range(2, 41)]
_NOISE_FACTOR = 8
_ALLOWED_ROUNDING = 16  # times the rounding error of eager mode


# The adjoint identity


@dataclass(frozen=True)
class Gap:
    """Two numbers that should be equal up to `tolerance`, relative to `scale`, the typical size of their terms."""

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
    def is_conclusive(self) -> bool:
        """Whether anything was compared: where all terms are zero, or some are not finite, nothing was."""
        return self.is_finite and self.scale > 0

    @property
    def is_small(self) -> bool:
        return self.relative <= self.tolerance


def random_like(types: Sequence[LeafType], seed: int) -> list[Tensor]:
    """Normally distributed tensors of some types. The global generator is not used."""
    tensors = []
    for i, leaf in enumerate(types):
        generator = torch.Generator(device="cpu").manual_seed(seed * 1009 + i)
        values = torch.randn(leaf.shape, generator=generator, dtype=torch.float64, device="cpu")
        laid_out = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=leaf.device)
        tensors.append(laid_out.copy_(values))
    return tensors


def _inner(left: Sequence[Tensor], right: Sequence[Tensor]) -> tuple[float, float]:
    """The inner product of two lists of tensors, and the root of the sum of its squared terms: its typical size."""
    terms = [(a.double() * b.double()).reshape(-1) for a, b in zip(left, right, strict=True)]
    total = sum(float(term.sum()) for term in terms)
    return total, math.sqrt(sum(float(term.square().sum()) for term in terms))


def adjoint_gap(v: Any, jvp: Any, w: Any, vjp: Any, tolerance: float) -> Gap:
    """<Jv, w> against <v, J'w>, for a tangent v and a cotangent w."""
    left, left_size = _inner(jvp, w)
    right, right_size = _inner(v, vjp)
    return Gap(left, right, max(left_size, right_size), tolerance)


def measure_gap(graphs: Graphs, kind: str, code: Code, leaves: Sequence[Tensor], seed: int = 0) -> Gap:
    """How far the compiled JVP is from being the adjoint of the eager VJP, or the compiled VJP of the eager JVP.

    An HVP, and a derivative whose counterpart does not exist, is compared with itself in eager mode.
    """
    v, w = random_like(tangent_types(graphs.program), seed), random_like(cotangent_types(graphs.outputs), seed + 1)
    base = kind.partition("_")[0]
    compiled = run_derivative(graphs, kind, code, leaves, v, w)
    eager = Executables(graphs, "eager")
    try:
        if base == "hvp":
            return _equality_gap(compiled, eager["hvp"]([*leaves, *v, *w]), v, graphs.tolerance)
        other = "jvp" if base == "vjp" else "vjp"
        dual = run_derivative(graphs, other, eager.code(other), leaves, v, w)
        jvp, vjp = (dual, compiled) if base == "vjp" else (compiled, dual)
        return adjoint_gap(v, jvp, w, vjp, graphs.tolerance)
    except MissingRuleError:
        expected = run_derivative(graphs, base, eager.code(base), leaves, v, w)
        return _equality_gap(compiled, expected, v if base == "vjp" else w, graphs.tolerance)


def _equality_gap(got: Sequence[Tensor], expected: Sequence[Tensor], weights: Any, tolerance: float) -> Gap:
    (left, left_size), (right, right_size) = _inner(got, weights), _inner(expected, weights)
    return Gap(left, right, max(left_size, right_size), tolerance)


def run_derivative(
    graphs: Graphs, kind: str, code: Code, leaves: Sequence[Tensor], v: Sequence[Tensor], w: Sequence[Tensor]
) -> list[Tensor]:
    """The output tangents or gradients that some code computes, in one part or in two."""
    base = kind.partition("_")[0]
    count = len(graphs.outputs)
    directions = {"jvp": [*v], "vjp": [*w], "hvp": [*v, *w]}[base]
    if code.split is None:
        results = code.runs[0]([*leaves, *directions])
        return list(results if base == "hvp" else results[count:])
    first = code.runs[0]([*leaves])
    residuals = code.split.collect(leaves, first[:count], first[count:])
    return list(code.runs[1]([*residuals, *directions]))


# The claims


def probe_claims(compiled: "CompiledOut", point: tuple[Tensor, ...], seed: int) -> Iterator[Claim]:
    """Claims about value, linearity, Taylor remainder, parts and adjoint identity, at a point, for random v and w."""
    yield from _value_claims(compiled, point)
    tangents, cotangents = compiled.tangents, compiled.cotangents
    v, u = random_like(tangents.types, seed), random_like(tangents.types, seed + 2)
    w, z = random_like(cotangents.types, seed + 1), random_like(cotangents.types, seed + 3)
    if not v or not w:
        yield Claim("probe", "derivatives", Verdict.INCONCLUSIVE, "No leaf or no output is differentiable.")
        return
    try:
        jvps = [compiled.derivative_at("jvp", point, tangent, w) for tangent in (v, u, _combined(v, u))]
        yield _linearity_claim(compiled, "jvp", "tangent", jvps)
        yield _taylor_claim(compiled, point, v, jvps[0])
        yield _split_claim(compiled, "jvp", point, v, w, jvps[0])
    except MissingRuleError as error:
        jvps = []
        yield Claim("probe", "jvp", Verdict.INCONCLUSIVE, f"The function has no jvp: {error}")
    try:
        vjps = [compiled.derivative_at("vjp", point, v, cotangent) for cotangent in (w, z, _combined(w, z))]
        yield _linearity_claim(compiled, "vjp", "cotangent", vjps)
        yield _split_claim(compiled, "vjp", point, v, w, vjps[0])
    except MissingRuleError as error:
        vjps = []
        yield Claim("probe", "vjp", Verdict.INCONCLUSIVE, f"The function has no vjp: {error}")
    if jvps and vjps:
        gap = adjoint_gap(v, jvps[0], w, vjps[0], compiled.graphs.tolerance)
        details = {"left": gap.left, "right": gap.right, "relative": gap.relative, "tolerance": gap.tolerance}
        verdict = Verdict.INCONCLUSIVE if not gap.is_finite else Verdict.PASS if gap.is_small else Verdict.FAIL
        yield Claim("probe", "vjp", verdict, f"<Jv, w> and <v, J'w> differ by {gap.relative:.1e}.", _as_json(details))


def _value_claims(compiled: "CompiledOut", point: tuple[Tensor, ...]) -> Iterator[Claim]:
    value = compiled.value_at(point)
    eager = Executables(compiled.graphs, "eager")["forward"]([*point])
    gap, allowed = _distance(value, eager), compiled.graphs.tolerance
    yield _gap_claim("forward", f"The value differs from eager mode's by {gap:.1e}.", gap, allowed)
    exact = _value_in_float64(compiled, point)
    if exact is None:
        yield Claim("probe", "forward", Verdict.INCONCLUSIVE, "The function cannot be run in float64.")
        return
    gap, eager_gap = _distance(value, exact), _distance(eager, exact)
    allowed = max(_ALLOWED_ROUNDING * eager_gap, compiled.graphs.tolerance**2)
    message = f"The value differs from float64 by {gap:.1e}, that of eager mode by {eager_gap:.1e}."
    yield _gap_claim("forward", message, gap, allowed)


def _value_in_float64(compiled: "CompiledOut", point: tuple[Tensor, ...]) -> list[Tensor] | None:
    """The value by eager mode in float64; None if the function fixes its dtypes."""
    widened = _in_float64(compiled, point)
    try:
        return None if widened is None else list(Executables(widened[0], "eager")["forward"](widened[1]))
    except (CompileError, RuntimeError):
        return None


def _in_float64(compiled: "CompiledOut", point: tuple[Tensor, ...]) -> tuple[Graphs, list[Tensor]] | None:
    """The graphs and the point with every floating-point leaf in float64; None if the function fixes its dtypes."""
    wide = [leaf.double() if leaf.is_floating_point() else leaf for leaf in point]
    pairs = zip(compiled.leaves, wide, strict=True)
    types = [replace(t, dtype=leaf.dtype, stride=tuple(leaf.stride())) for t, leaf in pairs]
    try:
        return Graphs(replace(compiled.program, leaves=tuple(types))), wide
    except (CompileError, RuntimeError):
        return None


def _combined(left: Sequence[Tensor], right: Sequence[Tensor]) -> list[Tensor]:
    """A linear combination with powers of two as weights: multiplying by them does not round."""
    return [0.5 * a - 2 * b for a, b in zip(left, right, strict=True)]


def _linearity_claim(compiled: "CompiledOut", subject: str, argument: str, results: Sequence[list[Tensor]]) -> Claim:
    first, second, both = results
    gap = _distance(both, _combined(first, second))
    return _gap_claim(subject, f"It is linear in the {argument} up to {gap:.1e}.", gap, compiled.graphs.tolerance)


def _split_claim(
    compiled: "CompiledOut", base: str, point: tuple[Tensor, ...], v: Any, w: Any, expected: list[Tensor]
) -> Claim:
    """`vjp` and `linearize` run code in two parts, which is compiled separately."""
    gap = _distance(compiled.derivative_at(f"{base}_split", point, v, w), expected)
    return _gap_claim(base, f"In two parts it differs from one run by {gap:.1e}.", gap, compiled.graphs.tolerance)


def _gap_claim(subject: str, message: str, gap: float, allowed: float) -> Claim:
    verdict = Verdict.PASS if gap <= allowed else Verdict.FAIL
    return Claim("probe", subject, verdict, message, _as_json({"gap": gap, "allowed": allowed}))


def _as_json(details: dict[str, float]) -> dict[str, Any]:
    """JSON has no infinity and no NaN."""
    return {key: value if math.isfinite(value) else str(value) for key, value in details.items()}


# The Taylor remainder


@dataclass(frozen=True)
class _TaylorTest:
    """A function near a point, and its derivative there. Remainders up to `noise` are rounding errors.

    Args:
        noise_steps: the number of last steps that are so small that their remainders are nothing but rounding.
    """

    function: Callable[[Sequence[Tensor]], list[Tensor]]
    point: tuple[Tensor, ...]
    tangents: tuple[Tensor | None, ...]
    jvp: Sequence[Tensor]
    steps: Sequence[float]
    noise: float
    noise_steps: int = 0

    def remainders(self) -> list[tuple[float, float]]:
        """Steps and their remainders, as far as these exceed the noise; only (0, inf) if one is not finite."""
        value = self.function(self.point)
        pairs = []
        for h in self.steps:
            step = h / self._length
            arguments = zip(self.point, self.tangents, strict=True)
            moved = self.function([x if v is None else _with_strides_of(x, x + step * v) for x, v in arguments])
            triples = zip(moved, value, self.jvp, strict=True)
            pairs.append((h, _norm([a.double() - b.double() - step * d.double() for a, b, d in triples])))
        if not all(math.isfinite(r) for _, r in pairs):
            return [(0.0, math.inf)]
        noise = max([self.noise, *(_NOISE_FACTOR * r for _, r in pairs[len(pairs) - self.noise_steps :])])
        return [(h, r) for h, r in pairs if r > noise]

    def is_hidden_by_rounding(self) -> bool:
        """Whether the noise is as large as the change of the value, even at the largest step."""
        return 0 < self.steps[0] / self._length * _norm(self.jvp) <= self.noise

    @property
    def _length(self) -> float:
        return _norm([v for v in self.tangents if v is not None]) or 1.0


def _taylor_claim(compiled: "CompiledOut", point: tuple[Tensor, ...], v: Sequence[Tensor], jvp: list[Tensor]) -> Claim:
    """The Taylor test on compiled values; where it fails, on values in float64."""
    function = lambda x: _smooth_outputs(compiled, compiled.value_at(x))  # noqa: E731
    queue = iter(v)
    tangents = tuple(next(queue) if leaf.differentiable else None for leaf in compiled.leaves)
    noise = 64 * compiled.graphs.eps * (1 + _norm(function(point)))
    test = _TaylorTest(function, point, tangents, jvp, _STEPS, noise)
    claim = _slope_claim(test, lambda remainders: _known_cause(compiled, point, remainders))
    if claim.verdict is not Verdict.FAIL:
        return claim
    widened = _in_float64(compiled, point)
    return claim if widened is None else _taylor_claim_in_float64(compiled, widened, test, v) or claim


def _taylor_claim_in_float64(
    compiled: "CompiledOut", widened: tuple[Graphs, list[Tensor]], test: _TaylorTest, v: Sequence[Tensor]
) -> Claim | None:
    """The same with smaller steps; None unless the compiled JVP is as near to that of float64 as eager mode's."""
    graphs, point = widened
    count, eager = len(graphs.outputs), Executables(graphs, "eager")
    eager_jvp = Executables(compiled.graphs, "eager")["jvp"]([*test.point, *v])[count:]
    tangents = [None if tangent is None else tangent.double() for tangent in test.tangents]
    jvp = list(eager["jvp"]([*point, *(tangent for tangent in tangents if tangent is not None)])[count:])
    allowed = max(_ALLOWED_ROUNDING * _distance(eager_jvp, jvp), compiled.graphs.tolerance**2)
    if _distance(test.jvp, jvp) > allowed or not all(tangent.dtype == torch.float64 for tangent in jvp):
        return None
    function = lambda x: _smooth_outputs(compiled, eager["forward"]([*x]))  # noqa: E731
    noise = graphs.eps * (1 + _norm(function(point)))
    wide = _TaylorTest(function, tuple(point), tuple(tangents), jvp, _SMALLER_STEPS, noise, noise_steps=4)
    claim = _slope_claim(wide, lambda remainders: "")
    return replace(claim, message=f"In float64: {claim.message}")


def _slope_claim(test: _TaylorTest, known_cause: Callable[[list[tuple[float, float]]], str]) -> Claim:
    remainders = test.remainders()
    if any(math.isinf(r) for _, r in remainders):
        return Claim("probe", "jvp", Verdict.INCONCLUSIVE, "The value is not finite nearby.")
    if len(remainders) < 3 and test.is_hidden_by_rounding():
        return Claim("probe", "jvp", Verdict.INCONCLUSIVE, "Rounding hides whether the value follows its derivative.")
    if len(remainders) < 3:
        return Claim("probe", "jvp", Verdict.PASS, "The Taylor remainder is within rounding.", {"slope": None})
    slope, cause = _slope(remainders), known_cause(remainders)
    verdict = Verdict.PASS if slope >= 1.7 else Verdict.FAIL if slope <= 1.3 and not cause else Verdict.INCONCLUSIVE
    message = f"The Taylor remainder shrinks with slope {slope:.2f}; expected 2{cause}."
    return Claim("probe", "jvp", verdict, message, {"slope": slope})


def _slope(remainders: Sequence[tuple[float, float]]) -> float:
    """The slope of the line through the logarithms of the five smallest steps and their remainders."""
    pairs = [(math.log(h), math.log(r)) for h, r in remainders][-5:]
    x, y = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    return sum((a - x) * (b - y) for a, b in pairs) / sum((a - x) ** 2 for a, _ in pairs)


def _known_cause(compiled: "CompiledOut", point: tuple[Tensor, ...], remainders: Sequence[tuple[float, float]]) -> str:
    """Why a remainder may be large although the derivative is right; empty if there is no such reason."""
    if compiled.nonsmooth_points:
        return ", but nonsmooth points may lower it"
    if any(op_name(node) == "detach" for node in compiled.graph.nodes):
        return ", but detached values change with the point as well"
    rounding = _largest_rounding(compiled.graphs, point)
    if sum(r > 64 * rounding for _, r in remainders) < 3:
        return ", but rounding inside the function is as large"
    return ""


def _largest_rounding(graphs: Graphs, point: Sequence[Tensor]) -> float:
    """The largest rounding error that an intermediate value may have at a point."""
    interpreter = _RoundingInterpreter(graphs.forward)
    with torch.no_grad():
        interpreter.run(*point)
    return interpreter.largest


class _RoundingInterpreter(Interpreter):
    largest = 0.0

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and value.is_floating_point():
            size = torch.finfo(value.dtype).eps * _norm([value])
            self.largest = max(self.largest, size if math.isfinite(size) else 0.0)
        return value


def _smooth_outputs(compiled: "CompiledOut", outputs: Sequence[Tensor]) -> list[Tensor]:
    return [out for out, chosen in zip(outputs, compiled.cotangents.differentiable, strict=True) if chosen]


def _with_strides_of(old: Tensor, new: Tensor) -> Tensor:
    if new.stride() == old.stride():
        return new
    return torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=old.device).copy_(new)


def _norm(values: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in values))


def _distance(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The distance of two lists of tensors relative to the second; non-finite elements have to be the same."""
    total, size = 0.0, 0.0
    for a, b in zip((t.double().reshape(-1) for t in got), (t.double().reshape(-1) for t in expected), strict=True):
        same = (a == b) | (a.isnan() & b.isnan())
        total += float(torch.where(same, 0.0, a - b).square().sum())
        size += float(torch.where(b.isfinite(), b, 0.0).square().sum())
    gap = math.sqrt(total) / math.sqrt(size) if size > 0 else math.sqrt(total)
    return gap if math.isfinite(gap) else math.inf
