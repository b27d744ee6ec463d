"""`Retry` on a GPU: half precision with a GradScaler, steps that nobody waits for, compiled models."""

import copy

import pytest
import torch
from torch import nn

from torchguard import Retry, check_grads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]

BATCH = 8


def make_model():
    torch.manual_seed(0)
    layers = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 4)
    return nn.Sequential(*layers).cuda()


def batches(dtype, faults):
    """Batches with the samples that are bad in each."""
    torch.manual_seed(1)
    for step in range(20):
        x = torch.randn(BATCH, 16, device="cuda", dtype=dtype)
        bad = [(3 * step) % BATCH] if step % 3 == 1 else []
        for row in bad:
            x[row] = faults[step % len(faults)]
        yield x, bad


def assert_close(one, other, tolerance):
    for got, want in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def good_rows(bad):
    return [row for row in range(BATCH) if row not in bad]


@pytest.mark.parametrize("backend", [None, "inductor"])
def test_weights_after_20_steps_are_those_without_the_bad_samples(backend):
    guarded, plain = make_model().double(), make_model().double()
    called = guarded if backend is None else torch.compile(guarded, backend=backend, fullgraph=True)
    guard = Retry(guarded, torch.optim.AdamW(guarded.parameters(), fused=True))
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True)
    for x, bad in batches(torch.float64, [float("nan"), 1e200]):
        assert guard.step(lambda b: called(b).square().mean(1), x, clip=1.0).bad == bad
        optimizer.zero_grad()
        plain(x[good_rows(bad)]).square().mean(1).mean().backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
    assert_close(guarded, plain, 1e-9)


def test_a_scaler_evolves_as_in_a_run_without_the_bad_samples():
    guarded, plain = make_model(), make_model()
    scalers = [torch.amp.GradScaler("cuda", init_scale=2.0**40, growth_interval=5) for _ in range(2)]
    guard = Retry(guarded, torch.optim.SGD(guarded.parameters(), lr=0.01, momentum=0.9))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)

    def losses(model, x):
        with torch.autocast("cuda", torch.float16):
            return model(x).float().square().mean(1)

    for x, bad in batches(torch.float32, [float("nan"), float("inf")]):
        assert guard.step(lambda b: losses(guarded, b), x, scaler=scalers[0]).bad == bad
        optimizer.zero_grad()
        scalers[1].scale(losses(plain, x[good_rows(bad)]).mean()).backward()
        scalers[1].step(optimizer)
        scalers[1].update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert scalers[0].get_scale() < 2.0**40
    assert_close(guarded, plain, 1e-3)


def test_a_healthy_step_without_waiting_does_not_synchronize(no_sync):
    model = make_model()
    guard = Retry(model, torch.optim.AdamW(model.parameters(), fused=True), wait=False)
    x = torch.randn(BATCH, 16, device="cuda")
    for _ in range(6):
        guard.step(lambda b: model(b).square().mean(1), x, clip=1.0)
    guard.finish()
    with no_sync:
        guard.step(lambda b: model(b).square().mean(1), x, clip=1.0)
    guard.finish()
    assert guard.history[-1].ok


def test_a_bad_step_without_waiting_is_skipped_and_its_good_samples_are_trained_later():
    model, plain = make_model(), make_model()
    guard = Retry(model, torch.optim.AdamW(model.parameters(), fused=True), wait=False)
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True)
    x = [torch.randn(BATCH, 16, device="cuda") for _ in range(3)]
    x[1][2] = float("nan")
    reports = [guard.step(lambda b: model(b).square().mean(1), one) for one in x]
    guard.finish()
    assert [report.bad for report in reports] == [[], [2], []]
    for one in (x[0], x[2], x[1][good_rows([2])]):  # in the order in which they were trained
        optimizer.zero_grad()
        plain(one).square().mean(1).mean().backward()
        optimizer.step()
    assert_close(model, plain, 1e-5)


def test_every_gradient_is_checked_without_waiting(no_sync):
    model = copy.deepcopy(make_model())
    model(torch.randn(BATCH, 16, device="cuda")).sum().backward()
    model[3].bias.grad[1] = float("inf")
    with no_sync:
        health = check_grads(model)
    assert health.bad == {"3.bias": "Inf"}
