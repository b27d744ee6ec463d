"""The probe layer of a certificate: identities tried on the compiled code itself."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Interpreter, Node

from torchguard.compiled.claims import Claim, Verdict
from torchguard.compiled.executables import Executables, Graphs
from torchguard.compiled.nodes import op_name
from torchguard.compiled.probe import adjoint_gap, random_like
from torchguard.exceptions import CompileError, MissingRuleError

if TYPE_CHECKING:
    from torchguard.compiled.functions import CompiledOut

_STEPS = [2.0**-k for k in range(2, 13)]
_ROUNDING_MAY_BE = 16  # times what eager mode's is


def probe_claims(made: "CompiledOut", point: tuple[Tensor, ...], seed: int) -> Iterator[Claim]:
    """Value, adjoint identity, Taylor remainder, linearity and parts, at one point and in random directions."""
    yield from _value_claims(made, point)
    tangents, seeds = made.directions
    v, u = random_like(tangents.types, seed), random_like(tangents.types, seed + 2)
    w, z = random_like(seeds.types, seed + 1), random_like(seeds.types, seed + 3)
    if not v or not w:
        yield Claim("probe", "derivatives", Verdict.INCONCLUSIVE, "No leaf or no output is differentiable.")
        return
    try:
        pushed = [made.derivative_at("jvp", point, direction, w) for direction in (v, u, _mix(v, u))]
        yield _linear(made, "jvp", "tangent", pushed)
        yield _taylor(made, point, v, pushed[0])
        yield _in_parts(made, "jvp", point, v, w, pushed[0])
    except MissingRuleError as error:
        pushed = []
        yield Claim("probe", "jvp", Verdict.INCONCLUSIVE, f"There is none: {error}")
    try:
        pulled = [made.derivative_at("vjp", point, v, direction) for direction in (w, z, _mix(w, z))]
        yield _linear(made, "vjp", "seed", pulled)
        yield _in_parts(made, "vjp", point, v, w, pulled[0])
    except MissingRuleError as error:
        pulled = []
        yield Claim("probe", "vjp", Verdict.INCONCLUSIVE, f"There is none: {error}")
    if pushed and pulled:
        gap = adjoint_gap(v, pushed[0], w, pulled[0], made.graphs.tolerance)
        details = {"left": gap.left, "right": gap.right, "relative": gap.relative, "tolerance": gap.tolerance}
        verdict = Verdict.INCONCLUSIVE if not gap.is_finite else Verdict.PASS if gap.is_small else Verdict.FAIL
        yield Claim("probe", "vjp", verdict, f"<Jv, w> and <v, J'w> differ by {gap.relative:.1e}.", _finite(details))


def _value_claims(made: "CompiledOut", point: tuple[Tensor, ...]) -> Iterator[Claim]:
    compiled = made.value_at(point)
    eager = Executables(made.graphs, "eager")["forward"]([*point])
    gap, allowed = _distance(compiled, eager), made.graphs.tolerance
    yield _claim("forward", gap <= allowed, f"It differs from eager mode by {gap:.1e}.", gap, allowed)
    exact = _in_float64(made, point)
    if exact is None:
        yield Claim("probe", "forward", Verdict.INCONCLUSIVE, "It cannot be run in float64.")
        return
    gap, of_eager = _distance(compiled, exact), _distance(eager, exact)
    allowed = max(_ROUNDING_MAY_BE * of_eager, made.graphs.tolerance**2)
    says = f"It is {gap:.1e} away from float64, and eager mode {of_eager:.1e}."
    yield _claim("forward", gap <= allowed, says, gap, allowed)


def _in_float64(made: "CompiledOut", point: tuple[Tensor, ...]) -> list[Tensor] | None:
    """The value by eager mode with every floating point leaf in float64; None where the function fixes its dtypes."""
    wide = [leaf.double() if leaf.is_floating_point() else leaf for leaf in point]
    types = [
        replace(t, dtype=leaf.dtype, stride=tuple(leaf.stride())) for t, leaf in zip(made.leaves, wide, strict=True)
    ]
    try:
        graphs = Graphs(replace(made.program, leaves=tuple(types)))
        return list(Executables(graphs, "eager")["forward"](wide))
    except (CompileError, RuntimeError):
        return None


def _mix(left: Sequence[Tensor], right: Sequence[Tensor]) -> list[Tensor]:
    """A combination whose weights are powers of two, so that none of it is rounded more than the parts are."""
    return [0.5 * a - 2 * b for a, b in zip(left, right, strict=True)]


def _in_parts(made: "CompiledOut", base: str, point: tuple[Tensor, ...], v: Any, w: Any, whole: list[Tensor]) -> Claim:
    """What `vjp` and `linearize` run is other code than that of one run."""
    gap, allowed = _distance(made.derivative_at(f"{base}_split", point, v, w), whole), made.graphs.tolerance
    return _claim(base, gap <= allowed, f"In two parts it differs from one run by {gap:.1e}.", gap, allowed)


def _linear(made: "CompiledOut", subject: str, what: str, results: Sequence[list[Tensor]]) -> Claim:
    first, second, both = results
    gap, allowed = _distance(both, _mix(first, second)), made.graphs.tolerance
    return _claim(subject, gap <= allowed, f"It is linear in the {what} up to {gap:.1e}.", gap, allowed)


def _taylor(made: "CompiledOut", point: tuple[Tensor, ...], v: Sequence[Tensor], pushed: Sequence[Tensor]) -> Claim:
    """f(x + hv) - f(x) - h Jv shrinks with the square of h, as far as rounding lets it be seen."""
    value = _smooth(made, made.value_at(point))
    noise = 64 * made.graphs.eps * (1 + _norm(value))
    lengths = _norm(v) or 1.0
    remainders = []
    for h in _STEPS:
        queue = iter(v)
        step = h / lengths
        moved = [x + step * next(queue) if t.differentiable else x for x, t in zip(point, made.leaves, strict=True)]
        moved = [_like(new, x) for new, x in zip(moved, point, strict=True)]
        there = _smooth(made, made.value_at(moved))
        left = [a.double() - b.double() - step * d.double() for a, b, d in zip(there, value, pushed, strict=True)]
        remainders.append((h, _norm(left)))
    seen = [(h, r) for h, r in remainders if r > noise and math.isfinite(r)]
    if not all(math.isfinite(r) for _, r in remainders):
        return Claim("probe", "jvp", Verdict.INCONCLUSIVE, "The value is not finite nearby.")
    if len(seen) < 3 and 0 < _STEPS[0] / lengths * _norm(pushed) <= noise:
        return Claim("probe", "jvp", Verdict.INCONCLUSIVE, "Rounding hides whether the value follows its derivative.")
    if len(seen) < 3:
        return Claim("probe", "jvp", Verdict.PASS, "The Taylor remainder is within rounding.", {"slope": None})
    slope = _slope(seen)
    excuse = _excuse(made, point, seen)
    verdict = Verdict.PASS if slope >= 1.7 else Verdict.FAIL if slope <= 1.3 and not excuse else Verdict.INCONCLUSIVE
    says = f"The Taylor remainder shrinks with slope {slope:.2f}; 2 is right{excuse}."
    return Claim("probe", "jvp", verdict, says, {"slope": slope})


def _excuse(made: "CompiledOut", point: tuple[Tensor, ...], seen: Sequence[tuple[float, float]]) -> str:
    """Why a remainder may be large though the derivative is right; nothing where there is no reason."""
    if made.kinks:
        return ", and kinks may lower it"
    if any(op_name(node) == "detach" for node in made.graph.nodes):
        return ", and what is detached moves all the same"
    inside = _Rounding(made.graphs.forward)
    inside.run(*point)
    if sum(r > 64 * inside.largest for _, r in seen) < 3:
        return ", and rounding inside is as large"
    return ""


class _Rounding(Interpreter):
    """Runs a graph, and keeps the largest rounding error a value in it may have."""

    largest = 0.0

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and value.is_floating_point():
            size = torch.finfo(value.dtype).eps * _norm([value])
            self.largest = max(self.largest, size if math.isfinite(size) else 0.0)
        return value


def _slope(seen: Sequence[tuple[float, float]]) -> float:
    """The slope of a line through the logarithms, of the smallest steps that tell something: those are most alike."""
    pairs = [(math.log(h), math.log(r)) for h, r in seen][-5:]
    x, y = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    return sum((a - x) * (b - y) for a, b in pairs) / sum((a - x) ** 2 for a, _ in pairs)


def _smooth(made: "CompiledOut", outputs: Sequence[Tensor]) -> list[Tensor]:
    return [out for out, chosen in zip(outputs, made.directions[1].chosen, strict=True) if chosen]


def _like(new: Tensor, old: Tensor) -> Tensor:
    return (
        new
        if new.stride() == old.stride()
        else torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=old.device).copy_(new)
    )


def _norm(values: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in values))


def _distance(found: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """How far apart two lists of tensors are, relative to the second; what is not finite has to be the same."""
    left, other = [t.double().reshape(-1) for t in found], [t.double().reshape(-1) for t in right]
    total, size = 0.0, 0.0
    for a, b in zip(left, other, strict=True):
        same = (a == b) | (a.isnan() & b.isnan())
        total += float(torch.where(same, 0.0, a - b).square().sum())
        size += float(torch.where(b.isfinite(), b, 0.0).square().sum())
    gap = math.sqrt(total) / math.sqrt(size) if size > 0 else math.sqrt(total)
    return gap if math.isfinite(gap) else math.inf


def _claim(subject: str, holds: bool, says: str, gap: float, allowed: float) -> Claim:
    details = _finite({"gap": gap, "allowed": allowed})
    return Claim("probe", subject, Verdict.PASS if holds else Verdict.FAIL, says, details)


def _finite(details: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity."""
    return {key: value if math.isfinite(value) else str(value) for key, value in details.items()}
