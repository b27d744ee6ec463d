"""Are torch's derivative graphs the derivatives of a graph? Do two graphs compute the same function?

Both questions are decided at random points of a prime field, where arithmetic is exact, by torchguard's own rule for
the value and the tangent of each operator. Torch's derivative formulas are not used: its graphs are what is tested.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from torchguard.compiled._nodes import on_the_cpu, op_name
from torchguard.compiled.certify._certificate import Claim, Json, Verdict
from torchguard.compiled.certify.algebra._evaluate import evaluate, evaluate_in_float64, unsupported_ops, with_rules
from torchguard.compiled.certify.algebra._field import EvaluationError, PrimeField, UnsupportedError
from torchguard.compiled.certify.algebra._sampling import Sampler
from torchguard.compiled.certify.algebra._search import Comparison, InReals, SampleResult, Search
from torchguard.compiled.certify.algebra._values import Value
from torchguard.exceptions import GraphMismatchError

_SAMPLES = 4
# At how many points graphs have to agree that differ at others, where the function divides by zero.
_AGREEING = 2
# How much real numbers that are equal may differ by rounding in float64, relative to the largest. Torch computes some
# second derivatives from a rounded result, as that of batch norm from the root of the variance.
_TOLERANCE, _TOLERANCE_OF_HVP = 1e-10, 1e-6


def check_derivatives(
    forward: GraphModule,
    jvp: GraphModule | None,
    vjp: GraphModule | None,
    *,
    hvp: GraphModule | None = None,
    differentiable: Sequence[bool],
    seed: int = 0,
) -> tuple[Claim, ...]:
    """One claim for each derivative graph given: that it is the derivative of the forward graph, or of the VJP graph.

    Args:
        forward: takes the leaves, and returns the outputs.
        jvp: takes the leaves and a tangent for each differentiable leaf; returns the outputs and their tangents.
        vjp: takes the leaves and a cotangent for each floating-point output; returns the outputs and a gradient for
            each differentiable leaf.
        hvp: takes the leaves, a tangent for each differentiable leaf and a cotangent for each floating-point output;
            returns the tangents of the gradients that `vjp` returns, which is then required.
        differentiable: which leaves are.

    Raises:
        GraphMismatchError: the graphs do not take and return these.
    """
    forward = with_rules(forward)
    jvp, vjp, hvp = (None if gm is None else with_rules(gm) for gm in (jvp, vjp, hvp))
    leaves = _leaves(forward, "forward")
    if len(leaves) != len(differentiable):
        raise GraphMismatchError(f"forward takes {len(leaves)} leaves, but differentiable has {len(differentiable)}.")
    function = _Function(forward, tuple(leaves), tuple(differentiable))
    comparisons = {
        "jvp": None if jvp is None else function.comparison_with_jvp(jvp),
        "vjp": None if vjp is None else function.comparison_with_vjp(vjp),
        "hvp": None if vjp is None or hvp is None else function.comparison_with_hvp(vjp, hvp),
    }
    claims = (_claim(subject, one, seed, _SAMPLES) for subject, one in comparisons.items() if one is not None)
    has_detached = any(op_name(node) == "detach" for node in forward.graph.nodes)
    return tuple(_with_detached(claim) if has_detached else claim for claim in claims)


def _with_detached(claim: Claim) -> Claim:
    """A claim about a function that detaches values: its VJP graph does not tell which of them are constants."""
    if claim.subject != "hvp" or claim.verdict is not Verdict.FAIL:
        return claim
    message = "It is not the derivative of the VJP graph, but the function detaches values, which are constants."
    return replace(claim, verdict=Verdict.INCONCLUSIVE, message=message)


def equivalent(g1: GraphModule, g2: GraphModule, *, seed: int = 0, samples: int = _SAMPLES) -> Claim:
    """Whether two graphs compute the same function.

    Args:
        samples: the number of points that are drawn freely; further ones follow where the graphs compare numbers.

    Raises:
        GraphMismatchError: the graphs do not take the same tensors, or do not return the same number of values.
    """
    leaves = _leaves(g1, "the first graph")
    g1, g2 = with_rules(g1), with_rules(g2)
    _require_same_signature(leaves, _leaves(g2, "the second graph"))

    def compare(sampler: Sampler) -> SampleResult:
        inputs = sampler.point(leaves)
        (first, is_first_singular), (second, is_second_singular) = (
            _outputs(gm, inputs, sampler.field) for gm in (g1, g2)
        )
        if len(first) != len(second):
            raise GraphMismatchError(f"The first graph returns {len(first)} values, the second {len(second)}.")
        return SampleResult(tuple(_differing("output", first, second)), is_first_singular and is_second_singular)

    return _claim("equivalence", Comparison((g1, g2), tuple(leaves), compare), seed, samples)


def _leaves(gm: GraphModule, name: str) -> list[Tensor]:
    """The inputs of a graph, as the fake tensors that its placeholders record."""
    nodes = gm.graph.find_nodes(op="placeholder")
    untyped = [node.name for node in nodes if not isinstance(node.meta.get("val"), Tensor)]
    if untyped:
        raise GraphMismatchError(
            f"{name}: the placeholders {', '.join(untyped)} have no meta['val']. Trace it with make_fx, or run "
            "torch.fx.passes.fake_tensor_prop.FakeTensorProp over it."
        )
    return [node.meta["val"] for node in nodes]


def _require_same_signature(first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
    if len(first) != len(second):
        raise GraphMismatchError(f"The first graph takes {len(first)} tensors, the second {len(second)}.")
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise GraphMismatchError(
                f"Input {i}: the first graph takes {_format_type(a)}, the second {_format_type(b)}. Only graphs of one "
                "signature can be compared."
            )


def _format_type(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"


def _outputs(gm: GraphModule, inputs: Sequence[Value], f: PrimeField) -> tuple[list[Any], bool]:
    """The outputs of a graph, and whether it divides by zero."""
    f.trace.zero_divisions.clear()
    return evaluate(gm, inputs, f), bool(f.trace.zero_divisions)


@dataclass(frozen=True)
class _Function:
    """A forward graph, evaluated with tangents by torchguard's rules."""

    forward: GraphModule
    leaves: tuple[Tensor, ...]
    differentiable: tuple[bool, ...]

    def comparison_with_jvp(self, gm: GraphModule) -> Comparison:
        tangents = lambda s: ([], self._tangents(s))  # noqa: E731
        return Comparison((self.forward, gm), self.leaves, lambda s: self._compare_jvp(gm, s), tangents)

    def comparison_with_vjp(self, gm: GraphModule) -> Comparison:
        cotangents = lambda s: ([], self._cotangents(gm, s))  # noqa: E731
        return Comparison((self.forward, gm), self.leaves, lambda s: self._compare_vjp(gm, s), cotangents)

    def comparison_with_hvp(self, vjp: GraphModule, gm: GraphModule) -> Comparison:
        def further(sampler: Sampler) -> tuple[list[Value], list[Value]]:
            cotangents = self._cotangents(vjp, sampler)
            return cotangents, [*self._tangents(sampler), *cotangents]

        return Comparison((vjp, gm), self.leaves, lambda s: self._compare_hvp(vjp, gm, s), further)

    def _compare_jvp(self, gm: GraphModule, sampler: Sampler) -> SampleResult:
        inputs, outputs, is_singular = self._evaluate_forward(sampler)
        arguments = [*(x.without_tangent() for x in inputs), *self._tangents(sampler)]
        results = evaluate(gm, arguments, sampler.field)
        tangents = [_tangent(y) for y in outputs if not y.is_integer]
        _require_count(len(results), len(outputs) + len(tangents), "jvp")
        mismatches = _differing("output", outputs, results[: len(outputs)])
        mismatches += _differing("tangent of output", tangents, results[len(outputs) :])

        def in_reals() -> InReals:
            expected = evaluate_in_float64(self.forward, inputs, self._tangents(sampler))
            known = [*expected, *(_tangent(y) for y in expected if not y.is_integer)]
            return _compare_in_reals(zip(known, evaluate_in_float64(gm, arguments), strict=True), _TOLERANCE)

        return _judged(mismatches, is_singular, in_reals)

    def _compare_vjp(self, gm: GraphModule, sampler: Sampler) -> SampleResult:
        f = sampler.field
        inputs, outputs, is_singular = self._evaluate_forward(sampler)
        floating = [y for y in outputs if not y.is_integer]
        _require_count(len(_leaves(gm, "vjp")), len(inputs) + len(floating), "vjp", "takes")
        cotangents = self._cotangents(gm, sampler)
        results = evaluate(gm, [*(x.without_tangent() for x in inputs), *cotangents], f)
        _require_count(len(results), len(outputs) + sum(self.differentiable), "vjp")
        mismatches = _differing("output", outputs, results[: len(outputs)])
        gradients = results[len(outputs) :]
        tangents = [_tangent(x) for x in inputs if x.tangent is not None]
        if _inner(f, cotangents, [_tangent(y) for y in floating]) != _inner(f, gradients, tangents):
            mismatches += self._wrong_gradients(f, inputs, cotangents, gradients) or ["the gradients"]

        def in_reals() -> InReals:
            tangents = self._tangents(sampler)
            expected = evaluate_in_float64(self.forward, inputs, tangents)
            found = evaluate_in_float64(gm, [*(x.without_tangent() for x in inputs), *cotangents])
            outer = zip(cotangents, (_tangent(y) for y in expected if not y.is_integer), strict=True)
            inner = zip(tangents, found[len(outputs) :], strict=True)
            values = _compare_in_reals(zip(expected, found[: len(outputs)], strict=True), _TOLERANCE)
            return _compare_inner_products(list(outer), list(inner)) if values is InReals.EQUAL else values

        return _judged(mismatches, is_singular, in_reals)

    def _compare_hvp(self, vjp: GraphModule, gm: GraphModule, sampler: Sampler) -> SampleResult:
        inputs, cotangents = self._inputs(sampler), self._cotangents(vjp, sampler)
        outputs, is_singular = _outputs(vjp, [*inputs, *cotangents], sampler.field)
        arguments = [*(x.without_tangent() for x in inputs), *self._tangents(sampler), *cotangents]
        results, count = evaluate(gm, arguments, sampler.field), sum(self.differentiable)
        _require_count(len(results), count, "hvp")
        mismatches = _differing("tangent of gradient", map(_tangent, outputs[len(outputs) - count :]), results)

        def in_reals() -> InReals:
            expected = evaluate_in_float64(vjp, [*inputs, *cotangents], self._tangents(sampler))
            found = evaluate_in_float64(gm, arguments)
            pairs = zip(map(_tangent, expected[len(outputs) - count :]), found, strict=True)
            own = [(y, y) for y in expected if isinstance(y, Value)]  # they have to be finite
            return _compare_in_reals([*own, *pairs], _TOLERANCE_OF_HVP)

        return _judged(mismatches, is_singular, in_reals)

    def _tangents(self, sampler: Sampler) -> list[Value]:
        """The tangents that a JVP graph takes after the leaves."""
        differentiable = [i for i, is_differentiable in enumerate(self.differentiable) if is_differentiable]
        return [sampler.elements(f"tangent {i}", self.leaves[i].shape) for i in differentiable]

    def _cotangents(self, gm: GraphModule, sampler: Sampler) -> list[Value]:
        """The cotangents that a VJP graph takes after the leaves."""
        outputs = _leaves(gm, "vjp")[len(self.leaves) :]
        return [sampler.elements(f"cotangent {i}", output.shape) for i, output in enumerate(outputs)]

    def _inputs(self, sampler: Sampler) -> list[Value]:
        """The leaves with their tangents."""
        tangents = iter(self._tangents(sampler))
        return [
            replace(x, tangent=next(tangents).element) if is_differentiable else x
            for x, is_differentiable in zip(sampler.point(self.leaves), self.differentiable, strict=True)
        ]

    def _evaluate_forward(self, sampler: Sampler) -> tuple[list[Value], list[Any], bool]:
        inputs = self._inputs(sampler)
        return inputs, *_outputs(self.forward, inputs, sampler.field)

    def _wrong_gradients(
        self, f: PrimeField, inputs: list[Value], cotangents: list[Value], gradients: list[Any]
    ) -> list[str]:
        """The leaves with a wrong gradient, found with a tangent for one leaf at a time."""
        wrong, differentiable = [], [i for i, x in enumerate(inputs) if x.tangent is not None]
        for leaf, gradient in zip(differentiable, gradients, strict=True):
            alone = [x if i == leaf else x.without_tangent() for i, x in enumerate(inputs)]
            tangents = [_tangent(y) for y in evaluate(self.forward, alone, f) if not y.is_integer]
            if _inner(f, cotangents, tangents) != _inner(f, [gradient], [_tangent(inputs[leaf])]):
                wrong.append(f"gradient of leaf {leaf}")
        return wrong


