"""Bounds that no computed output leaves."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.compiled.programs import BINARY, UNARY
from tests.compiled.zoo import ZOO, graphs, traced
from torch.fx.experimental.proxy_tensor import make_fx

from torchguard.compiled import compile_out
from torchguard.compiled.certify import ENCLOSURE_OPS, Box, BoxError, Verdict, enclose
from torchguard.compiled.certify.enclosure._check import count_outside, samples

# The functions of the zoo that have bounds, on a box around their example.
BOUNDED = {
    *("polynomial", "rational", "exp_log", "roots", "erf", "where_abs", "clamp_minmax", "relu_family", "gelu", "sums"),
    *("logsumexp", "softmax", "log_softmax", "vector_norm", "rms_norm", "linear", "mlp", "bilinear_einsum", "conv1d"),
    *("conv2d_groups", "conv_transpose2d", "conv_net", "conv_times_its_pool", "max_pool1d", "avg_pool2d", "attention"),
    *("pad_flip_roll", "embedding", "gather", "index_select", "pinn_residual", "hessian_vector", "rnn", "gru", "cdist"),
    *("glu_chunk_stack", "masks", "amax_amin", "pow_tensor", "prod_cumsum", "sort", "topk", "variance", "layer_norm"),
    *("group_norm", "batch_norm", "conv_bn_relu", "gelu_tanh", "sdpa", "attention_block"),
}


def box_around(x, width):
    if not x.is_floating_point():
        return Box(x, x)
    return Box(x - width, x + width)


def points_in(boxes, count, seed):
    """Corners and points inside, as the graph's own dtype holds them."""
    generator = torch.Generator().manual_seed(seed)

    def point(box, is_corner):
        if not box.low.is_floating_point():
            return box.low
        share = torch.rand(box.low.shape, generator=generator).to(box.low.dtype)
        if is_corner:
            return torch.where(share > 0.5, box.low, box.high)
        # Not `low + share * (high - low)`: the difference of large numbers overflows.
        return ((1 - share) * box.low + share * box.high).clamp(box.low, box.high)

    for i in range(count):
        yield [point(box, i % 2) for box in boxes]


def assert_holds(gm, boxes, count=12, seed=0):
    found = enclose(gm, boxes)
    assert found.outputs is not None, found.unsupported
    for inputs in points_in(boxes, count, seed):
        for box, y in zip(found.outputs, gm(*inputs), strict=True):
            assert box.contains(y)
    return found


@pytest.mark.parametrize("width", [0.0, 1e-3, 0.05])
@pytest.mark.parametrize("name", sorted(BOUNDED))
def test_no_output_leaves_its_bounds(name, width):
    g = graphs(name)
    assert_holds(g.forward, [box_around(x, width) for x in g.inputs])


@pytest.mark.parametrize("name", sorted(set(ZOO) - BOUNDED))
def test_what_has_no_bounds_is_inconclusive_and_says_why(name):
    g = graphs(name)
    found = enclose(g.forward, [box_around(x, 1e-3) for x in g.inputs])
    assert found.outputs is None
    assert found.unsupported
    claim = found.to_claim()
    assert claim.verdict is Verdict.INCONCLUSIVE
    assert claim.details["unsupported"] == list(found.unsupported)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("terms", [10, 1000, 20000])
def test_long_sums_and_products_stay_within_their_rounding_errors(terms, dtype):
    x = torch.randn(3, terms, dtype=dtype, generator=torch.Generator().manual_seed(1))
    w = torch.randn(terms, 2, dtype=dtype, generator=torch.Generator().manual_seed(2))
    gm = traced(lambda x, w: [x @ w, x.sum(1), x.mean(1), x.square().sum(1).sqrt()], [x, w])
    found = assert_holds(gm, [Box(x, x), Box(w, w)])
    exact = [x.double() @ w.double(), x.double().sum(1)]
    assert all(box.contains(y) for box, y in zip(found.outputs, exact, strict=False))


def test_bounds_of_one_point_are_tight():
    x = torch.linspace(-1, 1, 7, dtype=torch.float64)
    gm = traced(lambda x: [torch.tanh(x * 3 + 1)], [x])
    (box,) = assert_holds(gm, [Box(x, x)]).outputs
    assert float((box.high - box.low).max()) < 1e-13


def test_a_claim_states_the_bounds():
    gm = traced(lambda x: [torch.sigmoid(x)], [torch.zeros(2)])
    claim = enclose(gm, [Box(torch.full((2,), -100.0), torch.full((2,), 100.0))]).to_claim()
    assert claim.verdict is Verdict.PASS
    assert claim.message == "For all inputs in the box the outputs lie in [0, 1]."


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda x: torch.log(x), "log.*0 or less"),
        (lambda x: torch.sqrt(x), "sqrt.*0 or less"),
        (lambda x: 1 / x, "zero"),
        (lambda x: torch.exp(x * 1000), "may not be finite"),
        (lambda x: x.to(torch.int64), "from torch.float32 to torch.int64"),
    ],
    ids=["log", "sqrt", "division", "overflow", "conversion"],
)
def test_a_result_that_may_be_nan_has_no_bounds(fn, words):
    gm = traced(lambda x: [fn(x)], [torch.ones(2)])
    found = enclose(gm, [Box(-torch.ones(2), torch.ones(2))])
    assert found.outputs is None
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(found.unsupported[0])


