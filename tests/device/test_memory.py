"""The memory plan, compared with an interpreter that runs the graph and counts live storages."""

import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch._functorch.compile_utils import fx_graph_cse
from torch._subclasses import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from torchguard import device
from torchguard.device._memory import output_nodes, saved_between

aten = torch.ops.aten


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in tensors_in(part)] if isinstance(value, (tuple, list)) else []


def live_bytes(values):
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for v in values for t in tensors_in(v)}
    return sum(storages.values())


def run_and_count(module, inputs, held=(), freed=frozenset()):
    """Run a graph with real tensors; return its outputs, and the bytes that are live while each node runs.

    Args:
        held: further values that the caller holds.
        freed: positions of the inputs that the graph may free.
    """
    nodes = list(module.graph.nodes)
    placeholders = module.graph.find_nodes(op="placeholder")
    held_values = [*held, *(value for i, value in enumerate(inputs) if i not in freed)]
    waiting = {node: inputs[i] for i, node in enumerate(placeholders) if i in freed}
    left = {node: set(node.users) for node in nodes}
    env, curve, result = {}, {}, None
    for node in nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
        if node.op == "placeholder":
            env[node] = inputs[placeholders.index(node)]
            waiting.pop(node, None)
        elif node.op == "get_attr":
            env[node] = getattr(module, node.target)
            held_values.append(env[node])
        elif node.op == "output":
            result = args[0]
        else:
            env[node] = node.target(*args, **kwargs)
        curve[node.name] = live_bytes([*held_values, *waiting.values(), *env.values()])
        for used in node.all_input_nodes:
            left[used].discard(node)
        for done in {node, *node.all_input_nodes}:
            if not left[done]:
                env.pop(done, None)
        del args, kwargs
    return result, curve


# Each takes values of shape (6, 4) and returns one of the same shape, by the ops of its name.
UNARY = {
    "relu": lambda g, x: g.call_function(aten.relu.default, (x,)),
    "clone": lambda g, x: g.call_function(aten.clone.default, (x,)),
    "detach": lambda g, x: g.call_function(aten.detach.default, (x,)),
    "transposed twice": lambda g, x: g.call_function(aten.t.default, (g.call_function(aten.t.default, (x,)),)),
    "transposed and copied": lambda g, x: g.call_function(
        aten.view.default,
        (
            g.call_function(
                aten.clone.default,
                (g.call_function(aten.t.default, (x,)),),
                {"memory_format": torch.contiguous_format},
            ),
            [6, 4],
        ),
    ),
    "expanded row": lambda g, x: g.call_function(
        aten.expand.default, (g.call_function(aten.slice.Tensor, (x, 0, 2, 3)), [6, 4])
    ),
    "sum, broadcast": lambda g, x: g.call_function(
        aten.expand.default, (g.call_function(aten.sum.dim_IntList, (x, [1], True)), [6, 4])
    ),
    "layer norm": lambda g, x: g.call_function(
        operator.getitem, (g.call_function(aten.native_layer_norm.default, (x, [4], None, None, 1e-5)), 0)
    ),
    "largest": lambda g, x: g.call_function(
        aten.expand.default,
        (g.call_function(operator.getitem, (g.call_function(aten.max.dim, (x, 1, True), {}), 0)), [6, 4]),
    ),
    "to double and back": lambda g, x: g.call_function(
        aten._to_copy.default,
        (g.call_function(aten._to_copy.default, (x,), {"dtype": torch.float64}),),
        {"dtype": torch.float32},
    ),
}
BINARY = {
    "add": lambda g, x, y: g.call_function(aten.add.Tensor, (x, y)),
    "where": lambda g, x, y: g.call_function(aten.where.self, (g.call_function(aten.gt.Tensor, (x, y)), x, y)),
    "cat, half": lambda g, x, y: g.call_function(
        operator.getitem, (g.call_function(aten.split.Tensor, (g.call_function(aten.cat.default, ([x, y],)), 6)), 1)
    ),
    "split and crossed": lambda g, x, y: _crossed(g, x, y),
}


