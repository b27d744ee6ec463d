"""The probe layer of a certificate: identities tried on the compiled code itself."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torchguard.compiled.claims import Claim, Verdict
from torchguard.compiled.executables import Executables
from torchguard.compiled.probe import adjoint_gap, random_like
from torchguard.compiled.taylor import ROUNDING_MAY_BE, distance, in_float64, taylor_claim
from torchguard.exceptions import CompileError, MissingRuleError

if TYPE_CHECKING:
    from torchguard.compiled.functions import CompiledOut


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
