"""Quarantine replaces non-finite values where it meets them, and nothing else; and a watched model is the model."""

import copy
import gc
import pickle

import pytest
import torch
from tests.breadth import breadth
from tests.compare import assert_same_gradients, faults, take_gradients
from torch import nn

from torchguard import ErrorConfig, err, flags, get_config, set_config
from torchguard._watch import unwatch, watch
from torchguard.exceptions import MixedRowsWarning, WatchError

NAN, INF = float("nan"), float("inf")
BATCH = 6
GOOD, BAD = [0, 2, 3, 5], [1, 4]

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


class Fragile(nn.Module):
    """Between its modules are steps that `s`, a number for each row, makes go wrong; with ones, none does."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.third, self.head = nn.Linear(8, 8), nn.Linear(8, 2)
        with torch.no_grad():
            self.first.weight[0].fill_(1.0)

    def forward(self, x, s):
        h = self.norm(self.first(x)).tanh()
        log, ratio, power = s.unbind(1)
        h = self.second(((h + 2) * log[:, None]).log())  # the log of a negative
        h = self.third(h * ratio[:, None] / ratio[:, None])  # 0 / 0
        return self.head((h.sigmoid() * power[:, None]).exp())  # too large


def good_arguments(dtype):
    return torch.randn(BATCH, 4, dtype=dtype), torch.ones(BATCH, 3, dtype=dtype)


def planted(z, rows, column, value):
    z = z.clone()
    z[rows, column] = value
    return z


class Burst(nn.Module):
    """Overflows inside of a block: the weights of `block.0` are huge, and only bad rows are not tiny before them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 2)
        with torch.no_grad():
            self.block[0].weight[0].fill_(1e30)

    def forward(self, x):
        h = self.first(x).tanh().abs()
        return self.head(self.block(h * x[:, :1] * 1e-30))


# What to do to good arguments, and what is found then, and where: at the module that meets it.
FAULTS = {
    "NaN in the input": (lambda x, s: (planted(x, BAD, 1, NAN), s), "NAN @ input"),
    "Inf in the input": (lambda x, s: (planted(x, BAD, 2, INF), s), "INF @ input"),
    "-Inf in the input": (lambda x, s: (planted(x, BAD, 0, -INF), s), "INF @ input"),
    "overflow in a Linear": (lambda x, s: (planted(x, BAD, slice(None), 3e38), s), "INF @ first"),
    "log of a negative": (lambda x, s: (x, planted(s, BAD, 0, -1)), "NAN @ second"),
    "0 / 0": (lambda x, s: (x, planted(s, BAD, 1, 0)), "NAN @ third"),
    "overflow of exp": (lambda x, s: (x, planted(s, BAD, 2, 1e6)), "INF @ head"),
}


