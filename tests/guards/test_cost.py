"""How long guards take in a call, source by source."""

import re

import pytest
import torch
from tests.models import bert
from torch import nn

from torchguard.exceptions import GuardError
from torchguard.guards._cost import Cost, CostNode, cost


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()


class Uneven(nn.Module):
    """Nearly all of its guards are on one list."""

    def __init__(self, layers):
        super().__init__()
        self.small, self.many = nn.Linear(3, 3), nn.ModuleList(nn.Linear(3, 3) for _ in range(layers))

    def forward(self, x):
        x = self.small(x)
        for layer in self.many:
            x = layer(x)
        return x


def compiled(fn, **options):
    return torch.compile(fn, **{"backend": "eager", "dynamic": False, **options})


def test_self_times_sum_to_the_total():
    net = compiled(Uneven(4))
    x = torch.ones(2, 3)
    net(x)
    found = cost(net, x)
    assert 0 < found.hot == found.tree.microseconds
    assert found.profiled is not None
    assert found.profiled > 0
    assert sum(own for _, own in found.tree.self_times()) == pytest.approx(found.hot)
    for node in found.tree.subtrees():
        assert sum(child.microseconds for child in node.children) <= node.microseconds * (1 + 1e-9)


def test_the_most_expensive_subtree_is_the_long_list(fake_guard_clock):
    net = compiled(Uneven(60))
    x = torch.ones(2, 3)
    net(x)
    by_source = dict(cost(net, x, calls=0).by_source())
    many, small = by_source["L['self']._modules['many']"], by_source.get("L['self']._modules['small']", 0.0)
    assert many > by_source["L"] / 2
    assert many > small * 5


def test_the_most_expensive_come_first():
    found = Cost(3.0, None, CostNode("L", 3.0, (CostNode("L['x']", 0.5, ()), CostNode("L['y z']", 2.0, ()))))
    assert found.by_source() == [("L", 3.0), ("L['y z']", 2.0), ("L['x']", 0.5)]
    assert str(found).splitlines()[0] == "guards: 3.0 us hot"
    assert found.to_flamegraph() == "L 500\nL;L['x'] 500\nL;L['yz'] 2000"


def test_the_flame_graph_parses():
    net = compiled(Uneven(4))
    x = torch.ones(2, 3)
    net(x)
    found = cost(net, x, calls=1)
    total = 0
    for line in found.to_flamegraph().splitlines():
        matched = re.fullmatch(r"(\S+) (\d+)", line)
        assert matched, line
        assert matched[1].split(";")[0] == "L"
        total += int(matched[2])
    assert total == pytest.approx(found.hot * 1e3, rel=0.05)


def test_it_makes_the_given_number_of_calls_and_compiles_nothing():
    ran = []

    def counted(graph, inputs):
        return lambda *args: (ran.append(1), graph(*args))[1]

    net = compiled(lambda x: x + 1, backend=counted)
    x = torch.ones(2)
    net(x)
    torch._dynamo.utils.counters.clear()
    assert cost(net, x, calls=3).profiled is not None
    assert len(ran) == 4
    assert cost(net, x, calls=0).profiled is None
    assert len(ran) == 4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


def test_a_name_with_separators_in_it():
    net = compiled(lambda x, named: x + named["a; b c"])
    arguments = torch.ones(2), {"a; b c": 2}
    net(*arguments)
    flames = cost(net, *arguments, calls=0).to_flamegraph()
    assert all(re.fullmatch(r"\S+ \d+", line) for line in flames.splitlines())


def test_a_function_with_graph_breaks_and_one_compiled_in_place():
    def fn(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    net = compiled(fn)
    net(torch.ones(2))
    assert cost(net, torch.ones(2)).profiled
    model = Uneven(2)
    model.compile(backend="eager")
    model(torch.ones(2, 3))
    assert cost(model, torch.ones(2, 3)).hot > 0


def test_inductor():
    net = compiled(Uneven(2), backend="inductor")
    net(torch.ones(2, 3))
    assert cost(net, torch.ones(2, 3)).hot > 0


def test_a_real_model():
    net = compiled(bert(num_hidden_layers=2).eval())
    ids = torch.ones(1, 4, dtype=torch.int64)
    with torch.no_grad():
        net(ids)
        found = cost(net, ids)
    sources = [source for source, _ in found.by_source()]
    assert sources[:2] == ["L", "L['self']"]
    assert "L['self'].config" in sources[:8]


def test_bad_input():
    with pytest.raises(GuardError, match="is not compiled"):
        cost(Uneven(1), torch.ones(2, 3))
    with pytest.raises(GuardError, match="is not compiled"):
        cost(lambda x: x, torch.ones(2, 3))
    net = compiled(Uneven(1))
    with pytest.raises(GuardError, match="Call it once before"):
        cost(net, torch.ones(2, 3))
    net(torch.ones(2, 3))
    with pytest.raises(GuardError, match="no cached entry matches"):
        cost(net, torch.ones(4, 3))
    with pytest.raises(GuardError, match="do not match the signature"):
        cost(net, 1, 2, 3)
    with pytest.raises(GuardError, match="calls is -1"):
        cost(net, torch.ones(2, 3), calls=-1)


def test_a_profiler_that_runs_already_is_left_alone():
    fn, x = compiled(lambda x: x + 1), torch.ones(2)
    fn(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        assert cost(fn, x).profiled is None
        torch.ones(2).cosh()
    assert "aten::cosh" in [event.name for event in profile.events()]


def test_lost_events_do_not_lose_the_time(monkeypatch):
    fn, x = compiled(lambda x: x + 1), torch.ones(2)
    fn(x)
    events = torch.profiler.profile.events
    monkeypatch.setattr(torch.profiler.profile, "events", lambda self: events(self)[:-1] if events(self) else [])
    found = [cost(fn, x, calls=1 + n).profiled for n in range(2, 5)]
    assert all(found)
