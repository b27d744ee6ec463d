"""Pushes inside a graph are packed once, and nobody can tell."""

import pytest
import torch
from torch import nn

from torchguard import ErrorConfig, err, flag_nan, flags
from torchguard._channel.slot_bits import pack_slot

pytestmark = pytest.mark.compiled


def aten_graph(fn, *args):
    """The graph AOTAutograd hands to a compiler."""
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    torch.compile(fn, backend=aot_autograd(fw_compiler=keep, inference_compiler=keep), fullgraph=True)(*args)
    return graphs[0]


def chain(depth):
    def fn(x):
        f = err.new(x)
        for layer in range(depth):
            x = x.sin()
            f = flag_nan(x, layer + 1, f)
        return x, f

    return fn


def test_a_chain_of_checks_costs_a_few_nodes_each():
    """Packing at every check would add some twenty."""
    nodes = {depth: len(aten_graph(chain(depth), torch.randn(4, 3)).graph.nodes) for depth in (8, 16)}
    assert (nodes[16] - nodes[8]) / 8 <= 6


def test_only_the_last_packing_stays():
    graph = aten_graph(chain(12), torch.randn(4, 3))
    packings = [node for node in graph.graph.nodes if "shift" in str(node.target)]
    assert len(packings) == 1


def test_a_query_on_the_way_needs_no_packing():
    def fn(x):
        f = flag_nan(x, 1, err.new(x))
        x = err.take_ok_p(f, x)
        return x, flag_nan(x.log(), 2, f)

    graph = aten_graph(fn, torch.randn(4, 3))
    assert len([node for node in graph.graph.nodes if "shift" in str(node.target)]) == 1


@pytest.mark.long
@pytest.mark.parametrize("slots", [2, 64])
def test_long_chains_keep_the_first_that_fit(compiled, slots):
    config = ErrorConfig(num_slots=slots)
    depth = 80  # beyond the triangle

    def fn(x):
        f = err.new(x, config)
        for layer in range(depth):
            f = err.push(f, err.NAN, layer + 1, config=config, where=x[:, layer] > 0)
        return f

    x = torch.randn(6, depth)
    f = compiled(fn)(x)
    assert torch.equal(f, fn(x))
    assert [e.location for e in flags.unpack(f, 2)] == [i + 1 for i in range(depth) if x[2, i] > 0][:slots]


def test_flags_that_come_in_are_added_to(compiled, carrier):
    config = ErrorConfig(flag_dtype=carrier, num_slots=3)

    def fn(f, x):
        for layer in range(5):
            f = err.push(f, err.INF, layer, config=config, where=x[:, layer] > 0)
        return f

    begun = err.push(err.new_t(8, config=config), err.NAN, 1000, config=config, where=torch.arange(8) % 2 == 0)
    x = torch.randn(8, 5)
    assert flags.unpack_all(compiled(fn)(begun, x)) == flags.unpack_all(fn(begun, x))


def test_masks_that_change_later_were_taken_as_they_were(compiled):
    def fn(x):
        bad = x > 1
        f = err.push(err.new(x), err.NAN, 1, where=bad)
        bad |= x < 0
        return err.push(f, err.INF, 2, where=bad)

    x = torch.tensor([2.0, -1.0, 0.5])
    f = compiled(fn)(x)
    assert [[e.code for e in row] for row in flags.unpack_all(f)] == [[err.NAN, err.INF], [err.INF], []]


def test_flags_changed_in_place_are_taken_as_they_are(compiled):
    def fn(x):
        f = err.push(err.new(x), err.NAN, 1, where=x > 0)
        f.zero_()
        return err.push(f, err.INF, 2, where=x > 1)

    f = compiled(fn)(torch.tensor([2.0, 0.5]))
    assert [[e.code for e in row] for row in flags.unpack_all(f)] == [[err.INF], []]


@pytest.mark.inductor
def test_every_version_of_the_flags_can_be_returned(compiled):
    def fn(x):
        one = err.push(err.new(x), err.NAN, 1, where=x > 0)
        two = err.push(one, err.INF, 2, where=x > 1)
        other = err.push(one, err.OOB, 3, where=x < 0)
        return one, two, other, err.merge(two, other)

    x = torch.tensor([2.0, 0.5, -1.0])
    for got, want in zip(compiled(fn)(x), fn(x), strict=True):
        assert torch.equal(got, want)


def test_queries_agree_with_eager_when_slots_run_out(compiled):
    config = ErrorConfig(num_slots=1)

    def fn(x):
        f = err.push(err.new(x, config), err.NAN, 1, config=config, where=x > 0)
        f = err.push(f, err.INF, 2, config=config, where=x > -1)
        return err.has_inf(f), err.has_nan(f), err.is_err(f), err.has_fallback(f)

    x = torch.tensor([2.0, -0.5, -3.0])
    for got, want in zip(compiled(fn)(x), fn(x), strict=True):
        assert torch.equal(got, want)


