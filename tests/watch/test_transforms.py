"""A watched model under `torch.func`, and derivatives that are taken many at a time."""

import copy

import pytest
import torch
from torch import func, nn
from torch.autograd.functional import hessian, jacobian
from torch.utils._pytree import tree_leaves

from torchguard import err
from torchguard._watch import unwatch, watch
from torchguard.exceptions import MixedRowsWarning, WatchError

NAN = float("nan")
GOOD = [0, 1, 3]
pytestmark = pytest.mark.filterwarnings("ignore::torchguard.exceptions.MixedRowsWarning")


class Flattening(nn.Module):
    """A sample has several tokens, which are flattened on the way. (Compiled, torch has no jvp of a LayerNorm.)"""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x):
        h = self.first(x.reshape(-1, 3)).tanh()
        return self.head(h).reshape(x.shape[0], -1, 2).mean(1)


@pytest.fixture
def x():
    return torch.randn(4, 6, 3)


@pytest.fixture(params=[False, True], ids=["watched", "quarantine"])
def pair(request):
    model = Flattening()
    return model, watch(copy.deepcopy(model), level="modules", quarantine=request.param, returns="output")


def gradient(model):
    return func.grad(lambda x: model(x).sum())


def per_sample(model):
    weights = dict(model.named_parameters())
    loss = func.grad(lambda weights, x: func.functional_call(model, weights, (x[None],)).sum())
    return lambda x: func.vmap(loss, (None, 0))(weights, x)


TRANSFORMS = {
    "grad": gradient,
    "per sample": per_sample,
    "jvp": lambda model: lambda x: func.jvp(model, (x,), (x.sin(),)),
    "jacrev": func.jacrev,
    "jacfwd": func.jacfwd,
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize(
    "mode", ["plain", pytest.param("eager", marks=pytest.mark.long), pytest.param("aot_eager", marks=pytest.mark.long)]
)
def test_a_transform_gives_what_it_gives_for_the_plain_model(pair, x, name, mode):
    model, guarded = pair
    got = TRANSFORMS[name](guarded)
    got = got if mode == "plain" else torch.compile(got, fullgraph=True, backend=mode)
    torch.testing.assert_close(got(x), TRANSFORMS[name](model)(x))


@pytest.mark.long
@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, about itself
@pytest.mark.parametrize("name", ["jvp", "jacrev"])
def test_a_transform_that_is_compiled_whole(pair, x, name):
    model, guarded = pair
    got = torch.compile(TRANSFORMS[name](guarded), fullgraph=True)(x)
    torch.testing.assert_close(got, TRANSFORMS[name](model)(x))


@pytest.mark.parametrize("name", ["grad", "jacrev", "jacfwd"])
@pytest.mark.parametrize("mode", ["plain", "aot_eager"])
def test_a_bad_sample_has_no_derivative_and_the_others_have_theirs(x, name, mode):
    model = Flattening()
    want = TRANSFORMS[name](model)(x)
    guarded = watch(model, level="modules", quarantine=True, returns="output")
    call = TRANSFORMS[name](guarded)
    x[2, 4] = NAN
    got = (call if mode == "plain" else torch.compile(call, fullgraph=True, backend=mode))(x)
    assert got.isfinite().all()
    assert not got[2].any()
    if mode == "plain":
        torch.testing.assert_close(got[GOOD], want[GOOD])
    else:  # not followed, so all samples are taken for touched
        assert not got.any()


def test_a_fault_created_in_backward_is_masked_under_vmap_too():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x):
            return self.head((self.first(x) * x).abs().sqrt())

    guarded = watch(Root(), level="modules", quarantine=True, returns="output")
    x = torch.rand(4, 3) + 1
    x[1] = 0
    assert jacobian(guarded, x, vectorize=True)[GOOD].isfinite().all()
    weights = dict(guarded.named_parameters())
    found = func.grad(lambda w: func.functional_call(guarded, w, (x,)).sum())(weights)
    assert all(grad.isfinite().all() for grad in found.values())


def test_flags_come_out_of_a_transform_by_being_returned(x):
    guarded = watch(Flattening(), level="modules")
    x[2, 4] = NAN
    _, f = func.jacrev(guarded, has_aux=True)(x)
    assert err.is_err(f).tolist() == [False, False, True, False]
    for read in (lambda: guarded.flags, guarded.report, guarded.poll):
        with pytest.raises(WatchError, match="return the flags"):
            read()
    assert copy.deepcopy(guarded).flags is None  # it was not called yet
    guarded(x)
    assert [one.sample for one in guarded.report()] == [2]


