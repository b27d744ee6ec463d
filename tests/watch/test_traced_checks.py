"""While Dynamo traces, hooks are called instead of traced: the graph is the same, node for node."""

import copy
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tests.breadth import breadth
from tests.compare import faults
from tests.watch.architectures import build, inputs_of
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from torchguard import err
from torchguard._graphs.source_lines import source_line_of
from torchguard._torch import hook_calls
from torchguard._watch import watch
from torchguard._watch.traced_checks import TracedChecks

# torch's own about code after a graph break, and ours about samples that are mixed there.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::torchguard.exceptions.MixedRowsWarning")
NAMES = [
    "BartForConditionalGeneration",
    "ConvBertForMaskedLM",
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "ModernBertForSequenceClassification",
    "OPTForCausalLM",
    "RwkvForCausalLM",
    "SwiftFormerForImageClassification",
    "T5ForConditionalGeneration",
    "ViTForImageClassification",
]


@pytest.fixture
def calls(monkeypatch):
    """The modules whose hooks were called."""
    made, after = [], TracedChecks.after
    monkeypatch.setattr(
        TracedChecks, "after", lambda checks, *args: (made.append(checks.hook), after(checks, *args))[1]
    )
    return made


def described(graph: fx.Graph) -> list:
    """The nodes of a graph, by number: their names come from variables of the code that was traced."""
    numbers = {node: i for i, node in enumerate(graph.nodes)}
    nodes = []
    for node in graph.nodes:
        given = fx.node.map_aggregate(
            (node.args, node.kwargs), lambda one: f"%{numbers[one]}" if isinstance(one, fx.Node) else one
        )
        within = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
        is_ours = source_line_of(node) is not None and "torchguard/_watch" in source_line_of(node).file
        nodes.append((node.op, str(node.target) if node.op != "output" else "", str(given), within, is_ours))
    return nodes


def traced(model, inputs, quarantine, gradients):
    """The graphs of a watched model, and its flags."""
    graphs = []

    def backend(graph, _):
        graphs.append(described(graph.graph))
        return graph.forward

    torch._dynamo.reset()
    guarded = watch(copy.deepcopy(model), quarantine=quarantine)
    with torch.set_grad_enabled(gradients):
        _, f = torch.compile(guarded, backend=backend)(**inputs)
    return graphs, f, guarded.report()


def require_same_graphs(monkeypatch, model, inputs, quarantine, gradients=True):
    found = traced(model, inputs, quarantine, gradients)
    with monkeypatch.context() as patched:
        patched.setattr(hook_calls, "_hooks_of", lambda tx, module: None)
        want = traced(model, inputs, quarantine, gradients)
    assert found[0] == want[0]
    assert faults(found[1]) == faults(want[1])
    assert found[2] == want[2]
    return found[1]


@pytest.mark.parametrize("gradients", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("quarantine", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("name", breadth(NAMES, "ViTForImageClassification"))
def test_the_graph_is_the_one_of_traced_hooks(name, quarantine, gradients, monkeypatch, calls):
    model = build(name)
    inputs, bad = inputs_of(model)
    inputs[bad][1] = float("nan")
    f = require_same_graphs(monkeypatch, model, inputs, quarantine, gradients)
    assert len(calls) > 10
    assert err.is_err(f)[1]


class Complex(nn.Module):
    """A module returns complex numbers, and another takes them."""

    def __init__(self):
        super().__init__()
        self.turn = Turn()
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.turn(x).real)


class Turn(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        return torch.polar(super().forward(x), x)


class SameTensorTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        x = x.unsqueeze(1)
        mask = torch.zeros(1, 1).masked_fill(torch.ones(1, 1) < 0, float("-inf"))
        return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0].squeeze(1)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Returns(nn.Linear):
    """Returns the result of a function of its output."""

    def __init__(self, function):
        super().__init__(4, 4)
        self.function = function

    def forward(self, x, *others, **named):
        return self.function(super().forward(x))


class Calls(nn.Module):
    """Calls a layer that returns something else than a tensor, with arguments of several kinds."""

    def __init__(self, function, *args, **kwargs):
        super().__init__()
        self.layer, self.head, self.given = Returns(function), nn.Linear(4, 4), (args, kwargs)

    def forward(self, x):
        args, kwargs = self.given
        out = self.layer(x, *args, **kwargs)
        while not isinstance(out, torch.Tensor):
            (out, *_) = out.values() if isinstance(out, dict) else out
        return self.head(out)


class Indexed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.table(x[:, 0].nan_to_num().long().clamp(0, 7)) + x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x):
        out, (hidden, _) = self.cell(x.unsqueeze(1))
        return out.squeeze(1) + hidden[0]


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4))

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False)