class Vanishing(nn.Module):
    """exp overflows and rsqrt makes it 0: nothing bad arrives at a module, but 0 * Inf comes back."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x, s):
        return self.second((self.first(x).sigmoid() * s[:, :1]).exp().rsqrt())


def tolerance(expected):
    """Limits that grow with the largest value of a gradient."""
    bf16 = expected.dtype == torch.bfloat16
    scale = expected.abs().max().item()
    return {"rtol": 0.05 if bf16 else 1e-4, "atol": scale * (0.02 if bf16 else 1e-5) + 1e-7}


def assert_close(got, want, why=""):
    assert_same_gradients(got, want, why, tolerance)


def per_sample(out):
    return out.square().mean(-1)


def assert_quarantined(guarded, model, good, bad, expected, why):
    """The promise, for one way of going wrong. `guarded` may be compiled; `model` is the plain one."""
    want_out, f = guarded(*good)
    assert err.all_ok(f), why
    per_sample(model(*(z[GOOD] for z in good))).mean().backward()
    want = take_gradients(model)

    out, f = guarded(*bad)
    assert set(faults(f)) == set(BAD), why
    for found in faults(f).values():
        assert len(found) == 2, f"{why}: {found}"
        assert found[0] == expected, f"{why}: {found}"
        assert found[1] == f"FALLBACK_VALUE @ {expected.split()[-1]}", why
    assert torch.equal(out[GOOD], want_out[GOOD]), why
    assert (out[BAD] == 0).all(), why
    err.mean_ok(f, per_sample(out)).backward()
    assert_close(take_gradients(model), want, why)


@pytest.fixture(params=[torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long)], ids=str)
def dtype(request):
    return request.param


class TestOneBadSampleCostsOneSample:
    @pytest.mark.inductor
    def test_whatever_goes_wrong_in_values_or_between_modules(self, run, dtype):
        model = Fragile().to(dtype)
        guarded = run(watch(model, quarantine=True))
        good = good_arguments(dtype)
        for why, (spoil, expected) in FAULTS.items():
            assert_quarantined(guarded, model, good, spoil(*good), expected, why)

    def test_overflow_inside_a_block(self, run_light, dtype):
        model, x = Burst().to(dtype), torch.rand(BATCH, 4, dtype=dtype) + 0.5
        guarded = run_light(watch(model, quarantine=True))
        assert_quarantined(guarded, model, (x,), (planted(x, BAD, 0, 3e38),), "INF @ block.0", "block")

    def test_level_by_level(self, dtype):
        """Fewer boundaries, the same promise for what comes in with the input."""
        good = good_arguments(dtype)
        for level in ("blocks", "outputs"):
            model = Fragile().to(dtype)
            guarded = watch(model, level=level, quarantine=True)
            bad = (planted(good[0], BAD, 1, NAN), good[1])
            assert_quarantined(guarded, model, good, bad, "NAN @ input", level)

    def test_a_bad_value_that_never_arrives_leaves_finite_gradients(self, run_light, dtype):
        model = Vanishing().to(dtype)
        x, s = good_arguments(dtype)
        out, f = run_light(watch(model, quarantine=True))(x, planted(s, BAD, 0, 1e6))
        assert out.isfinite().all()
        err.mean_ok(f, per_sample(out)).backward()
        assert all(grad.isfinite().all() for grad in take_gradients(model).values())

    def test_all_rows_bad(self, run_light):
        model = Fragile()
        x, s = good_arguments(torch.float32)
        out, f = run_light(watch(model, quarantine=True))(torch.full_like(x, NAN), s)
        assert err.is_err(f).all()
        assert (out == 0).all()
        err.mean_ok(f, per_sample(out)).backward()
        assert all((grad == 0).all() for grad in take_gradients(model).values())

    def test_a_batch_of_one_in_a_deep_model(self):
        guarded = watch(nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)]), quarantine=True)
        out, f = guarded(torch.full((1, 4), torch.nan))
        assert out.isfinite().all()
        assert err.is_err(f).all()

    @pytest.mark.parametrize(
        "norm", [nn.LayerNorm(8), nn.RMSNorm(8), nn.GroupNorm(2, 6)], ids=lambda norm: type(norm).__name__
    )
    @pytest.mark.parametrize("size", breadth([1e19, 1e30, 3e38], 1e19))
    def test_numbers_whose_squares_overflow_in_a_norm(self, run_light, norm, size, dtype):
        model = nn.Sequential(nn.Identity(), copy.deepcopy(norm), nn.Linear(8, 2), nn.Flatten()).to(dtype)
        x = torch.randn(BATCH, 6, 8).to(dtype)
        bad = x.clone()
        bad[BAD, 2] = size * x[BAD, 2].sign()
        guarded = run_light(watch(model, quarantine=True))
        assert_quarantined(guarded, model, (x,), (bad,), "INF @ 1", "norm")

    def test_a_row_with_two_faults_keeps_both(self):
        """A replaced row is finite again: what goes wrong later is another fault."""
        x, s = good_arguments(torch.float32)
        _, f = watch(Fragile(), quarantine=True)(planted(x, BAD, 0, NAN), planted(s, BAD, 1, 0))
        both = ["NAN @ input", "FALLBACK_VALUE @ input", "NAN @ third", "FALLBACK_VALUE @ third"]
        assert faults(f) == dict.fromkeys(BAD, both)

    def test_the_gradient_of_the_input_is_zero_in_bad_rows_and_exact_in_the_others(self, run_light):
        model = Fragile()
        x, s = good_arguments(torch.float32)
        clean = x.clone().requires_grad_()
        per_sample(model(clean, s))[GOOD].mean().backward()
        poisoned = planted(x, BAD, 0, NAN).requires_grad_()
        out, f = run_light(watch(model, quarantine=True))(poisoned, s)
        err.mean_ok(f, per_sample(out)).backward()
        assert (poisoned.grad[BAD] == 0).all()
        torch.testing.assert_close(poisoned.grad[GOOD], clean.grad[GOOD])

    def test_while_all_is_clean_gradients_are_those_of_the_plain_model(self, dtype):
        model, good = Fragile().to(dtype), good_arguments(dtype)
        per_sample(model(*good)).mean().backward()
        want = take_gradients(model)
        out, f = watch(model, quarantine=True)(*good)
        err.mean_ok(f, per_sample(out)).backward()
        got = take_gradients(model)
        assert [name for name in want if not torch.equal(got[name], want[name])] == []

    def test_a_bad_token_does_not_touch_the_other_sequences(self, run_light):
        """Attention over three dims: one token of a row is bad, and the whole row is replaced in the output."""
        model, x = Attention(), torch.randn(BATCH, 5, 8)
        guarded = run_light(watch(model, quarantine=True))
        want_out, f = guarded(x)
        assert err.all_ok(f)
        per_sample(model(x[GOOD])).mean(-1).mean().backward()
        want = take_gradients(model)
        bad = x.clone()
        bad[BAD, 2, 3] = INF
        out, f = guarded(bad)
        assert faults(f) == {row: ["INF @ input", "FALLBACK_VALUE @ input"] for row in BAD}
        assert torch.equal(out[GOOD], want_out[GOOD])
        assert (out[BAD] == 0).all()
        err.mean_ok(f, per_sample(out).mean(-1)).backward()
        assert_close(take_gradients(model), want)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out((q @ k.transpose(1, 2)).softmax(-1) @ v)


class Root(nn.Module):
    """The square root of 0 is finite, its derivative is not."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x, s):
        return self.second((self.first(x).square() * s).sqrt())