def _require_count(got: int, expected: int, subject: str, verb: str = "returns") -> None:
    if got != expected:
        raise GraphMismatchError(f"{subject} {verb} {got} values, but the forward graph requires {expected}.")


def _tangent(x: Value) -> Value:
    return Value(x.field, torch.zeros_like(x.element) if x.tangent is None else x.tangent)


def _inner(f: PrimeField, left: Sequence[Any], right: Sequence[Value]) -> int:
    """The inner product of two lists of values; a gradient that is None is zero. -1 if shapes differ."""
    pairs = [(a.as_elements().element, b.element) for a, b in zip(left, right, strict=True) if a is not None]
    if any(a.shape != b.shape for a, b in pairs):
        return -1
    return sum(int(f.mul(a, b).sum()) for a, b in pairs) % f.prime


def _differing(what: str, expected: Iterable[Any], got: Iterable[Any]) -> list[str]:
    return [f"{what} {i}" for i, (a, b) in enumerate(zip(expected, got, strict=True)) if not _is_same(a, b)]


def _is_same(a: Any, b: Any) -> bool:
    if not isinstance(a, Value) or not isinstance(b, Value):
        return a is b
    if not (a.is_integer and b.is_integer):
        a, b = a.as_elements(), b.as_elements()
    return a.shape == b.shape and bool((a.element == b.element).all())


