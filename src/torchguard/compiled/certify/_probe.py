"""The probe layer: identities that hold for every function, tested on the compiled code at one point.

- The value is that of eager mode, and as near to float64 as eager mode is.
- A JVP is linear in its tangent, and a VJP in its cotangent.
- The adjoint identity <Jv, w> = <v, J'w> holds for random v and w. `CompiledOut` also tests it when a derivative is
  first used.
- The Taylor remainder f(x + hv) - f(x) - h Jv shrinks with the square of h.
- Code that runs in two parts (`vjp`, `linearize`) gives what code in one part does.
- The HVP is linear in its tangent, the Hessian is symmetric, <Hv, u> = <v, Hu>, and the Taylor remainder of the
  gradients g(x + hv) - g(x) - h Hv shrinks with the square of h.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchguard.compiled._derivatives import cotangent_types, tangent_types
from torchguard.compiled._executables import FALLBACKS, CompiledCode, Executables, ProgramGraphs
from torchguard.compiled._leaves import LeafType
from torchguard.compiled.certify._certificate import Claim, Verdict
from torchguard.compiled.certify._taylor import (
    ALLOWED_ROUNDING,
    HVP,
    JVP,
    VJP,
    Directions,
    as_json,
    distance,
    in_float64,
    known_cause,
    norm,
    taylor_claim,
)
from torchguard.exceptions import CompileError, MissingRuleError

if TYPE_CHECKING:
    from torchguard.compiled._functions import CompiledOut

_BY_ROUNDING = ", but rounding changes it by as much: the derivative may be zero"
_NUDGES = 4  # points next to one at which the rounding error of a derivative is estimated

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


def measure_gap(graphs: ProgramGraphs, kind: str, code: CompiledCode, leaves: Sequence[Tensor], seed: int = 0) -> Gap:
    """How far the compiled JVP is from being the adjoint of the eager VJP, or the compiled VJP of the eager JVP.

    An HVP is compared with the eager one by reverse mode alone, whose rules are others; where an operation has none,
    with its own transpose. A derivative whose counterpart does not exist is compared with itself in eager mode.
    """
    v, w = random_like(tangent_types(graphs.program), seed), random_like(cotangent_types(graphs.outputs), seed + 1)
    gap = _gap(graphs, kind, code, leaves, v, w)
    if gap.is_small or abs(gap.left - gap.right) > _rounding_of_both(graphs, kind.partition("_")[0], leaves, v, w):
        return gap
    return replace(gap, scale=0.0)  # nothing was compared but rounding errors


def _rounding_of_both(graphs: ProgramGraphs, base: str, leaves: Sequence[Tensor], v: Any, w: Any) -> float:
    """The rounding error of a derivative, and of the one that it is compared with."""
    other = {"jvp": "vjp", "vjp": "jvp", "hvp": "hvp"}[base]
    try:
        return max(_rounding(graphs, one, leaves, v, w) for one in {base, other})
    except (MissingRuleError, CompileError):
        return _rounding(graphs, base, leaves, v, w)


def _gap(
    graphs: ProgramGraphs, kind: str, code: CompiledCode, leaves: Sequence[Tensor], v: list[Tensor], w: list[Tensor]
) -> Gap:
    base = kind.partition("_")[0]
    compiled = run_derivative(graphs, kind, code, leaves, v, w)
    eager = Executables(graphs, "eager")
    try:
        if base == "hvp":
            return _hvp_gap(graphs, compiled, leaves, v, w)
        other = "jvp" if base == "vjp" else "vjp"
        dual = run_derivative(graphs, other, eager.code(other), leaves, v, w)
        jvp, vjp = (dual, compiled) if base == "vjp" else (compiled, dual)
        return adjoint_gap(v, jvp, w, vjp, graphs.tolerance)
    except (MissingRuleError, CompileError):
        expected = run_derivative(graphs, base, eager.code(base), leaves, v, w)
        return _equality_gap(compiled, expected, w if base == "jvp" else v, graphs.tolerance)


@dataclass(frozen=True)
class Choice:
    """Code for a derivative, the backend that compiled it, and the backends whose code failed the adjoint identity."""

    code: CompiledCode
    backend: str
    failed: tuple[str, ...] = ()


def choose_code(executables: Executables, kind: str, leaves: Sequence[Tensor]) -> Choice | None:
    """The code of the first backend, of this one and its fallbacks, whose derivative satisfies the adjoint identity.

    The last backend's code if none does. None if nothing can be compared here: all terms are zero, or some not finite.
    """
    graphs, first = executables.graphs, executables.backend
    choice = None
    failed: list[str] = []
    for backend in (first, *FALLBACKS[first]):
        code = (executables if backend == first else Executables(graphs, backend)).code(kind)
        gap = measure_gap(graphs, kind, code, leaves)
        if not gap.is_conclusive and not failed:
            return None
        if not gap.is_small:
            failed.append(backend)
        choice = Choice(code, backend, tuple(failed))
        if gap.is_small:
            break
    return choice


def _hvp_gap(graphs: ProgramGraphs, hvp: Sequence[Tensor], leaves: Sequence[Tensor], v: Any, w: Any) -> Gap:
    """An HVP against the eager one by reverse mode alone, or against its own transpose: <Hv, u> and <v, Hu>."""
    eager = Executables(graphs, "eager")
    if graphs.other_hvp is not None:
        gap = _equality_gap(hvp, eager.run(graphs.other_hvp)([*leaves, *v, *w]), v, graphs.tolerance)
    else:
        u = random_like(tangent_types(graphs.program), 2)
        gap = adjoint_gap(v, hvp, u, eager["hvp"]([*leaves, *u, *w]), graphs.tolerance)
    # Terms of the size of the gradients may cancel: what rounding leaves of them is no second derivative.
    rounding = 64 * graphs.eps * norm(v) * norm(run_derivative(graphs, "vjp", eager.code("vjp"), leaves, v, w))
    return replace(gap, scale=max(gap.scale, rounding / graphs.tolerance)) if gap.is_conclusive else gap


def _rounding(
    graphs: ProgramGraphs, base: str, leaves: Sequence[Tensor], v: Sequence[Tensor], w: Sequence[Tensor]
) -> float:
    """How much rounding may change a derivative, and its inner product with a tangent or cotangent.

    It is what eager mode's derivative changes by where the point, tangents and cotangents move by a few units in the
    last place. Where a derivative is zero, what rounding leaves of it changes by as much as it is large.
    """
    code = Executables(graphs, "eager").code(base)
    here, largest = run_derivative(graphs, base, code, leaves, v, w), 0.0
    for seed in range(_NUDGES):
        generator = torch.Generator().manual_seed(seed)
        moved = [[_nudged(x, graphs.eps, generator) for x in values] for values in (leaves, v, w)]
        there = run_derivative(graphs, base, code, *moved)
        largest = max(largest, norm([a.double() - b.double() for a, b in zip(there, here, strict=True)]))
    return ALLOWED_ROUNDING * largest * max(1.0, norm(v), norm(w))


def _nudged(x: Tensor, eps: float, generator: torch.Generator) -> Tensor:
    """A tensor moved by a few units in the last place, with its strides."""
    if not x.is_floating_point():
        return x
    steps = torch.randint(-4, 5, x.shape, generator=generator, dtype=torch.float64).to(x.device) * eps
    return torch.empty_like(x).copy_(x.double() * (1 + steps))


def _equality_gap(got: Sequence[Tensor], expected: Sequence[Tensor], weights: Any, tolerance: float) -> Gap:
    (left, left_size), (right, right_size) = _inner(got, weights), _inner(expected, weights)
    return Gap(left, right, max(left_size, right_size), tolerance)


def run_derivative(
    graphs: ProgramGraphs,
    kind: str,
    code: CompiledCode,
    leaves: Sequence[Tensor],
    v: Sequence[Tensor],
    w: Sequence[Tensor],
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
    directions = Directions(v, w, cotangents.differentiable)
    rounding = lambda base: lambda: _rounding(compiled.graphs, base, point, v, w)  # noqa: E731
    jvps: list[Any] = []
    vjps: list[Any] = []
    try:
        jvps = [compiled.derivative_at("jvp", point, tangent, w) for tangent in (v, u, _combined(v, u))]
        yield _linearity_claim(compiled, "jvp", "tangent", jvps, rounding("jvp"))
        yield taylor_claim(JVP, compiled, point, directions)
        yield _split_claim(compiled, "jvp", point, v, w, jvps[0], rounding("jvp"))
    except (CompileError, MissingRuleError) as error:
        yield Claim("probe", "jvp", Verdict.INCONCLUSIVE, f"The function has no jvp: {error}")
    try:
        vjps = [compiled.derivative_at("vjp", point, v, cotangent) for cotangent in (w, z, _combined(w, z))]
        yield _linearity_claim(compiled, "vjp", "cotangent", vjps, rounding("vjp"))
        if not jvps:
            yield taylor_claim(VJP, compiled, point, directions)
        yield _split_claim(compiled, "vjp", point, v, w, vjps[0], rounding("vjp"))
    except (CompileError, MissingRuleError) as error:
        yield Claim("probe", "vjp", Verdict.INCONCLUSIVE, f"The function has no vjp: {error}")
    if jvps and vjps:
        gap = adjoint_gap(v, jvps[0], w, vjps[0], compiled.graphs.tolerance)
        bound = lambda: max(rounding("jvp")(), rounding("vjp")())  # noqa: E731
        yield _identity_claim("vjp", "<Jv, w> and <v, J'w> differ by", gap, bound)
    yield from _hvp_claims(compiled, point, directions, u, rounding("hvp"))


def _hvp_claims(
    compiled: "CompiledOut", point: tuple[Tensor, ...], d: Directions, u: list[Tensor], rounding: Callable[[], float]
) -> Iterator[Claim]:
    """Claims about the HVP: linearity, the symmetry of the Hessian, and the Taylor remainder of the gradients."""
    try:
        hvps = [compiled.derivative_at("hvp", point, tangent, d.w) for tangent in (d.v, u, _combined(d.v, u))]
        yield _linearity_claim(compiled, "hvp", "tangent", hvps, rounding)
        yield _symmetry_claim(compiled, point, d, u, hvps, rounding)
        yield taylor_claim(HVP, compiled, point, d)
    except (CompileError, MissingRuleError) as error:
        yield Claim("probe", "hvp", Verdict.INCONCLUSIVE, f"The function has no hvp: {error}")


def _symmetry_claim(
    compiled: "CompiledOut",
    point: tuple[Tensor, ...],
    d: Directions,
    u: list[Tensor],
    hvps: Sequence[list[Tensor]],
    rounding: Callable[[], float],
) -> Claim:
    gap = adjoint_gap(d.v, hvps[0], u, hvps[1], compiled.graphs.tolerance)
    # Terms of the size of the gradients may cancel: what rounding leaves of them is no second derivative.
    gradients = compiled.derivative_at("vjp", point, d.v, d.w)
    left_over = 64 * compiled.graphs.eps * norm(gradients) * max(norm(d.v), norm(u))
    gap = replace(gap, scale=max(gap.scale, left_over / gap.tolerance))
    return _identity_claim("hvp", "<Hv, u> and <v, Hu> differ by", gap, rounding, known_cause(compiled))


def _identity_claim(subject: str, what: str, gap: Gap, rounding: Callable[[], float], cause: str = "") -> Claim:
    """Whether two numbers are equal, unless there is a cause for them not to be, or rounding is as large."""
    details = as_json({"left": gap.left, "right": gap.right, "relative": gap.relative, "tolerance": gap.tolerance})
    message = f"{what} {gap.relative:.1e}"
    if gap.is_small:
        return Claim("probe", subject, Verdict.PASS, f"{message}.", details)
    if gap.is_finite and not cause and abs(gap.left - gap.right) <= rounding():
        cause = _BY_ROUNDING
    verdict = Verdict.INCONCLUSIVE if cause or not gap.is_finite else Verdict.FAIL
    return Claim("probe", subject, verdict, f"{message}{cause}.", details)


def _value_claims(compiled: "CompiledOut", point: tuple[Tensor, ...]) -> Iterator[Claim]:
    value = compiled.value_at(point)
    eager = Executables(compiled.graphs, "eager")["forward"]([*point])
    gap, allowed = distance(value, eager), compiled.graphs.tolerance
    yield _gap_claim("forward", f"The value differs from eager mode's by {gap:.1e}", gap, allowed)
    exact = _value_in_float64(compiled, point)
    if exact is None:
        yield Claim("probe", "forward", Verdict.INCONCLUSIVE, "The function cannot be run in float64.")
        return
    gap, eager_gap = distance(value, exact), distance(eager, exact)
    allowed = max(ALLOWED_ROUNDING * eager_gap, compiled.graphs.tolerance**2)
    message = f"The value differs from float64 by {gap:.1e}, that of eager mode by {eager_gap:.1e}"
    if compiled.graphs.tolerance < gap <= allowed:
        message += ". Rounding is too large to tell whether it is right."
        details = as_json({"gap": gap, "eager_gap": eager_gap})
        yield Claim("probe", "forward", Verdict.INCONCLUSIVE, message, details)
    else:
        yield _gap_claim("forward", message, gap, allowed)


def _value_in_float64(compiled: "CompiledOut", point: tuple[Tensor, ...]) -> list[Tensor] | None:
    """The value by eager mode in float64; None if the function fixes its dtypes."""
    widened = in_float64(compiled, point)
    try:
        return None if widened is None else list(Executables(widened[0], "eager")["forward"](widened[1]))
    except (CompileError, RuntimeError):
        return None


def _combined(left: Sequence[Tensor], right: Sequence[Tensor]) -> list[Tensor]:
    """A linear combination with powers of two as weights: multiplying by them does not round."""
    return [0.5 * a - 2 * b for a, b in zip(left, right, strict=True)]


def _linearity_claim(
    compiled: "CompiledOut",
    subject: str,
    argument: str,
    results: Sequence[list[Tensor]],
    rounding: Callable[[], float],
) -> Claim:
    first, second, both = results
    expected = _combined(first, second)
    gap = distance(both, expected)
    message = f"It is linear in the {argument} up to {gap:.1e}"
    return _gap_claim(subject, message, gap, compiled.graphs.tolerance, norm(expected), rounding)


def _split_claim(
    compiled: "CompiledOut",
    base: str,
    point: tuple[Tensor, ...],
    v: Any,
    w: Any,
    expected: list[Tensor],
    rounding: Callable[[], float],
) -> Claim:
    """`vjp` and `linearize` run code in two parts, which is compiled separately."""
    gap = distance(compiled.derivative_at(f"{base}_split", point, v, w), expected)
    message = f"In two parts it differs from one run by {gap:.1e}"
    return _gap_claim(base, message, gap, compiled.graphs.tolerance, norm(expected), rounding)


def _gap_claim(
    subject: str,
    message: str,
    gap: float,
    allowed: float,
    size: float = 1.0,
    rounding: Callable[[], float] = lambda: 0.0,
) -> Claim:
    """Whether a gap is small, unless rounding is as large; the gap is relative to a size, if that is not zero."""
    details = as_json({"gap": gap, "allowed": allowed})
    if not math.isfinite(size):
        return Claim("probe", subject, Verdict.INCONCLUSIVE, "It is not finite at this point.", details)
    if gap <= allowed:
        return Claim("probe", subject, Verdict.PASS, f"{message}.", details)
    if gap * (size or 1.0) <= rounding():
        return Claim("probe", subject, Verdict.INCONCLUSIVE, f"{message}{_BY_ROUNDING}.", details)
    return Claim("probe", subject, Verdict.FAIL, f"{message}.", details)
