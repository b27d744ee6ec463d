"""Bounds hold for what torch computes: in its dtypes, with rounding, underflow and overflow of intermediate results."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from tests.compiled.programs import UNARY
from tests.compiled.test_enclosure import points_in
from tests.compiled.zoo import traced
from torch.fx.experimental.proxy_tensor import make_fx

from torchguard.compiled.certify import Box, enclose


def at_one_point(fn, *inputs):
    """Bounds of a function at one point, and what it computes there."""
    gm = traced(lambda *xs: [fn(*xs)], inputs, functional=False)
    return enclose(gm, [Box(x, x) for x in inputs]), fn(*inputs)


def assert_inside(fn, *inputs):
    found, y = at_one_point(fn, *inputs)
    assert found.outputs is not None, found.unsupported
    assert found.outputs[0].contains(y)
    return found.outputs[0]


def assert_no_bounds(words, fn, *inputs):
    found, _ = at_one_point(fn, *inputs)
    assert found.outputs is None
    assert words in found.unsupported[0]


TENTH, DOUBLE_TENTH, ODD = torch.tensor([0.1]), torch.tensor(0.1, dtype=torch.float64), torch.tensor([2**24 + 1])
BELOW = torch.tensor([-1.0, -2.0])


@pytest.mark.parametrize(
    ("fn", "inputs"),
    [
        pytest.param(lambda x: x - 0.1, (TENTH,), id="number"),
        pytest.param(lambda x: x + 0.1, (-TENTH,), id="number_added"),
        pytest.param(lambda x: 0.1 - x, (TENTH,), id="from_number"),
        pytest.param(lambda x: torch.where(x < 0.1, 1.0, 2.0), (TENTH,), id="number_compared"),
        pytest.param(lambda x: x.masked_fill(x < 0, 0.1), (BELOW,), id="number_filled"),
        pytest.param(lambda x: x**0.1, (torch.tensor([1e38]),), id="exponent"),
        pytest.param(lambda x, c: x - c, (TENTH, DOUBLE_TENTH), id="float64"),
        pytest.param(lambda x, c: torch.where(x < 0, c, x), (BELOW, DOUBLE_TENTH), id="float64_chosen"),
        pytest.param(torch.maximum, (BELOW, DOUBLE_TENTH), id="float64_maximum"),
        pytest.param(lambda x, c: x.clamp(min=c), (BELOW, DOUBLE_TENTH), id="float64_clamp"),
        pytest.param(lambda x, c: x.masked_fill(x < 0, c), (BELOW, DOUBLE_TENTH), id="float64_filled"),
        pytest.param(lambda x, c: torch.where(x > c, 1.0, 2.0), (TENTH, DOUBLE_TENTH), id="float64_compared"),
        pytest.param(lambda x, i: x + i, (torch.tensor([-(2.0**24)]), ODD), id="integer_added"),
        pytest.param(lambda x, i: torch.cat([x, i]), (TENTH, ODD), id="integer_cat"),
        pytest.param(lambda x, i: torch.stack([x, i]), (TENTH, ODD), id="integer_stack"),
        pytest.param(lambda i: torch.where(i > 2**24 + 0.5, 1.0, 2.0), (ODD,), id="integer_compared"),
        pytest.param(lambda x: x.sum(dtype=torch.float32), (DOUBLE_TENTH.reshape(1),), id="float64_sum"),
    ],
)
def test_an_operand_is_rounded_to_the_dtype_torch_computes_in(fn, inputs):
    assert_inside(fn, *inputs)


def test_bounds_of_a_converted_number_are_exact():
    box = assert_inside(lambda x, c: torch.maximum(x, c), BELOW, DOUBLE_TENTH)
    assert torch.equal(box.low, box.high)


HUGE = torch.tensor([3e38, 3e38, -3e38, -3e38])


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(lambda x: x.sum(), id="sum"),
        pytest.param(lambda x: x.mean(), id="mean"),
        pytest.param(lambda x: x.cumsum(0), id="cumsum"),
        pytest.param(lambda x: torch.dot(x, torch.ones(4)), id="dot"),
        pytest.param(lambda x: x[None] @ torch.ones(4, 1), id="matmul"),
        pytest.param(lambda x: torch.addmm(x[:1, None], x[None, 2:], torch.ones(2, 1)), id="addmm"),
        pytest.param(lambda x: F.conv1d(x[None, None], torch.ones(1, 1, 4)), id="conv1d"),
        pytest.param(lambda x: F.avg_pool2d(x.reshape(1, 1, 2, 2), 2), id="avg_pool2d"),
        pytest.param(lambda x: torch.linalg.vector_norm(x * 1e-13), id="norm"),
        pytest.param(lambda x: F.gelu(x.repeat(8)), id="gelu"),
        pytest.param(lambda x: torch.sinh(x * (89 / 3e38)), id="sinh"),
    ],
)
def test_a_finite_result_whose_intermediate_results_may_overflow_has_no_bounds(fn):
    found, _ = at_one_point(fn, HUGE)
    assert found.outputs is None
    assert "finite" in found.unsupported[0] or "exceed" in found.unsupported[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_squares_and_products_that_underflow_are_inside(dtype):
    small = torch.full((2,), torch.finfo(dtype).tiny ** 0.8, dtype=dtype)
    assert float(torch.linalg.vector_norm(small)) == 0
    assert_inside(torch.linalg.vector_norm, small)
    assert_inside(torch.dot, small, small)


I8, U8 = torch.int8, torch.uint8


@pytest.mark.parametrize(
    ("fn", "inputs"),
    [
        pytest.param(lambda x: x + 100, (torch.tensor([200], dtype=U8),), id="add"),
        pytest.param(lambda x: x * x, (torch.tensor([100], dtype=I8),), id="mul_int8"),
        pytest.param(lambda x: x * x, (torch.tensor([100000], dtype=torch.int32),), id="mul_int32"),
        pytest.param(lambda x: x**5, (torch.tensor([100], dtype=torch.int32),), id="pow"),
        pytest.param(lambda x: -x, (torch.tensor([1], dtype=U8),), id="neg"),
        pytest.param(lambda x: x.abs(), (torch.tensor([-128], dtype=I8),), id="abs"),
        pytest.param(lambda x: x.to(I8), (torch.tensor([300]),), id="to"),
        pytest.param(lambda x: x.sum(dtype=I8), (torch.tensor([100, 100], dtype=I8),), id="sum"),
        pytest.param(lambda x: x.cumsum(0, dtype=I8), (torch.tensor([100, 100], dtype=I8),), id="cumsum"),
        pytest.param(lambda x: x + x, (torch.tensor([True]),), id="bool"),
        pytest.param(lambda x: x - 2**53, (torch.tensor([2**53 + 1]),), id="past_2**53"),
        pytest.param(lambda x: x + 2**53, (torch.tensor([1]),), id="number_past_2**53"),
    ],
)
def test_integers_that_may_overflow_or_are_too_large_have_no_bounds(fn, inputs):
    found, _ = at_one_point(fn, *inputs)
    assert found.outputs is None
    assert "integers that may overflow" in found.unsupported[0] or "the number" in found.unsupported[0]


def test_integers_in_their_range_are_exact():
    x = torch.tensor([3, -7, 100], dtype=torch.int32)
    for fn in (lambda x: x * 5 - 2, lambda x: x**3, lambda x: x.cumsum(0), lambda x: -x.abs(), lambda x: x.sum()):
        box = assert_inside(fn, x)
        assert torch.equal(box.low, box.high)


def test_an_integer_is_true_unless_it_is_zero():
    x = torch.tensor([-3, 5, 0])
    assert assert_inside(lambda x: torch.where(x.to(torch.bool), 1.0, 2.0), x).low.tolist() == [1, 1, 2]
    assert assert_inside(lambda x: torch.where(~x.to(torch.bool), 1.0, 2.0), x).low.tolist() == [2, 2, 1]


def test_a_mask_is_not_a_list_of_indices():
    mask = torch.tensor([False, True, True])
    gm = make_fx(lambda x, m: [x[m]])(torch.arange(3.0), mask)
    (box,) = enclose(gm, [Box(torch.arange(3.0), torch.arange(3.0)), Box(mask, mask)]).outputs
    assert box.low.tolist() == [1, 2]


@pytest.mark.parametrize("reach", [100.0, 2000.0])
def test_a_softmax_is_largest_where_all_other_arguments_are_smallest(reach):
    gm = traced(lambda x: [x.softmax(0)], [torch.zeros(2)])
    low, high = torch.tensor([-reach, 0.0]), torch.tensor([reach, 0.0])
    (box,) = enclose(gm, [Box(low, high)]).outputs
    for x in (low, high):
        assert box.contains(gm(x)[0])


def test_the_softmax_of_a_row_that_may_be_masked_entirely_has_no_bounds():
    gm = traced(lambda x: [x.masked_fill(x > 0, -math.inf).softmax(0)], [torch.zeros(2)])
    assert "infinite" in enclose(gm, [Box(-torch.ones(2), torch.ones(2))]).unsupported[0]


def test_there_are_bounds_for_float32_and_float64_only():
    assert_no_bounds("arithmetic in torch.bfloat16", torch.exp, torch.ones(2, dtype=torch.bfloat16))
    assert_no_bounds("a conversion to torch.float16", lambda x: x.half(), torch.ones(2))


def test_products_in_a_lower_precision_have_no_bounds():
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        assert_no_bounds("precision below float32", torch.mm, torch.ones(2, 2), torch.ones(2, 2))
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


def test_flushed_denormals_have_no_bounds():
    if not torch.set_flush_denormal(True):
        pytest.fail("this processor cannot flush denormals")
    try:
        found, _ = at_one_point(lambda x: x + 1, TENTH)
    finally:
        torch.set_flush_denormal(False)
    assert "set_flush_denormal" in found.unsupported[0]


NUMBERS = [0.1, -0.1, 1 / 3, 3, -1, 1e-40, 1e-20, 1e20, -1e38, 2**24 + 1]
WITH_NUMBER = [
    *(lambda x, s: x + s, lambda x, s: s - x, lambda x, s: x * s, lambda x, s: x / s, lambda x, s: x.clamp(min=s)),
    *(lambda x, s: torch.where(x > s, x, s), lambda x, s: x.masked_fill(x <= s, s), lambda x, s: x.clamp(max=s)),
    *(lambda x, s: torch.add(x, x.flip(0), alpha=s), lambda x, s: F.pad(x, (1, 0), value=s)[:, 1:]),
    *(lambda x, s: x + torch.full_like(x, s), lambda x, s: torch.maximum(x, torch.full((), s, dtype=torch.float64))),
    *(lambda x, s: x * torch.full((), s, dtype=torch.float64), lambda x, s: x - torch.full((1,), 2**24 + 1)),
    lambda x, s: torch.where(x < torch.full((), s, dtype=torch.float64), x, -x),
    lambda x, s: torch.cat([x[:1], torch.full((2, 4), 2**30 + 1)]),
]
SUMS = [
    *(torch.relu, torch.abs, torch.neg, torch.square, torch.asinh, torch.sinh, torch.reciprocal, torch.rsqrt),
    *(torch.log1p, F.gelu, F.silu, F.softplus, lambda x: x**3, lambda x: x**-2, lambda x: x**0.3),
    *(lambda x: x.sum(0), lambda x: x.mean(0), lambda x: x.cumsum(1), lambda x: x.softmax(0)),
    *(lambda x: x.log_softmax(1), lambda x: x.logsumexp(1, keepdim=True), lambda x: x.amin(0), lambda x: x @ x.mT @ x),
    lambda x: torch.linalg.vector_norm(x, dim=0),
    lambda x: F.avg_pool2d(x[None, None], 3, 1, 1)[0, 0],
    lambda x: F.conv1d(x[None], x[:, None, :1].expand(-1, 3, -1), x[:, 0])[0],
    lambda x: x.to(torch.float32),
    lambda x: F.glu(torch.cat([x, x], 1), 1),
]
SCALES = [1.0, 0.1, 20.0, 1e4, 1e19, 1e25, 3e37, 1e-10, 1e-19, 1e-30, 1e-38, 1e-44]
SCALES_OF_DOUBLES = [1e153, 1e300, 1e-160, 1e-308, 1e-320]
extreme_steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(WITH_NUMBER), st.sampled_from(NUMBERS)),
        st.tuples(st.sampled_from(SUMS), st.none()),
        st.tuples(st.sampled_from(UNARY), st.none()),
    ),
    min_size=1,
    max_size=4,
)


@given(
    chosen=extreme_steps,
    scale=st.one_of(
        st.tuples(st.just(torch.float32), st.sampled_from(SCALES)),
        st.tuples(st.just(torch.float64), st.sampled_from(SCALES + SCALES_OF_DOUBLES)),
    ),
    width=st.sampled_from([0.0, 0.0, 1e-6, 0.1, 1.0, 3.0]),
    sign=st.sampled_from([None, 1, -1]),
    seed=st.integers(0, 10**6),
)
@example([(lambda x, s: x.clamp(min=s), 0.1)], (torch.float32, 3e37), 3.0, None, 200979)
def test_no_output_leaves_its_bounds_at_any_magnitude(chosen, scale, width, sign, seed):
    dtype, size = scale
    middle = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    middle = size * (middle if sign is None else sign * middle.abs())
    low, high = ((middle + side * width * middle.abs()).to(dtype) for side in (-1, 1))

    def program(x):
        values = [x]
        for step, number in chosen:
            y = step(values[-1]) if number is None else step(values[-1], number)
            values.append(y.expand(3, 4) if y.dim() < 2 or y.shape[1] == 1 else y)
        return values[1:]

    gm = make_fx(program, tracing_mode="fake")(low)
    found = enclose(gm, [Box(low, high)])
    if found.outputs is None:
        assert "no rule" not in found.unsupported[0]
        return
    for given_ in points_in([Box(low, high)], 8, seed):
        for box, y in zip(found.outputs, gm(*given_), strict=True):
            assert box.contains(y)
