"""Optimizers that are launched before the outcome of a step is known, and skip the step on the device if it is bad.

A GPU does so with fused optimizers. Here the CPU does, whose fused optimizers take the same flag.
"""

import copy
import random

import pytest
import torch
from tests.breadth import breadth
from tests.retry.test_models import compare, float64  # noqa: F401 (a fixture for every test)
from tests.retry.training_loops import LOOPS, B
from torch import nn

from torchguard import Retry, RetryError
from torchguard._retry import device_step, guarded_step, retry
from torchguard._retry.copies import Copies, elements_of
from torchguard._torch.support import torch_is_at_least

nan = float("nan")


@pytest.fixture
def ahead(monkeypatch):
    """Have the CPU treated as a device that the host does not wait for. Lists the flags that optimizers were given."""
    monkeypatch.setattr(retry, "runs_ahead", lambda devices: True)
    monkeypatch.setattr(guarded_step, "decides_on_host", lambda loss: False)
    flags, update = [], device_step.update

    def noted(optimizers, clip, norm, flag=None):
        flags.append(None if flag is None else flag.item())
        update(optimizers, clip, norm, flag)

    monkeypatch.setattr(device_step, "update", noted)
    return flags


FUSED = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.1, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, fused=True),
}


@pytest.mark.parametrize("clip", [pytest.param(None, marks=pytest.mark.long), 0.1])
@pytest.mark.parametrize("kind", breadth(FUSED, "adamw"))
def test_twenty_steps_with_faults_equal_twenty_without(kind, clip, ahead):
    make, make_batch, spoil = LOOPS["batch norm"]
    loops = []

    def with_optimizer():
        loops.append(make())
        loops[-1].optimizers = [FUSED[kind](loops[-1].modules[0].parameters())]
        return loops[-1]

    faults = random.Random(1)
    bad = [tuple(sorted(faults.sample(range(B), faults.choice([0, 0, 1, 2])))) for _ in range(20)]
    compare(with_optimizer, make_batch, spoil, bad, clip=clip)
    states = [one.optimizers[0].state_dict() for one in loops]
    torch.testing.assert_close(states[0], states[1], rtol=1e-9, atol=1e-12)  # the counts of steps are exact, too
    skips = kind != "adagrad" or torch_is_at_least(2, 12)  # torch 2.11 does not say that fused Adagrad skips steps
    assert len(ahead) >= 18 if skips else not ahead  # the first finite step waits
    assert ahead == [float(bool(rows)) for rows in bad[len(bad) - len(ahead) :]]


@pytest.mark.parametrize("clip", [None, 1e3])
def test_gradients_whose_norm_overflows_are_stepped_as_they_are(clip, ahead):
    models = [nn.Linear(4, 1, dtype=torch.float32) for _ in range(2)]
    nn.init.constant_(models[0].weight, 1e-3)
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-38, fused=True) for model in models]
    guard = Retry(models[0], optimizers[0])
    for scale in (1, 3e38):  # the norm of four gradients of 3e38 overflows
        x = torch.full((B, 4), scale, dtype=torch.float32)
        assert guard.step(lambda x: models[0](x)[:, 0], x, clip=clip).ok
        optimizers[1].zero_grad()
        models[1](x)[:, 0].mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(models[1].parameters(), clip)
        optimizers[1].step()
    assert ahead == [1.0]
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=0, atol=0)


def test_a_skipped_step_makes_no_optimizer_state(ahead):
    experts = nn.ModuleList([nn.Linear(4, 1) for _ in range(2)])
    optimizer = torch.optim.AdamW(experts.parameters(), fused=True)
    guard = Retry(experts, optimizer)

    def closure(batch):
        return torch.stack([experts[int(one)](x).sum() for x, one in zip(batch["x"], batch["expert"], strict=True)])

    x, expert = torch.randn(B, 4), torch.zeros(B)
    guard.step(closure, {"x": x, "expert": expert})
    x[2], expert[2] = nan, 1  # the only sample of the second expert is bad
    assert guard.step(closure, {"x": x, "expert": expert}).bad == [2]
    assert ahead == [1.0]
    assert {*map(id, optimizer.state)} == {*map(id, experts[0].parameters())}


def test_a_batch_of_bad_samples_alone_changes_nothing(ahead):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    guard = Retry(model, optimizer)
    guard.step(lambda x: model(x)[:, 0], torch.randn(B, 4))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert guard.step(lambda x: model(x)[:, 0], torch.full((B, 4), nan), clip=1.0).skipped
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize("is_bad", [False, True])
def test_an_interrupt_after_the_launch_leaves_a_whole_step_or_none(is_bad, ahead, monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    guard = Retry(model, optimizer)
    guard.step(lambda x: model(x)[:, 0], torch.randn(B, 4))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    x = torch.full((B, 4), nan) if is_bad else torch.randn(B, 4)
    monkeypatch.setattr(guard.tensors, "learn", _interrupt)
    monkeypatch.setattr(guard.tensors, "newly_non_finite", _interrupt)
    monkeypatch.setattr(guarded_step, "all_finite", lambda gradients: _interrupt())
    monkeypatch.setattr(guarded_step.GuardedStep, "_exactly", lambda *_: _interrupt())
    with pytest.raises(KeyboardInterrupt):
        guard.step(lambda x: model(x)[:, 0], x)
    if is_bad:
        torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)
    else:
        assert model[1].num_batches_tracked == 2
        assert all(state["step"] == 2 for state in optimizer.state.values())


