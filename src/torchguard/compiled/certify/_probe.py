"""The probe layer of a certificate: identities tried on the compiled code itself.

The Taylor probe: what is left of f(x + hv) - f(x) - h Jv has to shrink with the square of h.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Interpreter, Node

from torchguard.compiled._executables import Executables, Graphs
from torchguard.compiled._nodes import op_name
from torchguard.compiled.certify._adjoint import adjoint_gap, random_like
from torchguard.compiled.certify._claims import Claim, Verdict
from torchguard.exceptions import CompileError, MissingRuleError

if TYPE_CHECKING:
    from torchguard.compiled._functions import CompiledOut


_STEPS = [2.0**-k for k in range(2, 13)]
# In float64 a step may be so small that any function looks smooth: one that turns 1e4 times within a unit, say.
_SMALLER_STEPS = [2.0**-k for k in range(2, 41)]
_TIMES_THE_FLOOR = 8
ROUNDING_MAY_BE = 16  # times what eager mode's is


@dataclass(frozen=True)
class _Trial:
    """A value near a point and its derivative there. What is less than `noise` is rounding.

    Args:
        floor: how many steps, the last ones, are so small that rounding is all there is to be seen at them.
    """

    value: Callable[[Sequence[Tensor]], list[Tensor]]
    point: tuple[Tensor, ...]
    tangents: tuple[Tensor | None, ...]
    pushed: Sequence[Tensor]
    steps: Sequence[float]
    noise: float
    floor: int = 0

    def seen(self) -> list[tuple[float, float]]:
        """Steps with what is left at them, where it is more than rounding. If any is not finite, that is all."""
        here, length = self.value(self.point), norm([v for v in self.tangents if v is not None]) or 1.0
        left = []
        for h in self.steps:
            step = h / length
            pairs = zip(self.point, self.tangents, strict=True)
            there = self.value([x if v is None else _like(x + step * v, x) for x, v in pairs])
            triples = zip(there, here, self.pushed, strict=True)
            rest = [a.double() - b.double() - step * d.double() for a, b, d in triples]
            left.append((h, norm(rest)))
        noise = max([self.noise, *(_TIMES_THE_FLOOR * r for _, r in left[len(left) - self.floor :])])
        is_finite = all(math.isfinite(r) for _, r in left)
        return [(h, r) for h, r in left if r > noise] if is_finite else [(0.0, math.inf)]

    def is_hidden(self) -> bool:
        """Whether rounding is as large as the derivative itself, even at the largest step."""
        length = norm([v for v in self.tangents if v is not None]) or 1.0
        return 0 < self.steps[0] / length * norm(self.pushed) <= self.noise


def taylor_claim(made: "CompiledOut", point: tuple[Tensor, ...], v: Sequence[Tensor], pushed: list[Tensor]) -> Claim:
    """What compiled values say of a compiled derivative; and, where that is no good, what values in float64 say."""
    run = lambda x: _smooth(made, made.value_at(x))  # noqa: E731
    queue = iter(v)
    tangents = tuple(next(queue) if leaf.differentiable else None for leaf in made.leaves)
    noise = 64 * made.graphs.eps * (1 + norm(run(point)))
    trial = _Trial(run, point, tangents, pushed, _STEPS, noise)
    excuse = lambda seen: _excuse(made, point, seen)  # noqa: E731
    claim = _claim_of(trial, excuse)
    if claim.verdict is not Verdict.FAIL:
        return claim
    exact = in_float64(made, point)
    return claim if exact is None else _again(made, exact, trial, v) or claim


def in_float64(made: "CompiledOut", point: tuple[Tensor, ...]) -> tuple[Graphs, list[Tensor]] | None:
    """The function and a point with every floating point leaf in float64; None where the function fixes its dtypes."""
    wide = [leaf.double() if leaf.is_floating_point() else leaf for leaf in point]
    pairs = zip(made.leaves, wide, strict=True)
    types = [replace(t, dtype=leaf.dtype, stride=tuple(leaf.stride())) for t, leaf in pairs]
    try:
        return Graphs(replace(made.program, leaves=tuple(types))), wide
    except (CompileError, RuntimeError):
        return None


def _again(made: "CompiledOut", exact: tuple[Graphs, list[Tensor]], trial: _Trial, v: Sequence[Tensor]) -> Claim | None:
    """The same in float64 and with smaller steps, if the compiled derivative is as near to that as eager mode's."""
    graphs, point = exact
    count, eager = len(graphs.outputs), Executables(graphs, "eager")
    in_eager_mode = Executables(made.graphs, "eager")["jvp"]([*trial.point, *v])[count:]
    tangents = [None if one is None else one.double() for one in trial.tangents]
    pushed = list(eager["jvp"]([*point, *(one for one in tangents if one is not None)])[count:])
    allowed = max(ROUNDING_MAY_BE * distance(in_eager_mode, pushed), made.graphs.tolerance**2)
    if distance(trial.pushed, pushed) > allowed or not all(out.dtype == torch.float64 for out in pushed):
        return None
    value = lambda x: _smooth(made, eager["forward"]([*x]))  # noqa: E731
    noise = graphs.eps * (1 + norm(value(point)))
    again = _Trial(value, tuple(point), tuple(tangents), pushed, _SMALLER_STEPS, noise, floor=4)
    claim = _claim_of(again, lambda seen: "")
    return replace(claim, says=f"In float64: {claim.says}")


