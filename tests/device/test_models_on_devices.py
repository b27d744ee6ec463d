"""Common models: both graphs are checked, and results are those of eager."""

import pytest
import torch
from tests.compare import assert_same_state
from tests.models import gpt2
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from transformers import BertConfig, BertForSequenceClassification, GPT2LMHeadModel

from torchguard.device import Device, DeviceRejectionError, examples, mock_backend


def bert():
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=48,
        problem_type="single_label_classification",  # otherwise the first call sets it, which fails a guard
    )
    return BertForSequenceClassification(config).eval()


class Cnn(nn.Module):
    """A model with batch norm in training, whose buffers change with every call."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3)
        )
        self.head = nn.Linear(16, 16)

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3))).pow(2).mean()


def loss_of(model, inputs):
    if inputs.is_floating_point():
        return model(inputs)
    if isinstance(getattr(model, "_orig_mod", model), GPT2LMHeadModel):
        return model(input_ids=inputs, use_cache=False).logits.pow(2).mean()
    return model(input_ids=inputs, labels=inputs[:, 0] % 2).loss


TOKENS = torch.arange(32).reshape(2, 16)
MODELS = {
    "bert": (bert, TOKENS),
    "gpt2": (lambda: gpt2().eval(), TOKENS),
    "cnn": (Cnn, torch.linspace(-1, 1, 1536).reshape(2, 3, 16, 16)),
}
# An op of the forward graph of each, and one of its backward graph.
DENIED = {
    "bert": ("aten.gelu", "aten.gelu_backward"),
    "gpt2": ("aten.tanh", "aten.tanh_backward"),
    "cnn": ("aten.convolution", "aten.convolution_backward"),
}


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


def test_results_and_gradients_equal_those_of_eager(name):
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(0)
    other = make()
    backend = mock_backend(Device(deny=DENIED[name], alignment=16, layouts="contiguous", max_memory=1), mode="warning")
    compiled = torch.compile(other, backend=backend)
    for _ in range(2):
        expected, got = loss_of(model, inputs), loss_of(compiled, inputs)
        torch.testing.assert_close(got, expected)
        expected.backward()
        got.backward()
    assert_same_state(other, model)
    report = backend.report()
    assert [graph.name for graph in report.graphs] == ["forward", "backward"]
    denied = {(one.graph, one.op.rpartition(".")[0]) for one in report.violations if one.code == "TGD501"}
    assert denied == {("forward", DENIED[name][0]), ("backward", DENIED[name][1])}
    assert 0 < report.coverage.by_count < 100
    assert report.transfer_bytes > 0
    assert report.memory[1].peak > report.memory[0].saved > 0


def test_strict_names_violations_of_both_graphs_before_the_forward_runs(name):
    make, inputs = MODELS[name]
    compiled = torch.compile(make(), backend=mock_backend(Device(deny=DENIED[name]), mode="strict"))
    with pytest.raises(BackendCompilerFailed) as raised:
        loss_of(compiled, inputs)
    error = raised.value.inner_exception
    assert isinstance(error, DeviceRejectionError)
    assert {one.graph for one in error.violations} == {"forward", "backward"}
    assert all(one.source_line is not None for one in error.violations)


def test_strict_passes_a_model_without_violations(name):
    make, inputs = MODELS[name]
    backend = mock_backend(Device(max_memory="1GiB", max_rank=6), mode="strict")
    loss_of(torch.compile(make(), backend=backend), inputs).backward()
    assert backend.report().coverage.by_count == 100
    assert backend.report().violations == ()


def test_inference_is_one_graph(name):
    make, inputs = MODELS[name]
    model = make().eval()
    backend = mock_backend(Device())
    with torch.no_grad():
        torch.testing.assert_close(loss_of(torch.compile(model, backend=backend), inputs), loss_of(model, inputs))
    assert [graph.name for graph in backend.report().graphs] == ["inference"]


@pytest.mark.long
@pytest.mark.parametrize("example", examples())
def test_every_example_finds_violations(example):
    make, inputs = MODELS["bert"]
    backend = mock_backend(example, mode="warning")
    loss_of(torch.compile(make(), backend=backend), inputs).backward()
    report = backend.report()
    assert 0 <= report.coverage.by_count < 100
    assert report.violations
    assert report.to_json()


def test_indices_and_views_make_no_violations():
    """Of a transformer, only the batch and the labels are not aligned."""
    make, inputs = MODELS["bert"]
    backend = mock_backend(Device(alignment=16, layouts=["contiguous", "broadcast"]), mode="warning")
    loss_of(torch.compile(make(), backend=backend), inputs)
    violations = backend.report().violations
    assert len(violations) < 40
    aligned = [one for one in violations if one.code == "TGD301" and one.graph == "forward"]
    assert {one.remedy[len("pad dim 0 ") :] for one in aligned} == {"from 2 to 16"}


@pytest.mark.long
def test_sequences_of_any_length_need_one_compilation():
    backend = mock_backend(Device(alignment=16), mode="warning")
    compiled = torch.compile(gpt2().eval(), backend=backend, dynamic=True)
    for length in (8, 12, 20):
        loss_of(compiled, TOKENS[:, :1].repeat(1, length)).backward()
    assert len(backend.report().graphs) == 2
    assert any(one.condition for one in backend.report().violations)
