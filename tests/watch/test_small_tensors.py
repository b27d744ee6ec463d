"""Small tensors on a GPU are scanned together at the end of a call. Here the CPU takes the way of a GPU, with what the
kernels do in plain Python."""

import copy
import sys

import pytest
import torch
from tests.watch import summary_model
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from torchguard import watch
from torchguard._watch import detect, origins, summarize


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    for module in (detect, origins, summarize):
        monkeypatch.setattr(module, "compiles_summary", lambda device: True)
    monkeypatch.setattr(summarize, "can_summarize", lambda *_: True)
    monkeypatch.setitem(sys.modules, "torchguard._watch.summary_kernels", summary_model)
    torch._dynamo.reset()


class Model(nn.Module):
    """Divides by the second argument between two layers; changes an output in place if it is told to."""

    def __init__(self, in_place=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.in_place = in_place

    def forward(self, x, divisor):
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 2:
                x = x.div_(divisor) if self.in_place else x / divisor
        return x


def scans_in_graph(model):
    """How many operations of the compiled graph scan numbers."""
    graphs = []

    def compiler(graph, inputs):
        graphs.append(graph)
        return graph.forward

    call = torch.compile(watch(model), fullgraph=True, backend=aot_autograd(fw_compiler=compiler))
    with torch.no_grad():
        call(torch.ones(3, 4, 8), torch.ones(3, 4, 1))
    (graph,) = graphs
    graph.graph.eliminate_dead_code()  # as Inductor does
    scans = [node for node in graph.graph.nodes if node.target is torch.ops.aten.amax.default]
    return sum(node.args[0].meta["val"].shape[-1] == 8 for node in scans)


def incidents(model, divisor, backend, **options):
    guarded = watch(model, **options)
    call = torch.compile(guarded, fullgraph=True, backend=backend) if backend else guarded
    with torch.no_grad():
        call(torch.ones(3, 4, 8, dtype=divisor.dtype), divisor)
    return [(one.sample, one.path, one.code, one.position, one.times) for one in guarded.report()]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
@pytest.mark.parametrize("in_place", [False, True])
def test_what_is_scanned_together_is_found_where_it_began(in_place, backend):
    divisor = torch.ones(3, 4, 1)
    divisor[1, 2] = 0.0
    divisor[2] = float("nan")
    found = incidents(Model(in_place), divisor, backend)
    assert found == incidents(Model(in_place), divisor, None)
    assert (found[0][:2], found[0][3]) == ((1, "layers.3"), 2)


def test_no_operation_of_the_graph_scans_them():
    assert scans_in_graph(Model()) == 0


def test_a_large_tensor_is_scanned_where_it_is_computed(monkeypatch):
    monkeypatch.setattr(detect, "_MAX_SMALL", 8)
    assert scans_in_graph(Model()) > 5


class Widths(nn.Module):
    """Vectors of several lengths, some without a long common divisor."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(i, o) for i, o in [(8, 128), (128, 192), (192, 7), (7, 320), (320, 5), (5, 8)])
        )

    def forward(self, x, divisor):
        return self.layers(x / divisor)


@pytest.mark.parametrize("options", [{}, {"quarantine": True}], ids=["watched", "quarantine"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_vectors_of_several_lengths_are_scanned_together(dtype, options):
    divisor = torch.ones(3, 4, 1, dtype=dtype)
    divisor[1, 2], divisor[2, 3] = 0.0, float("nan")
    torch.manual_seed(0)
    model = Widths().to(dtype)
    found = incidents(copy.deepcopy(model), divisor, "aot_eager", **options)
    assert [one[:4] for one in found] == [one[:4] for one in incidents(model, divisor, None, **options)]
    assert [(sample, position) for sample, _, _, position, _ in found] == [(1, 2), (2, 3)]


def test_numbers_whose_squares_overflow_count_as_infinite_before_a_norm():
    model = nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.LayerNorm(8), nn.Linear(8, 8)).eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(8))
    x = torch.ones(3, 4, 8)
    x[1, 2] = 1e25
    guarded = watch(model, quarantine=True)
    with torch.no_grad():
        torch.compile(guarded, fullgraph=True, backend="aot_eager")(x)
        compiled = [(one.sample, one.path, one.position) for one in guarded.report()]
        guarded(x)
    assert compiled == [(one.sample, one.path, one.position) for one in guarded.report()]
    assert [one[0] for one in compiled] == [1]