def _claim_of(trial: _Trial, excuse: Callable[[list[tuple[float, float]]], str]) -> Claim:
    seen = trial.seen()
    if any(math.isinf(r) for _, r in seen):
        return Claim("probe", "jvp", Verdict.INCONCLUSIVE, "The value is not finite nearby.")
    if len(seen) < 3 and trial.is_hidden():
        return Claim("probe", "jvp", Verdict.INCONCLUSIVE, "Rounding hides whether the value follows its derivative.")
    if len(seen) < 3:
        return Claim("probe", "jvp", Verdict.PASS, "The Taylor remainder is within rounding.", {"slope": None})
    slope, reason = _slope(seen), excuse(seen)
    verdict = Verdict.PASS if slope >= 1.7 else Verdict.FAIL if slope <= 1.3 and not reason else Verdict.INCONCLUSIVE
    says = f"The Taylor remainder shrinks with slope {slope:.2f}; 2 is right{reason}."
    return Claim("probe", "jvp", verdict, says, {"slope": slope})


def _excuse(made: "CompiledOut", point: tuple[Tensor, ...], seen: Sequence[tuple[float, float]]) -> str:
    """Why a remainder may be large though the derivative is right; nothing where there is no reason."""
    if made.nonsmooth_points:
        return ", and kinks may lower it"
    if any(op_name(node) == "detach" for node in made.graph.nodes):
        return ", and what is detached moves all the same"
    rounding = _largest_rounding(made.graphs, point)
    if sum(r > 64 * rounding for _, r in seen) < 3:
        return ", and rounding inside is as large"
    return ""


def _largest_rounding(graphs: Graphs, point: Sequence[Tensor]) -> float:
    """The largest rounding error a value inside may have at a point."""
    inside = _Rounding(graphs.forward)
    with torch.no_grad():
        inside.run(*point)
    return inside.largest


class _Rounding(Interpreter):
    largest = 0.0

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and value.is_floating_point():
            size = torch.finfo(value.dtype).eps * norm([value])
            self.largest = max(self.largest, size if math.isfinite(size) else 0.0)
        return value


def _slope(seen: Sequence[tuple[float, float]]) -> float:
    """The slope of a line through the logarithms, of the smallest steps that tell something: those are most alike."""
    pairs = [(math.log(h), math.log(r)) for h, r in seen][-5:]
    x, y = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    return sum((a - x) * (b - y) for a, b in pairs) / sum((a - x) ** 2 for a, _ in pairs)


def _smooth(made: "CompiledOut", outputs: Sequence[Tensor]) -> list[Tensor]:
    return [out for out, chosen in zip(outputs, made.cotangents.differentiable, strict=True) if chosen]


def _like(new: Tensor, old: Tensor) -> Tensor:
    if new.stride() == old.stride():
        return new
    return torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=old.device).copy_(new)


