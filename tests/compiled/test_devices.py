"""Devices of compiled functions: missing ones are refused, and checks run on the CPU whatever the default device is."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchguard.compiled import Builder, CompileError, LeafTypeError, SavedGraphError, compile_out, load
from torchguard.compiled.certify import Box, enclose

MISSING = "cuda:99"


def f(x, w):
    return torch.tanh(x @ w).softmax(-1) + torch.arange(5, device=x.device)


@pytest.fixture
def point():
    return torch.randn(3, 4), torch.randn(4, 5)


def test_a_file_for_a_device_that_is_missing_is_refused(point, tmp_path):
    path = tmp_path / "g.json"
    compile_out(f, *point, backend="eager").save(path)
    path.write_text(path.read_text().replace('"cpu"', f'"{MISSING}"'))
    with pytest.raises(SavedGraphError, match=f"the file needs the device {MISSING}, which this machine does not have"):
        load(path, backend="eager")


def test_a_leaf_on_a_device_that_is_missing_is_refused():
    with pytest.raises(CompileError, match=f"leaf 'x' is on {MISSING}, and this machine has no such device"):
        Builder("by_hand").leaf("x", (3,), device=MISSING)


def test_an_operation_on_a_device_that_is_missing_is_refused():
    b = Builder("by_hand")
    b.leaf("x", (3,))
    with pytest.raises(CompileError, match=r"by_hand: .*99"):
        b.compile_out(b.op("aten.full", [3], 1.0, device=torch.device(MISSING)), backend="eager")


def test_a_leaf_on_another_device_is_refused_by_name(point):
    c = compile_out(f, *point, backend="eager")
    with pytest.raises(LeafTypeError, match="f: leaf w: expected device cpu, got meta"):
        c(point[0], point[1].to("meta"))
    with pytest.raises(LeafTypeError, match="f: cotangent_0: expected device cpu, got meta"):
        c.vjp_with_seed(point, torch.ones(3, 5, device="meta"))


def test_a_function_on_another_device_has_a_graph_and_no_bounds(point):
    c = compile_out(f, *(leaf.to("meta") for leaf in point), backend="eager")
    found = enclose(c.graphs.forward, [Box(leaf, leaf) for leaf in point])
    assert found.outputs is None
    assert found.unsupported == ("arithmetic on meta",)


def test_checks_ignore_the_default_device(point):
    c = compile_out(f, *point, backend="eager")
    right = c.certify(level="enclosure")
    with torch.device("meta"):
        assert c.certify(level="enclosure").to_json() == right.to_json()
    assert right.ok
    assert all(claim.verdict == "pass" for claim in right.claims), right


def test_fused_attention_returns_what_its_gradients_need():
    attention = torch.ops.aten._scaled_dot_product_efficient_attention.default
    q = torch.ones(1, 2, 4, 8, device="meta")
    c = compile_out(lambda q: attention(q, q, q, None, False)[0], q, backend="eager")
    (node,) = c.graph.find_nodes(op="call_function", target=attention)
    assert node.args[4] is True


def test_tracing_switches_fused_layers_off_and_on_again():
    seen = []

    def record(x):
        seen.append((torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled))
        return x * 2

    before = torch.backends.cudnn.enabled
    compile_out(record, torch.ones(3), backend="eager")
    assert seen[0][0] is False
    assert torch.backends.cudnn.enabled is before


@pytest.mark.parametrize("kind", [pytest.param("lstm", marks=pytest.mark.long), "gru"])
@pytest.mark.parametrize("bias", [True, pytest.param(False, marks=pytest.mark.long)])
def test_fused_cells_are_decomposed(kind, bias):
    """These are operations of a GPU, which the CPU does not implement."""
    cell = {"lstm": nn.LSTMCell, "gru": nn.GRUCell}[kind](4, 5, bias=bias)
    fused = getattr(torch.ops.aten, f"_thnn_fused_{kind}_cell")

    def by_hand(x, h, c, wi, wh, *biases):
        return fused(x @ wi.T, h @ wh.T, c if kind == "lstm" else h, *biases)[0]

    x, h, c = torch.randn(2, 4), torch.randn(2, 5), torch.randn(2, 5)
    point = x, h, c, *(parameter.detach() for parameter in cell.parameters())
    made = compile_out(by_hand, *point, backend="eager")
    right = cell(x, (h, c))[0] if kind == "lstm" else cell(x, h)
    torch.testing.assert_close(made(*point), right.detach())
    gradients = torch.autograd.grad(right.sum(), list(cell.parameters()))
    torch.testing.assert_close(made.vjp_with_seed(point, torch.ones(2, 5))[3:], gradients)
    assert made.certify().ok


@pytest.mark.parametrize(
    ("work", "coarse"),
    [(lambda x, w: F.conv2d(x, w), False), (lambda x, w: x.flatten(1) @ w.flatten(1).t(), True)],
    ids=["convolution", "product"],
)
def test_the_precision_of_products_counts(work, coarse):
    graphs = compile_out(work, torch.ones(2, 3, 1, 1), torch.ones(4, 3, 1, 1), backend="eager").graphs
    fine = graphs.tolerance
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "tf32"
    try:
        assert (graphs.eps == 2.0**-10) is coarse
        assert (graphs.tolerance > fine) is coarse
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    assert graphs.tolerance == fine
