"""Parameters that a model's own code uses: a fault between two of them costs one sample, or is declared."""

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from tests.breadth import breadth
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchguard import err, unwatch
from torchguard._watch import watch
from torchguard.exceptions import MixedRowsWarning

SIZE, TIME, WIDTH, BAD = 5, 4, 8, 2
ALL = [*range(SIZE)]


class Own(nn.Module):
    """Two weights with a step between them that overflows, or whose derivative does not exist, for some samples."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, h, x):
        h = h @ self.first
        burst, root = x[:, 0, 0].exp(), (x[:, 0, 1] * h[:, 0, 0]).abs().sqrt()
        h = (h * (burst * root).reshape(-1, 1, 1)) @ self.second
        return h.tanh() * self.scale + h


class Model(nn.Module):
    def __init__(self, step, **parts):
        super().__init__()
        self.inp, self.out, self.own, self.step = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Own(), step
        self.parts = nn.ModuleDict(parts)
        self.scale, self.table = nn.Parameter(torch.ones(())), nn.Parameter(torch.randn(TIME, WIDTH))

    def forward(self, x):
        return self.out(self.step(self, self.inp(x), x))


def large_where_marked(x, number):
    """A factor for each sample: the number where the sample is marked, else 1."""
    mark = x[:, 0, 0].reshape(-1, 1, 1)
    return torch.where(mark > 1, torch.full_like(mark, number), torch.ones_like(mark))


def attention_overflow(model, h, x):
    large = large_where_marked(x, torch.finfo(h.dtype).max ** 0.6)
    return model.parts["attention"](model.own(h, x.clamp(max=1)) * large, h * large, h)[0]


def in_place(model, h, x):
    h = model.own(h, x).clone()
    h *= model.scale
    h += model.table
    return h


def experts(model, h, x):
    h = model.own(h, x)
    return torch.einsum("bte,btf,efd->btd", h[..., :1].softmax(-1), h, model.own.first.unsqueeze(0))


STEPS = {
    "in one module": lambda model, h, x: model.own(h, x),
    "in the model": lambda model, h, x: model.own(h, x) * model.scale + model.table,
    "a function of a parameter": lambda model, h, x: model.own(h, x) * -torch.exp(model.scale),
    "a weight of a layer": lambda model, h, x: F.linear(model.own(h, x), model.inp.weight),
    "attention": attention_overflow,
    "in place": in_place,
    "einsum": experts,
    "learned queries": lambda model, h, x: model.table.expand(len(h), -1, -1) @ model.own(h, x).mT @ h,
    "checkpoint": lambda model, h, x: checkpoint(model.own, h, x, use_reentrant=False),
}
DECLARED_IN_EAGER_MODE = ("checkpoint",)


def make(name, dtype=torch.float64):
    torch.manual_seed(0)
    return Model(STEPS[name], attention=nn.MultiheadAttention(WIDTH, 2, batch_first=True)).to(dtype)


def batch(fault=None, dtype=torch.float64):
    x = torch.randn(SIZE, TIME, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(0))
    x[:, 0, 0], x[:, 0, 1] = 0.1, 1
    if fault == "overflow":
        x[BAD, 0, 0] = 1000
    elif fault == "backward":
        x[BAD, 0, 1] = 0
    return x


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def named(f):
    return err.is_err(f).nonzero().flatten().tolist()


@pytest.mark.parametrize("mode", ["plain", "aot_eager"])
@pytest.mark.parametrize("name", breadth(STEPS, "in one module", "attention", "in place"))
def test_a_fault_between_two_parameters_costs_one_sample(name, mode, recwarn):
    model = make(name)
    plain, guarded = copy.deepcopy(model), watch(model, quarantine=True)
    call = guarded if mode == "plain" else torch.compile(guarded, backend=mode, fullgraph=True)
    x = batch()
    out, f = call(x)
    assert torch.equal(out, plain(x))
    assert named(f) == []
    x, others = batch("overflow"), [i for i in ALL if i != BAD]
    want = plain(x[others])
    want.square().mean().backward()
    for _ in range(2):
        out, f = call(x)
        err.mean_ok(f, out.square().mean((1, 2))).backward()
        found = gradients(model)
        assert all(grad.isfinite().all() for grad in found.values())
        if name in DECLARED_IN_EAGER_MODE and mode == "plain":
            assert named(f) == ALL
            assert any(issubclass(one.category, MixedRowsWarning) for one in recwarn)
            continue
        assert named(f) == [BAD]
        torch.testing.assert_close(out[others], want, rtol=1e-9, atol=1e-12)
        for key, grad in plain.named_parameters():
            if grad.grad is not None:
                torch.testing.assert_close(found[key], grad.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("mode", ["plain", "aot_eager"])
@pytest.mark.parametrize("name", breadth(STEPS, "in one module"))
def test_a_fault_that_backward_creates_between_two_parameters_is_named(name, mode):
    model = make(name)
    guarded = watch(model, quarantine=True)
    call = guarded if mode == "plain" else torch.compile(guarded, backend=mode, fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MixedRowsWarning)
        out, f = call(batch("backward"))
    assert named(f) == []
    out.square().mean().backward()
    assert all(grad.isfinite().all() for grad in gradients(model).values())
    assert named(guarded.backward_flags) == [BAD]


class Layers(nn.Module):
    """Two layers with a step between them that overflows, or whose derivative does not exist, for some samples."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h, x):
        h = self.first(h)
        return self.second(h * (x[:, 0, 0].exp() * (x[:, 0, 1] * h[:, 0, 0]).abs().sqrt()).reshape(-1, 1, 1))


