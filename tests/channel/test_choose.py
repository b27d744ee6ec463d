"""Gradients of `IF` over a whole batch: those of the branch that was chosen, and zeros elsewhere."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchguard import HAS, IF, err, flag_nan_and_inf

NAN, INF = float("nan"), float("inf")


def safe(model, x):
    """The output of a model, or zeros for the whole batch if any of it is not finite."""
    out = model(x)
    f = flag_nan_and_inf(out, 1, flag_nan_and_inf(x, 2, err.new(x)))
    return IF(HAS(f), lambda: torch.zeros_like(out)).ELSE(lambda: out)


def planted(x, value):
    x = x.clone()
    x[1, 0] = value
    return x


class Exp(nn.Module):
    def forward(self, x):
        return (x * 1e4).exp().log1p()


class First(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


MODELS = {
    "linear": lambda: nn.Linear(4, 3),
    "deep": lambda: nn.Sequential(
        nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 3)
    ),
    "exp": lambda: nn.Sequential(nn.Linear(4, 4), Exp(), nn.Linear(4, 3)),
    "lstm": lambda: First(nn.LSTM(4, 3)),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
    "checkpoint": Checkpointed,
}


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("name", MODELS)
def test_a_bad_batch_gives_zero_gradients(run_light, name, value):
    model, x = MODELS[name](), planted(torch.randn(5, 4), value).requires_grad_()
    safe_model = (lambda x: safe(model, x)) if name == "lstm" else run_light(lambda x: safe(model, x))
    out = safe_model(x)
    assert torch.equal(out, torch.zeros_like(out))
    out.sum().backward()
    for grad in (x.grad, *(parameter.grad for parameter in model.parameters())):
        assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("name", ["linear", "deep", "batch norm", "checkpoint"])
def test_a_clean_batch_gives_the_gradients_of_the_model(run_light, name):
    model, x = MODELS[name]().double(), torch.randn(5, 4, dtype=torch.float64)
    model(x).square().sum().backward()
    want = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    run_light(lambda x: safe(model, x))(x).square().sum().backward()
    for parameter, grad in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-12, atol=1e-12)


@pytest.mark.long
def test_another_use_of_a_value_keeps_its_gradient(run):
    """The weights get the gradient of the second use, and nothing from the branch that was not chosen."""
    layer, x = nn.Linear(4, 3), torch.randn(5, 4)

    def fn(x, y):
        return safe(layer, y).sum() + layer(x).square().sum()

    layer(x).square().sum().backward()
    want = layer.weight.grad.clone()
    layer.zero_grad()
    run(fn)(x, planted(x, NAN)).backward()
    torch.testing.assert_close(layer.weight.grad, want)


def test_a_gradient_that_is_not_finite_for_another_reason_stays():
    """Only what follows from a gradient of zero is replaced."""
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    root = x.sqrt()
    IF(torch.tensor(False), lambda: -root).ELSE(lambda: root).sum().backward()
    assert x.grad.tolist() == [INF, 0.5]


def test_second_derivatives_at_a_gradient_of_zero(run_light):
    """At the minimum of a square the gradient is zero, its derivative is not."""

    def loss(x):
        return IF(x.sum() > 100, lambda: x * 0).ELSE(lambda: (x - 1) ** 2).sum()

    x = torch.ones(2, requires_grad=True)
    (grad,) = torch.autograd.grad(loss(x), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    assert (grad.tolist(), second.tolist()) == ([0.0, 0.0], [2.0, 2.0])


def test_function_transforms():
    layer = nn.Linear(4, 3)
    weights = dict(layer.named_parameters())

    def loss(weights, x):
        return safe(lambda x: torch.func.functional_call(layer, weights, (x,)), x).square().sum()

    x = torch.randn(5, 4)
    want = torch.func.grad(lambda w, x: torch.func.functional_call(layer, w, (x,)).square().sum())(weights, x)
    torch.testing.assert_close(torch.func.grad(loss)(weights, x), want)
    bad = torch.func.grad(loss)(weights, planted(x, NAN))
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in bad.values())
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, planted(x, NAN)[:, None])
    assert [grad.isfinite().all().item() for grad in each.values()] == [True, True]
    assert not each["weight"][1].any()
    assert each["weight"][[0, 2, 3, 4]].flatten(1).any(-1).all()


def test_sparse_gradients_are_left_alone():
    table = nn.Embedding(5, 3, sparse=True)
    out = table(torch.tensor([[1], [2]]))
    IF(torch.tensor(True), lambda: out * 0).ELSE(lambda: out).sum().backward()
    assert table.weight.grad.is_sparse
    assert not table.weight.grad.to_dense().any()


def test_autocast(run_light):
    layer, x = nn.Linear(4, 3), planted(torch.randn(5, 4), NAN)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = run_light(lambda x: safe(layer, x))(x)
    out.sum().backward()
    assert torch.equal(layer.weight.grad, torch.zeros(3, 4))


@pytest.mark.compiled
def test_dynamic_batch_sizes():
    layer = nn.Linear(4, 3)
    fn = torch.compile(lambda x: safe(layer, x), backend="aot_eager", fullgraph=True, dynamic=True)
    for size in (3, 5, 8):
        layer.zero_grad()
        fn(planted(torch.randn(size, 4), NAN)).sum().backward()
        assert torch.equal(layer.weight.grad, torch.zeros(3, 4))


def test_an_exported_program_chooses():
    class Safe(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return safe(self.layer, x)

    program = torch.export.export(Safe(), (torch.randn(5, 4),)).module()
    assert torch.equal(program(planted(torch.randn(5, 4), NAN)), torch.zeros(5, 3))
    assert program(torch.randn(5, 4)).any()