def norm(values: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in values))


def distance(found: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """How far apart two lists of tensors are, relative to the second; what is not finite has to be the same."""
    left, other = [t.double().reshape(-1) for t in found], [t.double().reshape(-1) for t in right]
    total, size = 0.0, 0.0
    for a, b in zip(left, other, strict=True):
        same = (a == b) | (a.isnan() & b.isnan())
        total += float(torch.where(same, 0.0, a - b).square().sum())
        size += float(torch.where(b.isfinite(), b, 0.0).square().sum())
    gap = math.sqrt(total) / math.sqrt(size) if size > 0 else math.sqrt(total)
    return gap if math.isfinite(gap) else math.inf


def probe_claims(made: "CompiledOut", point: tuple[Tensor, ...], seed: int) -> Iterator[Claim]:
    """Value, adjoint identity, Taylor remainder, linearity and parts, at one point and in random directions."""
    yield from _value_claims(made, point)
    tangents, seeds = made.tangents, made.cotangents
    v, u = random_like(tangents.types, seed), random_like(tangents.types, seed + 2)
    w, z = random_like(seeds.types, seed + 1), random_like(seeds.types, seed + 3)
    if not v or not w:
        yield Claim("probe", "derivatives", Verdict.INCONCLUSIVE, "No leaf or no output is differentiable.")
        return
    try:
        pushed = [made.derivative_at("jvp", point, direction, w) for direction in (v, u, _mix(v, u))]
        yield _linear(made, "jvp", "tangent", pushed)
        yield taylor_claim(made, point, v, pushed[0])
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
    gap, allowed = distance(compiled, eager), made.graphs.tolerance
    yield _claim("forward", gap <= allowed, f"It differs from eager mode by {gap:.1e}.", gap, allowed)
    exact = _by_float64(made, point)
    if exact is None:
        yield Claim("probe", "forward", Verdict.INCONCLUSIVE, "It cannot be run in float64.")
        return
    gap, of_eager = distance(compiled, exact), distance(eager, exact)
    allowed = max(ROUNDING_MAY_BE * of_eager, made.graphs.tolerance**2)
    says = f"It is {gap:.1e} away from float64, and eager mode {of_eager:.1e}."
    yield _claim("forward", gap <= allowed, says, gap, allowed)


def _by_float64(made: "CompiledOut", point: tuple[Tensor, ...]) -> list[Tensor] | None:
    """The value by eager mode in float64; None where the function fixes its dtypes."""
    found = in_float64(made, point)
    try:
        return None if found is None else list(Executables(found[0], "eager")["forward"](found[1]))
    except (CompileError, RuntimeError):
        return None


def _mix(left: Sequence[Tensor], right: Sequence[Tensor]) -> list[Tensor]:
    """A combination whose weights are powers of two, so that none of it is rounded more than the parts are."""
    return [0.5 * a - 2 * b for a, b in zip(left, right, strict=True)]


def _in_parts(made: "CompiledOut", base: str, point: tuple[Tensor, ...], v: Any, w: Any, whole: list[Tensor]) -> Claim:
    """What `vjp` and `linearize` run is other code than that of one run."""
    gap, allowed = distance(made.derivative_at(f"{base}_split", point, v, w), whole), made.graphs.tolerance
    return _claim(base, gap <= allowed, f"In two parts it differs from one run by {gap:.1e}.", gap, allowed)


def _linear(made: "CompiledOut", subject: str, what: str, results: Sequence[list[Tensor]]) -> Claim:
    first, second, both = results
    gap, allowed = distance(both, _mix(first, second)), made.graphs.tolerance
    return _claim(subject, gap <= allowed, f"It is linear in the {what} up to {gap:.1e}.", gap, allowed)


def _claim(subject: str, holds: bool, says: str, gap: float, allowed: float) -> Claim:
    details = _finite({"gap": gap, "allowed": allowed})
    return Claim("probe", subject, Verdict.PASS if holds else Verdict.FAIL, says, details)


def _finite(details: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity."""
    return {key: value if math.isfinite(value) else str(value) for key, value in details.items()}
