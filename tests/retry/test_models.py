"""`Retry` gives what the same run without the bad samples gives: gradients, buffers, weights, random numbers."""

import copy
import random

import numpy as np
import pytest
import torch
from tests.breadth import breadth
from tests.retry import hub_models, training_loops
from tests.retry.training_loops import LOOPS, B, Loop

from torchguard import Retry

QUICK = [
    name for name in LOOPS if "overflow" not in name and not name.startswith(("mixup", "bptt", "packed", "momentum"))
]


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class World:
    """The random numbers, and a global, of one of two runs that are compared."""

    def __init__(self, seed=0):
        self._seed = seed
        self._state = None

    def __enter__(self):
        if self._state is None:
            torch.manual_seed(self._seed)
            random.seed(self._seed)
            np.random.seed(self._seed)
        else:
            torch.set_rng_state(self._state[0])
            random.setstate(self._state[1])
            np.random.set_state(self._state[2])
            training_loops.HIDDEN = self._state[3]

    def __exit__(self, *_):
        self._state = torch.get_rng_state(), random.getstate(), np.random.get_state(), training_loops.HIDDEN

    def draws(self):
        with self:
            return torch.rand(1).item(), random.random(), np.random.rand()


def part(loop: Loop, batch, rows):
    if "select" in loop.options:
        return loop.options["select"](batch, rows)
    return {key: value[rows] for key, value in batch.items()}


def plain_step(loop: Loop, batch, clip=None):
    """The step as one writes it without `Retry`."""
    for optimizer in loop.optimizers:
        optimizer.zero_grad()
    returned = loop.closure(batch)
    loss = returned[0].sum() / returned[1].sum() if isinstance(returned, tuple) else returned.mean()
    loss.backward()
    if clip:
        torch.nn.utils.clip_grad_norm_([p for m in loop.modules for p in m.parameters()], clip)
    for optimizer in loop.optimizers:
        optimizer.step()


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        torch.testing.assert_close(
            value, wanted[name], rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


def compare(make, make_batch, spoil, bad_of_steps, *, make_plain=None, **options):
    """Train two copies, one guarded on all samples, one plainly on the good ones."""
    guarded, plain = World(), World()
    with guarded:
        loop = make()
    with plain:
        expected = (make_plain or make)()
    clip = options.pop("clip", None)
    guard = Retry(loop.modules, loop.optimizers, **loop.options, **options)
    torch.manual_seed(7)
    for step, bad in enumerate(bad_of_steps):
        batch = make_batch()
        spoilt = copy.deepcopy(batch)
        spoil(spoilt, list(bad))
        with guarded:
            report = guard.step(loop.closure, spoilt, clip=clip)
        assert report.bad == list(bad), (step, str(report))
        assert not report.left_out
        with plain:
            plain_step(expected, part(expected, batch, [row for row in range(B) if row not in bad]), clip)
        with guarded:
            found = loop.values()
        with plain:
            wanted = expected.values()
        assert_same(found, wanted)
        assert guarded.draws() == plain.draws()
    return guard


@pytest.mark.parametrize("name", breadth(LOOPS, *QUICK))
def test_a_run_with_bad_samples_equals_the_run_without_them(name):
    compare(*LOOPS[name], [(), (2,), (0, 4), (), (5,)])


class Drawn(torch.nn.Module):
    """A model that is drawn at random, with a derivative that does not exist for a vector of zeros."""

    def __init__(self, draw):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 8, bias=False), torch.nn.Linear(8, 1)
        self.has_length = draw.random() < 0.5
        self.norm = torch.nn.BatchNorm1d(8) if draw.random() < 0.5 and not self.has_length else torch.nn.Identity()
        self.drop = torch.nn.Dropout(draw.choice([0.0, 0.3]))
        self.is_scalar = draw.random() < 0.4
        self.faults = [0.0, float("nan"), 1e300] if self.has_length else [float("nan"), 1e300]

    def forward(self, b):
        hidden = self.a(b["x"])
        length = hidden.pow(2).sum(1) ** 0.5 if self.has_length else 0
        losses = (self.b(self.drop(self.norm(hidden).relu())).squeeze(1) + length).square()
        return losses.mean() if self.is_scalar else losses