def test_all_operators_without_a_rule_are_named():
    gm = traced(lambda x: [torch.special.bessel_j0(x) + torch.linalg.det(x)], [torch.ones(2, 2)])
    found = enclose(gm, [Box(torch.zeros(2, 2), torch.ones(2, 2))])
    assert found.unsupported == ("aten._linalg_det.default", "aten.special_bessel_j0.default")


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([], "takes 1 tensors, got 0 boxes"),
        (
            [Box(torch.zeros(3), torch.ones(3))],
            r"expected shape \[2\], got a box with low of shape \[3\]",
        ),
        ([Box(torch.ones(2), torch.zeros(2))], "is empty"),
        ([Box(torch.full((2,), math.nan), torch.ones(2))], "NaN"),
    ],
    ids=["count", "shape", "empty", "nan"],
)
def test_boxes_that_do_not_match_the_graph_are_refused(boxes, words):
    gm = traced(lambda x: [x + 1], [torch.ones(2)])
    with pytest.raises(BoxError, match=words):
        enclose(gm, boxes)


steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(range(len(UNARY))), st.just(-1)),
        st.tuples(st.sampled_from(range(len(BINARY))), st.integers(0, 3)),
    ),
    min_size=1,
    max_size=6,
)


@given(
    steps, st.sampled_from([torch.float32, torch.float64]), st.sampled_from([0.0, 1e-6, 0.01, 0.3]), st.integers(0, 999)
)
def test_no_output_of_a_random_graph_leaves_its_bounds(chosen, dtype, width, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(3, 4, dtype=dtype, generator=generator) for _ in range(2)]

    def program(x, y):
        values = [x, y]
        for which, other in chosen:
            if other < 0:
                values.append(UNARY[which](values[-1]))
            else:
                values.append(BINARY[which](values[-1], values[other % len(values)]))
        return values[2:]

    gm = make_fx(program, tracing_mode="fake")(*inputs)
    boxes = [Box(x - width, x + width) for x in inputs]
    found = enclose(gm, boxes)
    if found.outputs is None:
        # Large numbers only: all operators here have rules.
        assert "finite" in found.unsupported[0] or "exceed" in found.unsupported[0]
        return
    for given_ in points_in(boxes, 8, seed):
        for box, y in zip(found.outputs, gm(*given_), strict=True):
            assert box.contains(y)


def test_each_corner_of_a_small_box_stays_inside():
    gm = traced(lambda x: [torch.sin(3 * x) * x.exp()], [torch.zeros(3)])
    low, high = torch.tensor([-1.0, 0.2, 2.0]), torch.tensor([0.5, 1.9, 2.0])
    (box,) = enclose(gm, [Box(low, high)]).outputs
    for corner in itertools.product(*zip(low.tolist(), high.tolist(), strict=True)):
        assert box.contains(gm(torch.tensor(corner))[0])


def test_a_certificate_counts_eager_and_compiled_values_separately():
    made = compile_out(lambda x: (x - 0.1).tanh(), torch.full((3,), 0.1), backend="eager")
    claim = made.certify("enclosure").claims[-1]
    assert (claim.layer, claim.verdict) == ("enclosure", Verdict.PASS)
    assert "10 points of a box" in claim.message
    assert "0 eager values are outside the bounds proven for it" in claim.message
    assert "0 compiled values by more than 64 units in the last place" in claim.message


@pytest.mark.parametrize("point", [math.nan, math.inf, 3.4e38])
def test_around_a_point_that_is_not_finite_a_certificate_is_inconclusive(point):
    made = compile_out(torch.tanh, torch.ones(3), backend="eager")
    claims = made.certify("enclosure", at=torch.full((3,), point)).claims
    assert [(c.verdict, c.message) for c in claims if c.layer == "enclosure"] == [
        (Verdict.INCONCLUSIVE, "There are no bounds around a point that is not finite.")
    ]


def test_eager_values_have_no_slack_and_compiled_ones_that_of_rounding():
    box = Box(torch.tensor([0.0], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64))
    just_out, far_out = torch.tensor([1 + 2.0**-23]), torch.tensor([1.001])
    assert count_outside([just_out], [box], slack=0) == 1
    assert count_outside([just_out], [box], slack=64) == 0
    assert count_outside([far_out], [box], slack=64) == 1
    assert count_outside([torch.tensor([math.nan])], [box], slack=64) == 1


def test_a_certificate_tries_the_corners_of_its_box():
    x = torch.linspace(-1, 1, 5)
    box = Box(x - 0.5, x + 0.5)
    points = [point for (point,) in samples([box], [x], seed=0)]
    is_corner = [bool(((p == box.low) | (p == box.high)).all()) for p in points]
    assert torch.equal(points[0], box.low)
    assert torch.equal(points[1], box.high)
    assert torch.equal(points[-1], x)
    assert sum(is_corner) == 6
    assert all(box.contains(p) for p in points)


def test_the_table_of_operators_is_the_documented_one():
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs" / "certificates.md").read_text()
    assert set(page.split("<!-- enclosure -->")[1].split("`")[1::2]) == ENCLOSURE_OPS
