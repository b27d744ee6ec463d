"""Are torch's derivative graphs the derivatives of a graph? Do two graphs compute the same function?

Both are asked at random points of a prime field, where arithmetic is exact, with a rule of our own for the value and
the tangent of each operator. What torch knows of derivatives is not used: its graphs are what is tested.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from torchguard.compiled._nodes import on_the_cpu, op_name
from torchguard.compiled.certify._claims import Claim, Json, Verdict
from torchguard.compiled.certify.algebra._evaluate import evaluate, unsupported_ops
from torchguard.compiled.certify.algebra._field import Field, UnfitError, UnsupportedError
from torchguard.compiled.certify.algebra._points import Places, drawn, placeholders, point
from torchguard.compiled.certify.algebra._trials import Case, Outcome, Trials
from torchguard.compiled.certify.algebra._values import Value
from torchguard.exceptions import GraphMismatchError

TRIALS = 4


def _evaluated(gm: GraphModule, inputs: Sequence[Value], f: Field) -> tuple[list[Any], bool]:
    """The outputs of a graph, and whether it divides by zero on the way."""
    f.journal.zero_divisions.clear()
    return evaluate(gm, inputs, f), bool(f.journal.zero_divisions)


def check_derivatives(
    forward: GraphModule,
    jvp: GraphModule | None,
    vjp: GraphModule | None,
    *,
    differentiable: Sequence[bool],
    seed: int = 0,
) -> tuple[Claim, ...]:
    """One claim for each derivative graph given: that it is the derivative of the forward graph."""
    leaves = placeholders(forward, "forward")
    if len(leaves) != len(differentiable):
        raise GraphMismatchError(f"forward takes {len(leaves)} leaves, but differentiable has {len(differentiable)}.")
    function = _Function(forward, tuple(leaves), tuple(differentiable))
    checks = {
        "jvp": (jvp, function.jvp_trial, lambda f, gm: function.tangents(f)),
        "vjp": (vjp, function.vjp_trial, function.seeds),
    }
    return tuple(
        _claim(
            subject,
            Case(
                (forward, gm),
                function.leaves,
                lambda f, places, gm=gm, trial=trial: trial(gm, f, places),
                lambda f, gm=gm, moving=moving: moving(f, gm),
            ),
            seed,
            TRIALS,
        )
        for subject, (gm, trial, moving) in checks.items()
        if gm is not None
    )


def equivalent(g1: GraphModule, g2: GraphModule, *, seed: int = 0, trials: int = TRIALS) -> Claim:
    """Whether two graphs compute the same function, as far as our table of operators reaches.

    Raises:
        GraphMismatchError: they do not take and return the same things.
    """
    leaves = placeholders(g1, "the first graph")
    _require_same_signature(leaves, placeholders(g2, "the second graph"))

    def trial(f: Field, places: Places) -> Outcome:
        inputs = point(f, leaves, places)
        (first, is_singular), (second, is_other) = (_evaluated(gm, inputs, f) for gm in (g1, g2))
        if len(first) != len(second):
            raise GraphMismatchError(f"The first graph returns {len(first)} values, the second {len(second)}.")
        return Outcome(tuple(_differing("output", first, second)), is_singular and is_other)

    return _claim("equivalence", Case((g1, g2), tuple(leaves), trial), seed, trials)


def _require_same_signature(first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
    if len(first) != len(second):
        raise GraphMismatchError(f"The first graph takes {len(first)} tensors, the second {len(second)}.")
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise GraphMismatchError(
                f"Input {i}: the first graph takes {_type(a)}, the second {_type(b)}. Only graphs of one signature "
                "can be compared."
            )


def _type(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"


@dataclass(frozen=True)
class _Function:
    """A forward graph with its leaves, evaluated by our own rules."""

    forward: GraphModule
    leaves: tuple[Tensor, ...]
    differentiable: tuple[bool, ...]

    def jvp_trial(self, gm: GraphModule, f: Field, places: Places) -> Outcome:
        inputs, outputs, is_singular = self._forward(f, places)
        results = evaluate(gm, [*(x.without_tangent() for x in inputs), *self.tangents(f)], f)
        ours = [_tangent(y) for y in outputs if not y.is_exact]
        _require(len(results), len(outputs) + len(ours), "jvp")
        wrong = _differing("output", outputs, results[: len(outputs)])
        wrong += _differing("tangent of output", ours, results[len(outputs) :])
        return Outcome(tuple(wrong), is_singular)

    def vjp_trial(self, gm: GraphModule, f: Field, places: Places) -> Outcome:
        inputs, outputs, is_singular = self._forward(f, places)
        smooth = [y for y in outputs if not y.is_exact]
        _require(len(placeholders(gm, "vjp")), len(inputs) + len(smooth), "vjp", "takes")
        seeds = self.seeds(f, gm)
        results = evaluate(gm, [*(x.without_tangent() for x in inputs), *seeds], f)
        _require(len(results), len(outputs) + sum(self.differentiable), "vjp")
        wrong = _differing("output", outputs, results[: len(outputs)])
        moved = [x for x in inputs if x.tangent is not None]
        gradients = results[len(outputs) :]
        if _pairing(f, seeds, [_tangent(y) for y in smooth]) != _pairing(f, gradients, [_tangent(x) for x in moved]):
            wrong += self._wrong_gradients(f, inputs, seeds, gradients) or ["the gradients"]
        return Outcome(tuple(wrong), is_singular)

    def tangents(self, f: Field) -> list[Value]:
        """What a JVP graph takes beside the leaves."""
        moved = (i for i, is_moved in enumerate(self.differentiable) if is_moved)
        return [drawn(f, f"tangent {i}", self.leaves[i].shape) for i in moved]

    def seeds(self, f: Field, gm: GraphModule) -> list[Value]:
        """What a VJP graph takes beside the leaves."""
        taken = placeholders(gm, "vjp")[len(self.leaves) :]
        return [drawn(f, f"seed {i}", seed.shape) for i, seed in enumerate(taken)]

    def _forward(self, f: Field, places: Places) -> tuple[list[Value], list[Any], bool]:
        inputs = [
            replace(x, tangent=drawn(f, f"tangent {i}", x.shape).element) if is_moved else x
            for i, (x, is_moved) in enumerate(zip(point(f, self.leaves, places), self.differentiable, strict=True))
        ]
        return inputs, *_evaluated(self.forward, inputs, f)

    def _wrong_gradients(self, f: Field, inputs: list[Value], seeds: list[Value], gradients: list[Any]) -> list[str]:
        """Which leaves have a wrong gradient: each is moved alone."""
        wrong, moved = [], [i for i, x in enumerate(inputs) if x.tangent is not None]
        for place, gradient in zip(moved, gradients, strict=True):
            alone = [x if i == place else x.without_tangent() for i, x in enumerate(inputs)]
            smooth = [y for y in evaluate(self.forward, alone, f) if not y.is_exact]
            ours = _pairing(f, seeds, [_tangent(y) for y in smooth])
            if ours != _pairing(f, [gradient], [_tangent(inputs[place])]):
                wrong.append(f"gradient of leaf {place}")
        return wrong


def _require(got: int, expected: int, subject: str, verb: str = "returns") -> None:
    if got != expected:
        raise GraphMismatchError(f"{subject} {verb} {got} values, where the forward graph asks for {expected}.")


def _tangent(x: Value) -> Value:
    return Value(x.field, torch.zeros_like(x.element) if x.tangent is None else x.tangent)


def _pairing(f: Field, left: Sequence[Any], right: Sequence[Value]) -> int:
    """The sum of all products of corresponding elements; a gradient that is None is zero. -1 if shapes differ."""
    pairs = [(a.as_elements().element, b.element) for a, b in zip(left, right, strict=True) if a is not None]
    if any(a.shape != b.shape for a, b in pairs):
        return -1
    return sum(int(f.mul(a, b).sum()) for a, b in pairs) % f.prime


def _differing(what: str, ours: Sequence[Any], theirs: Sequence[Any]) -> list[str]:
    return [f"{what} {i}" for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not _is_same(a, b)]


def _is_same(a: Any, b: Any) -> bool:
    if not isinstance(a, Value) or not isinstance(b, Value):
        return a is b
    if not (a.is_exact and b.is_exact):
        a, b = a.as_elements(), b.as_elements()
    return a.shape == b.shape and bool((a.element == b.element).all())


def _claim(subject: str, case: Case, seed: int, trials: int) -> Claim:
    def ended(verdict: Verdict, says: str, **details: Json) -> Claim:
        return Claim("algebraic", subject, verdict, says, details)

    if names := unsupported_ops(*case.graphs):
        return ended(Verdict.INCONCLUSIVE, f"There is no rule for {', '.join(names)}.", unsupported=list(names))
    tried = Trials(case, seed)
    try:
        with on_the_cpu():
            outcomes = list(tried.run(trials))
    except UnsupportedError as error:
        return ended(Verdict.INCONCLUSIVE, f"There is no rule for {error}.", unsupported=[str(error)])
    except UnfitError as error:
        return ended(Verdict.INCONCLUSIVE, f"There is no rule that takes {error}.", unsupported=[str(error)])
    wrong = [o for o in outcomes if o.wrong]
    count: dict[str, Json] = {"trials": len(outcomes), "seed": seed}
    if any(not o.is_singular for o in wrong):
        names = sorted({name for o in wrong for name in o.wrong})
        says = f"Wrong: {', '.join(names)}.{_known_reason(subject, case.graphs[0])}"
        return ended(Verdict.FAIL, says, wrong=list(names), **count)
    if wrong:
        return ended(Verdict.INCONCLUSIVE, "It divides by zero wherever it was tried, and differs there.", **count)
    same = "They agree" if subject == "equivalence" else "It is the derivative of the forward graph"
    says = f"{same} at {len(outcomes)} random points of a prime field"
    if never := tried.never_taken():
        says += f", but one way of {', '.join(never)} was taken at none of them."
        return ended(Verdict.INCONCLUSIVE, says, never_taken=list(never), **count)
    says += "." + " Some of what it divides by was zero there." * any(o.is_singular for o in outcomes)
    return ended(Verdict.PASS, says, **count)


def _known_reason(subject: str, forward: GraphModule) -> str:
    """Where torch is known to return something else than a derivative, on purpose."""
    if subject != "vjp":
        return ""
    called = [node for node in forward.graph.nodes if node.op == "call_function"]
    if any(op_name(node) == "embedding" and len(node.args) > 2 and node.args[2] != -1 for node in called):
        return (
            " The VJP of an embedding with padding_idx leaves that row out, which is torch's choice and no derivative."
        )
    if any(op_name(node) == "linalg_cholesky_ex" for node in called):
        return (
            " The VJP of cholesky is symmetric, though only one triangle is read, which is torch's choice and no "
            "derivative. Take the factor of (a + a.mT) / 2."
        )
    return ""