@pytest.mark.parametrize("seed", range(12))
def test_models_batches_and_faults_drawn_at_random(seed):
    draw = random.Random(seed)
    size, count = draw.choice([4, 9, 16, 32]), draw.choice([1, 1, 2, 3])
    torch.manual_seed(seed)
    model = Drawn(draw)
    expected, batch = copy.deepcopy(model), {"x": torch.randn(size, 4)}
    bad, fault = sorted(draw.sample(range(size), min(count, size // 3))), draw.choice(model.faults)
    spoilt = copy.deepcopy(batch)
    spoilt["x"][bad] = fault
    state = torch.get_rng_state()
    assert Retry(model).backward(model, spoilt).bad == bad
    found = torch.get_rng_state()
    torch.set_rng_state(state)
    expected({"x": batch["x"][[row for row in range(size) if row not in bad]]}).mean().backward()
    assert torch.equal(found, torch.get_rng_state())
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12)
    assert_same(model.state_dict(), expected.state_dict())


OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
}


@pytest.mark.parametrize("clip", [pytest.param(None, marks=pytest.mark.long), 0.1])
@pytest.mark.parametrize("kind", breadth(OPTIMIZERS, "momentum", "adamw"))
def test_twenty_steps_with_faults_equal_twenty_without(kind, clip):
    make, make_batch, spoil = LOOPS["batch norm"]

    def with_optimizer():
        loop = make()
        loop.optimizers = [OPTIMIZERS[kind](loop.modules[0].parameters())]
        return loop

    faults = random.Random(1)
    bad = [tuple(sorted(faults.sample(range(B), faults.choice([0, 0, 1, 2])))) for _ in range(20)]
    compare(with_optimizer, make_batch, spoil, bad, clip=clip)


def test_several_optimizers_step_together():
    make, make_batch, spoil = LOOPS["packed lstm"]

    def with_two():
        loop = make()
        loop.optimizers = [
            torch.optim.Adam(loop.modules[0].parameters()),
            torch.optim.SGD(loop.modules[1].parameters()),
        ]
        return loop

    compare(with_two, make_batch, spoil, [(), (1,), (0, 3)])


@pytest.mark.parametrize("name", ["batch norm", "rolled, shown by others", "backward only", "one loss"])
def test_a_batch_of_bad_samples_alone_changes_nothing(name):
    make, make_batch, spoil = LOOPS[name]
    loop = make()
    guard = Retry(loop.modules, loop.optimizers)
    before, batch = copy.deepcopy(loop.values()), make_batch()
    spoil(batch, [*range(B)])
    state = torch.get_rng_state()
    report = guard.step(loop.closure, batch)
    assert report.skipped
    assert_same(loop.values(), before)
    assert torch.equal(torch.get_rng_state(), state)


def test_micro_batches_are_one_batch_weighted_by_their_tokens():
    make, make_batch, spoil = LOOPS["token-weighted"]
    torch.manual_seed(0)
    loop, batches = make(), [make_batch() for _ in range(3)]
    spoil(batches[1], [0, 5])
    report = Retry(loop.modules).backward(loop.closure, batches)
    assert report.bad == [B, B + 5]
    parts = [batches[0], part(loop, batches[1], [1, 2, 3, 4]), batches[2]]
    sums, weights = zip(*(loop.closure(one) for one in parts), strict=True)
    found = [one.grad for one in loop.modules[0].parameters()]
    wanted = torch.autograd.grad(torch.cat(sums).sum() / torch.cat(weights).sum(), [*loop.modules[0].parameters()])
    torch.testing.assert_close(found, [*wanted], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("empty", [0, 1])
def test_a_micro_batch_without_a_labelled_token_counts_nothing(empty):
    make, make_batch, spoil = LOOPS["token-weighted"]
    torch.manual_seed(0)
    loop, batches = make(), [make_batch() for _ in range(2)]
    batches[empty]["weight"].zero_()
    spoil(batches[1 - empty], [3])
    report = Retry(loop.modules).backward(loop.closure, batches)
    assert report.bad == [3 + B * (1 - empty)]
    sums, weights = loop.closure(part(loop, batches[1 - empty], [0, 1, 2, 4, 5]))
    wanted = torch.autograd.grad(sums.sum() / weights.sum(), [*loop.modules[0].parameters()])
    torch.testing.assert_close([one.grad for one in loop.modules[0].parameters()], [*wanted], rtol=1e-9, atol=1e-12)


def test_a_micro_batch_of_bad_samples_alone_is_left_out_of_its_window():
    make, make_batch, spoil = LOOPS["rolled"]
    torch.manual_seed(0)
    loop, batches = make(), [make_batch() for _ in range(3)]
    spoil(batches[0], [*range(B)])
    report = Retry(loop.modules).backward(loop.closure, batches)
    assert report.bad == [*range(B)]
    losses = torch.cat([loop.closure(one) for one in batches[1:]])
    wanted = torch.autograd.grad(losses.mean(), [*loop.modules[0].parameters()])
    torch.testing.assert_close([one.grad for one in loop.modules[0].parameters()], [*wanted], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["batch norm", "sparse embeddings"])
def test_backward_adds_to_the_gradients_that_are_there(name):
    make, make_batch, spoil = LOOPS[name]
    torch.manual_seed(0)
    loop = make()
    torch.manual_seed(0)
    expected = make()
    guard = Retry(loop.modules)
    for bad in ([], [3], [0, 1]):
        batch = make_batch()
        spoilt = copy.deepcopy(batch)
        spoil(spoilt, bad)
        assert guard.backward(loop.closure, spoilt).bad == bad
        expected.closure(part(expected, batch, [row for row in range(B) if row not in bad])).mean().backward()
    for found, wanted in zip(loop.modules, expected.modules, strict=True):
        for one, other in zip(found.parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(one.grad.to_dense(), other.grad.to_dense(), rtol=1e-9, atol=1e-12)


def test_a_gan_with_two_guards():
    def make():
        torch.manual_seed(0)
        g = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))
        d = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LeakyReLU(), torch.nn.Linear(8, 1))
        of_d = Loop([g, d], lambda b: discriminate(g, d, b), [torch.optim.Adam(d.parameters(), 0.01)])
        of_g = Loop([g, d], lambda b: -d(g(b["z"])).squeeze(1), [torch.optim.Adam(g.parameters(), 0.01)])
        return of_d, of_g

    def discriminate(g, d, b):
        return torch.nn.functional.softplus(-d(b["x"])).squeeze(1) + torch.nn.functional.softplus(
            d(g(b["z"]).detach())
        ).squeeze(1)

    loops, expected = make(), make()
    guards = [Retry(one.modules, one.optimizers) for one in loops]
    for bad in ([], [2], [0, 5], []):
        batch = {"x": torch.randn(B, 4), "z": torch.randn(B, 3)}
        spoilt = copy.deepcopy(batch)
        spoilt["z"][bad] = float("nan")
        good = [row for row in range(B) if row not in bad]
        for guard, loop, other in zip(guards, loops, expected, strict=True):
            assert guard.step(loop.closure, spoilt).bad == bad
            plain_step(other, part(other, batch, good))
    assert_same(loops[0].values(), expected[0].values())


