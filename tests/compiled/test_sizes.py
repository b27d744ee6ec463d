"""Dynamic dims: one symbolic graph serves the sizes it is valid for; others are traced when they are first used."""

import threading

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compare import assert_same
from tests.compiled.autograd_functions import SavesInputs
from tests.models import affine_softmax as mlp
from torch import func, nn

from torchguard.compiled import CompileError, compile_out, compile_scalar, state_of

BATCH = {"x": {0: "batch"}}
W, B = torch.linspace(-1, 1, 24).view(8, 3).sin(), torch.linspace(-1, 1, 3)


def by_size(x, w, b):
    return (x @ w + b) * 2 if x.shape[0] < 10 else (x @ w - b) ** 2


def with_the_mean(x, w, b):
    return F.layer_norm(x @ w + b, (3,)).mean(0) * x.shape[0], torch.cat([x, x]).T.reshape(-1).exp()


def in_place(x, w, b):
    y = torch.zeros_like(x @ w)
    y[1:] = (x @ w + b)[1:]
    return y.mul_(2) * torch.arange(x.shape[0]).unsqueeze(1)


def attention(x, w, b):
    y = (x @ w @ w.T).unsqueeze(0)
    return F.scaled_dot_product_attention(y, y, y, is_causal=True).cumsum(1)


def padded(x, w, b):
    return F.pad(x @ w, (1, 2, 2, 1)).exp()[::2].unfold(0, 2, 1)


FUNCTIONS = [mlp, by_size, with_the_mean, in_place, attention, padded]


def counted(f):
    calls = []

    def counting(x, w, b):
        calls.append(1)
        return f(x, w, b)

    return counting, calls


def gradients(f, x, cotangent):
    return func.vjp(f, *x)[1](cotangent)


def test_one_symbolic_graph_serves_many_sizes(backend):
    f, calls = counted(mlp)
    c = compile_out(f, torch.randn(6, 8), W, B, dynamic=BATCH, backend=backend)
    pullbacks = []
    for n in (6, 7, 2, 33):
        x, cotangent = (torch.randn(n, 8), W, B), torch.randn(n, 3)
        assert_same(c(*x), mlp(*x))
        assert_same(c.vjp_with_seed(x, cotangent), gradients(mlp, x, cotangent))
        pullbacks.append((c.vjp(x)[1], x, cotangent))
    assert len(calls) == 2  # with numbers, and with symbols
    for pullback, x, cotangent in pullbacks:
        assert_same(pullback(cotangent), gradients(mlp, x, cotangent))


def test_sizes_on_the_other_side_of_a_branch_are_traced_one_by_one():
    f, calls = counted(by_size)
    c = compile_out(f, torch.randn(6, 8), W, B, dynamic=BATCH, backend="eager")
    runs = []
    for n in (6, 3, 9, 10, 40, 10):
        x = torch.randn(n, 8), W, B
        assert_same(c(*x), by_size(*x))
        runs.append(len(calls))
    assert runs == [2, 2, 2, 3, 4, 4]


@pytest.mark.long
def test_no_derivative_runs_the_function_again():
    for f in (mlp, by_size, with_the_mean, in_place):
        counting, calls = counted(f)
        c = compile_out(counting, torch.randn(6, 8), W, B, dynamic=BATCH, backend="eager")
        for n in (6, 9):
            x = torch.randn(n, 8), W, B
            y, _ = c.vjp(x)
            c.jvp(x, x)
            c.linearize(x)
            c.vjp_with_seed(x, y)
            c.hvp(x, x, y)
        assert len(calls) == 2


def test_closed_over_values_are_those_of_when_it_was_compiled(backend):
    k = [2.0]
    c = compile_out(lambda x: x.sin() * k[0], torch.randn(4), dynamic={"x": 0}, backend=backend)
    k[0] = 5.0
    for n in (4, 6, 9):
        x = torch.randn(n)
        assert_same(c(x), 2 * x.sin())
        assert_same(c.jvp(x, torch.ones(n)), (2 * x.sin(), 2 * x.cos()))
        assert_same(c.vjp(x)[1](torch.ones(n)), 2 * x.cos())


