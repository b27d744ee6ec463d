"""Plans: what was found in one call holds in another only if that takes the same way through the model."""

import contextlib

import pytest
import torch
from torch import nn

from torchguard import err
from torchguard._watch import watch
from torchguard.exceptions import MixedRowsWarning

NAN, HUGE = float("nan"), 1e200
ALL = [0, 1, 2, 3]


class Steps(nn.Module):
    """A step of its own between two layers, with a third layer that the step may call."""

    def __init__(self, step):
        super().__init__()
        self.first, self.last, self.inner = (nn.Linear(5, 5).double() for _ in range(3))
        self.step, self.flag = step, False

    def forward(self, x, *others):
        return self.last(self.step(self, self.first(x), *others))


def batch(*shape, bad=None, value=HUGE):
    x = torch.randn(shape, dtype=torch.float64)
    if bad is not None:
        x[bad] = value  # finite, but not its square
    return x


def bad_samples(f):
    return err.is_err(f).nonzero().flatten().tolist()


def in_another_order(self, z):
    size, length, width = z.shape
    z = z**2
    if self.flag:
        rows = self.inner(z.transpose(0, 1).reshape(size * length, width))
        return rows.view(length, size, width).transpose(0, 1)
    return self.inner(z.reshape(size * length, width)).view(size, length, width)


def test_a_call_on_another_way_accuses_all_and_the_next_is_exact():
    model = Steps(in_another_order)
    guarded = watch(model, quarantine=True)
    guarded(batch(4, 3, 5))
    model.flag = True
    x = batch(4, 3, 5)
    x[2, 0] = HUGE
    with pytest.warns(MixedRowsWarning, match="another way through the model"):
        _, f = guarded(x)
    assert bad_samples(f) == ALL
    for _ in range(2):
        assert bad_samples(guarded(x)[1]) == [2]


def reads_lengths(self, z, lengths):
    longest = max(int(lengths.max()), *lengths.tolist())
    return self.inner(z[:, :longest]) ** 2


def writes_by_columns(self, z, lengths):
    out = torch.empty_like(z).transpose(1, 2)
    for i in range(z.shape[1]):
        out[..., i] = z[:, i]
    return self.inner.weight[0] * out.transpose(1, 2) ** 2


@pytest.mark.filterwarnings("error::torchguard.exceptions.MixedRowsWarning")
@pytest.mark.parametrize("step", [reads_lengths, writes_by_columns])
def test_what_following_does_itself_is_no_other_way(step):
    guarded = watch(Steps(step), quarantine=True)
    lengths = torch.tensor([3, 2, 3, 1])
    guarded(batch(4, 3, 5), lengths)
    assert bad_samples(guarded(batch(4, 3, 5, bad=2), lengths)[1]) == [2]


def test_a_mixture_that_comes_later_is_noticed():
    model = Steps(lambda self, z: z + z.roll(1, 0) if self.flag else z)
    guarded = watch(model, quarantine=True)
    guarded(batch(4, 3, 5))
    model.flag = True
    with pytest.warns(MixedRowsWarning):
        _, f = guarded(batch(4, 3, 5, bad=2, value=NAN))
    assert bad_samples(f) == ALL


@pytest.mark.filterwarnings("ignore::torchguard.exceptions.MixedRowsWarning", "ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_model_that_takes_another_way_again_and_again_is_followed_in_each_call(is_compiled):
    compiled = torch.compile(lambda z: z**2 + 1, backend="eager")

    def step(self, z):
        self.flag = not self.flag
        if is_compiled:
            return self.inner(compiled(z))
        return self.inner(z**2) if self.flag else self.inner(z.transpose(0, 1) ** 2).transpose(0, 1)

    guarded = watch(Steps(step), quarantine=True)
    for _ in range(6):
        guarded(batch(4, 3, 5))
    for _ in range(2):
        assert bad_samples(guarded(batch(4, 3, 5, bad=2))[1]) == [2]


def test_each_size_is_followed():
    def step(self, z):
        z = z**2
        return self.inner(z.transpose(0, 1)).transpose(0, 1) if z.shape[1] > 6 else self.inner(z)

    guarded = watch(Steps(step), quarantine=True)
    for length in (2, 3, 5):
        guarded(batch(4, length, 5))
    x = batch(4, 8, 5)
    x[2, 0] = HUGE
    assert bad_samples(guarded(x)[1]) == [2]


@pytest.mark.parametrize(
    "step",
    [
        lambda self, z: z / z.abs().max().item(),
        lambda self, z: z if (z > 0).any() else -z,
        lambda self, z: z - self.inner(z).mean(0),
        lambda self, z: torch.sparse.mm(torch.eye(4, dtype=z.dtype).to_sparse(), z),
    ],
)
def test_what_cannot_be_told_is_declared(step):
    guarded = watch(Steps(step), quarantine=True)
    with pytest.warns(MixedRowsWarning, match=r"torchguard\.Retry"):
        out, f = guarded(batch(4, 5, bad=2, value=NAN))
    assert bad_samples(f) == ALL
    out.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in guarded.parameters())


