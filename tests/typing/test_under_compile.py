"""In a graph, `@tensorcheck` validates nothing, changes nothing and leaves nothing behind."""

import pytest
import torch
from torch import nn

from torchguard import DimensionMismatchError, err, tensorcheck
from torchguard.typing import Dim, Tensor, bool_t, error_t, float32_t


def forward(
    self, x: Tensor[float32_t, ("batch", Dim.width)], mask: Tensor[bool_t, ("batch",)] | None = None
) -> Tensor[float32_t, ("batch", Dim.width)]:
    out = self.layer(x).relu()
    return out if mask is None else out * mask[:, None]


class Plain(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        torch.manual_seed(0)
        self.width = width
        self.layer = nn.Linear(width, width)

    forward = forward


class Checked(Plain):
    forward = tensorcheck(forward)


class Detecting(Plain):
    @tensorcheck
    def forward(
        self, x: Tensor[float32_t, ("batch", Dim.width)]
    ) -> tuple[Tensor[float32_t, ("batch", Dim.width)], Tensor[error_t, ("batch", "words")]]:
        return self.layer(x), err.new(x)


class Recorder:
    """A backend that keeps the graphs it is given."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append([(node.op, str(node.target)) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward


def test_the_graph_is_that_of_the_plain_model():
    graphs = []
    for model in (Plain(), Checked()):
        recorder = Recorder()
        compiled = torch.compile(model, backend=recorder, fullgraph=True)
        compiled(torch.ones(2, 4))
        compiled(torch.ones(2, 4), torch.ones(2, dtype=torch.bool))
        graphs.append(recorder.graphs)
    assert graphs[0] == graphs[1]


def test_shapes_cause_no_recompile_that_the_plain_model_does_not_have():
    for model in (Plain(), Checked(), Detecting()):
        recorder = Recorder()
        compiled = torch.compile(model, backend=recorder, fullgraph=True, dynamic=True)
        for batch in (2, 3, 5, 7):
            compiled(torch.ones(batch, 4))
        assert len(recorder.graphs) == 1


@pytest.mark.inductor
def test_outputs_and_gradients_are_those_of_the_plain_model(compiled):
    found = []
    for model in (Plain(), Checked()):
        out = compiled(model)(torch.ones(2, 4))
        out.sum().backward()
        found.append((out, model.layer.weight.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_nothing_is_validated(compiled):
    @tensorcheck
    def double(x: Tensor[float32_t, ("n", 3)]) -> Tensor[float32_t, ("n", 4)]:
        return 2 * x

    assert compiled(double)(torch.ones(5)).shape == (5,)
    with pytest.raises(DimensionMismatchError):
        double(torch.ones(5))


def test_a_compiled_function_is_validated_from_outside():
    @tensorcheck
    @torch.compile(backend="eager")
    def double(x: Tensor[float32_t, ("n", 3)]):
        return 2 * x

    double(torch.ones(5, 3))
    with pytest.raises(DimensionMismatchError):
        double(torch.ones(5))


def test_where_the_graph_breaks_the_rest_is_validated():
    @tensorcheck
    def inner(x: Tensor[float32_t, ("n", 3)]):
        return 2 * x

    def outer(x):
        torch._dynamo.graph_break()
        return torch.compiler.disable(inner)(x)

    with pytest.raises(DimensionMismatchError):
        torch.compile(outer, backend="eager")(torch.ones(5))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_other_ways_to_a_graph():
    model, x = Checked(), torch.ones(2, 4)
    expected = model(x)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), expected)
    assert torch.equal(torch.fx.symbolic_trace(model, {"mask": None})(x), expected)
    assert torch.equal(torch.jit.trace(model, (x,))(x), expected)
    assert torch.equal(torch.func.functional_call(model, dict(model.named_parameters()), (x,)), expected)


def test_an_exported_model_takes_other_batches():
    batch = torch.export.Dim("batch")
    exported = torch.export.export(Detecting(), (torch.ones(2, 4),), dynamic_shapes={"x": {0: batch}})
    x = torch.ones(5, 4)
    x[3, 0] = torch.nan
    out, f = exported.module()(x)
    assert out.shape == (5, 4)
    assert err.is_err(f).tolist() == [False, False, False, True, False]


def test_transforms_see_one_sample():
    @tensorcheck
    def norm(x: Tensor[float32_t, ("features",)]) -> Tensor[float32_t, ()]:
        return x.square().sum()

    x = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(torch.vmap(norm)(x), x.square().sum(-1))
    assert torch.equal(torch.vmap(torch.func.grad(norm))(x), 2 * x)
    assert torch.equal(torch.compile(torch.vmap(torch.func.grad(norm)), backend="aot_eager", fullgraph=True)(x), 2 * x)
    with pytest.raises(DimensionMismatchError):
        torch.vmap(norm)(x[None])


def test_fake_tensors_are_validated():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = Checked()
        model(torch.ones(2, 4))
        with pytest.raises(DimensionMismatchError):
            model(torch.ones(2, 5))
