"""Every built-in rule: what it finds, what it ignores, and its messages."""

import pytest
import torch
from functorch.compile import make_boxed_func
from tests.device.chip import codes, only, violations_of
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torchguard import device
from torchguard._graphs.codec import decode_graph, encode_graph
from torchguard._torch import aot
from torchguard.device import Device

x = torch.randn(4, 8)


class Transposed(nn.Module):
    def forward(self, x):
        return x.t()


def test_double_precision_is_refused_by_default():
    violation = only(violations_of(lambda x: x.double(), x))
    assert (violation.code, violation.op) == ("TGD102", "aten._to_copy.default")
    assert violation.message == "float64 activations, chip supports float32, float16, bfloat16"
    assert violation.remedy == "convert to float32: .to(torch.float32)"
    assert violation.source_line.file == __file__
    assert "x.double()" in violation.source_line.text


def test_a_view_of_another_dtype_does_not_hide_the_dtype():
    violation = only(violations_of(lambda x: x.double().view(torch.int64).int(), x))
    assert (violation.code, violation.op) == ("TGD102", "aten._to_copy.default")
    assert violation.message.startswith("float64 activations")
    violation = only(violations_of(lambda x: torch.fft.fft(x).real, x))
    assert (violation.code, violation.op) == ("TGD102", "aten._fft_r2c.default")
    assert violation.message.startswith("complex64 activations")
    violation = only(violations_of(lambda x: x.view(torch.int64).t() + 1, x.double()))
    assert (violation.code, violation.tensors) == ("TGD102", ("x",))
    assert violations_of(lambda x: x.view(torch.int32) + 1, x) == ()


def test_parameters_and_activations_have_separate_dtypes():
    model = nn.Linear(8, 8)
    wrong = violations_of(model, x, parameters="bfloat16")
    assert codes(wrong) == ["TGD101"]
    assert {tensor for one in wrong for tensor in one.tensors} == {"weight", "bias"}
    assert "float32 parameters, chip supports bfloat16" in str(wrong[0])
    assert codes(violations_of(model, x, activations="bfloat16")) == ["TGD102"]
    assert violations_of(model, x) == ()


def test_buffers_are_checked_as_parameters():
    model = nn.BatchNorm1d(8).eval()
    names = {tensor for one in violations_of(model, x, parameters="float16") for tensor in one.tensors}
    assert "running_mean" in names


def test_parts_and_views_of_parameters_are_parameters():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 8))

        def forward(self, x):
            one, other = self.weight.chunk(2)
            return x @ one.t() + x @ other

    with torch.no_grad():
        wrong = violations_of(Halves(), x, parameters="bfloat16")
    assert {tensor for one in wrong for tensor in one.tensors} == {"weight"}


def test_indices_are_integer_tensors_that_ops_take():
    table, index = torch.randn(10, 8), torch.tensor([1, 2])
    violation = only(violations_of(lambda t, i: t[i], table, index, indices="int32"))
    assert violation.code == "TGD103"
    assert violation.message == "int64 indices, chip supports int32"
    assert violations_of(lambda t, i: t[i], table, index.int(), indices="int32") == ()
    assert violations_of(lambda t, i: t[i], table, index) == ()


def test_counters_and_masks_are_not_indices():
    model = nn.BatchNorm1d(8)  # its batch counter is an int64
    assert violations_of(model, x, indices="int32") == ()
    assert violations_of(lambda x: x.masked_fill(x > 0, 0.0), x, indices="int32") == ()


def test_reductions_accumulate_in_the_dtype_of_their_result():
    violation = only(violations_of(lambda x: x.bfloat16().sum(-1), x, accumulators="float32"))
    assert (violation.code, violation.op) == ("TGD104", "aten.sum.dim_IntList")
    assert violation.message == "accumulates in bfloat16, chip supports float32"
    assert violation.remedy == "pass dtype=torch.float32, or convert before"
    assert violations_of(lambda x: x.bfloat16().sum(-1, dtype=torch.float32), x, accumulators="float32") == ()
    assert codes(violations_of(lambda x: x.bfloat16().cumsum(-1), x, accumulators="float32")) == ["TGD104"]
    assert violations_of(lambda x: (x > 0).sum(-1), x, accumulators="float32") == ()
    assert violations_of(lambda x: x.bfloat16().amax(-1), x, accumulators="float32") == ()