def step_clipped(loop, batch):
    """A step of one of two optimizers, which clips the gradients of its own parameters alone."""
    loop.optimizers[0].zero_grad()
    loop.closure(batch).mean().backward()
    torch.nn.utils.clip_grad_norm_(loop.optimizers[0].param_groups[0]["params"], 0.1)
    loop.optimizers[0].step()


def test_a_gan_whose_closures_freeze_and_unfreeze_the_discriminator():
    def make():
        torch.manual_seed(0)
        g, d = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)

        def of_d(b):
            d.requires_grad_(True)
            return d(b["x"])[:, 0].square() + d(g(b["z"]).detach())[:, 0]

        def of_g(b):
            d.requires_grad_(False)
            return -d(g(b["z"]))[:, 0]

        optimizers = [torch.optim.Adam(one.parameters(), 0.01) for one in (d, g)]
        return [Loop([g, d], closure, [one]) for closure, one in zip((of_d, of_g), optimizers, strict=True)]

    loops, expected = make(), make()
    guards = [Retry(one.modules, one.optimizers) for one in loops]
    for bad in ([], [2], [0, 5], [1]):
        batch = {"x": torch.randn(B, 4), "z": torch.randn(B, 3)}
        spoilt = copy.deepcopy(batch)
        spoilt["z"][bad] = float("nan")
        for guard, loop, other in zip(guards, loops, expected, strict=True):
            assert guard.step(loop.closure, spoilt, clip=0.1).bad == bad
            step_clipped(other, part(other, batch, [row for row in range(B) if row not in bad]))
            assert [p.requires_grad for p in loop.modules[1].parameters()] == [loop is loops[0]] * 2
    assert_same(loops[0].values(), expected[0].values())