def _judged(mismatches: Sequence[str], is_singular: bool, in_reals: Callable[[], InReals]) -> SampleResult:
    """A result, with how it compares in real numbers if it differs in the field."""
    if not mismatches or is_singular:
        return SampleResult(tuple(mismatches), is_singular)
    try:
        return SampleResult(tuple(mismatches), is_singular, in_reals())
    except (EvaluationError, UnsupportedError):
        return SampleResult(tuple(mismatches), is_singular)


def _compare_in_reals(pairs: Iterable[tuple[Any, Any]], tolerance: float) -> InReals:
    """Results with the right ones, which come first. Where these are not finite, the point is outside the domain."""
    values = [(a.as_elements().element, b.as_elements().element) for a, b in pairs if isinstance(b, Value)]
    values = [(a, b) for a, b in values if a.numel()]
    if any(a.shape != b.shape for a, b in values):
        return InReals.DIFFERENT
    if not all(bool(a.isfinite().all()) for a, _ in values):
        return InReals.NOT_FINITE
    # A result that is zero is rounded like the others.
    allowed = tolerance * max((float(a.abs().max()) for a, _ in values), default=0.0)
    is_close = all(bool(((a - b).abs() <= allowed).all()) for a, b in values)
    return InReals.EQUAL if is_close else InReals.DIFFERENT


