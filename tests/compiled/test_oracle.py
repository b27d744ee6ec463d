"""134 functions: derivatives against those of JAX and against differences, and how many certificates cover."""

import functools
import json
from pathlib import Path

import pytest
import torch
from tests.compiled.oracle import ARGUMENTS, FUNCTIONS, JAX, directions

from torchguard.compiled import compile_out
from torchguard.compiled._trace import output_values
from torchguard.exceptions import TorchGuardError

pytestmark = pytest.mark.long

# Python's control flow, and shapes, that depend on values.
REFUSED = {"nll_gauss", "cov_corrcoef", "lstsq"}
# Derivatives that torch has no rule for.
MISSING = {("multi_margin", "jvp"), ("multi_margin", "hvp")}
# JAX has no bicubic resampling of this kind: its entry holds something else.
NO_ORACLE = {name for name in FUNCTIONS if f"{name}/v/0" not in JAX} | {"bicubic"}
# Torch's gradients of a symmetric matrix are symmetric, on purpose: differences along others are not.
SYMMETRIC = {"cholesky"}
NAMES = sorted(set(FUNCTIONS) - REFUSED)
STEP = 1e-5
RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "certificates.json"


@functools.cache
def compiled(name):
    x = tuple(torch.tensor(argument) for argument in ARGUMENTS[name])
    return compile_out(FUNCTIONS[name], *x, backend="eager", probe=False), x


def point(name):
    """The compiled function, its arguments, and tangents and cotangents."""
    c, x = compiled(name)
    v, w = directions(x, output_values(c.graphs.forward))
    if name in SYMMETRIC:
        v = [one + one.mT for one in v]
    return c, x, v, w


def derivative(name, kind, x):
    c, _, v, w = point(name)
    return c.derivative_at(kind, x, [one for one in v if one is not None], w)


def differences(name, run):
    """The derivative of something along the tangents, by differences."""
    _, x, v, _ = point(name)
    at = lambda h: run(tuple(leaf if d is None else leaf + h * d for leaf, d in zip(x, v, strict=True)))  # noqa: E731
    return [(a - b) / (2 * STEP) for a, b in zip(at(STEP), at(-STEP), strict=True)]


@pytest.mark.parametrize("kind", ["v", "jvp", "vjp"])
@pytest.mark.parametrize("name", sorted(set(NAMES) - NO_ORACLE))
def test_value_and_first_derivatives_are_those_of_jax(name, kind):
    c, x, _, _ = point(name)
    if (name, kind) in MISSING:
        with pytest.raises(TorchGuardError, match="no rule"):
            derivative(name, kind, x)
        return
    found = c.value_at(x) if kind == "v" else derivative(name, kind, x)
    for i, got in enumerate(found):
        torch.testing.assert_close(got, torch.tensor(JAX[f"{name}/{kind}/{i}"]).to(got.dtype), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", sorted(NO_ORACLE - REFUSED))
def test_functions_that_jax_lacks_agree_with_eager_mode_and_differences(name):
    c, x, v, w = point(name)
    (out,) = c.value_at(x)
    torch.testing.assert_close(out, FUNCTIONS[name](*x), rtol=1e-12, atol=1e-12)
    (tangent,), (expected,) = derivative(name, "jvp", x), differences(name, c.value_at)
    torch.testing.assert_close(tangent, expected, rtol=1e-6, atol=1e-8)
    pairs = zip(derivative(name, "vjp", x), (one for one in v if one is not None), strict=True)
    torch.testing.assert_close(sum((g * one).sum() for g, one in pairs), (w[0] * tangent).sum())


@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives_are_those_of_differences(name):
    x = compiled(name)[1]
    if (name, "hvp") in MISSING:
        with pytest.raises(TorchGuardError, match="no rule"):
            derivative(name, "hvp", x)
        return
    expected = differences(name, lambda moved: derivative(name, "vjp", moved))
    for got, right in zip(derivative(name, "hvp", x), expected, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_functions_are_refused_with_a_message(name):
    with pytest.raises(TorchGuardError, match=r"value|shape"):
        compiled(name)


def test_layers_cover_three_quarters_and_one_half_and_nothing_right_fails():
    verdicts = {name: _verdicts(name) for name in NAMES}
    covered = {
        layer: sum(all(v == "pass" for key, v in found.items() if key.startswith(layer)) for found in verdicts.values())
        for layer in ("algebraic", "enclosure")
    }
    failed = {(name, key) for name, found in verdicts.items() for key, v in found.items() if v == "fail"}
    # Torch makes the gradient of cholesky symmetric, on purpose. That of cosine_similarity is wrong where a norm is
    # below eps: torch clamps the norm without recording it, so that its derivative is that of the norm itself.
    of_cholesky = {("cholesky", claim) for claim in ("algebraic vjp", "probe vjp", "probe hvp")}
    assert failed == {*of_cholesky, ("cosine_sim", "algebraic vjp")}
    assert covered["algebraic"] >= 0.75 * len(FUNCTIONS)
    assert covered["enclosure"] >= 0.5 * len(FUNCTIONS)
    stored = json.loads(RESULT.read_text())["functions"]
    exact = ("typed", "algebraic", "enclosure")
    for name, found in verdicts.items():
        now, then = ({k: v for k, v in one.items() if k.startswith(exact)} for one in (found, stored[name]))
        assert now == then, f"{name}: run benchmarks/certificates.py and benchmarks/tables.py"


def test_torchs_gradient_of_cosine_similarity_is_wrong_for_tiny_vectors():
    torch.manual_seed(0)
    x, y = 1e-10 * torch.randn(1, 4, dtype=torch.float64), torch.randn(1, 4, dtype=torch.float64)
    similarity = lambda x: torch.nn.functional.cosine_similarity(x, y).sum()  # noqa: E731
    gradient = torch.func.grad(similarity)(x)
    right = torch.func.jacfwd(similarity)(x)
    h = 1e-12
    steps = h * torch.eye(4, dtype=torch.float64).unsqueeze(1)
    differences = torch.stack([(similarity(x + step) - similarity(x - step)) / (2 * h) for step in steps])
    torch.testing.assert_close(right.flatten(), differences, rtol=1e-6, atol=0)
    assert ((gradient - right).abs() > 1e-3 * right.abs()).any()


def _verdicts(name):
    claims = compiled(name)[0].certify("enclosure").claims
    return {f"{claim.layer} {claim.subject}": str(claim.verdict) for claim in claims}