@pytest.mark.parametrize("transform", [func.jacrev, gradient], ids=["jacrev", "grad"])
def test_a_transform_leaves_nothing_behind_for_later_calls(x, transform):
    guarded = watch(Flattening(), level="modules", quarantine=True, returns="output")
    x[2, 4] = NAN
    transform(guarded)(x)
    torch.compile(guarded, fullgraph=True, backend="aot_eager")(x)
    assert [one.sample for one in guarded.report()] == [2]


@pytest.mark.parametrize("how", [{}, {"vectorize": True}, {"vectorize": True, "strategy": "forward-mode"}], ids=str)
def test_jacobians(pair, x, how):
    model, guarded = pair
    torch.testing.assert_close(jacobian(guarded, x, **how), jacobian(model, x))


def test_hessians_many_at_a_time(pair, x):
    model, guarded = pair
    want = hessian(lambda x: model(x).square().sum(), x)
    torch.testing.assert_close(hessian(lambda x: guarded(x).square().sum(), x, vectorize=True), want)


def test_batched_gradients(pair, x):
    model, guarded = pair
    x.requires_grad_()
    along = torch.randn(7, 4, 2)
    (got,) = torch.autograd.grad(guarded(x), x, along, is_grads_batched=True)
    (want,) = torch.autograd.grad(model(x), x, along, is_grads_batched=True)
    torch.testing.assert_close(got, want)


def test_jacobians_of_convolutions_and_of_recurrent_layers():
    convs = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)).to(
        memory_format=torch.channels_last  # pyright: ignore[reportCallIssue]
    )
    image = torch.randn(3, 2, 4, 4).to(memory_format=torch.channels_last)
    guarded = watch(copy.deepcopy(convs), level="modules", quarantine=True, returns="output")
    torch.testing.assert_close(jacobian(guarded, image, vectorize=True), jacobian(convs, image))
    recurrent, steps = nn.GRU(3, 4), torch.randn(6, 5, 3)
    guarded = watch(copy.deepcopy(recurrent), level="modules", quarantine=True, returns="output", batch_dim=1)
    want = jacobian(lambda x: recurrent(x)[0].sum(0), steps)
    torch.testing.assert_close(jacobian(lambda x: guarded(x)[0].sum(0), steps, vectorize=True), want)


def test_a_compiled_transform_in_quarantine_is_declared(x):
    for _ in range(2):  # each time that it is traced, also for models of one class
        torch._dynamo.reset()
        guarded = watch(Flattening(), quarantine=True)
        call = torch.compile(func.grad(lambda z: guarded(z)[0].sum()), backend="eager")  # noqa: B023
        with pytest.warns(MixedRowsWarning, match="all samples of the call are flagged"):
            call(x)


class Between(nn.Module):
    """Two layers with a step between them that overflows, or whose derivative does not exist, for some samples."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x):
        return self.head((self.first(x) * x[:, :1]).abs().sqrt() * x[:, 1:2].exp())


class OwnParameters(nn.Module):
    """The same with parameters that the model's own code uses."""

    def __init__(self):
        super().__init__()
        self.first, self.scale = nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return (x @ self.first * x[:, :1]).abs().sqrt() * x[:, 1:2].exp() * self.scale


def of_weights(model, transform):
    """A transform of the loss as a function of the weights."""
    weights = dict(model.named_parameters())
    return lambda x: transform(lambda weights: func.functional_call(model, weights, (x,)).square().sum())(weights)


DERIVATIVES = {
    **TRANSFORMS,
    "grad": lambda model: of_weights(model, func.grad),
    "hessian": lambda model: of_weights(model, func.hessian),
}


@pytest.mark.long
@pytest.mark.parametrize("make", [Between, OwnParameters])
@pytest.mark.parametrize(
    "name",
    [
        "per sample",
        "hessian",
        *[pytest.param(one, marks=pytest.mark.long) for one in ("grad", "jvp", "jacrev", "jacfwd")],
    ],
)
def test_derivatives_of_a_compiled_transform_are_finite(make, name):
    guarded = watch(make(), quarantine=True, returns="output")
    call = torch.compile(DERIVATIVES[name](guarded), backend="aot_eager", fullgraph=True)
    for column, value in [(0, NAN), (1, 1000.0), (0, 0.0)]:  # the last is a fault that the derivative alone has
        x = torch.randn(4, 3)
        x[2, column] = value
        assert all(one.isfinite().all() for one in tree_leaves(call(x)))


