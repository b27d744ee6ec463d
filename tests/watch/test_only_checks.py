"""Compiled inference whose samples stay apart is checked at every module, and replaced at its output alone.

Everything else is replaced at every module: what outlives the call must stay finite.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from tests.compare import faults
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from torchguard._watch import watch

NAN, INF = float("nan"), float("inf")
BATCH, BAD = 4, 2


class Middle(nn.Module):
    """Takes the logarithm of `first`'s output, which is NaN for a large negative input."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        with torch.no_grad():
            self.first.weight.copy_(torch.rand(8, 4))

    def between(self, h):
        return (h + 50).log()

    def forward(self, x):
        return self.last(self.norm(self.between(self.first(x))))


class Stored(Middle):
    def between(self, h):
        self.state = super().between(h)
        return self.state


class Listed(Middle):
    def __init__(self):
        super().__init__()
        self.seen = []

    def between(self, h):
        self.seen.append([super().between(h)])
        return self.seen[-1][0]


class Cached(Middle):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(BATCH, 8))

    def between(self, h):
        self.state.copy_(super().between(h))
        return self.state.clone()


class Looked(Middle):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 8)

    def between(self, h):
        return self.table(super().between(h).mean(-1).long() % 8)


class Pooled(Middle):
    def between(self, h):
        return F.max_pool2d(super().between(h).view(-1, 1, 4, 2), 2).flatten(1).repeat(1, 4)


class PooledByIndex(Middle):
    def between(self, h):
        h = super().between(h)
        places = F.max_pool2d(h.view(-1, 1, 4, 2), 2, return_indices=True)[1]
        return h.gather(1, places.flatten(1)).repeat(1, 4)


class Decomposed(Middle):
    def between(self, h):
        h = super().between(h)
        matrix = h.unsqueeze(-1) * h.unsqueeze(1)
        return torch.linalg.eigh(matrix + torch.eye(8)).eigenvalues


def compiled(model, backend="aot_eager"):
    torch._dynamo.reset()
    return torch.compile(watch(model, quarantine=True), backend=backend, fullgraph=True)


def batch_with_fault(value):
    x = torch.rand(BATCH, 4, dtype=torch.float64)
    x[BAD] = value
    return x


def number_of_replacements(model, x, grad):
    """How many operations of the compiled graph replace values."""
    model = watch(model, quarantine=True)
    torch._dynamo.reset()
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with torch.set_grad_enabled(grad):
        torch.compile(model, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(x)
    where = [node for node in graphs[0].graph.nodes if node.target is torch.ops.aten.where.self]
    return sum(node.meta["val"].is_floating_point() and node.meta["val"].ndim > 1 for node in where)


def test_inference_replaces_the_output_alone():
    model, x = Middle().double(), torch.rand(BATCH, 4, dtype=torch.float64)
    assert number_of_replacements(copy.deepcopy(model), x, grad=False) == 1
    assert number_of_replacements(model, x, grad=True) > 3


def test_the_indices_of_a_pooling_count_where_they_are_used():
    x = torch.rand(BATCH, 4, dtype=torch.float64)
    assert number_of_replacements(Pooled().double(), x, grad=False) == 1
    assert number_of_replacements(PooledByIndex().double(), x, grad=False) > 3


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("value", [NAN, INF, -1e3])
def test_a_fault_is_named_as_in_eager_mode_and_costs_one_sample(value, mode, backend):
    model = Middle().double().eval()
    x = batch_with_fault(value)
    good = [i for i in range(BATCH) if i != BAD]
    with mode():
        expected, expected_flags = watch(copy.deepcopy(model), quarantine=True)(x)
        out, f = compiled(model, backend)(x)
        alone = model(x[good])
    assert [*faults(f)] == [*faults(expected_flags)] == [BAD]
    assert faults(f)[BAD][0] == faults(expected_flags)[BAD][0]
    torch.testing.assert_close(out[good], alone)
    torch.testing.assert_close(out, expected)
    assert not out[BAD].any()


@pytest.mark.parametrize("cls", [Stored, Listed, Cached])
def test_what_outlives_the_call_stays_finite(cls):
    model = cls().double().eval()
    guarded = compiled(model)
    with torch.no_grad():
        guarded(torch.rand(BATCH, 4, dtype=torch.float64))
        _, f = guarded(batch_with_fault(NAN))
    state = model.seen[-1][0] if cls is Listed else model.state
    assert [*faults(f)] == [BAD]
    assert state.isfinite().all()


@pytest.mark.parametrize("cls", [Looked, Decomposed])
def test_no_operation_meets_a_value_that_it_refuses(cls):
    model, x = cls().double().eval(), batch_with_fault(NAN)
    good = [i for i in range(BATCH) if i != BAD]
    with torch.no_grad():
        out, f = compiled(model)(x)
        torch.testing.assert_close(out[good], model(x[good]))
    assert [*faults(f)] == [BAD]
    assert not out[BAD].any()