_zeros, _half = torch.zeros(4, dtype=torch.int64), torch.zeros(8, dtype=torch.bfloat16)
ACCUMULATING = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: nn.functional.layer_norm(x, (8,)),
    "group_norm": lambda x: nn.functional.group_norm(x, 2),
    "batch_norm": lambda x: nn.functional.batch_norm(x, _half, _half + 1, training=True),
    "mse_loss": lambda x: nn.functional.mse_loss(x, x * 2),
    "cross entropy": lambda x: nn.functional.cross_entropy(x, _zeros),
    "scatter_add": lambda x: x.scatter_add(0, _zeros[None, :1].expand(1, 8), x),
    "index_add": lambda x: x.index_add(0, _zeros, x),
    "embedding_bag": lambda x: nn.functional.embedding_bag(_zeros.view(2, 2), x),
    "dist": lambda x: torch.dist(x, x * 2),
    "pooling": lambda x: nn.functional.avg_pool1d(x, 2),
}


@pytest.mark.parametrize("name", ACCUMULATING)
def test_ops_that_accumulate_without_the_reduction_tag_are_checked(name):
    half = x.bfloat16()
    assert codes(violations_of(ACCUMULATING[name], half, accumulators="float32")) == ["TGD104"]
    assert violations_of(ACCUMULATING[name], half, accumulators=["float32", "bfloat16"]) == ()


def test_a_loss_without_reduction_accumulates_nothing():
    loss = nn.MSELoss(reduction="none")
    assert violations_of(lambda x: loss(x, x * 2), x.bfloat16(), accumulators="float32") == ()


def test_an_op_with_an_unsupported_layout_is_named():
    violation = only(violations_of(lambda x: x.t().relu(), x, layouts="contiguous"))
    assert (violation.code, violation.op) == ("TGD201", "aten.relu.default")
    assert violation.message == "input (8, 4) with strides (1, 8) is transposed, chip supports contiguous"
    assert violation.remedy == "call .contiguous() before it"
    assert violations_of(lambda x: x.relu(), x, layouts="contiguous") == ()


def test_matrix_products_accept_transposed_operands():
    assert violations_of(nn.Linear(8, 8), x, layouts="contiguous", train=True) == ()
    assert violations_of(lambda a, b: torch.bmm(a, b.transpose(1, 2)), x[None], x[None], layouts="contiguous") == ()


def test_the_layout_of_what_a_graph_returns_is_checked():
    violation = only(violations_of(lambda x: (x.relu().t(), x + 1), x, layouts="contiguous"))
    assert violation.message == "output (8, 4) with strides (1, 8) is transposed, chip supports contiguous"
    assert violation.remedy == "return a copy: .contiguous()"
    assert violations_of(lambda x: x.relu().t(), x, layouts=["contiguous", "transposed"]) == ()
    assert "broadcast" in only(violations_of(lambda x: x.sum(0).expand(4, 8), x, layouts="contiguous")).message


@pytest.mark.parametrize("train", [False, True])
def test_the_layout_of_a_transposed_product_that_a_graph_returns_is_checked(train):
    found = violations_of(nn.Sequential(nn.Linear(8, 4), Transposed()), x, layouts="contiguous", train=train)
    output = only([one for one in found if one.graph != "backward"])  # torch 2.11 sums a transposed gradient
    assert "output (4, 4) with strides (1, 4) is transposed" in output.message


def test_layouts_of_copies_of_gradients_and_of_what_is_saved_are_not_checked():
    assert violations_of(lambda x: x.t().contiguous() + 1, x, layouts="contiguous") == ()
    assert violations_of(nn.Linear(8, 4), x, layouts="contiguous", train=True) == ()  # the gradient of its weight
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    assert violations_of(net, x, layouts="contiguous", train=True) == ()


def test_memory_is_checked_for_all_sizes_of_a_dynamic_graph():
    def fn(x):
        return (x * 2).relu() + 1

    violation = only(violations_of(fn, torch.randn(8), dynamic=True, max_memory=1000))
    assert violation.code == "TGD401"
    assert violation.holds_now
    assert violation.condition.startswith("12*s")
    assert violation.condition.endswith(" <= 1000")
    assert "more may be live: 96 bytes are live at the sizes of this call" in violation.message
    assert "dynamic=False" in violation.remedy

    def bounded(x):
        torch._check(x.shape[0] <= 80)
        return fn(x)

    assert violations_of(bounded, torch.randn(8), dynamic=True, max_memory=1000) == ()
    assert not only(violations_of(bounded, torch.randn(8), dynamic=True, max_memory=90)).holds_now


def test_the_peak_of_other_sizes_may_be_at_another_node():
    def fn(x, y):
        return (x * 2).relu().sum() + (y * 2).relu().sum()

    x, y = torch.randn(100), torch.randn(8)
    torch._dynamo.mark_dynamic(y, 0)
    violation = only(violations_of(fn, x, y, max_memory=10_000))
    assert violation.holds_now
    assert "12*s" in violation.condition  # the second half, although the first half has the peak of this call