class Mapped(nn.Module):
    """Calls a layer under a transform, and again outside of it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return torch.func.vmap(self.layer)(x) + self.layer(x)


class Broken(nn.Module):
    """The graph breaks inside of a layer, which is called once more."""

    class Layer(nn.Linear):
        def forward(self, x):
            torch._dynamo.graph_break()
            return super().forward(x)

    def __init__(self):
        super().__init__()
        self.one, self.two = self.Layer(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.two(self.one(self.two(x)))


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)] * 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(input=x)
        return x


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.relu, self.two = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)

    def forward(self, x):
        return self.two(F.relu_(self.relu(self.one(x)).sub_(1)))


MODELS = {
    "complex numbers": Complex,
    "the same tensor twice": SameTensorTwice,
    "a tuple": lambda: Calls(lambda z: (z, None, 3, z.argmax(-1))),
    "a tuple in a tuple": lambda: Calls(lambda z: ((z, z + 1), z)),
    "a named tuple": lambda: Calls(lambda z: Pair(z, z * 2)),
    "a list": lambda: Calls(lambda z: [z, z]),
    "a dict": lambda: Calls(lambda z: {"z": z, "n": 2}),
    "a result of sort": lambda: Calls(lambda z: z.sort(-1)),
    "arguments that are no tensors": lambda: Calls(lambda z: z, None, 2, 0.5, "text", flag=True),
    "a tuple as an argument": lambda: Calls(lambda z: z, (1, None), named={"a": 1}),
    "a mask": lambda: Calls(lambda z: z, attention_mask=torch.tensor([[0.0, float("-inf"), 0.0, 0.0]])),
    "indices": Indexed,
    "a recurrent layer": Recurrent,
    "a checkpoint": Checkpointed,
    "a transform": Mapped,
    "a graph break": Broken,
    "a shared layer, by keyword": Shared,
    "operations in place": InPlace,
}


@pytest.mark.parametrize("quarantine", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("name", breadth(MODELS, *(MODELS.keys() - {"a graph break", "a recurrent layer"})))
def test_the_graph_of_an_unusual_model_is_the_one_of_traced_hooks(name, quarantine, monkeypatch):
    torch.manual_seed(0)
    model = MODELS[name]()
    x = torch.randn(3, 4)
    x[1, 2] = float("nan")
    f = require_same_graphs(monkeypatch, model, {"x": x}, quarantine)
    assert 1 in faults(f)


def hooked(hook_of):
    """A compiled watched model of two layers; `hook_of` is called with the first one after the first call."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    guarded = watch(model)
    run = torch.compile(guarded, backend="eager", fullgraph=True)
    x = torch.ones(2, 4)
    before, _ = run(x)
    hook_of(model[0])
    after, _ = run(x)
    want, _ = guarded(x)
    torch.testing.assert_close(after, want)
    return not torch.equal(before, after)


@pytest.mark.parametrize(
    "register",
    [
        lambda layer: layer.register_forward_hook(lambda module, args, out: out + 1),
        lambda layer: layer.register_forward_hook(lambda module, args, kwargs, out: out + 1, with_kwargs=True),
        lambda layer: layer.register_forward_hook(lambda module, args, out: out + 1, always_call=True),
    ],
    ids=["forward", "with kwargs", "always"],
)
def test_a_hook_that_is_added_after_compiling_is_called(register, calls):
    assert hooked(register)
    assert calls


def plus_one(module, args, out):
    return out + 1 if type(module) is nn.Linear else None


@pytest.mark.parametrize("is_late", [False, True])
def test_a_hook_for_all_modules_is_called(is_late, calls):
    guarded, x = watch(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), torch.ones(2, 4)
    out, _ = guarded(x)
    run = torch.compile(guarded, backend="eager", fullgraph=True)
    if is_late:
        run(x)
    handle = nn.modules.module.register_module_forward_hook(plus_one)
    try:
        other, _ = run(x)
    finally:
        handle.remove()
    assert not torch.equal(out, other)
    assert len(calls) == 2 * is_late


def test_a_backward_hook_is_called(calls):
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), []
    guarded = watch(model)
    model[0].register_full_backward_hook(lambda module, grads, outputs: seen.append(module))
    out, _ = torch.compile(guarded, backend="eager")(torch.ones(2, 4))
    out.sum().backward()
    assert seen == [model[0]]


@pytest.mark.parametrize("name", ["__call__", "_call_impl"])
def test_a_patched_call_is_traced(name, monkeypatch, calls):
    original = getattr(nn.Module, name)

    def patched(module, *args, **kwargs):
        out = original(module, *args, **kwargs)
        return out + 1 if type(module) is nn.Linear else out

    guarded, x = watch(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), torch.ones(2, 4)
    monkeypatch.setattr(nn.Module, name, patched)
    out, _ = torch.compile(guarded, backend="eager")(x)
    torch.testing.assert_close(out, guarded(x)[0])


def test_another_forward_is_called(calls):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    guarded, x = watch(model), torch.ones(2, 4)
    run = torch.compile(guarded, backend="eager", fullgraph=True)
    run(x)
    model[0].forward = lambda x: x * 3
    out, _ = run(x)
    torch.testing.assert_close(out, model[1].forward(x * 3))