def _crossed(g, x, y):
    """One half of each input: views of two storages, one of which has no further use."""
    half = g.call_function(aten.split.Tensor, (x, 3))
    other = g.call_function(aten.split.Tensor, (y, 3))
    parts = [g.call_function(operator.getitem, (half, 0)), g.call_function(operator.getitem, (other, 1))]
    return g.call_function(aten.cat.default, (parts,))


@st.composite
def graphs(draw):
    """A graph whose inputs may share a storage or be unused, with nodes that have no users."""
    graph = fx.Graph()
    values = [graph.placeholder(f"x{i}") for i in range(draw(st.integers(1, 3)))]
    for _ in range(draw(st.integers(1, 8))):
        one, other = (values[draw(st.integers(0, len(values) - 1))] for _ in range(2))
        made = draw(st.one_of(*(st.sampled_from(sorted(kind)) for kind in (UNARY, BINARY))))
        # CSE may remove a duplicate.
        values += [
            UNARY[made](graph, one) if made in UNARY else BINARY[made](graph, one, other)
            for _ in range(draw(st.integers(1, 2)))
        ]
    returned = draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=3))
    graph.output(tuple(values[i] for i in returned))
    return fx.GraphModule(nn.Module(), graph), draw(st.booleans())


def with_fake_values(module, inputs):
    mode = FakeTensorMode()
    FakeTensorProp(module, mode).propagate(*inputs)
    return module


def without_duplicates(module):
    """The graph as the partitioner leaves it: duplicates are removed, and their views are not."""
    return fx.GraphModule(module, fx_graph_cse(module.graph))


@pytest.mark.parametrize(
    "change",
    [pytest.param(lambda module: module, marks=pytest.mark.long), without_duplicates],
    ids=["as drawn", "without duplicates"],
)
@settings(max_examples=150)
@given(graphs())
def test_the_plan_equals_what_an_interpreter_counts_at_every_node(change, drawn):
    module, share = drawn
    count = len(module.graph.find_nodes(op="placeholder"))
    base = torch.randn(count, 6, 4)
    inputs = [base[i] if share else base[i].clone() for i in range(count)]
    module = change(with_fake_values(module, inputs))
    plan = device.plan_memory(module)
    _, curve = run_and_count(module, inputs)
    assert dict(plan.curve) == curve
    assert plan.peak == max(curve.values()) == sum(live.bytes for live in plan.at_peak)
    assert curve[plan.peak_node] == plan.peak


class Branches(nn.Module):
    """Saves several tensors, returns one of them, and has a parameter that the backward graph does not use."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(8, 32), nn.Linear(32, 8), nn.LayerNorm(8)

    def forward(self, x):
        hidden = self.one(x).relu()
        return self.norm(self.two(hidden) + x).softmax(-1), hidden


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1), nn.GELU()
        )

    def forward(self, x):
        return self.layers(x).flatten(1).sum(1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = (part.view(2, 5, 4, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 5, 16)


class Twice(nn.Module):
    """Computes a product twice. The partitioner removes one, and keeps the views of both."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        one, other = (x @ self.weight).t(), (x @ self.weight).view(-1)
        return one.sin().sum() + other.cos().sum(), one


MODELS = {
    "twice": (Twice, (16, 16)),
    "branches": (Branches, (4, 8)),
    "convolutions": (Convolutions, (2, 3, 8, 8)),
    "attention": (Attention, (2, 5, 16)),
}


def real_like(module):
    """Real inputs with the shapes of a graph's fake ones, which share storages where these do."""
    made, inputs = {}, []
    for node in module.graph.find_nodes(op="placeholder"):
        fake = node.meta["val"]
        key = fake.untyped_storage()._cdata
        made.setdefault(key, torch.zeros(fake.untyped_storage().nbytes(), dtype=torch.uint8).untyped_storage())
        real = torch.empty(0, dtype=fake.dtype).set_(made[key], fake.storage_offset(), fake.shape, fake.stride())
        inputs.append(real)
    return inputs