def test_dims_of_size_one_do_not_affect_the_layout():
    assert violations_of(lambda x: x.t().relu(), torch.randn(1, 8), layouts="contiguous") == ()


@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), "channels_last"),
        (lambda: torch.randn(8, 4).t(), "transposed"),
        (lambda: torch.randn(1, 8).expand(4, 8), "broadcast"),
        (lambda: torch.randn(8, 8)[::2, ::2], "strided"),
    ],
    ids=["channels_last", "transposed", "broadcast", "strided"],
)
def test_each_layout_has_a_name_and_may_be_allowed(make, layout):
    refused = only(violations_of(torch.relu, make(), layouts="contiguous"))
    assert f" is {layout}, chip supports contiguous" in refused.message
    assert violations_of(torch.relu, make(), layouts=["contiguous", layout]) == ()


def test_the_remedy_for_an_unaligned_dim_is_padding():
    violation = only(violations_of(torch.relu, torch.randn(4, 770), alignment=16)[:1])
    assert violation.code == "TGD301"
    assert violation.message == "dim 1 of (4, 770) is not a multiple of 16"
    assert violation.remedy == "pad dim 1 from 770 to 784"
    assert violation.condition == ""
    assert violations_of(torch.relu, torch.randn(4, 784), alignment=16) == ()


def test_alignment_may_be_given_by_dim():
    violations = violations_of(torch.relu, torch.randn(6, 32), alignment={-1: 16, -2: 8})
    assert {one.remedy for one in violations} == {"pad dim 0 from 6 to 8"}
    assert violations_of(torch.relu, torch.randn(5, 8, 32), alignment={-1: 16, -2: 8}) == ()


def test_alignment_ignores_dims_of_one_indices_scalars_and_transposed_weights():
    table, index = torch.randn(10, 16), torch.tensor([1, 2, 3])
    assert violations_of(lambda t, i: t[i].mean(-1, keepdim=True), table, index, alignment=16) == ()
    assert violations_of(lambda x: x.sum(), torch.randn(4, 16), alignment=16) == ()
    assert violations_of(nn.Linear(16, 32), torch.randn(4, 16), alignment=16, train=True) == ()


def test_a_line_that_runs_in_many_layers_is_one_violation():
    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(6)))
    violations = violations_of(model, torch.randn(16, 10), alignment=16)
    weights = only([one for one in violations if one.graph == "forward" and "(10, 10)" in one.message])
    assert len(weights.nodes) == len(weights.tensors) == 6
    assert "[6 times]" in str(weights)
    assert "0.weight and 5 more" in str(weights)


def test_ranks_and_sizes_have_a_maximum():
    violation = violations_of(torch.relu, torch.zeros(2, 2, 2, 2), max_rank=3)[0]
    assert (violation.code, violation.message) == ("TGD302", "(2, 2, 2, 2) has 4 dims, chip supports 3")
    violation = violations_of(torch.relu, torch.zeros(2, 100), max_dim=64)[0]
    assert (violation.code, violation.message) == ("TGD303", "dim 1 of (2, 100) is larger than 64")
    assert violation.remedy == "split it into parts of 64 at most"
    assert violations_of(torch.relu, torch.zeros(2, 100), max_dim={0: 64}, max_rank=2) == ()


def test_symbolic_sizes_become_conditions():
    violation = violations_of(lambda x: x.relu(), torch.randn(4, 32), dynamic=True, alignment=16)[0]
    assert violation.condition.startswith("s")
    assert violation.condition.endswith(" % 16 == 0")
    assert f"(needs {violation.condition})" in str(violation)
    assert "may not be a multiple of 16" in violation.message
    remedy = "assert it in the model: torch._check(x.shape[1] % 16 == 0), or compile with dynamic=False"
    assert violation.remedy == remedy
    assert violation.holds_now
    assert not violations_of(torch.relu, torch.randn(4, 33), dynamic=True, alignment=16)[0].holds_now
    largest = violations_of(torch.relu, torch.randn(4, 32), dynamic=True, max_dim=64)[0]
    assert largest.condition.endswith(" <= 64")


def test_conditions_that_the_model_asserts_are_known():
    def aligned(x):
        torch._check(x.shape[1] % 16 == 0)
        torch._check(x.shape[1] <= 64)
        return x.relu()

    assert violations_of(aligned, torch.randn(4, 32), dynamic=True, alignment=16, max_dim={1: 64}) == ()


