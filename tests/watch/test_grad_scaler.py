"""float16 with a `GradScaler`: overflow due to the loss scale reaches the scaler, and one bad sample costs no step."""

import copy

import pytest
import torch
from torch import nn

from torchguard import err
from torchguard._watch import watch

NAN = float("nan")


def model_on(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).to(device)


def batches(device, count, bad=None):
    generator = torch.Generator().manual_seed(1)
    for step in range(count):
        x = torch.randn(8, 16, generator=generator)
        y = x[:, :4] * 0.5
        if step == bad:
            x[3] = NAN
        yield x.to(device), y.to(device)


def train(model, device, watched, data, init_scale=2.0**24):
    """The scale after each step, and the losses."""
    call = watch(model, quarantine=True) if watched else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=init_scale, growth_interval=5)
    scales, losses = [], []
    for x, y in data:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            out, f = call(x) if watched else (call(x), None)
        each = (out.float() - y).square().mean(-1)
        loss = each.mean() if f is None else err.mean_ok(f, each)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        losses.append(loss.item())
    return scales, losses


def test_the_scale_evolves_as_without_watch(device):
    plain, watched = model_on(device), model_on(device)
    scales, losses = train(plain, device, False, batches(device, 40))
    assert scales[0] < 2.0**24  # it overflowed at first
    assert losses[-1] < losses[0]
    got, other = train(watched, device, True, batches(device, 40))
    assert got == scales
    assert other == pytest.approx(losses, rel=1e-2)


def test_a_bad_sample_costs_no_step(device):
    scales, _ = train(copy.deepcopy(model_on(device)), device, True, batches(device, 4, bad=2), init_scale=2.0**8)
    assert scales == [2.0**8] * 4


def test_without_watch_a_bad_sample_costs_a_step(device):
    scales, _ = train(model_on(device), device, False, batches(device, 4, bad=2), init_scale=2.0**8)
    assert scales[2:] == [2.0**7] * 2