def _compare_inner_products(left: Sequence[tuple[Value, Any]], right: Sequence[tuple[Value, Any]]) -> InReals:
    """Two inner products of directions with real numbers, the right one first, up to rounding errors of their terms."""
    totals, sizes = [], []
    for pairs in (left, right):
        known = [(a.real, b.as_elements().element) for a, b in pairs if isinstance(b, Value)]
        if any(a is None or a.shape != b.shape for a, b in known):
            return InReals.DIFFERENT
        terms = [a * b for a, b in known if a is not None]
        totals.append(sum(float(term.sum()) for term in terms))
        sizes.append(sum(float(term.abs().sum()) for term in terms))
    if not math.isfinite(sizes[0]):
        return InReals.NOT_FINITE
    is_close = math.isfinite(sizes[1]) and abs(totals[0] - totals[1]) <= _TOLERANCE * sum(sizes)
    return InReals.EQUAL if is_close else InReals.DIFFERENT


def _claim(subject: str, comparison: Comparison, seed: int, samples: int) -> Claim:
    def claim(verdict: Verdict, message: str, **details: Json) -> Claim:
        return Claim("algebraic", subject, verdict, message, details)

    if names := unsupported_ops(*comparison.graphs):
        return claim(Verdict.INCONCLUSIVE, f"There is no rule for {', '.join(names)}.", unsupported=list(names))
    search = Search(comparison, seed)
    try:
        with on_the_cpu():
            results = list(search.run(samples))
    except UnsupportedError as error:
        return claim(Verdict.INCONCLUSIVE, f"There is no rule for {error}.", unsupported=[str(error)])
    except EvaluationError as error:
        return claim(Verdict.INCONCLUSIVE, f"The rules cannot evaluate {error}.", unsupported=[str(error)])
    mismatched = [result for result in results if result.mismatches]
    count: dict[str, Json] = {"samples": len(results), "seed": seed}
    if excuse := _excuse(mismatched, results):
        return claim(Verdict.INCONCLUSIVE, excuse, **count)
    if any(not result.is_singular for result in mismatched):
        names = sorted({name for result in mismatched for name in result.mismatches})
        message = f"Wrong: {', '.join(names)}.{_known_cause(subject, comparison.graphs[0])}"
        return claim(Verdict.FAIL, message, wrong=list(names), **count)
    # What differs where the function divides by zero shows nothing; the other points have to show enough.
    if mismatched and len(results) - len(mismatched) < _AGREEING:
        return claim(Verdict.INCONCLUSIVE, "It differs, but divides by zero at every point where it does.", **count)
    whose = "VJP" if subject == "hvp" else "forward"
    message = "The graphs agree" if subject == "equivalence" else f"It is the derivative of the {whose} graph"
    message += f" at {len(results)} random points of a prime field"
    if one_sided := search.one_sided_nodes():
        message += f", but {', '.join(one_sided)} had only one outcome at all of them."
        return claim(Verdict.INCONCLUSIVE, message, one_sided=list(one_sided), **count)
    message += ", and divides by zero at some of them." if any(r.is_singular for r in results) else "."
    return claim(Verdict.PASS, message, **count)


