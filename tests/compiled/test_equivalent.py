"""Two graphs, one function: how to test a pass or a decomposition."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from tests.compiled.zoo import ZOO, graphs, traced
from torch.fx.experimental.proxy_tensor import make_fx

from torchguard.compiled.certify import GraphMismatchError, Verdict, equivalent

aten = torch.ops.aten


@functools.cache
def core_decompositions():
    return torch.export.default_decompositions() | torch._decomp.core_aten_decompositions()


def decomposed(gm, inputs):
    return make_fx(gm, decomposition_table=core_decompositions(), tracing_mode="fake")(*inputs)


# Functions with an operator that torch's core decompositions decompose.
DECOMPOSED = [
    *("gelu", "gelu_tanh", "hard_activations", "relu_family", "logsigmoid", "mse_huber"),
    *("softmax", "log_softmax", "layer_norm", "group_norm", "batch_norm", "attention_block", "cross_entropy"),
    *("linear", "glu_chunk_stack", "variance", "adaptive_avg_pool2d", "upsample_nearest", "embedding", "masks"),
    *("erf", "vector_norm", "bce_with_logits", "index_select", "conv_net", "rnn"),
]


@pytest.mark.parametrize("name", DECOMPOSED)
def test_the_core_decompositions_compute_the_same(name):
    g = graphs(name)
    claim = equivalent(g.forward, decomposed(g.forward, g.inputs))
    assert claim.verdict is Verdict.PASS, claim


@pytest.mark.parametrize(
    "name", ["layer_norm", "gelu", "group_norm", "softmax", "mse_huber", "hard_activations", "glu_chunk_stack"]
)
def test_the_core_decompositions_of_derivatives_compute_the_same(name):
    g = graphs(name)
    inputs = [torch.randn(n.meta["val"].shape) for n in g.vjp.graph.find_nodes(op="placeholder")]
    claim = equivalent(g.vjp, decomposed(g.vjp, inputs))
    assert claim.verdict is Verdict.PASS, claim


def test_a_decomposition_that_is_only_nearly_right_fails():
    """Torch decomposes mish with a softplus that is x above 20, which mish's is not."""
    mish, silu = traced(lambda x: [F.mish(x)], [torch.randn(8)]), traced(lambda x: [F.silu(x)], [torch.randn(8)])
    assert equivalent(mish, decomposed(mish, [torch.randn(8)])).verdict is Verdict.FAIL
    assert equivalent(silu, decomposed(silu, [torch.randn(8)])).verdict is Verdict.PASS


def test_moving_a_threshold_along_is_no_difference():
    f = traced(lambda x: [torch.relu(2 * x + 6)], [torch.randn(8)])
    same = traced(lambda x: [torch.where(x > -3, 2 * (x + 3), 0.0)], [torch.randn(8)])
    other = traced(lambda x: [torch.where(x > -2, 2 * (x + 3), 0.0)], [torch.randn(8)])
    assert equivalent(f, same).verdict is Verdict.PASS
    assert equivalent(f, other).verdict is Verdict.FAIL


def test_a_pass_that_does_nothing_is_fine():
    g = graphs("attention")
    assert equivalent(g.forward, copy.deepcopy(g.forward)).verdict is Verdict.PASS


def replaced(gm, target, new):
    changed = copy.deepcopy(gm)
    for node in changed.graph.find_nodes(op="call_function", target=target):
        node.target = new
    changed.recompile()
    return changed


@pytest.mark.parametrize(
    ("name", "target", "new"),
    [
        ("mlp", aten.tanh.default, aten.sigmoid.default),
        ("polynomial", aten.add.Tensor, aten.sub.Tensor),
        ("amax_amin", aten.amax.default, aten.amin.default),
        ("where_abs", aten.gt.Tensor, aten.lt.Tensor),
    ],
    ids=str,
)
def test_a_wrong_pass_fails(name, target, new):
    forward = graphs(name).forward
    claim = equivalent(forward, replaced(forward, target, new))
    assert claim.verdict is Verdict.FAIL
    assert claim.message == "Wrong: output 0."
    assert claim.subject == "equivalence"


def test_a_pass_that_strengthens_a_constant_a_little_too_much_fails():
    f = traced(lambda x: [x / 3.0], [torch.randn(4)])
    g = traced(lambda x: [x * 0.3333333], [torch.randn(4)])
    assert equivalent(f, g).verdict is Verdict.FAIL
    assert equivalent(f, traced(lambda x: [x * (1 / 3)], [torch.randn(4)])).verdict is Verdict.PASS


def test_reassociation_is_no_difference():
    a, b, c = torch.randn(3, 4), torch.randn(4, 5), torch.randn(5, 2)
    left = traced(lambda a, b, c: [(a @ b) @ c], [a, b, c])
    right = traced(lambda a, b, c: [a @ (b @ c)], [a, b, c])
    assert equivalent(left, right).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([torch.randn(4), torch.randn(4)], "The first graph takes 1 tensors, the second 2."),
        ([torch.randn(5)], r"Input 0: the first graph takes float32\[4\], the second float32\[5\]"),
        ([torch.randn(4, dtype=torch.float64)], "the second float64"),
    ],
    ids=["count", "shape", "dtype"],
)
def test_graphs_of_other_signatures_are_refused(inputs, words):
    f = traced(lambda x: [x.exp()], [torch.randn(4)])
    with pytest.raises(GraphMismatchError, match=words):
        equivalent(f, traced(lambda *xs: [xs[0].exp()], inputs))


def test_graphs_with_other_outputs_are_refused():
    f = traced(lambda x: [x.exp()], [torch.randn(4)])
    with pytest.raises(GraphMismatchError, match="returns 1 values, the second 2"):
        equivalent(f, traced(lambda x: [x.exp(), x], [torch.randn(4)]))


def test_a_graph_without_types_is_refused_with_what_to_do():
    bare = torch.fx.symbolic_trace(lambda x: x + 1)
    with pytest.raises(GraphMismatchError, match="FakeTensorProp"):
        equivalent(bare, bare)


def test_an_operator_without_a_rule_is_named():
    gm = traced(lambda x: [torch.special.bessel_j0(x)], [torch.randn(4)])
    claim = equivalent(gm, gm)
    assert claim.verdict is Verdict.INCONCLUSIVE
    assert claim.details["unsupported"] == ["aten.special_bessel_j0.default"]


def test_decomposed_functions_are_of_the_zoo():
    assert set(DECOMPOSED) <= set(ZOO)
