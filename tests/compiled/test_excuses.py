"""A difference in the field that may be none in real numbers: when it is inconclusive, and that others still fail."""

import pytest
import torch
from tests.compiled.autograd_functions import SavesInputs

from torchguard.compiled import compile_out
from torchguard.compiled.certify import Verdict, check_derivatives


def verdict_of(forward, backward, kind="vjp"):
    class Function(SavesInputs):
        @staticmethod
        def forward(x):
            return forward(x)

        @staticmethod
        def backward(ctx, g):
            return backward(g, *ctx.saved_tensors)

    x = torch.rand(5, dtype=torch.float64) * 0.8 + 0.1
    c = compile_out(lambda x: Function.apply(x), x, backend="eager", probe=False)
    (claim,) = check_derivatives(c.graphs.forward, None, c.graphs[kind], differentiable=[True])
    return claim.verdict


OFF = 1 + 1e-7
WRONG = {
    "factor behind log": (torch.log, lambda g, x: g / x * OFF),
    "sign behind sqrt": (torch.sqrt, lambda g, x: -g / (2 * x.sqrt())),
    "factor behind sqrt": (torch.sqrt, lambda g, x: g / (2 * x.sqrt()) * OFF),
    "factor and a law": (lambda x: x.sqrt() * x.sqrt() * x, lambda g, x: 2 * x * g * OFF),
    "factor behind logit": (torch.logit, lambda g, x: g / (x * (1 - x)) * OFF),
    "sign behind acos": (torch.acos, lambda g, x: g / (1 - x * x).sqrt()),
    "factor behind a root": (lambda x: x**0.3, lambda g, x: g * 0.3 * x**-0.7 * OFF),
    "constant behind xlogy": (lambda x: torch.xlogy(x, x), lambda g, x: g * (x.log() + 1.001)),
    "constant behind erfcx": (torch.special.erfcx, lambda g, x: g * (2 * x * torch.special.erfcx(x) - 1.12837)),
    "wrong transform": (
        lambda x: torch.fft.rfft(x).abs(),
        lambda g, x: torch.fft.irfft(g * torch.fft.rfft(x).sgn(), n=5),
    ),
    "remainder": (torch.sin, lambda g, x: g * x.cos() * (1 + (torch.remainder(x, 7.0) > 6.9).to(x.dtype))),
    "order statistic": (torch.sin, lambda g, x: g * x.cos() * (1 + (x.kthvalue(2).indices == 3).to(x.dtype))),
    "running maximum": (torch.sin, lambda g, x: g * x.cos() * (1 + (x.cummax(0).indices[4] == 1).to(x.dtype))),
    "quotient rounded": (
        torch.sin,
        lambda g, x: g * x.cos() * (1 + (torch.div(x, 3.0, rounding_mode="floor") > 200).to(x.dtype)),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_derivative_fails_where_laws_and_domains_matter(name):
    assert verdict_of(*WRONG[name]) is Verdict.FAIL


def test_a_derivative_that_is_right_by_a_law_is_inconclusive():
    assert verdict_of(lambda x: x.sqrt() * x.sqrt() * x, lambda g, x: 2 * x * g) is Verdict.INCONCLUSIVE


def test_a_derivative_that_differs_outside_the_domain_alone_is_inconclusive():
    nan_outside = lambda g, x: torch.where((x >= 0) & (x <= 1), g / (x * (1 - x)), torch.nan)  # noqa: E731
    assert verdict_of(torch.logit, nan_outside) is Verdict.INCONCLUSIVE


def test_a_derivative_that_is_not_finite_where_the_function_is_fails():
    assert verdict_of(lambda x: x * x, lambda g, x: torch.where(x > 1, g * torch.inf, 2 * x * g)) is Verdict.FAIL


def test_tangents_of_logcumsumexp_are_right_where_the_first_sums_are_small():
    x, v = torch.tensor([0.0, 100.0, 50.0], dtype=torch.float64), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    c = compile_out(lambda x: x.logcumsumexp(0), x, backend="eager")
    (tangent,) = c.derivative_at("jvp", (x,), [v], [v])
    torch.testing.assert_close(tangent, torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64))
    torch.testing.assert_close(c.value_at((x,))[0], x.logcumsumexp(0))


def test_gradients_of_ldexp_are_right_for_negative_exponents():
    x, e = torch.ones(3, dtype=torch.float64), torch.tensor([-1, 2, -3])
    c = compile_out(torch.ldexp, x, e, backend="eager")
    (gradient,) = c.derivative_at("vjp", (x, e), [x], [x])
    torch.testing.assert_close(gradient, torch.tensor([0.5, 4.0, 0.125], dtype=torch.float64))


def test_attention_whose_heads_share_keys_passes():
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    attend = lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)  # noqa: E731
    c = compile_out(attend, q, k, k.clone(), backend="eager", probe=False)
    claims = check_derivatives(c.graphs.forward, c.graphs["jvp"], c.graphs["vjp"], differentiable=[True] * 3)
    assert {claim.verdict for claim in claims} == {Verdict.PASS}
