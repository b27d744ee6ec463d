"""Small tensors on a GPU are scanned together at the end of a call. Here the CPU takes the way of a GPU."""

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from torchguard import watch
from torchguard._watch import detect, origins, summarize


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    for module in (detect, origins, summarize):
        monkeypatch.setattr(module, "compiles_summary", lambda device: True)
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


def incidents(model, divisor, backend):
    guarded = watch(model)
    call = torch.compile(guarded, fullgraph=True, backend=backend) if backend else guarded
    with torch.no_grad():
        call(torch.ones(3, 4, 8), divisor)
    return [(one.sample, one.path, one.code, one.position, one.times) for one in guarded.report()]


@pytest.mark.parametrize("in_place", [False, True])
def test_what_is_scanned_together_is_found_where_it_began(in_place):
    divisor = torch.ones(3, 4, 1)
    divisor[1, 2] = 0.0
    divisor[2] = float("nan")
    found = incidents(Model(in_place), divisor, "aot_eager")
    assert found == incidents(Model(in_place), divisor, None)
    assert (found[0][:2], found[0][3]) == ((1, "layers.3"), 2)


def test_tensors_of_one_shape_are_scanned_by_one_operation():
    assert scans_in_graph(Model()) == 1


def test_a_large_tensor_is_scanned_where_it_is_computed(monkeypatch):
    monkeypatch.setattr(detect, "_MAX_SMALL", 8)
    assert scans_in_graph(Model()) > 5
