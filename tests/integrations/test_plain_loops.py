"""Loops of the user's own: accelerate, a `GradScaler`, a metric over ranks."""

import copy

import pytest
import torch
from torch import nn

from torchguard import Retry, err
from torchguard.testing import run_ranks

BAD = 5


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()


def batch():
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[BAD] = torch.nan
    return x


def test_accelerate_trains_as_without_the_bad_sample():
    accelerate = pytest.importorskip("accelerate")
    model = net()
    want = copy.deepcopy(model)
    reference = torch.optim.SGD(want.parameters(), lr=0.1)
    want(torch.cat([batch()[:BAD], batch()[BAD + 1 :]])).square().mean(1).mean().backward()
    reference.step()
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    report = Retry(prepared).backward(lambda x: prepared(x).square().mean(1), batch())
    optimizer.step()
    assert report.bad == [BAD]
    for (name, one), two in zip(model.state_dict().items(), want.state_dict().values(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


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

    rank, metric = torch.distributed.get_rank(), BadSampleRate()
    metric.update(err.push(err.new_t(4 + rank), err.NAN, 1, where=torch.arange(4 + rank) < 3 * rank))
    return metric.compute().item()


@pytest.mark.long
def test_the_metric_counts_over_ranks():
    assert run_ranks(rate_of_rank, size=2) == [pytest.approx(3 / 9)] * 2
