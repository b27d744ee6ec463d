"""Loops of the user's own: accelerate, a `GradScaler`, a metric over ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
from tests.integrations.launch import become_rank
from torch import nn
from torch.utils.data import DataLoader

from torchguard import Retry, distributed, err, watch
from torchguard.testing import run_ranks

BAD = 5


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()


def layers():
    """A model that keeps samples apart."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).double()


def batch():
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[BAD] = torch.nan
    return x


def trained_by_accelerate(way, samples, accumulate):
    """The weights after one epoch of a loop as accelerate shows it, and how many samples of this rank were bad."""
    from accelerate import Accelerator

    become_rank()
    size = dist.get_world_size()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    assert accelerator.num_processes == size
    net = layers()
    guarded = watch(net, quarantine=True, returns="output") if way == "watch" else net
    optimizer = torch.optim.SGD(guarded.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(samples, 4 // size)
    model, optimizer, loader = accelerator.prepare(guarded, optimizer, loader)
    guard, found = Retry(model, optimizer) if way == "retry" else None, 0
    for x in loader:
        with accelerator.accumulate(model):
            if guard is not None:
                report = guard.backward(lambda x: model(x).square().mean(1) / accumulate, x)
                found += len(report.bad)
            else:
                losses = model(x).square().mean(1)
                f = guarded.flags
                accelerator.backward(distributed.mean_ok(f, losses))
                found += int(err.is_err(f).sum())
            optimizer.step()
            optimizer.zero_grad()
    return [one.detach() for one in net.parameters()], found


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("way", ["retry", "watch"])
def test_accelerate_trains_as_without_the_bad_sample(way, accumulate, size):
    pytest.importorskip("accelerate")
    samples = torch.randn(16, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    samples[[5, 11]] = torch.nan
    want = layers()
    optimizer = torch.optim.SGD(want.parameters(), lr=0.1, momentum=0.9)
    for number, rows in enumerate([[0, 1, 2, 3], [4, 6, 7], [8, 9, 10], [12, 13, 14, 15]], 1):
        (want(samples[rows]).square().mean() / accumulate).backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    results = run_ranks(trained_by_accelerate, way, samples, accumulate, size=size, timeout=200)
    assert sum(found for _, found in results) == 2
    for weights, _ in results:
        for one, two in zip(weights, want.parameters(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


def test_a_grad_scaler_and_the_report_agree():
    model = net().float()
    guard = Retry(model, torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def losses(x):
        return model(x).square().mean(1)

    report = guard.step(losses, batch().float(), scaler=scaler)
    assert (report.bad, scaler.get_scale()) == ([BAD], 2.0**10)  # the sample is to blame, not the scale
    before = copy.deepcopy(model.state_dict())
    good, scaler = batch().float()[:BAD], torch.amp.GradScaler("cpu", init_scale=2.0**127)
    report = guard.step(losses, good * 1e3, scaler=scaler)
    assert (report.bad, scaler.get_scale()) == ([], 2.0**126)  # the scale is, and no sample
    assert all(torch.equal(one, before[name]) for name, one in model.named_parameters())


def rate_of_rank():
    from torchguard.integrations.torchmetrics import BadSampleRate

    rank, metric = dist.get_rank(), BadSampleRate()
    metric.update(err.push(err.new_t(4 + rank), err.NAN, 1, where=torch.arange(4 + rank) < 3 * rank))
    return metric.compute().item()


@pytest.mark.long
def test_the_metric_counts_over_ranks():
    assert run_ranks(rate_of_rank, size=2) == [pytest.approx(3 / 9)] * 2