def test_dynamic_batch(compiled):
    compiled_chain = compiled(chain(3), dynamic=True)
    for batch in (3, 5, 9):
        x = torch.randn(batch, 4)
        x[1] = float("nan")
        _, f = compiled_chain(x)
        assert err.is_err(f).nonzero().flatten().tolist() == [1]
        assert flags.unpack(f, 1) == flags.unpack(chain(3)(x)[1], 1)


@pytest.mark.inductor
def test_int64_flags_train_on_every_backend(compiled):
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            f = err.new(x)
            for place, layer in enumerate(self.layers):
                x = layer(x).relu()
                f = flag_nan(x, place + 1, f)
            return x, f

    net = Layers()
    x = torch.randn(5, 4)
    net(x)[0].sum().backward()
    want = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    out, f = compiled(net)(x)
    assert f.dtype == torch.int64
    assert not f.requires_grad
    out.sum().backward()
    for p, grad in zip(net.parameters(), want, strict=True):
        torch.testing.assert_close(p.grad, grad)


def test_checks_inside_checkpointed_blocks(compiled):
    from torch.utils.checkpoint import checkpoint

    linear = nn.Linear(4, 4)

    def block(x, f):
        x = linear(x)
        return x, flag_nan(x, 2, f)

    def fn(x):
        f = flag_nan(x, 1, err.new(x))
        return checkpoint(block, x, f, use_reentrant=False)

    x = torch.randn(3, 4)
    x[0] = float("nan")
    out, f = compiled(fn)(x)
    out.sum().backward()
    assert [e.location for e in flags.unpack(f, 0)] == [1, 2]


def test_export_holds_standard_operators_only():
    class PushesTwice(nn.Module):
        def forward(self, x):
            f = err.push(err.new(x), err.NAN, 4, where=torch.isnan(x).any(-1))
            return x, err.push(f, err.INF, 5, where=torch.isinf(x).any(-1))

    x = torch.tensor([[float("nan")], [float("inf")], [1.0]])
    for strict in (True, False):
        program = torch.export.export(PushesTwice(), (x,), strict=strict)
        targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
        assert all(target.startswith("aten.") for target in targets), targets
        assert torch.equal(program.module()(x)[1], PushesTwice()(x)[1])


def test_a_graph_traced_by_hand():
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.tensor([[float("nan")], [1.0]])
    traced = make_fx(chain(3), tracing_mode="fake")(x)
    assert torch.equal(traced(x)[1], chain(3)(x)[1])


def test_vmap_over_a_check():
    """Nothing is read that `torch.func` cannot read."""
    x = torch.randn(2, 3, 4)
    x[1, 2, 0] = float("nan")
    f = torch.func.vmap(lambda x: err.is_err(flag_nan(x, 1, err.new(x))))(x)
    assert f.tolist() == [[False, False, False], [False, False, True]]


def test_vmap_over_a_check_in_a_graph(compiled):
    x = torch.ones(3, 2, 4)
    x[1, 0, 2] = float("nan")
    checked = torch.vmap(lambda x: err.is_err(flag_nan(x, "v", err.new(x))))
    assert compiled(checked)(x).tolist() == [[False, False], [True, False], [False, False]]


def test_lengths_that_meet_by_chance_cost_no_recompile():
    from torch._dynamo.testing import CompileCounter

    def fn(a, b):
        f = flag_nan(a, 1, err.new(a))
        return flag_nan(b, 2, f)

    counter = CompileCounter()
    compiled = torch.compile(fn, backend=counter, fullgraph=True, dynamic=True)
    for first, second in ((3, 5), (4, 7), (6, 6)):
        compiled(torch.ones(2, first, 9), torch.ones(2, second, 9))
    assert counter.frame_count == 1


@pytest.mark.long
def test_many_checks_on_flags_that_come_in(compiled):
    """Packed sixteen at a time, they still come out as if pushed one by one."""

    def fn(f, x):
        for place in range(40):
            f = err.push(f, err.INF, place + 1, where=x[:, place] > 1)
        return f

    begun, x = err.from_code(err.NAN, 1000, 4), torch.randn(4, 40)
    assert torch.equal(compiled(fn)(begun, x), fn(begun, x))


def test_slots_are_what_the_layout_says(compiled):
    f = compiled(lambda x: err.push(err.new(x), err.NAN, 1023, where=x > 0))(torch.tensor([1.0, -1.0]))
    assert f.tolist() == [[pack_slot(1, 1023, 3), 0, 0, 0], [0, 0, 0, 0]]