def losses(out):
    return per_sample(out.flatten(1))


class TestCreatedInBackward:
    @pytest.fixture(params=[(), (3,), (2, 3)], ids=["vectors", "tokens", "images"], autouse=True)
    def between(self, request):
        """The dims between those of the samples and of their vectors: one of the vectors of a bad sample is bad."""
        self.dims = request.param

    def arguments(self, dtype):
        x, s = torch.randn(BATCH, *self.dims, 4, dtype=dtype), torch.ones(BATCH, *self.dims, 1, dtype=dtype)
        s[(BAD, *(-1 for _ in self.dims))] = 0
        return x, s

    def test_the_plain_model_has_no_finite_gradient(self, dtype):
        model = Root().to(dtype)
        losses(model(*self.arguments(dtype))).mean().backward()
        assert model.first.weight.grad.isnan().any()

    def test_every_gradient_is_finite_and_the_other_rows_contribute_exactly(self, run, dtype):
        model, (x, s) = Root().to(dtype), self.arguments(dtype)
        out = model(x, s)
        (second,) = torch.autograd.grad(losses(out).mean(), [model.second.weight])
        share = losses(model(x[GOOD], s[GOOD])).sum() / BATCH
        first = torch.autograd.grad(share, [model.first.weight, model.first.bias])

        guarded_out, f = run(watch(model, quarantine=True))(x, s)
        assert err.all_ok(f)
        torch.testing.assert_close(guarded_out, out)
        err.mean_ok(f, losses(guarded_out)).backward()
        got = take_gradients(model)
        assert_close(got, got)  # all finite
        want = {"first.weight": first[0], "first.bias": first[1], "second.weight": second}
        assert_close({name: got[name] for name in want}, want)

    def test_it_can_be_read_afterwards(self, run_light):
        model, (x, s) = Root(), self.arguments(torch.float32)
        guarded = watch(model, quarantine=True)
        out, f = run_light(guarded)(x, s)
        err.mean_ok(f, losses(out)).backward()
        found = faults(guarded.backward_flags)
        assert set(found) == set(BAD)
        assert {error.split()[-1] for errors in found.values() for error in errors} == {"first"}


class Waves(nn.Module):
    """One of its gradients is complex: no operator masks that."""

    def __init__(self):
        super().__init__()
        self.first, self.turn, self.last = nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.complex64), nn.Linear(4, 2)

    def forward(self, x, s):
        z = self.turn(torch.complex(self.first(x), x))
        return self.last((z.real.square() * s).sqrt() + (z.imag.square() * s.roll(1, 1)).sqrt())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex operators")
