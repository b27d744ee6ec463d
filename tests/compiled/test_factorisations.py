"""Eigenvalues, singular values and QR in exact arithmetic: right derivatives pass, wrong ones do not."""

import pytest
import torch
from torch import linalg

from torchguard.compiled import compile_out

A = torch.tensor([[2.0, 0.3, -0.4], [0.3, 1.0, 0.5], [-0.4, 0.5, -1.0], [0.1, 0.7, 0.2]], dtype=torch.float64)


def symmetric(a):
    return (a + a.mT) / 2


def of_eigenvectors(a):
    numbers, vectors = linalg.eigh(symmetric(a[:3]))
    return (vectors * numbers.sin()) @ vectors.mT


def of_singular_vectors(a):
    left, numbers, right = linalg.svd(a, full_matrices=False)
    return (left * numbers.sin()) @ right


def of_wide_factors(a):
    q, r = linalg.qr(a.mT)
    return q.sin() @ r


def of_factors(a):
    q, r = linalg.qr(a)
    return q.sin() @ r.cos()


FUNCTIONS = [of_eigenvectors, of_singular_vectors, of_factors, of_wide_factors]


def verdicts(f, *x):
    claims = compile_out(f, *x, backend="eager", probe=False).certify().claims
    return {claim.subject: claim.verdict for claim in claims if claim.layer == "algebraic"}


@pytest.mark.parametrize(
    "f", [FUNCTIONS[0], *(pytest.param(f, marks=pytest.mark.long) for f in FUNCTIONS[1:])], ids=lambda f: f.__name__
)
def test_first_and_second_derivatives_pass(f):
    assert verdicts(f, A) == {"jvp": "pass", "vjp": "pass", "hvp": "pass"}


@pytest.mark.long
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("is_batched", [False, True], ids=["one", "batch"])
def test_a_slightly_wrong_gradient_fails(f, is_batched):
    g = torch.vmap(f) if is_batched else f

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(a):
            return g(a)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, cotangent):
            (a,) = ctx.saved_tensors
            gradient = torch.func.vjp(g, a)[1](cotangent)[0]
            return gradient + 1e-6 * gradient.flip(-1)

    assert verdicts(Wrong.apply, torch.stack([A, A.flip(0)]) if is_batched else A)["vjp"] == "fail"


def test_a_derivative_that_needs_the_product_of_the_factors_is_inconclusive():
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(a):
            q, r = linalg.qr(a)
            return (q @ r).sin()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, cotangent):
            return cotangent * ctx.saved_tensors[0].cos()

    assert verdicts(Product.apply, A)["vjp"] == "inconclusive"


def test_derivatives_of_eigh_fail_for_a_matrix_that_is_not_made_symmetric():
    claims = compile_out(linalg.eigvalsh, symmetric(A[:3]), backend="eager", probe=False).certify().of("fail")
    assert {claim.subject for claim in claims if claim.layer == "algebraic"} == {"jvp", "vjp", "hvp"}
    assert any("(a + a.mT) / 2" in claim.message for claim in claims)
