"""A compiled derivative is probed when it is first used; a wrong one is compiled again by a safer backend."""

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from tests.compiled.autograd_functions import WronglyDoubled

from torchguard.compiled import CompiledFunctionWarning, compile_out
from torchguard.compiled._executables import BACKENDS
from torchguard.compiled.certify._probe import adjoint_gap, measure_gap


def conv_times_pool(x, w, b):
    c = F.conv2d(x, w, b, padding=1)
    return c * F.max_pool2d(c, 3, 1, 1)


@pytest.fixture
def image():
    return torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(4)


def by_torch_compile(x, w):
    """Value and gradients as `torch.compile` and autograd give them."""
    tracked = [leaf.clone().requires_grad_() for leaf in x]
    with torch.enable_grad():
        y = torch.compile(conv_times_pool, fullgraph=True)(*tracked)
    return [y.detach(), *torch.autograd.grad(y, tracked, w)]


@pytest.mark.long
def test_the_gradient_that_torch_compile_gets_wrong_is_right(image):
    w = torch.randn(1, 4, 8, 8)
    right = torch.func.vjp(conv_times_pool, *image)[1](w)
    c = compile_out(conv_times_pool, *image)
    torch.testing.assert_close(c.vjp_with_seed(image, w), right, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(c.vjp(image)[1](w), right, rtol=1e-3, atol=1e-3)


@pytest.mark.long
def test_code_with_the_gradient_of_torch_compile_is_caught_and_replaced(image, monkeypatch):
    w = torch.randn(1, 4, 8, 8)
    right = torch.func.vjp(conv_times_pool, *image)[1](w)
    theirs = by_torch_compile(image, w)[1:]
    is_wrong = not torch.allclose(theirs[0], right[0], rtol=0.1, atol=0.1)
    run = lambda values: by_torch_compile(values[:3], values[3])  # noqa: E731
    monkeypatch.setitem(BACKENDS, "inductor", lambda graph: run)
    c = compile_out(conv_times_pool, *image)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = c.vjp_with_seed(image, w)
    torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-3)
    said = [str(one.message) for one in caught if one.category is CompiledFunctionWarning]
    assert bool(said) == is_wrong
    assert c.fallbacks == ({"vjp": "inductor without layout optimisation"} if is_wrong else {})


def off_by(factor):
    """A backend whose results after the first are off by a factor."""

    def compile_wrongly(graph):
        return lambda values: [y if i == 0 else y * factor for i, y in enumerate(graph(*values))]

    return compile_wrongly


def test_wrong_code_is_replaced_and_a_warning_says_so(monkeypatch):
    for backend in ("inductor", "inductor without layout optimisation"):
        monkeypatch.setitem(BACKENDS, backend, off_by(1.1))
    c = compile_out(torch.sin, torch.ones(8))
    x = torch.randn(8)
    expected = (
        "sin: the vjp compiled with inductor, and with inductor without layout optimisation fails the adjoint identity "
        "here; aot_eager is used instead."
    )
    with pytest.warns(CompiledFunctionWarning, match=f"^{re.escape(expected)}$"):
        found = c.vjp_with_seed(x, torch.ones(8))
    torch.testing.assert_close(found, x.cos())
    assert c.fallbacks == {"vjp": "aot_eager"}