def test_statistics_that_a_model_reads_after_a_batch_norm_are_declared(run_light):
    class ReadsStatistics(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.last = nn.BatchNorm1d(5), nn.Linear(5, 5)

        def forward(self, x):
            self.norm(x)
            return self.last(x - self.norm.running_mean)

    x = torch.randn(4, 5)
    x[2] = NAN
    with pytest.warns(MixedRowsWarning, match="batch_norm"):
        _, f = run_light(watch(ReadsStatistics(), quarantine=True))(x)
    assert bad_samples(f) == ALL


def test_a_gradient_that_the_model_takes_itself_is_not_masked():
    def force(self, z):
        return torch.autograd.grad((self.inner(z) ** 3).sum(), z, create_graph=True)[0]

    assert bad_samples(watch(Steps(force), quarantine=True)(batch(4, 5, bad=2))[1]) == [2]


def test_samples_in_an_object_that_the_model_is_given():
    class Pair:
        def __init__(self, x):
            self.x = x

    guarded = watch(Steps(lambda self, z, pair: z + self.inner(pair.x**2)), quarantine=True)
    assert bad_samples(guarded(batch(4, 3, 5), Pair(batch(4, 3, 5, bad=1)))[1]) == [1]


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_sample_that_is_picked_by_its_number_in_a_graph(dynamic):
    def step(self, z):
        return z + self.inner(z[-1] ** 2)

    guarded = watch(Steps(step))
    compiled = torch.compile(guarded, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    compiled(batch(4, 5))
    assert 5 in bad_samples(compiled(batch(6, 5, bad=5))[1])


@pytest.mark.parametrize("quarantine", [False, True])
def test_what_the_user_says_is_taken_as_true(run_light, quarantine):
    def chosen_by_value(self, z):
        order = z[:, 0].argsort()
        return self.inner(z[order])[order.argsort()]

    x = batch(4, 5, bad=1, value=NAN)
    guarded = watch(Steps(chosen_by_value), quarantine=quarantine, sample_of={"inner": 0, "last": 0, "": 0})
    assert 1 in bad_samples(run_light(guarded)(x)[1])
    assert len(bad_samples(run_light(guarded)(x)[1])) < 4


class Idiom(nn.Module):
    """Two layers with a step of torch's own between them."""

    def __init__(self, step):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
        self.attention = nn.MultiheadAttention(6, 2).double()
        self.step = step

    def forward(self, x):
        return self.last(self.step(self, self.first(x)))


def ensemble(self, z):
    both = {name: torch.stack([getattr(self.first, name), getattr(self.last, name)]) for name in ("weight", "bias")}
    return torch.vmap(lambda weights: torch.func.functional_call(self.last, weights, (z,)))(both).mean(0)


def assigned(self, z):
    z, mask = z.clone(), torch.zeros(5, dtype=torch.bool)
    z[:, 0], z[:, [1, 2]], mask[2] = 1.0, 0.5, True
    return z * mask[:, None]


def attention_over_time(self, z):
    z = z.transpose(0, 1)
    return self.attention(z, z, value=z)[0].transpose(0, 1)


EXACT = {
    "a module in vmap": lambda self, z: torch.vmap(lambda row: self.last(row).cumsum(0))(z),
    "an ensemble": ensemble,
    "torch.func.grad": lambda self, z: torch.func.grad(lambda x: self.last(x.tanh()).tanh().sum())(z),
    "torch.func.jvp": lambda self, z: torch.func.jvp(lambda x: self.last(x.tanh()), (z,), (torch.ones_like(z),))[1],
    "numbers assigned": assigned,
    "one tensor as query, key and value": attention_over_time,
    "a generator": lambda self, z: z * (torch.rand(5, 1, generator=torch.Generator().manual_seed(0)) > 0.3),
}
DECLARED = {
    "a nested tensor": lambda self, z: self.last(torch.nested.nested_tensor([*z])).to_padded_tensor(0.0),
    "a jagged tensor that has NaN": lambda self, z: self.last(
        torch.nested.as_nested_tensor([*(z - 1).sqrt()], layout=torch.jagged)
    ).to_padded_tensor(0.0),
    "a derivative in vmap": lambda self, z: torch.vmap(torch.func.grad(lambda x: self.last(x.tanh()).sum()))(z),
    "an index made of samples": lambda self, z: z[:, [0, 1, 2, 3, z[0].sum(-1).argmax()]],
}


@pytest.mark.parametrize("name", [*EXACT, *DECLARED])
def test_idioms_of_torch_are_as_without_watch_and_exact_or_declared(name, recwarn):
    torch.manual_seed(0)
    model = Idiom({**EXACT, **DECLARED}[name])
    x = torch.randn(4, 5, 6, dtype=torch.float64)
    want = model(x)
    guarded = watch(model, quarantine=True)
    assert want.isnan().any() or torch.equal(guarded(x)[0], want)
    x[2] = NAN
    out, f = guarded(x)
    err.mean_ok(f, out.flatten(1).square().sum(-1)).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    is_declared = any(issubclass(one.category, MixedRowsWarning) for one in recwarn)
    assert is_declared == (name in DECLARED)
    if is_declared:
        assert bad_samples(f) == ALL
    else:
        assert bad_samples(f) == [2]
        torch.testing.assert_close(out[[0, 1, 3]], want[[0, 1, 3]], rtol=1e-9, atol=1e-12)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.scale, self.shifts = nn.Parameter(torch.ones(4)), False

    def forward(self, x):
        h = self.first(x) + 1 if self.shifts else self.first(x)
        h = (x[:, :, :1].sqrt() + h) * self.scale
        return self.last(self.attention(h, h, h)[0])


def new_last_layer(model):
    model.last = nn.Linear(4, 4)


BETWEEN_CALLS = {
    "inference mode after no_grad": ([torch.no_grad, torch.inference_mode], None),
    "gradients after inference mode": ([torch.inference_mode, torch.enable_grad], None),
    "autocast": ([contextlib.nullcontext, lambda: torch.autocast("cpu", torch.bfloat16)], None),
    "another last layer": ([contextlib.nullcontext] * 2, new_last_layer),
    "a parameter that is trained from now on": ([contextlib.nullcontext] * 2, lambda m: m.scale.requires_grad_(True)),
}


@pytest.mark.parametrize("name", BETWEEN_CALLS)
def test_what_changes_between_calls_is_no_other_way_through_the_model(name, recwarn):
    modes, change = BETWEEN_CALLS[name]
    model = Attending()
    model.scale.requires_grad_(False)
    guarded = watch(model, quarantine=True)
    x = torch.rand(4, 3, 4)
    with modes[0]():
        guarded(x)
    if change is not None:
        change(model)
    x[2, 1, 0] = -1  # NaN where samples meet the scale
    with modes[1]():
        out, f = guarded(x)
    assert bad_samples(f) == [2]
    if out.requires_grad:
        err.mean_ok(f, out.flatten(1).float().square().mean(-1)).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert not [one for one in recwarn if issubclass(one.category, MixedRowsWarning)]


def test_two_calls_under_one_autocast_are_both_exact():
    guarded = watch(Attending(), quarantine=True)  # autocast keeps the weights that the first call has cast
    x = torch.rand(4, 3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        guarded(x)
        x[1, 0, 0] = -1
        assert bad_samples(guarded(x)[1]) == [1]


def test_attention_on_a_way_that_was_not_followed_is_declared():
    model = Attending()
    guarded = watch(model, quarantine=True)
    x = torch.rand(4, 3, 4)
    guarded(x)
    model.shifts = True
    x[1, 0, 0] = -1
    with pytest.warns(MixedRowsWarning, match="another way"):
        out, f = guarded(x)
    assert bad_samples(f) == ALL
    out.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
