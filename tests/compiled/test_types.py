"""The type of each node, derived from the leaves by torchguard's rules."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.compiled.zoo import ZOO, graphs
from torch.fx.experimental.proxy_tensor import make_fx

from torchguard.compiled import compile_out
from torchguard.compiled.certify import ALGEBRAIC_OPS, TYPED_OPS, Verdict, check_types
from torchguard.compiled.certify.types._check import RULES
from torchguard.compiled.certify.types._types import Type, broadcast, promoted

aten = torch.ops.aten


def leaves_of(gm):
    return [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]


@pytest.mark.parametrize("name", ZOO)
def test_all_graphs_of_the_zoo_are_well_typed(name):
    g = graphs(name)
    for subject, gm in (("forward", g.forward), ("jvp", g.jvp), ("vjp", g.vjp)):
        claim = check_types(gm, leaves_of(gm), subject=subject)
        assert claim.verdict is Verdict.PASS, claim
        assert claim.layer == "typed"


def test_a_node_that_records_a_wrong_shape_fails_and_is_named():
    gm = copy.deepcopy(graphs("mlp").forward)
    node = gm.graph.find_nodes(op="call_function", target=aten.tanh.default)[0]
    with node.meta["val"].fake_mode:
        node.meta["val"] = torch.empty(3, 6)
    claim = check_types(gm, leaves_of(gm))
    assert claim.verdict is Verdict.FAIL
    assert claim.message == "tanh is float32[3, 5], but records float32[3, 6]."
    assert "tanh" in claim.details["wrong"]


def test_a_node_that_records_a_wrong_dtype_fails():
    gm = copy.deepcopy(graphs("where_abs").forward)
    node = gm.graph.find_nodes(op="call_function", target=aten.gt.Tensor)[0]
    with node.meta["val"].fake_mode:
        node.meta["val"] = torch.empty(3, 4)
    claim = check_types(gm, leaves_of(gm))
    assert claim.verdict is Verdict.FAIL
    assert claim.message.startswith("gt is bool[3, 4], but records float32[3, 4]")


def test_a_node_that_records_nothing_fails():
    gm = copy.deepcopy(graphs("mlp").forward)
    del gm.graph.find_nodes(op="call_function", target=aten.tanh.default)[0].meta["val"]
    assert "records no type" in check_types(gm, leaves_of(gm)).message


def test_leaves_of_another_type_or_number_fail():
    gm = graphs("linear").forward
    x, w, b = leaves_of(gm)
    claim = check_types(gm, [Type((3, 7), torch.float32), w, b])
    assert claim.verdict is Verdict.FAIL
    assert "The graph takes 3 tensors, got 2 leaves." in check_types(gm, [x, w]).message


def test_incompatible_operands_fail_and_are_named():
    gm = copy.deepcopy(graphs("bilinear_einsum").forward)
    node = next(n for n in gm.graph.nodes if n.target in (aten.bmm.default, aten.mm.default))
    node.args = (node.args[1], node.args[0])
    claim = check_types(gm, leaves_of(gm))
    assert claim.verdict is Verdict.FAIL
    assert "times" in claim.message


def test_an_operator_without_a_rule_is_inconclusive_and_named():
    gm = make_fx(lambda x: torch.special.bessel_j0(x) + 1, tracing_mode="fake")(torch.randn(3))
    claim = check_types(gm, leaves_of(gm))
    assert claim.verdict is Verdict.INCONCLUSIVE
    assert claim.details["unsupported"] == ["aten.special_bessel_j0.default"]


@pytest.mark.parametrize(
    "fn",
    [
        lambda z: torch.fft.rfft(z.abs()).abs(),
        lambda z: torch.stft(z.abs(), 4, return_complex=True, window=torch.ones(4)).abs(),
        lambda z: torch.linalg.vector_norm(z, dim=1),
        lambda z: z.var(0) + z.std(0),
        lambda z: torch.var_mean(z, 0),
        lambda z: torch.linalg.eigvalsh(z[:3]),
        lambda z: torch.linalg.svdvals(z),
        lambda z: z.abs() * (1 + 2j),
    ],
    ids=["rfft", "stft", "norm", "spread", "spread and mean", "eigenvalues", "singular values", "complex number"],
)
def test_real_results_of_complex_numbers_have_a_real_type(fn):
    gm = make_fx(fn, tracing_mode="fake")(torch.randn(4, 3, dtype=torch.complex64).repeat(1, 3)[:, :3])
    assert check_types(gm, leaves_of(gm)).verdict is not Verdict.FAIL


def test_a_complex_absolute_value_fails():
    gm = make_fx(torch.abs, tracing_mode="fake")(torch.randn(4, dtype=torch.complex64))
    assert check_types(gm, leaves_of(gm)).verdict is Verdict.PASS
    node = gm.graph.find_nodes(op="call_function", target=aten.abs.default)[0]
    with node.meta["val"].fake_mode:
        node.meta["val"] = torch.empty(4, dtype=torch.complex64)
    assert "abs_1 is float32[4], but records complex64[4]" in check_types(gm, leaves_of(gm)).message


dtypes = st.sampled_from(
    [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16]
    + [torch.float32, torch.float64]
)
shapes = st.lists(st.sampled_from([1, 2, 3]), max_size=3).map(tuple)
operands = st.one_of(st.tuples(shapes, dtypes), st.sampled_from([True, 2, 0.5]))


@given(st.tuples(shapes, dtypes), operands)
def test_promotion_and_broadcasting_are_torchs(first, second):
    a = torch.empty(first[0], dtype=first[1])
    b = torch.empty(second[0], dtype=second[1]) if isinstance(second, tuple) else second
    own = [Type(tuple(t.shape), t.dtype) if isinstance(t, torch.Tensor) else t for t in (a, b)]
    try:
        result = torch.mul(a, b)
    except RuntimeError:
        with pytest.raises(Exception, match="do not broadcast"):
            broadcast(a.shape, b.shape)
        return
    assert promoted(*own) == result.dtype
    assert broadcast(a.shape, b.shape if isinstance(b, torch.Tensor) else ()) == tuple(result.shape)


def test_the_typed_layer_covers_the_operators_of_the_algebraic_one():
    assert {"matmul"} == ALGEBRAIC_OPS - TYPED_OPS


OPERATIONS = {
    "trace": lambda op: op(torch.ones(3, 4)),
    "addr": lambda op: op(torch.ones(3, 1), torch.ones(3), torch.ones(4)),
    "linalg_cross": lambda op: op(torch.ones(2, 3, 1), torch.ones(1, 3, 5), dim=1),
    "pixel_shuffle": lambda op: op(torch.ones(2, 8, 3, 5), 2),
    "pixel_unshuffle": lambda op: op(torch.ones(2, 2, 6, 4), 2),
    "rot90": lambda op: op(torch.ones(2, 3, 4), 3, [0, 2]),
    "median": lambda op: op(torch.ones(2, 3, 4), 1, True),
    "kthvalue": lambda op: op(torch.ones(2, 3, 4), 2, 1),
    "cummax": lambda op: op(torch.ones(2, 3), 1),
    "logcumsumexp": lambda op: op(torch.ones(2, 3), 1),
    "_linalg_slogdet": lambda op: op(torch.eye(3).expand(2, 3, 3)),
    "hypot": lambda op: op(torch.ones(3, 1), torch.ones(4, dtype=torch.float64)),
    "fmod": lambda op: op(torch.ones(3), 2.0),
    "isnan": lambda op: op(torch.ones(3)),
    "index_select": lambda op: op(torch.ones(()), 0, torch.zeros(1, dtype=torch.int64)),
    "_linalg_svd": lambda op: op(torch.ones(2, 0, 3), False, True),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_rule_gives_the_type_that_torch_gives(name):
    def as_type(value):
        return Type(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value

    def typed(*args, **options):
        return RULES[name](*map(as_type, args), **options)

    expected = OPERATIONS[name](getattr(torch.ops.aten, name))
    found = OPERATIONS[name](typed)
    if isinstance(expected, torch.Tensor):
        expected, found = [expected], [found]
    assert [*found] == [as_type(one) for one in expected]


@pytest.mark.parametrize("shape", [(3,), (2, 3)], ids=["one vector", "a vector for each matrix"])
def test_solving_for_vectors_has_the_type_that_torch_records(shape):
    a = torch.eye(3).expand(2, 3, 3) + torch.arange(18.0).reshape(2, 3, 3)
    c = compile_out(torch.linalg.solve, a, torch.ones(shape), backend="eager", probe=False)
    assert c.certify("typed").claims[0].verdict == "pass"