def test_probes_for_gradients_of_several_dtypes(backend):
    x, s = torch.randn(BATCH, 4), torch.ones(BATCH, 1)
    s[BAD] = 0
    created = []
    for run in (lambda model: model, lambda model: torch.compile(model, backend=backend, fullgraph=True)):
        torch.manual_seed(0)
        guarded = watch(Waves(), quarantine=True)
        out, f = run(guarded)(x, s)
        err.mean_ok(f, losses(out)).backward()
        created.append(faults(guarded.backward_flags))
    assert created[0] == created[1]
    assert created[0]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_two_models_in_one_graph_have_probes_of_their_own(backend):
    one, two = (watch(Root(), quarantine=True) for _ in range(2))

    def both(x, s):
        (first, f), (second, g) = one(x, s), two(x, s.flip(0))
        return losses(first) + losses(second), f, g

    x, s = torch.randn(BATCH, 4), torch.ones(BATCH, 1)
    s[0] = 0
    loss, _, _ = torch.compile(both, backend=backend, fullgraph=True)(x, s)
    loss.mean().backward()
    assert [*faults(one.backward_flags)] == [0]
    assert [*faults(two.backward_flags)] == [BATCH - 1]


class Forked(Root):
    def forward(self, x, s):
        return super().forward(x, s), self.second(self.first(x))


def test_for_a_gradient_taken_in_a_graph_there_are_no_backward_flags():
    guarded = watch(Forked(), quarantine=True)

    def step(x, s):
        (root, other), _ = guarded(x, s)
        return other.sum(), torch.autograd.grad(root.sum(), x, retain_graph=True)

    x, s = torch.randn(BATCH, 4, requires_grad=True), torch.zeros(BATCH, 1)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        loss, _ = torch.compile(step, backend="aot_eager", fullgraph=True)(x, s)
        loss.backward()
    assert not faults(guarded.backward_flags)