def _excuse(mismatched: Sequence[SampleResult], results: Sequence[SampleResult]) -> str:
    """Why a difference in the field may be none in real numbers; empty if there is no reason.

    Nowhere may real numbers differ, and somewhere inside the domain of the function they have to be equal.
    """
    found = {result.in_reals for result in mismatched if not result.is_singular}
    if not found or found & {None, InReals.DIFFERENT}:
        return ""
    if InReals.EQUAL in found:
        return "It differs in the field, but agrees in real numbers: it may need a law such as sqrt(x)² = x."
    is_right_inside = any(not result.mismatches for result in results)
    return "It differs only where results are not finite in real numbers." if is_right_inside else ""


def _known_cause(subject: str, forward: GraphModule) -> str:
    """Why torch's derivative is none, where that is on purpose."""
    nodes = [node for node in forward.graph.nodes if node.op == "call_function"]
    if any(op_name(node) == "_linalg_eigh" for node in nodes):
        return (
            " Torch's derivatives of eigh are those for a symmetric matrix, on purpose, although one triangle is read. "
            "Take the eigenvalues of (a + a.mT) / 2."
        )
    if subject != "vjp":
        return ""
    if any(op_name(node) == "embedding" and len(node.args) > 2 and node.args[2] != -1 for node in nodes):
        return " Torch leaves the row padding_idx out of the VJP of an embedding, on purpose: it is not the derivative."
    if any(op_name(node) == "linalg_cholesky_ex" for node in nodes):
        return (
            " Torch makes the VJP of cholesky symmetric, on purpose, although only one triangle is read: it is not the "
            "derivative. Take the factor of (a + a.mT) / 2."
        )
    return ""