def test_a_remedy_names_a_symbolic_size_as_the_program_does():
    def nested(x, batch):
        return torch.cat([x, batch["rows"][0]], dim=1).relu()

    inputs = torch.randn(4, 20), {"rows": [torch.randn(4, 30)]}
    (violation,) = [one for one in violations_of(nested, *inputs, dynamic=True, alignment=16) if "relu" in one.op]
    one, other = "x.shape[1]", "batch['rows'][0].shape[1]"
    assert violation.remedy in [
        f"assert it in the model: torch._check(({a} + {b}) % 16 == 0), or compile with dynamic=False"
        for a, b in ((one, other), (other, one))
    ]
    assert violation.condition.startswith("(s")
    assert violation.condition.endswith(") % 16 == 0")


def test_a_data_dependent_size_is_to_be_asserted_where_it_is_computed():
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        violation = only(violations_of(lambda x: x[x > 0].relu(), torch.randn(4, 16), alignment=16)[:1])
    assert "assert it where the size is computed, with torch._check" in violation.remedy


def test_a_multiple_of_a_symbolic_size_is_aligned():
    assert violations_of(lambda x: x.repeat(1, 16).relu(), torch.randn(4, 3), dynamic=True, alignment=16)[1:] == ()


def test_a_device_without_dynamic_shapes_refuses_symbolic_sizes():
    violation = violations_of(torch.relu, x, dynamic=True, dynamic_shapes=False)[0]
    assert violation.code == "TGD304"
    assert violation.remedy == "compile with dynamic=False"
    assert "are symbolic, chip needs static shapes" in violation.message
    assert violations_of(torch.relu, x, dynamic_shapes=False) == ()


def test_the_peak_is_compared_with_the_memory_of_the_device():
    violation = only(violations_of(lambda x: x.relu() + 1, x, max_memory=300))
    assert (violation.code, violation.op) == ("TGD401", "aten.add.Tensor")
    assert violation.message == "384 bytes are live, chip has 300"
    assert violation.remedy == "the largest live tensor is x, 128 bytes"
    assert violations_of(lambda x: x.relu() + 1, x, max_memory=384) == ()


def test_the_memory_of_symbolic_sizes_is_a_condition():
    violation = only(violations_of(lambda x: x.relu() + 1, x, dynamic=True, max_memory=300))
    assert violation.condition.endswith(" <= 300")
    assert not violation.holds_now


def test_graphs_of_other_tracers_are_checked():
    graph = make_fx(lambda x: torch.nn.functional.gelu(x.double()), tracing_mode="fake")(x)
    report = device.check(graph, device=Device(name="chip", deny="aten.gelu"))
    assert codes(report.violations) == ["TGD102", "TGD501"]
    assert [one.name for one in report.graphs] == ["inference"]


def test_compiled_graphs_can_be_checked_again():
    backend = device.mock_backend(Device())
    model, labels = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.arange(4)
    torch.compile(lambda x: nn.functional.cross_entropy(model(x), labels), backend=backend)(x).backward()
    forward, backward = (one.graph.module for one in backend.report().graphs)
    report = device.check(forward, backward, device=Device(decompositions="core", deny="aten.erf"))
    assert [(one.graph, one.op) for one in report.violations] == [("backward", "aten.erf.default")]


def test_graphs_without_fake_tensors_raise():
    with pytest.raises(device.DeviceError, match=r"got node 'relu' .* in the inference graph.*make_fx"):
        device.check(torch.fx.symbolic_trace(nn.ReLU()), device=Device())
    with pytest.raises(device.DeviceError, match="node '_0'"):
        device.check(torch.fx.symbolic_trace(nn.Sequential(nn.ReLU())), device=Device())


def test_a_glob_that_matches_graph_ops_is_not_expanded():
    assert violations_of(lambda x: x @ x.T, x, deny=("aten.linalg_*",)) == ()
    assert codes(violations_of(lambda x: torch.linalg.vector_norm(x), x, deny=("aten.linalg_*",))) == ["TGD501"]


@pytest.mark.parametrize("is_from_file", [False, True])
def test_a_denied_op_that_the_compiler_has_decomposed_is_found(is_from_file):
    compiled = []
    keep = lambda graph, _: compiled.append(graph) or make_boxed_func(graph.forward)  # noqa: E731
    backend = aot_autograd(fw_compiler=keep, decompositions=aot.decompositions("inductor"))
    torch.compile(nn.functional.gelu, backend=backend)(x)
    (graph,) = compiled
    if is_from_file:
        with FakeTensorMode():
            graph = decode_graph(encode_graph(graph))
    violation = only(device.check(graph, device=Device(name="chip", deny="aten.gelu")).violations)
    assert violation.message == "the compiler made it of aten.gelu.default, and chip does not support aten.gelu"
    own = Device(deny="aten.gelu", decompositions=["aten.gelu.default"])  # the device decomposes it itself
    assert device.check(graph, device=own).violations == ()
