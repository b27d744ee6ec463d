"""One fault neither compiles the healthy step again nor moves it to a graph of dynamic sizes."""

import pytest
import torch
from torch import nn

from torchguard import Retry
from torchguard.guards import inspect

B = 6


class WithBatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n, self.b = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x):
        return self.b(self.n(self.a(x)).relu()).squeeze(1)


def compiled_model(model, backend):
    compiled = torch.compile(model, backend=backend)
    return lambda x: compiled(x).square()


def model_compiled_in_place(model, backend):
    model.compile(backend=backend)
    return lambda x: model(x).square()


def compiled_function(model, backend):
    @torch.compile(backend=backend)
    def losses(x):
        return model(x).square()

    return lambda x: losses(x)


def compiled_closure(model, backend):
    return torch.compile(lambda x: model(x).square(), backend=backend, fullgraph=True)


WAYS = [compiled_model, model_compiled_in_place, compiled_function, compiled_closure]


def train(way, backend, steps=5, **options):
    """Steps of which the third and the last have a bad sample; weights, and those of an eager run without it."""
    torch.manual_seed(0)
    model, plain = WithBatchNorm().double(), WithBatchNorm().double()
    plain.load_state_dict(model.state_dict())
    closure = way(model, backend)
    guard = Retry(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), **options)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    reports = []
    with inspect() as seen:
        for step in range(steps):
            bad = {2: [3], steps - 1: [0, 4]}.get(step, [])
            x = torch.randn(B, 4, dtype=torch.float64)
            spoilt = x.clone()
            spoilt[bad] = float("nan") if step == 2 else 1e300
            reports.append(guard.step(closure, spoilt))
            assert reports[-1].bad == bad
            optimizer.zero_grad()
            plain(x[[row for row in range(B) if row not in bad]]).square().mean().backward()
            optimizer.step()
    return model.state_dict(), plain.state_dict(), seen


# torch 2.12's, about runs in eager mode.
@pytest.mark.filterwarnings("ignore:torch.compile with fullgraph=True found no compiled frames:UserWarning")
@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.long), "aot_eager"])
@pytest.mark.parametrize("way", WAYS)
def test_a_fault_compiles_nothing_and_the_result_is_exact(way, backend):
    found, wanted, seen = train(way, backend)
    assert len(seen.frames) == 1
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.inductor
@pytest.mark.long
def test_a_fault_in_a_step_that_inductor_compiled():
    found, wanted, seen = train(compiled_model, "inductor")
    assert len(seen.frames) == 1
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_compiled_retries_leave_the_healthy_step_alone(way):
    found, wanted, seen = train(way, "aot_eager", steps=6, retries="compiled")
    names = [one.function for one in seen.frames]
    assert len([name for name in names if "call" not in name.split(".")[-1]]) <= 1, names
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_a_closure_that_cannot_be_traced_is_retried_eagerly():
    model = nn.Linear(4, 1).double()

    def closure(x):
        torch._dynamo.graph_break()
        return model(x).squeeze(1)

    x = torch.randn(B, 4, dtype=torch.float64)
    x[2] = float("nan")
    assert Retry(model, retries="compiled").backward(closure, x).bad == [2]


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.b(self.a(x).relu()).squeeze(1)


def test_keep_shapes_runs_every_part_in_the_graph_of_the_healthy_step():
    torch.manual_seed(0)
    model = Plain().double()
    compiled = torch.compile(model, backend="aot_eager")
    guard = Retry(model, keep_shapes=True)
    with inspect() as seen:
        for step in range(3):
            x = torch.randn(B, 4, dtype=torch.float64)
            if step:
                x[[1, 4]] = float("nan")
            model.zero_grad()
            assert guard.backward(lambda x: compiled(x).square(), x).bad == ([1, 4] if step else [])
    assert len(seen.frames) == 1
    wanted = torch.autograd.grad(model(x[[0, 2, 3, 5]]).square().mean(), [*model.parameters()])
    torch.testing.assert_close([one.grad for one in model.parameters()], [*wanted], rtol=1e-9, atol=1e-12)


def test_keep_shapes_compiles_nothing_where_samples_influence_each_other():
    torch.manual_seed(0)
    model = WithBatchNorm().double()
    compiled = torch.compile(model, backend="aot_eager")
    guard = Retry(model, keep_shapes=True)
    with inspect() as seen:
        for step in range(2):
            x = torch.randn(B, 4, dtype=torch.float64)
            if step:
                x[1] = 1e300
            report = guard.backward(lambda x: compiled(x).square(), x)
    assert report.bad == [1]
    assert len(seen.frames) == 1