@pytest.mark.parametrize("call", ["jvp", "vjp_with_seed"])
def test_each_derivative_is_probed_once(monkeypatch, call):
    monkeypatch.setitem(BACKENDS, "inductor", off_by(0.9))
    monkeypatch.setitem(BACKENDS, "inductor without layout optimisation", BACKENDS["eager"])
    c, x = compile_out(torch.sin, torch.ones(8)), torch.randn(8)
    with pytest.warns(CompiledFunctionWarning):
        getattr(c, call)(x, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        getattr(c, call)(x, x)


def test_a_wrong_rule_is_distinguished_from_wrong_code():
    c = compile_out(WronglyDoubled.apply, torch.ones(8), backend="eager")
    with pytest.warns(CompiledFunctionWarning, match="eager mode fails it too: a rule is wrong"):
        c.vjp_with_seed(torch.ones(8), torch.ones(8))


def test_the_probe_may_be_switched_off(monkeypatch):
    monkeypatch.setitem(BACKENDS, "inductor", off_by(2.0))
    c = compile_out(torch.sin, torch.ones(3), probe=False)
    assert torch.equal(c.vjp_with_seed(torch.zeros(3), torch.ones(3)), torch.full((3,), 2.0))


def test_the_probe_leaves_the_generator_alone():
    c = compile_out(torch.sin, torch.ones(3), backend="eager")
    before = torch.get_rng_state()
    c.vjp_with_seed(torch.ones(3), torch.ones(3))
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_not_finite_is_not_probed():
    c = compile_out(torch.sqrt, torch.ones(3), backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert c.vjp_with_seed(torch.zeros(3), torch.ones(3)).isinf().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_right_code_passes_by_far(dtype):
    x = torch.randn(64, dtype=dtype)
    c = compile_out(lambda x: torch.softmax(x, dim=0).log().tanh(), x, backend="eager")
    gap = measure_gap(c.graphs, "vjp", c._executables.code("vjp"), (x,))
    assert gap.is_conclusive
    assert gap.relative <= gap.tolerance / 4


def test_a_gap_is_measured_by_the_usual_size_of_the_terms():
    ones = [torch.ones(10_000)]
    gap = adjoint_gap(ones, ones, ones, [torch.full((10_000,), 1.01)], tolerance=1e-3)
    assert gap.relative == pytest.approx(1 / 1.01, rel=0.02)
    assert not gap.is_small


@pytest.mark.parametrize("nothing", [0.0, float("nan")], ids=["zero", "not finite"])
@pytest.mark.parametrize("call", ["vjp_with_seed", "vjp"])
def test_an_inconclusive_point_does_not_end_the_probing(monkeypatch, nothing, call):
    def doubles(graph):
        return lambda values: [2 * y for y in graph(*values)]

    monkeypatch.setitem(BACKENDS, "inductor", doubles)
    c, x, w = compile_out(torch.square, torch.ones(8)), torch.randn(8), torch.ones(8)
    gradient = (lambda x: c.vjp(x)[1](w)) if call == "vjp" else (lambda x: c.vjp_with_seed(x, w))
    gradient(torch.full((8,), nothing))
    with pytest.warns(CompiledFunctionWarning, match="fails the adjoint identity"):
        torch.testing.assert_close(gradient(x), 2 * x)


def test_a_derivative_that_is_zero_everywhere_is_not_probed_again_and_again():
    c = compile_out(torch.floor, torch.ones(3), backend="eager")
    c.vjp_with_seed(torch.ones(3), torch.ones(3))
    assert "vjp" in c._codes


def test_rounding_inside_is_allowed_for():
    def f(x, w):
        return (x.bfloat16() @ w.bfloat16()).float().tanh()

    c, x = compile_out(f, torch.randn(16, 64), torch.randn(64, 16), backend="eager"), torch.randn(16, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        c.vjp_with_seed((x, torch.randn(64, 16)), torch.ones(16, 16))
    assert c.graphs.eps == torch.finfo(torch.bfloat16).eps


ZERO_DERIVATIVES = {
    "softmax": lambda x: x.softmax(-1).sum(-1),
    "normalised": lambda x: torch.nn.functional.normalize(x, dim=-1).norm(dim=-1),
    "centered": lambda x: (x - x.mean(-1, keepdim=True)).mean(-1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ZERO_DERIVATIVES)
def test_what_rounding_leaves_of_a_zero_derivative_is_not_called_wrong(name, dtype):
    x = torch.randn(3, 5, dtype=dtype, generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        certificate = compile_out(ZERO_DERIVATIVES[name], x, backend="eager").certify("probe")
    assert certificate.ok, certificate
    assert any("rounding" in claim.message for claim in certificate.of("inconclusive"))


@pytest.mark.parametrize("f", [torch.sqrt, torch.reciprocal], ids=["sqrt", "reciprocal"])
def test_a_derivative_that_is_not_finite_is_inconclusive(f):
    certificate = compile_out(f, torch.zeros(3), backend="eager").certify("probe")
    assert certificate.ok, certificate
    assert "It is not finite at this point." in {claim.message for claim in certificate.of("inconclusive")}