def test_a_model_that_is_trained_afterwards_stays_as_it_was_compiled():
    model = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)).eval()
    c = compile_out(model, torch.randn(6, 8), dynamic={"input": 0}, backend="eager")
    x = torch.randn(9, 8)
    right = model(x).detach()
    model.train()
    assert_same(c(state_of(model), x), right)
    assert_same(c.vjp((state_of(model), x))[0], right)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x * (2 if isinstance(x.shape[0], int) else 5),
        lambda x: (x.sin(),) if isinstance(x.shape[0], int) else [x.sin()],
        lambda x: x * len(str(x.shape[0])),
        lambda x: x * (2 if f"{x.shape[0]}" == "7" else 3),
        lambda x: x * {6: 2, 7: 3}.get(x.shape[0], 4),
        lambda x: x * len(range(x.shape[0])),
    ],
    ids=["isinstance", "nested", "str", "format", "lookup", "range"],
)
@pytest.mark.parametrize("example", [6, 10])
def test_a_function_that_uses_a_size_as_a_number_gets_one(f, example):
    c = compile_out(f, torch.randn(example), dynamic={"x": 0}, backend="eager")
    for n in (6, 7, 10, 123):
        x = torch.randn(n)
        assert_same(c(x), f(x))
        assert type(c(x)) is type(f(x))


def test_the_structure_of_the_results_may_depend_on_the_size():
    def f(x):
        return {"small": x.sin()} if x.shape[0] < 8 else [x.sin(), x.cos()]

    c = compile_out(f, torch.randn(6), dynamic={"x": 0}, backend="eager")
    for n in (6, 9, 5, 12, 1, 6, 9):
        x = torch.randn(n)
        assert_same(c(x), f(x))
        assert_same(c.vjp(x)[0], f(x))


def test_a_size_that_fails_leaves_the_symbolic_graph_in_use():
    calls = []

    def f(x):
        calls.append(1)
        return x.view(2, -1).sin()

    c = compile_out(f, torch.randn(6), dynamic={"x": 0}, backend="eager")
    with pytest.raises(CompileError, match="invalid for input of size 5"):
        c(torch.randn(5))
    before = len(calls)
    x = torch.randn(8)
    assert_same(c(x), x.view(2, -1).sin())
    assert_same(c.vjp(x)[1](torch.ones(2, 4)), x.cos())
    assert len(calls) == before


def test_a_derivative_that_needs_numbers_leaves_the_other_code_symbolic():
    f, calls = counted(in_place)
    c = compile_out(f, torch.randn(6, 8), W, B, dynamic=BATCH, backend="eager")
    x = torch.randn(9, 8), W, B
    c.hvp(x, x, torch.ones(9, 3))
    assert c._executables.code("hvp") is not c._by_size[(9,)]._executables.code("hvp")
    assert c._executables.code("vjp") is c._by_size[(9,)]._executables.code("vjp")
    assert len(calls) == 2


@pytest.mark.long
def test_the_listing_is_that_of_the_graph_that_runs():
    for f in FUNCTIONS:
        c, static = (
            compile_out(f, torch.randn(6, 8), W, B, dynamic=dynamic, backend="eager") for dynamic in (BATCH, None)
        )
        x = torch.randn(6, 8), W, B
        assert c.listing() == static.listing()
        torch.testing.assert_close(c(*x), static(*x), rtol=0, atol=0)
        c(torch.randn(9, 8), W, B)
        same = compile_out(f, torch.randn(9, 8), W, B, backend="eager")
        assert c._by_size[(9,)].listing() == same.listing()


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_two_dims_of_a_module_may_vary(backend):
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    c = compile_out(model, torch.randn(4, 5, 8), dynamic={"src": {0: "batch", 1: "tokens"}}, backend=backend)
    for shape in ((4, 5, 8), (3, 7, 8), (5, 5, 8), (2, 1, 8)):
        x = torch.randn(shape, requires_grad=True)
        (right,) = torch.autograd.grad(model(x).square().sum(), x)
        y, pullback = c.vjp((state_of(model), x.detach()))
        assert_same(y, model(x).detach())
        assert_same(pullback(2 * y)[1], right)