class TestReentrantCheckpoints:
    """Their second run is outside of the call: layers are protected, uses of parameters are declared."""

    @staticmethod
    def watched(inside):
        torch.manual_seed(0)
        model = Model(lambda model, h, x: checkpoint(model.parts["inside"], h, x, use_reentrant=True), inside=inside)
        return model.double(), copy.deepcopy(model).double(), watch(model, quarantine=True)

    def test_a_fault_between_layers_costs_one_sample(self):
        model, plain, guarded = self.watched(Layers())
        x, others = batch("overflow"), [i for i in ALL if i != BAD]
        plain(x[others]).square().mean().backward()
        for _ in range(2):
            out, f = guarded(x)
            err.mean_ok(f, out.square().mean((1, 2))).backward()
            assert named(f) == [BAD]
            found = gradients(model)
            for key, want in plain.named_parameters():
                if want.grad is not None:
                    torch.testing.assert_close(found[key], want.grad, rtol=1e-9, atol=1e-11)

    def test_a_fault_between_parameters_is_declared(self):
        model, plain, guarded = self.watched(Own())
        with pytest.warns(MixedRowsWarning, match="use_reentrant=True"):
            out, f = guarded(batch())
        assert torch.equal(out, plain(batch()))
        assert named(f) == []
        for _ in range(2):
            out, f = guarded(batch("overflow"))
            err.mean_ok(f, out.square().mean((1, 2))).backward()
            assert named(f) == ALL
            assert all(grad.isfinite().all() for grad in gradients(model).values())

    @pytest.mark.filterwarnings("ignore::torchguard.exceptions.MixedRowsWarning")
    @pytest.mark.parametrize("inside", [Own, Layers])
    def test_a_fault_in_backward_is_recorded_for_all_samples(self, inside):
        model, _, guarded = self.watched(inside())
        out, f = guarded(batch("backward"))
        out.square().mean().backward()
        assert named(f) == []
        assert all(grad.isfinite().all() for grad in gradients(model).values())
        assert named(guarded.backward_flags) == ALL


@pytest.mark.parametrize("mode", ["plain", "aot_eager"])
def test_a_weight_gradient_that_overflows_from_finite_numbers_is_recorded_for_all_samples(mode):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    guarded = watch(model, quarantine=True)
    call = guarded if mode == "plain" else torch.compile(guarded, backend=mode, fullgraph=True)
    out, f = call(torch.tensor([[1.0, 1.0], [1e25, 1.0]]))
    (out * 1e20).sum().backward()
    assert named(f) == []
    assert model[0].weight.grad.isinf().any()  # as without `watch`: a `GradScaler` has to see it
    assert named(guarded.backward_flags) == [0, 1]
    model.zero_grad()
    assert named(guarded.backward_flags) == []


@pytest.mark.parametrize("mode", ["plain", "aot_eager"])
def test_a_batch_of_one(mode):
    model = make("in one module")
    guarded = watch(model, quarantine=True)
    call = guarded if mode == "plain" else torch.compile(guarded, backend=mode, fullgraph=True)
    out, f = call(batch("overflow")[BAD : BAD + 1])
    err.mean_ok(f, out.square().mean((1, 2))).backward()
    assert named(f) == [0]
    assert all(grad.eq(0).all() for grad in gradients(model).values())


