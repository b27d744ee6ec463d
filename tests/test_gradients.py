"""One bad sample costs one sample, gradients included."""

import pytest
import torch
from tests.compare import assert_same_gradients, take_gradients
from torch import nn

from torchguard import IF, err, fix, flag_nan_and_inf

NAN, INF = float("nan"), float("inf")
GOOD = [0, 2, 3, 5]
BAD = [1, 4]


def plant(x, value):
    x = x.clone()
    x[BAD[0], 0] = value
    x[BAD[1], -1] = value
    return x


class WithFixes(nn.Module):
    """The recipe: `fix` at the input, and after every step that can create NaN or Inf."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        f = flag_nan_and_inf(x, "input", err.new(x))
        x, f = fix(x, f, "input")
        h = self.norm(self.embed(x)).relu()
        h = self.hidden(h)
        h, f = fix(h, f, "hidden")
        return self.head(h.tanh()), f


def test_the_recipe_for_bad_input(run):
    for value in (NAN, INF, -INF):
        net, x = WithFixes(), torch.randn(6, 4)
        y = torch.randn(6, 3)
        net(x[GOOD])[0].sub(y[GOOD]).square().mean(-1).mean().backward()
        want = take_gradients(net)

        out, f = run(net)(plant(x, value))
        err.mean_ok(f, out.sub(y).square().mean(-1)).backward()
        assert err.is_err(f).nonzero().flatten().tolist() == BAD
        assert_same_gradients(take_gradients(net), want)


@pytest.mark.inductor
def test_the_recipe_for_overflow_inside_the_model(run):
    class Burst(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x):
            f = err.new(x)
            h = self.inner(x)
            h, f = fix(h, f, "inner")  # drops the 0 * Inf gradient of exp
            h = h.exp()
            f = flag_nan_and_inf(h, "exp", f)
            h, f = fix(h, f, "exp")
            return self.outer(h).squeeze(-1), f

    net, x = Burst(), torch.randn(6, 4)
    net(x[GOOD])[0].square().mean().backward()
    want = take_gradients(net)

    x = x.clone()
    x[BAD] = 1e4 * net.inner.weight[0].detach().sign()  # exp overflows in these rows
    out, f = run(net)(x)
    err.mean_ok(f, out.square()).backward()
    assert err.has_inf(f).nonzero().flatten().tolist() == BAD
    assert_same_gradients(take_gradients(net), want)


def test_dropping_rows_at_the_loss_alone_is_not_enough():
    """Why the recipe is needed: this is the obvious way, and it fails."""
    linear, x = nn.Linear(4, 2), plant(torch.randn(6, 4), NAN)
    loss = linear(x).square().mean(-1)
    torch.where(torch.isfinite(loss), loss, 0).sum().backward()
    assert torch.isnan(linear.weight.grad).any()


class TestOwnOps:
    """Rows that are replaced or dropped get a zero gradient."""

    def grad_of(self, run, fn, x):
        x = x.clone().requires_grad_()
        out = run(fn)(x)
        assert torch.isfinite(out).all()
        out.sum().backward()
        return x.grad

    @pytest.fixture
    def x(self):
        return plant(torch.rand(6, 3) + 0.5, NAN)

    def assert_only_good_rows_get_gradient(self, grad):
        assert torch.isfinite(grad).all()
        assert (grad[GOOD] != 0).all()
        assert (grad[BAD] == 0).all()

    def test_take_ok_p(self, run, x):
        def fn(x):
            return err.take_ok_p(flag_nan_and_inf(x, 1, err.new(x)), x * 2)

        self.assert_only_good_rows_get_gradient(self.grad_of(run, fn, x))

    def test_fix(self, run, x):
        self.assert_only_good_rows_get_gradient(self.grad_of(run, lambda x: fix(x * 2, err.new(x), 1)[0], x))

    def test_recover_with_fallback(self, run, x):
        def fn(x):
            return err.recover_with_fallback(flag_nan_and_inf(x, 1, err.new(x)), x * 2, 1.0, 2)[0]

        self.assert_only_good_rows_get_gradient(self.grad_of(run, fn, x))

    def test_if(self, run, x):
        def fn(x):
            f = flag_nan_and_inf(x, 1, err.new(x))
            return IF(err.is_err(f), lambda: torch.zeros_like(x)).ELSE(lambda: x * 2)

        self.assert_only_good_rows_get_gradient(self.grad_of(run, fn, x))

    def test_map_err(self, run, x):
        def fn(x):
            return err.map_err(flag_nan_and_inf(x, 1, err.new(x)), x * 2, torch.zeros_like)

        self.assert_only_good_rows_get_gradient(self.grad_of(run, fn, x))

    def test_mean_ok(self, run, x):
        grad = self.grad_of(run, lambda x: err.mean_ok(flag_nan_and_inf(x, 1, err.new(x)), x.sum(-1)), x)
        self.assert_only_good_rows_get_gradient(grad)
        torch.testing.assert_close(grad[GOOD], torch.full((4, 3), 1 / 4))

    def test_replace_works_on_elements(self, run, x):
        grad = self.grad_of(run, lambda x: err.replace(x * 2, value=0.0, targets=[err.NAN, err.INF]), x)
        assert torch.equal(grad, torch.where(torch.isnan(x), 0.0, 2.0))

    @pytest.mark.parametrize("combine", [err.map_ok, lambda f, z, fn: err.and_then(f, z, lambda z: (fn(z), f))[0]])
    def test_a_function_of_good_rows_receives_no_bad_value(self, run, combine):
        """Neither in the forward pass, nor in what it saves for the backward pass."""
        layer = nn.Linear(3, 3)
        x = plant(torch.randn(6, 3), INF)

        def fn(x):
            f = flag_nan_and_inf(x, 1, err.new(x))
            z = combine(f, x, lambda z: layer(z) / z.norm(dim=-1, keepdim=True))
            return err.take_ok_p(f, z)

        (layer(x[GOOD]) / x[GOOD].norm(dim=-1, keepdim=True)).sum().backward()
        want = take_gradients(layer)
        run(fn)(x).sum().backward()
        assert_same_gradients(take_gradients(layer), want)

    def test_a_function_of_good_rows_when_all_are_bad(self, run):
        layer = nn.Linear(3, 3)
        x = torch.full((2, 3), NAN)
        f = err.from_code(err.NAN, 1, 2)
        out = run(lambda x: err.take_ok_p(f, err.map_ok(f, x, layer)))(x)
        out.sum().backward()
        assert torch.isfinite(layer.weight.grad).all()


@pytest.mark.parametrize("value", [NAN, INF])
def test_bind_after_fix(run_light, value):
    """`bind` gives its function bad rows as they are: what the docs advise for training."""
    layer, x = nn.Linear(3, 3), torch.randn(6, 3)

    def step(z):
        z = layer(z)
        return z, flag_nan_and_inf(z, 2, err.new(z))

    def fn(x):
        f = flag_nan_and_inf(x, 1, err.new(x))
        x, f = fix(x, f, "input")
        z, f = err.bind(f, x, step)
        return err.mean_ok(f, z.square().sum(-1))

    layer(x[GOOD]).square().sum(-1).mean().backward()
    want = take_gradients(layer)
    run_light(fn)(plant(x, value)).backward()
    assert_same_gradients(take_gradients(layer), want)


def test_map_err_receives_no_good_value(run):
    """Its result for good rows is not used, so it must not run on them: the root of -4 is NaN."""
    z = torch.tensor([[-4.0], [9.0]], requires_grad=True)
    bad = torch.tensor([False, True])
    run(lambda z: err.map_err(err.push(err.new(z), err.OVERFLOW, 1, where=bad), z, torch.sqrt).sum())(z).backward()
    torch.testing.assert_close(z.grad, torch.tensor([[1.0], [1 / 6]]))


def test_fix_under_function_transforms():
    def loss(w, x):
        return fix(x @ w, err.new(x), "h")[0].sum()

    w, x = torch.ones(2, 2), torch.tensor([[1.0, 2.0], [NAN, 1.0]])
    x = fix(x, err.new(x), "x")[0]
    torch.testing.assert_close(torch.func.grad(loss)(w, x), torch.tensor([[1.0, 1.0], [2.0, 2.0]]))
    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(w, x[:, None])
    assert per_sample.shape == (2, 2, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_a_clean_batch_are_bit_equal(dtype):
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).to(dtype)
    x = torch.randn(5, 4, dtype=dtype)
    net(x).square().mean(-1).mean().backward()
    want = take_gradients(net)
    z, f = fix(x, err.new(x), 1)
    h, f = fix(net[1](net[0](z)), f, 2)
    err.mean_ok(f, net[2](h).square().mean(-1)).backward()
    for name, grad in take_gradients(net).items():
        assert torch.equal(grad, want[name])