def test_a_scalar_of_any_size_has_gradients_and_a_hessian():
    c = compile_scalar(lambda x: (x**3).mean(), torch.ones(4), dynamic={"x": 0}, backend="eager")
    for n in (4, 5, 1, 9):
        x, dx = torch.randn(n), torch.randn(n)
        assert_same(c.backward(x), 3 * x**2 / n)
        assert_same(c.hvp(x, dx), 6 * x * dx / n)


def test_a_scalar_has_to_be_one_at_every_size():
    c = compile_scalar(lambda x: x.sum() if x.shape[0] < 5 else x, torch.ones(4), dynamic={"x": 0}, backend="eager")
    with pytest.raises(CompileError, match=r"expected one float of shape \[\] as result, got f32\[7\]"):
        c(torch.ones(7))
    assert c(torch.ones(3)) == 3


def test_threads_may_use_new_sizes_at_once():
    c = compile_out(mlp, torch.randn(6, 8), W, B, dynamic=BATCH, backend="eager")
    found: list[bool] = []

    def call(start):
        for n in range(start, start + 6):
            x = torch.randn(n, 8), W, B
            found.append(torch.allclose(c(*x), mlp(*x)) and c.vjp(x)[1](torch.ones(n, 3))[0].shape == (n, 8))

    threads = [threading.Thread(target=call, args=(start,)) for start in range(2, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 24


@pytest.mark.long
def test_a_certificate_is_of_one_size():
    c = compile_out(mlp, torch.randn(6, 8), W, B, dynamic=BATCH, backend="aot_eager")
    c(torch.randn(9, 8), W, B)
    certificate = c.certify(level="enclosure")
    assert certificate.ok
    assert "%x: f32[6, 8]" in str(c)


def test_a_wrong_derivative_is_found_at_any_size():
    class Wrong(SavesInputs):
        @staticmethod
        def forward(x):
            return x**2

        @staticmethod
        def backward(ctx, g):
            return 3 * ctx.saved_tensors[0] * g

        @staticmethod
        def jvp(ctx, dx):
            return 2 * ctx.saved_tensors[0] * dx

    c = compile_out(lambda x: Wrong.apply(x), torch.randn(4), dynamic={"x": 0}, backend="aot_eager")
    for n in (5, 6):
        with pytest.warns(UserWarning, match="fails the adjoint identity"):
            c.vjp_with_seed(torch.randn(n), torch.randn(n))
    assert c.fallbacks == {"vjp": "eager"}


@pytest.fixture(scope="module")
def compiled():
    return {f: compile_out(f, torch.randn(6, 8), W, B, dynamic=BATCH, backend="eager") for f in FUNCTIONS}


@pytest.mark.long
@settings(max_examples=settings.default.max_examples // 5)
@given(f=st.sampled_from(FUNCTIONS), n=st.sampled_from([1, 2, 5, 9, 10, 13]))
def test_any_size_gives_what_eager_mode_gives(compiled, f, n):
    c = compiled[f]
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, 8, generator=generator), W, B
    dx = tuple(torch.randn(leaf.shape, generator=generator) for leaf in x)
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):  # torch has no JVP rule for the fused kernel
        y, dy = func.jvp(f, x, dx)
        cotangent = tuple(map(torch.cos, y)) if isinstance(y, tuple) else y.cos()
        gradient = gradients(f, x, cotangent)
    assert_same(c(*x), y)
    assert_same(c.jvp(x, dx), (y, dy))
    assert_same(c.linearize(x)[1](dx), dy)
    assert_same(c.value_and_vjp(x, cotangent), (y, gradient))
    assert_same(c.vjp(x)[1](cotangent), gradient)