def _interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.usefixtures("ahead")
def test_without_waiting_the_device_restores_buffers_and_skips():
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
        model.register_buffer("columns", torch.ones(3, 4, dtype=torch.float64).t())
        model.register_buffer("gaps", torch.ones(3, 4, dtype=torch.float64)[:, :2])
        return model, torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)

    def losses(model, x):
        model.columns += x.detach().mean()
        model.gaps.mul_(1 + x.detach().mean())
        return model(x).square().squeeze(1)

    (model, optimizer), (other, plain) = make(), make()
    batches = [torch.randn(B, 4, dtype=torch.float64) for _ in range(5)]
    spoilt = [x.clone() for x in batches]
    spoilt[2][1] = nan
    guard = Retry(model, optimizer, wait=False)
    reports = [guard.step(lambda x: losses(model, x), x, clip=0.5) for x in spoilt]
    guard.finish()
    for x in [*batches[:2], batches[3], batches[2][[0, 2, 3, 4, 5]], batches[4]]:
        plain.zero_grad()
        losses(other, x).mean().backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        plain.step()
    assert [report.bad for report in reports] == [[], [], [1], [], []]
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-9, atol=1e-12)


# Who is not launched ahead.


class Own(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


def _with_hook(p):
    optimizer = torch.optim.AdamW(p, fused=True)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def _patched(p):
    optimizer = torch.optim.AdamW(p, fused=True)
    step = optimizer.step
    optimizer.step = lambda: step()
    return optimizer


NOT_AHEAD = {
    "is not fused": lambda p: torch.optim.AdamW(p),
    "has step hooks": _with_hook,
    "has a step that is not torch's": _patched,
    "has a step that is not torch's, in a subclass": lambda p: Own(p, fused=True),
}


@pytest.mark.parametrize("reason", NOT_AHEAD)
def test_optimizers_that_do_more_than_skip_wait_for_the_outcome(reason, ahead):
    model = nn.Linear(4, 1)
    guard = Retry(model, NOT_AHEAD[reason](model.parameters()))
    for _ in range(3):
        assert guard.step(lambda x: model(x)[:, 0], torch.randn(B, 4)).ok
    assert not any(flag is not None for flag in ahead)
    other = Retry(model, NOT_AHEAD[reason](model.parameters()), wait=False)
    with pytest.raises(RetryError, match=reason.partition(",")[0]):
        other.step(lambda x: model(x)[:, 0], torch.randn(B, 4))


def test_step_hooks_run_once_a_step(ahead):
    model, calls = nn.Linear(4, 1), []
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    guard = Retry(model, optimizer)
    for number in range(4):
        x = torch.randn(B, 4)
        x[number % 2 * 3] = nan
        guard.step(lambda x: model(x)[:, 0], x)
    assert len(calls) == 4


def test_an_optimizer_with_a_scheduler_is_launched_ahead(ahead):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    guard = Retry(model, optimizer)
    for _ in range(3):
        guard.step(lambda x: model(x)[:, 0], torch.randn(B, 4))
        scheduler.step()
    assert ahead[-1] == 0.0


def test_gradients_of_others_do_not_count_in_what_is_clipped(ahead):
    models = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(model[1].parameters(), fused=True) for model in models]
    guard = Retry(models[0], optimizers[0])
    for _ in range(3):
        x = torch.randn(B, 4)
        guard.step(lambda x: models[0](x)[:, 0], x, clip=0.1)
        for optimizer in optimizers:
            optimizer.zero_grad()
        models[1](x)[:, 0].mean().backward()
        nn.utils.clip_grad_norm_(models[1][1].parameters(), 0.1)
        optimizers[1].step()
    assert ahead[-1] == 0.0
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict())


# Copies.


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.zero_(),
        lambda one: one.data.zero_(),
        lambda one: one.resize_(2, 2),
        lambda one: setattr(one, "data", torch.zeros(5)),
        lambda one: setattr(one, "data", torch.zeros(3, 4).t()[:4, :3].t() * 0),
    ],
)
def test_tensors_of_every_layout_are_restored(change):
    values = torch.arange(12.0).view(3, 4)
    makers = {
        "contiguous": lambda: values.clone(),
        "transposed": lambda: values.clone().t(),
        "gaps": lambda: torch.stack([values, values], 1)[:, 0],
        "complex": lambda: torch.complex(values, values),
        "integers": lambda: values.long(),
        "empty": lambda: values[:0].clone(),
        "float8": lambda: values.to(torch.float8_e4m3fn),
    }
    tensors = {name: make() for name, make in makers.items()}
    expanded = torch.ones(3, 1).expand(3, 4)
    saved = Copies([*tensors.values(), expanded])
    saved.save()
    assert saved.fits()
    assert all(bool(one.isfinite()) for one in saved.finiteness(frozenset()))
    change(tensors["contiguous"])
    tensors["transposed"].fill_(nan)
    tensors["gaps"].fill_(nan)
    elements_of(expanded).zero_()
    assert not all(bool(one.isfinite()) for one in saved.finiteness(frozenset()))
    saved.restore()
    for name, make in makers.items():
        assert torch.equal(tensors[name].to(torch.complex64), make().to(torch.complex64)), name
    assert bool((expanded == 1).all())