@pytest.mark.parametrize("fault", [(0, NAN), (1, 1000.0), (0, 0.0)])
def test_gradients_of_a_transform_are_finite(fault):
    guarded, x = watch(Between(), quarantine=True, returns="output"), torch.randn(4, 3)
    x[2, fault[0]] = fault[1]
    assert all(grad.isfinite().all() for grad in of_weights(guarded, func.grad)(x).values())


@pytest.mark.parametrize("mode", ["plain", "eager"])
def test_forward_mode_within_forward_mode_is_refused_in_quarantine(x, mode):
    model = Flattening()
    want = func.jacfwd(func.jacfwd(lambda x: model(x).square().sum()))(x)
    watched = watch(copy.deepcopy(model), returns="output")
    torch.testing.assert_close(func.jacfwd(func.jacfwd(lambda x: watched(x).square().sum()))(x), want)
    guarded = watch(model, quarantine=True, returns="output")
    call = func.jacfwd(func.jacfwd(lambda x: guarded(x).square().sum()))
    with pytest.raises(Exception, match="forward mode within forward mode"):
        (call if mode == "plain" else torch.compile(call, backend=mode))(x)


class TimeFirst(nn.Module):
    """Its rows are in another order than sizes suggest; it has a parameter of its own, and a random number."""

    def __init__(self, mixes=False):
        super().__init__()
        self.first, self.head, self.mixes = nn.Linear(3, 5), nn.Linear(5, 2), mixes
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        size, length, _ = x.shape
        burst = x[:, 0, 0].exp().reshape(-1, 1, 1)
        h = self.first(x.clamp(max=9).transpose(0, 1).reshape(-1, 3)).view(length, size, 5).transpose(0, 1) * burst
        h = h + h.mean(0) if self.mixes else h
        return self.head(h * self.scale).mean(1)


@pytest.mark.parametrize("fault", ["input", "inside"])
def test_rows_are_followed_under_a_transform(fault):
    model = TimeFirst().double()
    x = torch.randn(4, 4, 3, dtype=torch.float64)
    want = func.jacrev(model)(x)
    guarded = watch(model, quarantine=True)
    before = torch.random.get_rng_state()
    got, f = func.jacrev(guarded, has_aux=True)(x)
    assert torch.equal(got, want)
    assert not err.is_err(f).any()
    assert torch.equal(torch.random.get_rng_state(), before)
    x[2, 0, 0] = NAN if fault == "input" else 1000
    weights = dict(model.named_parameters())

    def loss(weights, x):
        out, f = func.functional_call(guarded, weights, (x,))
        return err.mean_ok(f, out.square().mean(-1)), f

    found, f = func.grad(loss, has_aux=True)(weights, x)
    assert all(grad.isfinite().all() for grad in found.values())
    if (
        fault == "inside"
    ):  # under a transform, parameters that the model itself uses are protected for all samples alike
        assert err.is_err(f).all()
        return
    assert err.is_err(f).nonzero().flatten().tolist() == [2]
    want = func.grad(lambda w: func.functional_call(unwatch(guarded), w, (x[GOOD],)).square().mean(-1).mean())(weights)
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-12)


def test_a_model_that_mixes_samples_is_declared_under_a_transform():
    guarded = watch(TimeFirst(mixes=True), quarantine=True)
    x = torch.randn(4, 4, 3)
    x[2, 1] = NAN
    with pytest.warns(MixedRowsWarning, match="may mix samples"):
        got, f = func.jacrev(guarded, has_aux=True)(x)
    assert err.is_err(f).all()
    assert not got.any()


def test_vmap_over_batches_tells_samples_apart():
    guarded = watch(TimeFirst(), quarantine=True)
    x = torch.randn(2, 4, 4, 3)
    x[1, 2, 1] = NAN
    out, f = func.vmap(guarded)(x)
    assert out.isfinite().all()
    assert [err.is_err(one).tolist() for one in f] == [[False] * 4, [False, False, True, False]]