def test_parameters_that_a_bad_step_unfreezes():
    class Unfreezing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.calls = torch.nn.Linear(4, 8).requires_grad_(False), torch.nn.Linear(8, 3), 0

        def forward(self, x):
            self.calls += 1
            self.a.requires_grad_(self.calls > 1)
            return self.b(self.a(x).tanh())

    def make():
        model = Unfreezing()
        closure = lambda b: training_loops.by_class(model(b["x"]), b)  # noqa: E731
        return Loop([model], closure, [torch.optim.AdamW(model.parameters())])

    compare(make, training_loops.vectors, training_loops.with_nan, [(), (2,), (0, 4), ()], clip=0.1)


IN_SHORT_RUN = ("MixtralForCausalLM", "WhisperForConditionalGeneration")


@pytest.mark.parametrize(
    "name", [name if name in IN_SHORT_RUN else pytest.param(name, marks=pytest.mark.long) for name in hub_models.MODELS]
)
@pytest.mark.parametrize("value", [float("nan"), pytest.param(1e300, marks=pytest.mark.long)])
def test_models_of_transformers_with_their_own_loss(name, value):
    _, _, make_batch, key = hub_models.MODELS[name]

    def make():
        model = hub_models.make(name)
        return Loop([model], lambda b: model(**b).loss, [torch.optim.AdamW(model.parameters(), lr=1e-3)])

    guarded, plain = World(), World()
    with guarded:
        loop = make()
    with plain:
        expected = make()
    guard = Retry(loop.modules, loop.optimizers)
    for bad in ([], [2], [0, 3]):
        batch = make_batch()
        spoilt = copy.deepcopy(batch)
        spoilt[key][bad] = value
        good = [row for row in range(hub_models.B) if row not in bad]
        with guarded:
            report = guard.step(loop.closure, spoilt)
        if value != value or not report.ok:  # some models normalize what is huge
            assert report.bad == bad, str(report)
        else:
            good = [*range(hub_models.B)]
            batch = spoilt
        with plain:
            plain_step(expected, {k: v[good] if isinstance(v, torch.Tensor) else v for k, v in batch.items()})
        assert_same(loop.values(), expected.values())
        assert guarded.draws() == plain.draws()


# AOTAutograd has no second derivatives, and a checkpointed batch norm counts a batch once, in eager mode twice.
NOT_COMPILED = ("gradient penalty", "checkpointing")


# Dynamo reads it where a graph breaks.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in LOOPS if name not in NOT_COMPILED])
def test_a_compiled_run_with_bad_samples_equals_the_run_without_them(name):
    make, make_batch, spoil = LOOPS[name]

    def make_compiled():
        loop = make()
        loop.closure = torch.compile(loop.closure, backend="aot_eager")
        return loop

    compare(make_compiled, make_batch, spoil, [(), (2,), (0, 4)], make_plain=make)