@pytest.mark.long
def test_attention_in_a_graph_for_several_sizes_accuses_all_samples():
    model = make("attention")
    call = torch.compile(watch(model, quarantine=True), backend="aot_eager", fullgraph=True, dynamic=True)
    x = batch("overflow")
    for size in (SIZE, SIZE - 1):
        out, f = call(x[:size])
        assert named(f) == [*range(size)]
        err.mean_ok(f, out.square().mean((1, 2))).backward()
        assert all(grad.isfinite().all() for grad in gradients(model).values())
    assert named(call(batch())[1]) == []


class Growing(nn.Module):
    """A recurrent layer whose state overflows."""

    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rnn = nn.RNN(WIDTH, WIDTH, batch_first=True, nonlinearity="relu")
        with torch.no_grad():
            self.rnn.weight_ih_l0.abs_().mul_(4)

    def forward(self, x):
        large = large_where_marked(x, torch.finfo(x.dtype).max * 0.3)
        return self.out(self.rnn(self.inp(x).abs().clamp(max=3) * large)[0])


def test_a_fault_inside_a_recurrent_layer_is_declared_when_it_happens(recwarn):
    model = Growing().double()
    guarded = watch(model, quarantine=True)
    guarded(batch())
    assert not recwarn.list
    with pytest.warns(MixedRowsWarning, match="recurrent layer"):
        out, f = guarded(batch("overflow"))
    assert named(f) == ALL
    err.mean_ok(f, out.square().mean((1, 2))).backward()
    assert all(grad.isfinite().all() for grad in gradients(model).values())
    x = batch()
    x[BAD, 1] = math.nan  # a fault that comes from outside of the layer is its sample's
    assert named(guarded(x)[1]) == [BAD]
    shown = len(recwarn)
    assert named(guarded(batch("overflow"))[1]) == ALL
    assert len(recwarn) == shown  # it is said once for each watched model


class Breaking(Model):
    def forward(self, x):
        h = self.step(self, self.inp(x), x)
        torch._dynamo.graph_break()
        return self.out(h)


@pytest.mark.filterwarnings("ignore::torchguard.exceptions.MixedRowsWarning", "ignore:The .grad attribute:UserWarning")
def test_a_graph_break_leaves_gradients_finite():
    torch.manual_seed(0)
    model = Breaking(STEPS["in the model"]).double()
    guarded = watch(model, quarantine=True)
    call = torch.compile(guarded, backend="aot_eager")
    assert named(call(batch())[1]) == []
    out, f = call(batch("overflow"))
    assert named(f) == ALL
    err.mean_ok(f, out.square().mean((1, 2))).backward()
    assert all(grad.isfinite().all() for grad in gradients(model).values())
    call(batch("backward"))[0].square().mean().backward()
    assert all(grad.isfinite().all() for grad in gradients(model).values())
    assert named(guarded.backward_flags) == ALL
    assert not any(p._backward_hooks for p in unwatch(guarded).parameters())


def test_a_way_through_the_model_that_was_not_followed_leaves_gradients_finite():
    model = make("in the model")
    guarded = watch(model, quarantine=True)
    guarded(batch())
    model.step = lambda model, h, x: (model.own(h, x) * model.scale).exp().log() * model.scale
    with pytest.warns(MixedRowsWarning, match="another way"):
        out, f = guarded(batch("overflow"))
    assert named(f) == ALL
    err.mean_ok(f, out.square().mean((1, 2))).backward()
    assert all(grad.isfinite().all() for grad in gradients(model).values())


class Reshaped(nn.Module):
    """Its graph for varying sizes has nodes that are given a size as a whole."""

    def __init__(self):
        super().__init__()
        self.inp, self.out, self.scale = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Parameter(torch.ones(WIDTH)),
        )

    def forward(self, x):
        size = x.size()[:-1] + (WIDTH,)
        return self.out((self.inp(x) * self.scale).view(size))


def test_sizes_that_vary_are_arguments_like_others():
    model, x = Reshaped(), torch.randn(SIZE, TIME, WIDTH)
    guarded = torch.compile(watch(model, quarantine=True), backend="aot_eager", dynamic=True, fullgraph=True)
    x[BAD, 0] = math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error", MixedRowsWarning)
        out, f = guarded(x)
    out.square().sum().backward()
    assert err.is_err(f).nonzero().flatten().tolist() == [BAD]
    assert all(p.grad.isfinite().all() for p in model.parameters())
