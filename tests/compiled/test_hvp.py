"""Hessian products: right where torch's shortcuts in a pullback are not, and certified like the other derivatives."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchguard.compiled import compile_out, compile_scalar
from torchguard.compiled._executables import BACKENDS
from torchguard.exceptions import CompiledFunctionWarning, MissingRuleError

linalg = torch.linalg


def positive(n):
    a = torch.randn(n, n, dtype=torch.float64)
    return a @ a.mT + n * torch.eye(n, dtype=torch.float64)


def wide(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def symmetric(a):
    return (a + a.mT) / 2


def deprecated_cholesky(a):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.cholesky(symmetric(a))


# The pullbacks of these read what the forward pass saved: factors, norms, counts, indices.
SAVES_AUXILIARIES = {
    "det": (linalg.det, positive(3)),
    "slogdet": (lambda a: linalg.slogdet(a).logabsdet, positive(3)),
    "logdet": (torch.logdet, positive(3)),
    "solve": (linalg.solve, positive(3), wide(3, 2)),
    "solve for one vector": (linalg.solve, positive(3), wide(3)),
    "solve from the right": (lambda a, b: linalg.solve(a, b, left=False), positive(3), wide(2, 3)),
    "lu_solve": (lambda a, b: linalg.lu_solve(*linalg.lu_factor(a), b), positive(3), wide(3, 2)),
    "lu": (lambda a: linalg.lu(a)[2], positive(3)),
    "cholesky": (lambda a: linalg.cholesky(symmetric(a)), positive(3)),
    "cholesky_inverse": (lambda a: torch.cholesky_inverse(linalg.cholesky(symmetric(a))), positive(3)),
    "cholesky_solve": (lambda a, b: torch.cholesky_solve(b, linalg.cholesky(symmetric(a))), positive(3), wide(3, 2)),
    "eigvalsh": (lambda a: linalg.eigvalsh(symmetric(a)).sin(), positive(3)),
    "svd": (lambda a: linalg.svdvals(a).sin(), wide(4, 3)),
    "qr": (lambda a: linalg.qr(a).R, wide(4, 3)),
    "pinv": (linalg.pinv, wide(4, 3)),
    "Gaussian log-likelihood": (
        lambda x, a: x @ linalg.solve(a, x) / 2 + linalg.slogdet(a).logabsdet / 2,
        wide(3),
        positive(3),
    ),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), wide(3, 4), wide(4), wide(4)),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), wide(2, 4, 3), wide(4), wide(4)),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), wide(5, 3)),
    "weight_norm": (lambda v, g: torch._weight_norm(v, g, 0), wide(3, 4), wide(3, 1)),
    "silu, mish and huber": (lambda x, y: F.huber_loss(F.silu(x), F.mish(y), delta=0.3), wide(6), wide(6)),
    "grid_sample": (
        lambda x, grid: F.grid_sample(x, grid.tanh() * 0.8, align_corners=True),
        wide(1, 2, 4, 4),
        wide(1, 3, 3, 2),
    ),
    "cdist": (lambda x, y: torch.cdist(x, y, p=3), wide(3, 4), wide(2, 4)),
    "hardsigmoid": (F.hardsigmoid, wide(6)),
    **({"deprecated cholesky": (deprecated_cholesky, positive(3))} if hasattr(torch.ops.aten, "cholesky") else {}),
    "logcumsumexp": (lambda x: x.logcumsumexp(0), torch.tensor([0.0, -2000, 1000, 1001], dtype=torch.float64)),
    "max_pool2d": (lambda x: F.max_pool2d(x.sin(), 2), wide(1, 1, 4, 4)),
    "embedding_bag": (
        lambda w, p: F.embedding_bag(
            torch.tensor([0, 2, 1, 1]), w.sin(), torch.tensor([0, 1, 1]), mode="sum", per_sample_weights=p
        ),
        wide(3, 4),
        wide(4),
    ),
}


def hvp_by_differences(f, x, v, w, h=1e-5):
    def gradients(step):
        moved = [(leaf + step * along).requires_grad_() for leaf, along in zip(x, v, strict=True)]
        return torch.autograd.grad(f(*moved), moved, w, allow_unused=True, materialize_grads=True)

    return [(a - b) / (2 * h) for a, b in zip(gradients(h), gradients(-h), strict=True)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("slogdet", "solve", "layer_norm") else pytest.mark.long)
        for name in SAVES_AUXILIARIES
    ],
)
def test_it_is_the_derivative_of_the_gradients(name):
    f, *x = SAVES_AUXILIARIES[name]
    c = compile_out(f, *x, backend="eager")
    v, w = tuple(map(torch.randn_like, x)), torch.randn_like(f(*x))
    expected = hvp_by_differences(f, x, v, w)
    for got, right in zip(c.hvp(tuple(x), v, w), expected, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-6, atol=1e-6)


def test_tangents_that_torch_gets_wrong_are_refused():
    index = torch.tensor([0, 1, 0, 2])
    x = wide(3), wide(4), index
    c = compile_out(lambda x, s, i: x.scatter_reduce(0, i, s, "prod"), *x, backend="eager")
    for call in (lambda: c.jvp(x, x), lambda: c.hvp(x, x, wide(3))):
        with pytest.raises(MissingRuleError, match=r"rule of torch for the tangents of aten.scatter_reduce is wrong"):
            call()
    assert c.vjp_with_seed(x, wide(3))[0].shape == (3,)


@pytest.mark.long
def test_it_uses_reverse_mode_alone_where_an_operation_has_no_tangents():
    x = wide(4, 3), torch.rand(3, dtype=torch.float64), wide(4, 2)
    c = compile_out(torch.ormqr, *x, backend="eager")
    v, w = tuple(map(torch.randn_like, x)), wide(4, 2)
    for got, right in zip(c.hvp(x, v, w), hvp_by_differences(torch.ormqr, x, v, w), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-6, atol=1e-6)


def wrong_in(part, factor=1.5):
    """A backend that compiles a wrong HVP: the results of graphs with two kinds of directions are multiplied."""

    def compile_(graph):
        names = {node.name for node in graph.graph.find_nodes(op="placeholder")}
        is_hvp = any(name.startswith("d_") for name in names) and "cotangent_0" in names
        return lambda values: [part(y, factor) if is_hvp else y for y in graph(*values)]

    return compile_


def test_the_probe_at_first_use_does_not_compare_the_graph_with_itself(monkeypatch):
    """Both the compiled and the eager graph are wrong in the same way; the transpose is not."""
    f = lambda x: (x.sin() * x.flip(0)).sum()  # noqa: E731
    x = wide(5)
    c = compile_scalar(f, x, backend="eager")
    graph = c.graphs["hvp"]
    last = graph.graph.find_nodes(op="output")[0]
    with graph.graph.inserting_before(last):
        wrong = graph.graph.call_function(torch.ops.aten.cumsum.default, (last.args[0][0], 0))
    wrong.meta = dict(last.args[0][0].meta)
    last.args = ([wrong],)
    graph.recompile()
    with pytest.warns(CompiledFunctionWarning, match="hvp compiled with eager fails"):
        c.hvp(x, torch.randn_like(x))


@pytest.mark.parametrize(
    "name",
    [
        "layer_norm",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("det", "solve", "cdist", "silu, mish and huber")),
    ],
)
def test_a_right_hvp_is_certified(name):
    f, *x = SAVES_AUXILIARIES[name]
    claims = [claim for claim in compile_out(f, *x, backend="eager").certify().claims if claim.subject == "hvp"]
    messages = " ".join(claim.message for claim in claims)
    assert all(claim.verdict != "fail" for claim in claims)
    assert "linear in the tangent" in messages
    assert "<Hv, u> and <v, Hu>" in messages
    assert "Taylor remainder of the gradient" in messages
    assert claims[-1].layer == "algebraic"


def test_the_algebraic_layer_passes_second_derivatives():
    f, *x = SAVES_AUXILIARIES["solve"]
    certificate = compile_out(f, *x, backend="eager").certify()
    verdicts = {(claim.layer, claim.subject): claim.verdict for claim in certificate.claims}
    assert verdicts["algebraic", "hvp"] == "pass"


@pytest.mark.parametrize(
    "part",
    [lambda y, factor: y * factor, lambda y, factor: y.cumsum(0), lambda y, factor: torch.zeros_like(y)],
    ids=["scaled", "not symmetric", "zero"],
)
def test_a_wrong_hvp_fails(monkeypatch, part):
    monkeypatch.setitem(BACKENDS, "eager", wrong_in(part))
    c = compile_scalar(lambda x: (x.sin() * x.flip(0)).sum(), wide(5), backend="eager", probe=False)
    failed = c.certify(level="probe").of("fail")
    assert {claim.subject for claim in failed} == {"hvp"}


class Cube(torch.autograd.Function):
    """Right gradients, whose own derivative is wrong."""

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return CubeBackward.apply(g, *ctx.saved_tensors)

    @staticmethod
    def jvp(ctx, t):
        return 3 * ctx.saved_tensors[0] ** 2 * t


class CubeBackward(torch.autograd.Function):
    @staticmethod
    def forward(g, x):
        return 3 * x**2 * g

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, h):
        g, x = ctx.saved_tensors
        return 3 * x**2 * h, 6.0006 * x * g * h

    @staticmethod
    def jvp(ctx, dg, dx):
        g, x = ctx.saved_tensors
        return 3 * x**2 * dg + 6.0006 * x * g * dx


def test_a_slightly_wrong_second_derivative_is_found_by_algebra():
    def cube(x: Tensor) -> Tensor:
        return Cube.apply(x)  # pyright: ignore[reportReturnType]

    certificate = compile_out(cube, torch.randn(8), backend="eager").certify()
    assert [(claim.layer, claim.subject) for claim in certificate.of("fail")] == [("algebraic", "hvp")]


def test_the_second_derivative_of_sinc_is_right_at_and_near_zero():
    x = torch.tensor([0.0, 1e-9, 1e-4, 0.03, 0.5], dtype=torch.float64)
    one = torch.ones_like(x)
    z = torch.pi * x[1:]
    far = torch.pi**2 * ((2 - z**2) * z.sin() - 2 * z * z.cos()) / z**3
    near = -(torch.pi**2) / 3 * (1 - 3 * (torch.pi * x) ** 2 / 10)
    expected = torch.cat([near[:3], far[2:]])
    torch.testing.assert_close(
        compile_out(torch.sinc, x, backend="eager").hvp(x, one, one), expected, rtol=2e-5, atol=0
    )


def test_detached_values_are_no_reason_to_call_it_wrong():
    certificate = compile_out(lambda x: x.detach() * x, wide(3), backend="eager").certify()
    assert certificate.ok, certificate


def test_attention_has_derivatives_by_its_mask():
    x = wide(1, 2, 3, 4), wide(1, 2, 3, 4), wide(1, 2, 3, 4), wide(3, 3)
    c = compile_out(F.scaled_dot_product_attention, *x, backend="eager")
    tracked, w = [leaf.clone().requires_grad_() for leaf in x], wide(1, 2, 3, 4)
    expected = torch.autograd.grad(F.scaled_dot_product_attention(*tracked), tracked, w)
    torch.testing.assert_close(c.vjp_with_seed(x, w), expected)
