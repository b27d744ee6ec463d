"""Ops that a device does not support: the names they are found by, and the remedies."""

import pytest
import torch
from tests.device.chip import codes, only, violations_of
from torch import nn

from torchguard.device import Device
from torchguard.exceptions import DeviceError

ANY = {"parameters": None, "activations": None}


x = torch.randn(4, 8)


def test_denied_ops_are_found_by_name_overload_and_glob():
    for pattern in ("aten.gelu", "aten.gelu.default", "gelu", "aten.gel*", "aten::gelu"):
        violation = only(violations_of(nn.GELU(), x, deny=pattern))
        assert (violation.code, violation.op) == ("TGD501", "aten.gelu.default")
        assert violation.message.startswith("chip does not support aten.gel")
    assert violation.remedy == "torch can decompose it: decompositions=['aten.gelu.default']"
    assert violations_of(nn.GELU(), x, deny="aten.gelu_backward") == ()
    assert violations_of(nn.GELU(), x, deny="aten.add.Scalar") == ()


@pytest.mark.parametrize("op", ["cos", "exp", "add"])
def test_decomposing_is_not_suggested_where_it_would_hide_the_op(op):
    functions = {"cos": torch.cos, "exp": torch.exp, "add": lambda x: x + 1}
    assert only(violations_of(functions[op], x, deny=op)).remedy == ""


def test_the_suggestion_to_decompose_can_be_followed():
    norm = nn.LayerNorm(8)
    remedy = only(violations_of(norm, x, deny="aten.native_layer_norm")).remedy
    assert remedy == "torch can decompose it: decompositions=['aten.native_layer_norm.default']"
    with torch.no_grad():
        names = {"deny": "aten.native_layer_norm", "decompositions": ["aten.native_layer_norm.default"]}
        assert violations_of(norm, x, **names) == ()
    assert violations_of(norm, x, deny=["aten.native_layer_norm", "aten.rsqrt"])[0].remedy == ""
    assert violations_of(nn.GELU(), x, allow=["aten.erf", "aten.mul.*"])[0].remedy == ""
    assert "decompose it" in violations_of(nn.GELU(), x, allow=["aten.erf", "aten.mul.*", "aten.add.*"])[0].remedy


_image, _row = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8)
# The denied name: the function, its input, and the op that the graph contains.
PROGRAM_NAMES = {
    "linear": (nn.Linear(8, 8), x, "addmm"),
    "linear without bias": (nn.Linear(8, 8, bias=False), x, "mm"),
    "softmax": (lambda x: x.softmax(-1), x, "_softmax"),
    "aten.softmax.int": (lambda x: x.softmax(-1), x, "_softmax"),
    "log_softmax": (lambda x: x.log_softmax(-1), x, "_log_softmax"),
    "conv1d": (nn.Conv1d(3, 4, 3), _row, "convolution"),
    "conv2d": (nn.Conv2d(3, 4, 3), _image, "convolution"),
    "conv?d": (nn.Conv2d(3, 4, 3), _image, "convolution"),
    "matmul": (lambda x: x @ x.t(), x, "mm"),
    "layer_norm": (lambda x: nn.functional.layer_norm(x, (8,)), x, "native_layer_norm"),
    "group_norm": (nn.GroupNorm(3, 3), _image, "native_group_norm"),
    "batch_norm": (nn.BatchNorm2d(3), _image, "_native_batch_norm_legit_functional"),
    "native_batch_norm": (nn.BatchNorm2d(3).eval(), _image, "_native_batch_norm_legit_no_training"),
    "dropout": (nn.Dropout(0.5), x, "native_dropout"),
    "max_pool2d": (nn.MaxPool2d(2), _image, "max_pool2d_with_indices"),
    "relu_": (lambda x: x.clone().relu_(), x, "relu"),
    "aten.add_.Tensor": (lambda x: x.clone().add_(1), x, "add"),
    "fft_fft": (lambda x: torch.fft.fft(x).abs(), x, "_fft_r2c"),
    "scaled_dot_product_attention": (
        lambda x: nn.functional.scaled_dot_product_attention(x, x, x),
        torch.randn(1, 2, 4, 8),
        "_scaled_dot_product_flash_attention_for_cpu",
    ),
    "scaled_dot_product_attention with dropout": (
        lambda x: nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        torch.randn(1, 2, 4, 8),
        "_safe_softmax",
    ),
}


PYTHON_NAMES = {
    "torch.relu": torch.relu,
    "F.gelu": nn.functional.gelu,
    "nn.GELU": nn.GELU(),
    "Aten.gelu": nn.GELU(),
    "torch.nn.functional.silu": nn.functional.silu,
    "torch.nn.LeakyReLU": nn.LeakyReLU(),
    "nn.ReLU6": nn.ReLU6(),
    "nn.BatchNorm1d": nn.BatchNorm1d(8),
    "torch.Tensor.mul": lambda x: x * 2,
    "torch.linalg.norm": torch.linalg.norm,
    "linalg.vector_norm": torch.linalg.vector_norm,
    "special.expit": torch.special.expit,
    "fft.fft": lambda x: torch.fft.fft(x).abs(),
    "torch.norm": torch.norm,
    "nn.Unfold": lambda x: nn.Unfold(2)(x[None, None]),
    "F.fold": lambda x: nn.functional.fold(x.T, (2, 2), (1, 1)),
    "F.cross_entropy": lambda x: nn.functional.cross_entropy(x, torch.arange(4)),
    "torch.select": lambda x: torch.select(x, 0, 1),
}
# Calls that are decomposed to ops that many others use, and what the graph contains instead.
CALLS = {
    "torch.max": (lambda x: torch.max(x, 2 * x), "maximum"),
    "torch.Tensor.min": (lambda x: x.min(2 * x), "minimum"),
    "nn.CrossEntropyLoss": (lambda x: nn.functional.cross_entropy(x, x.softmax(-1)), "_log_softmax"),
    "nn.AdaptiveAvgPool2d": (lambda x: nn.AdaptiveAvgPool2d(1)(x[None]), "mean"),
    "torch.repeat_interleave": (lambda x: x.repeat_interleave(2), "clone"),
    "torch.linalg.norm": (lambda x: torch.linalg.norm(x, "nuc"), "_linalg_svd"),
    "torch.norm": (lambda x: torch.norm(x, "nuc"), "_linalg_svd"),
    "torch.Tensor.norm": (lambda x: x.norm("nuc"), "_linalg_svd"),
    "torch.einsum": (lambda x: torch.einsum("ij->j", x), "sum"),
    "torch.split": (lambda x: torch.split(x, [1, 3])[0] * 2, "split_with_sizes"),
}