@pytest.mark.parametrize("decompositions", ["none", "core"])
@pytest.mark.parametrize("name", MODELS)
def test_forward_and_backward_are_planned_with_the_saved_tensors(name, decompositions):
    make, shape = MODELS[name]
    backend = device.mock_backend(device.Device(decompositions=decompositions))
    result = torch.compile(make(), backend=backend)(torch.randn(shape))
    (result[0] if isinstance(result, tuple) else result).sum().backward()
    one, other = backend.report().graphs
    forward, backward = one.graph.module, other.graph.module

    given = real_like(forward)
    outputs, curve = run_and_count(forward, given)
    assert dict(one.memory.curve) == curve

    executed = device.mock_backend()
    torch._dynamo.reset()
    torch.compile(make(), backend=executed)(torch.randn(shape))
    saved = saved_between(*(report.graph.module for report in executed.report().graphs))
    inputs = [
        outputs[saved[i]] if i in saved else torch.zeros(node.meta["val"].shape, dtype=node.meta["val"].dtype)
        for i, node in enumerate(backward.graph.find_nodes(op="placeholder"))
    ]
    returned = [value for i, value in enumerate(outputs) if i not in saved.values()]
    owned = {t.untyped_storage()._cdata for t in tensors_in([*given, *returned])}
    freed = {i for i in saved if inputs[i].untyped_storage()._cdata not in owned}
    saved_bytes = live_bytes([inputs[i] for i in freed])
    assert one.memory.saved == saved_bytes > 0
    del outputs
    _, curve = run_and_count(backward, inputs, held=[*given, *returned], freed=freed)
    assert dict(other.memory.curve) == curve


def test_views_of_duplicates_share_the_remaining_storage():
    def twice(x):
        one, other = (x * 2).t(), (x * 2).view(-1)
        return one.sin().sum() + other.cos().sum()

    backend = device.mock_backend()
    torch.compile(twice, backend=backend)(torch.randn(256, 256, requires_grad=True))
    assert backend.report().memory[0].peak == 3 * 256 * 256 * 4 + 4  # x, the product, its sine, and the sum of that


def test_tensors_of_a_branch_are_live_while_it_runs():
    def branch(x, w):
        return torch.cond(x.sum() > 0, lambda x, w: (x @ w).relu() @ w + x @ w @ w, lambda x, w: x @ w, (x, w))

    backend = device.mock_backend()
    with torch.no_grad():
        torch.compile(branch, backend=backend)(torch.randn(16, 16), torch.randn(16, 16))
    outer, one, other = backend.report().memory
    matrix, mask = 16 * 16 * 4, 1
    assert (one.peak, other.peak) == (5 * matrix, 3 * matrix)
    assert (outer.peak, outer.peak_node) == (5 * matrix + mask, "cond")
    assert {live.name: live.bytes for live in outer.at_peak} == {
        "inside cond": 2 * matrix,
        "x": matrix,
        "w": matrix,
        "cond": matrix,
        "gt": mask,
    }


def test_live_tensors_at_the_peak_have_names_and_source_lines():
    backend = device.mock_backend()
    model = Branches()
    torch.compile(model, backend=backend)(torch.randn(4, 8))
    plan = backend.report().memory[0]
    by_name = {live.name: live for live in plan.at_peak}
    assert by_name["one.weight"].bytes == 8 * 32 * 4
    made = [live for live in plan.at_peak if live.source_line is not None]
    assert made
    assert all(live.source_line.file == __file__ for live in made)
    assert "bytes at" in str(plan)
    assert list(plan.at_peak) == sorted(plan.at_peak, key=lambda live: -live.bytes)


def test_symbolic_sizes_give_an_expression():
    backend = device.mock_backend()
    compiled = torch.compile(Branches(), backend=backend, dynamic=True)
    with torch.no_grad():
        compiled(torch.randn(4, 8))
    (plan,) = backend.report().memory
    assert plan.peak == 4 * (8 * 32 + 32 + 32 * 8 + 8 + 8 + 8) + 4 * int(plan.expression.split("*")[0])
    assert "*s" in plan.expression


def test_outputs_may_be_constants():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output([x, None, 3])
    module = with_fake_values(fx.GraphModule(nn.Module(), graph), [torch.zeros(4)])
    assert device.plan_memory(module).peak == 16
    assert output_nodes(module)[1:] == [None, None]