class Routed(nn.Module):
    """How many rows go through it is not known before."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(12, 4)

    def forward(self, x):
        rows = (x[:, 0] > 0).nonzero().flatten()
        return x.index_add(0, rows, self.out(self.qkv(x[rows])))


def test_where_rows_are_chosen_by_their_values_all_samples_are_flagged():
    x = torch.randn(BATCH, 4)
    x[BAD] = NAN
    with (
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        pytest.warns(MixedRowsWarning, match="Routed may mix samples.*torchguard.Retry"),
    ):
        _, f = torch.compile(watch(Routed(), quarantine=True), backend="aot_eager", fullgraph=True)(x)
    assert [*faults(f)] == [*range(BATCH)]


def normalized_mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)).eval()


def faults_of(guarded, dtype=torch.float32):
    """What is found in a batch with one bad sample."""
    x = torch.randn(3, 4, dtype=dtype)
    x[1, 0] = NAN
    return faults(guarded(x)[1])


@pytest.mark.filterwarnings("ignore::torchguard.exceptions.MixedRowsWarning")
class TestTheWatchedModelIsTheModel:
    @pytest.fixture(params=[False, True], ids=["", "quarantine"])
    def quarantine(self, request):
        return request.param

    def test_it_has_its_class_name_and_parameters(self, quarantine):
        model = normalized_mlp()
        names = [name for name, _ in model.named_parameters()]
        modules = [name for name, _ in model.named_modules()]
        buffers = [name for name, _ in model.named_buffers()]
        text, keys = repr(model), list(model.state_dict())
        guarded = watch(model, quarantine=quarantine)
        assert isinstance(guarded, nn.Sequential)
        assert repr(guarded) == text
        assert list(guarded.state_dict()) == keys == list(model.state_dict())
        assert [name for name, _ in guarded.named_parameters()] == names
        assert [name for name, _ in guarded.named_modules()] == modules
        assert [name for name, _ in guarded.named_buffers()] == buffers
        assert all(p is q for p, q in zip(guarded.parameters(), model.parameters(), strict=True))
        assert guarded[0] is model[0]
        assert len(guarded) == len(model)

    def test_the_model_goes_on_as_before(self, quarantine):
        model, x = normalized_mlp(), torch.randn(3, 4)
        want = model(x)
        guarded = watch(model, quarantine=quarantine)
        assert torch.equal(model(x), want)
        assert torch.equal(guarded(x)[0], want)
        x[1] = NAN
        assert model(x)[1].isnan().all()

    def test_weights_load_into_either(self, quarantine):
        other, model, x = normalized_mlp(), normalized_mlp(), torch.randn(3, 4)
        guarded = watch(model, quarantine=quarantine)
        guarded.load_state_dict(other.state_dict())
        assert torch.equal(guarded(x)[0], other(x))
        assert torch.equal(model(x), other(x))
        plain = normalized_mlp()
        plain.load_state_dict(guarded.state_dict())
        assert torch.equal(plain(x), other(x))

    def test_both_are_in_the_same_mode(self, quarantine):
        model = normalized_mlp()
        guarded = watch(model, quarantine=quarantine)
        for change, training in (
            (guarded.train, True),
            (model.eval, False),
            (model.train, True),
            (guarded.eval, False),
        ):
            change()
            assert model.training is guarded.training is model[3].training is training

    def test_an_attribute_set_on_one_is_on_the_other(self):
        model = normalized_mlp()
        guarded = watch(model)
        guarded.temperature = 2.0
        guarded.register_buffer("count", torch.zeros(1))
        assert model.temperature == 2.0
        assert model.count is guarded.count
        model.head = nn.Linear(2, 1)
        assert guarded.head is model.head

    def test_it_moves_to_another_dtype(self, quarantine, dtype):
        model = normalized_mlp()
        guarded = watch(model, quarantine=quarantine)
        assert guarded.to(dtype) is guarded
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert guarded(torch.randn(3, 4, dtype=dtype))[0].dtype == dtype
        assert faults_of(guarded, dtype)[1][0] == "NAN @ input"

    def test_unwatch_removes_all_hooks_and_attributes(self, quarantine):
        model, x = normalized_mlp(), torch.randn(3, 4)
        attributes, want = set(model.__dict__), model(x)
        guarded = watch(model, quarantine=quarantine)
        guarded(x)
        assert unwatch(guarded) is model
        assert set(model.__dict__) == attributes
        for module in model.modules():
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
            assert not module._forward_pre_hooks_with_kwargs
            assert not module._forward_hooks_with_kwargs
        assert type(model) is nn.Sequential
        assert torch.equal(model(x), want)
        assert faults_of(watch(model)) == {1: ["NAN @ input"]}

    def test_after_unwatch_it_says_so(self, quarantine):
        guarded = watch(normalized_mlp(), quarantine=quarantine)
        guarded(torch.randn(3, 4))
        unwatch(guarded)
        uses = [guarded.report, guarded.run_report, guarded.poll, lambda: guarded(torch.randn(3, 4))]
        uses += [lambda name=name: getattr(guarded, name) for name in ("flags", "history", "backward_flags")]
        for use in (*uses, lambda: unwatch(guarded)):
            with pytest.raises(WatchError, match=r"is no longer watched.*Use the model that unwatch returned"):
                use()

    def test_hooks_of_others_stay_when_it_is_unwatched(self):
        model, called = normalized_mlp(), []
        model[0].register_forward_hook(lambda *_: called.append("after"))
        model[0].register_forward_pre_hook(lambda *_: called.append("before"))
        guarded = watch(model, quarantine=True)
        guarded(torch.randn(3, 4))
        assert called == ["before", "after"]
        unwatch(guarded)(torch.randn(3, 4))
        assert called == ["before", "after"] * 2

    @pytest.mark.parametrize(
        "copied", [copy.deepcopy, lambda guarded: pickle.loads(pickle.dumps(guarded))], ids=["deepcopy", "pickle"]
    )
    def test_a_copy_is_watched_and_shares_nothing(self, copied, quarantine):
        model, x = normalized_mlp(), torch.randn(3, 4)
        guarded = watch(model, quarantine=quarantine)
        guarded(x)
        twin = copied(guarded)
        assert type(twin) is type(guarded)
        assert torch.equal(twin(x)[0], guarded(x)[0])
        with torch.no_grad():
            twin[0].weight.zero_()
            twin.train()
        assert not (guarded[0].weight == 0).any()
        assert not guarded.training
        want = faults_of(guarded)
        del model, guarded
        gc.collect()
        others = [watch(nn.Sequential(nn.Linear(4, 2))) for _ in range(3)]  # take the ids that became free
        twin.eval()
        assert faults_of(twin) == want
        assert faults_of(others[-1])[1] == ["NAN @ input"]
        with torch.no_grad():
            twin[4].weight.fill_(NAN)
        assert faults(twin(x)[1])[0][0] == "NAN @ 4"
        plain = unwatch(twin)
        assert type(plain) is nn.Sequential
        assert isinstance(plain(x), torch.Tensor)

    def test_a_copy_of_the_plain_model_is_plain(self):
        model, x = normalized_mlp(), torch.randn(3, 4)
        guarded = watch(model)
        twin = copy.deepcopy(model)
        assert torch.equal(twin(x), model(x))
        twin.train()
        assert not guarded.training
        assert isinstance(watch(copy.deepcopy(normalized_mlp()))(x), tuple)

    def test_an_optimizer_trains_both(self, run_light, quarantine):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        guarded = watch(model, quarantine=quarantine)
        optimizer = torch.optim.SGD(guarded.parameters(), lr=0.1)
        before = model[0].weight.detach().clone()
        out, f = run_light(guarded)(torch.randn(3, 4))
        err.mean_ok(f, per_sample(out)).backward()
        optimizer.step()
        assert not torch.equal(model[0].weight, before)


def tokens(*modules, dtype=torch.float32):
    """A model and a batch of sequences for it."""
    return nn.Sequential(*modules).to(dtype), torch.randn(5, 3, 4, dtype=dtype)


class TestOddGradients:
    def test_of_an_empty_batch(self, run):
        model, x = tokens(nn.Linear(4, 4), nn.Linear(4, 4))
        out, f = run(watch(model, quarantine=True))(x[:0].requires_grad_())
        assert f.shape[0] == 0
        out.sum().backward()
        assert all(p.grad.eq(0).all() for p in model.parameters())

    @pytest.mark.filterwarnings(
        "ignore:Complex modules:UserWarning", "ignore:Torchinductor does not support:UserWarning"
    )
    def test_complex(self, run):
        model, x = tokens(nn.Linear(4, 4), nn.Linear(4, 4), dtype=torch.complex64)
        model(x[1:]).abs().flatten(1).mean(1).mean().backward()
        want = take_gradients(model)
        x[0, 1, 2] = NAN
        out, f = run(watch(model, quarantine=True))(x)
        err.mean_ok(f, out.abs().flatten(1).mean(1)).backward()
        assert err.is_err(f).tolist() == [True, False, False, False, False]
        assert_close(take_gradients(model), want)

    def test_of_gradients(self):
        model, x = tokens(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2), dtype=torch.float64)
        guarded = watch(model, quarantine=True)
        assert torch.autograd.gradgradcheck(lambda x: guarded(x)[0], x[:2].clone().requires_grad_())


def test_one_slot_holds_the_fault(run_light):
    model, x = tokens(nn.Linear(4, 4))
    x[1, 2, 3] = NAN
    before = get_config()
    set_config(ErrorConfig(num_slots=1))
    try:
        _, f = run_light(watch(model, quarantine=True))(x)
        assert faults(f) == {1: ["NAN @ input"]}
    finally:
        set_config(before)


@pytest.mark.long
@pytest.mark.parametrize("quarantine", [False, True])
def test_a_wrapper_in_cpp(quarantine):
    model, x = tokens(nn.Linear(4, 4))
    x[1, 2, 3] = NAN
    guarded = watch(model, quarantine=quarantine)
    _, f = torch.compile(guarded, fullgraph=True, options={"cpp_wrapper": True})(x)
    assert err.is_err(f).tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("quarantine", [False, True])
@pytest.mark.parametrize("depth", [8, 40], ids=["few", "many"])
@pytest.mark.long
def test_few_checks_and_many_give_the_same(run_light, depth, quarantine):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth)))
    with torch.no_grad():
        model[depth // 2].weight[0] = 1e30
    x = torch.randn(BATCH, 3, 4)
    x[1, 2], x[4, 0, 1] = 1e30, NAN
    guarded = watch(model, quarantine=quarantine)
    _, want = guarded(x)
    report = guarded.report()
    assert {incident.sample for incident in report} >= {1, 4}
    out, f = run_light(guarded)(x)
    assert torch.equal(f, want)
    assert guarded.report() == report
    assert out[GOOD].isfinite().all() or not quarantine


class Short(nn.Module):
    """Returns numbers of one byte."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x).to(torch.float8_e5m2)


class Shortened(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = Short(), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.first(x).to(torch.float32))


def test_numbers_of_one_byte(run):
    model = Shortened()
    guarded = watch(model, quarantine=True, include=["first", "head"], level="outputs")
    x = torch.randn(BATCH, 4)
    x[BAD] = 1e30  # overflows in one byte
    out, f = run(guarded)(x)
    assert err.is_err(f).nonzero().flatten().tolist() == BAD
    assert {error.location_name for error in flags.unpack(f, BAD[0])} == {"first"}
    err.mean_ok(f, out.square().mean(-1)).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


class Transposed(nn.Module):
    """Hands a tensor that is not contiguous to its last layer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.first(x.transpose(0, 1)).transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_clean_batch_meets_the_kernels_of_the_plain_model(dtype):
    """A layer computes a product and a sum, or both at once, by the strides of its input: they round differently."""
    model, x = Transposed().to(dtype), torch.randn(4, 5, 16, dtype=dtype)
    want = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")(x)
    got, _ = torch.compile(watch(model, quarantine=True), fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(got, want)