@pytest.mark.parametrize("name", PYTHON_NAMES)
def test_an_op_is_found_by_its_name_in_python(name, monkeypatch):
    assert codes(violations_of(PYTHON_NAMES[name], x, deny=[name], **ANY)) == ["TGD501"]
    monkeypatch.setenv("MOCK_DENY", name)
    assert Device.from_environment().deny == Device(deny=[name]).deny


@pytest.mark.parametrize("name", CALLS)
def test_a_call_whose_ops_many_others_use_is_found_where_it_is_called(name):
    call, in_graph = CALLS[name]
    with torch.no_grad():
        violation = only(violations_of(call, x, deny=[name], **ANY))
        assert violation.op.startswith(f"aten.{in_graph}.")
        assert violations_of(lambda x: x.maximum(2 * x).mean(), x, deny=[name], **ANY) == ()


def test_where_with_one_argument_is_found():
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert codes(violations_of(lambda x: torch.where(x > 0)[0] * 2, x, deny=["torch.where"])) == ["TGD501"]


def test_a_call_that_the_device_decomposes_is_no_violation():
    fields = {"deny": "layer_norm", "decompositions": ["aten.native_layer_norm"]}
    with torch.no_grad():
        assert violations_of(lambda x: nn.functional.layer_norm(x, (8,)), x, **fields) == ()


@pytest.mark.parametrize(
    "name",
    [
        "torch.masked.mean",
        "masked.mean",
        "signal.windows.hann",
        "operator.add",
        "torch.nn.init.normal_",
        "torch.Tensor.T",
        "torch.equal",
    ],
)
def test_a_name_that_is_no_op_is_not_taken_for_another(name):
    with pytest.raises(DeviceError, match=r"There is no op|No graph contains"):
        Device(deny=[name])


@pytest.mark.parametrize("name", ["nn.Sequential", "F.normalize", "nn.Dropout2d", "torch.foo", "prims.foo", "nn.LSTM"])
def test_a_name_that_no_graph_can_contain_is_refused(name, monkeypatch):
    with pytest.raises(DeviceError, match=r"There is no op|No graph contains"):
        Device(deny=[name])
    monkeypatch.setenv("MOCK_DENY", name)
    with pytest.raises(DeviceError, match=r"MOCK_DENY"):
        Device.from_environment()


def test_an_op_of_a_library_that_was_not_imported_is_logged(caplog):
    assert violations_of(nn.GELU(), x, deny=["somewhere.gelu"]) == ()
    assert "no op of 'somewhere' is registered: it finds nothing" in caplog.text


@pytest.mark.parametrize("name", PROGRAM_NAMES)
def test_an_op_is_found_by_its_name_in_programs(name):
    fn, value, in_graph = PROGRAM_NAMES[name]
    denied = name.split(" ")[0]
    with torch.no_grad():
        (violation, *_) = violations_of(fn, value, deny=denied, **ANY)
        assert violation.op.startswith(f"aten.{in_graph}.")
        assert violation.message == f"chip does not support aten.{denied.removeprefix('aten.')}"
        allowed = violations_of(fn, value, allow=denied, **ANY)
    assert not any(one.op.startswith(f"aten.{in_graph}.") for one in allowed)


def test_a_denied_view_is_found_and_an_allowed_list_needs_no_views():
    assert codes(violations_of(nn.Linear(8, 8), x, deny="aten.t")) == ["TGD501"]
    assert violations_of(nn.Linear(8, 8), x, allow=["aten.addmm", "aten.mm", "aten.sum.*"]) == ()


def test_ops_that_are_not_on_the_allow_list_are_found():
    violation = only(violations_of(nn.GELU(), x, allow=["aten.relu", "aten.mm"]))
    assert (violation.code, violation.message) == ("TGD502", "is not among the ops that chip allows")
    assert violations_of(nn.GELU(), x, allow="aten.gelu*") == ()


def test_deny_wins_over_allow():
    assert codes(violations_of(nn.GELU(), x, allow="aten.*", deny="aten.gelu")) == ["TGD501"]


def test_custom_and_higher_order_ops_have_names():
    with torch.library._scoped_library("torchguard_device_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        library._register_fake("twice", torch.empty_like)
        twice = torch.ops.torchguard_device_test.twice
        assert codes(violations_of(lambda x: twice(x), x, deny="torchguard_device_test.twice")) == ["TGD501"]

    def branch(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    assert codes(violations_of(branch, x, deny="higher_order.cond")) == ["TGD501"]
    inside = only(violations_of(branch, x, deny="aten.cos"))
    assert inside.graph.startswith("inference.")
