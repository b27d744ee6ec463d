"""Functions with branches: wrong ones fail on either side of every comparison, or the comparison is named."""

import random
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from tests.compiled.autograd_functions import SavesInputs
from tests.compiled.zoo import graphs_of, traced
from torch.func import vjp

from torchguard.compiled import compile_out
from torchguard.compiled.certify import Verdict, check_derivatives, equivalent
from torchguard.compiled.certify.algebra._field import PrimeField, draw_prime
from torchguard.compiled.certify.algebra._sampling import Mode, Sampler, Targets, find_targets, index_leaves
from torchguard.compiled.certify.algebra._search import _digest


def square_wrong_where(is_wrong):
    """x² of its first argument, with a derivative of the wrong sign where something holds of all its arguments."""

    class Square(SavesInputs):
        @staticmethod
        def forward(x, *others):
            return x * x

        @staticmethod
        def backward(ctx, g):
            x, *others = ctx.saved_tensors
            return torch.where(is_wrong(x, *others), -1.0, 1.0) * 2 * x * g, *[None] * len(others)

    return Square.apply


def vjp_claim(fn, *inputs, seed=0):
    """The claim about the gradient by the first input."""
    n = len(inputs)
    forward = traced(lambda *xs: [fn(*xs)], inputs, functional=False)
    pulled = lambda *xs: [fn(*xs[:n]), *vjp(lambda x: fn(x, *xs[1:n]), xs[0])[1](xs[n])]  # noqa: E731
    pull = traced(pulled, [*inputs, torch.randn_like(fn(*inputs))], functional=False)
    differentiable = [True, *[False] * (n - 1)]
    (claim,) = check_derivatives(forward, None, pull, differentiable=differentiable, seed=seed)
    return claim


def same(f, g, *inputs):
    return equivalent(*(traced(lambda *xs, fn=fn: [fn(*xs)], inputs) for fn in (f, g)))


ONE, THREE, MANY = torch.randn(1), torch.randn(3), torch.randn(30)
WHOLE, MASK = torch.tensor([1, 2, 3]), torch.ones(20, dtype=torch.bool)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("is_wrong", "inputs"),
    [
        (lambda x: x > 100, [THREE]),
        (lambda x: x.abs() < 1e-3, [THREE]),
        (lambda x: (x > 1) & (x < 1.2), [THREE]),
        (lambda x: torch.where(x > 1, (x < 1.2).float(), 0.0) == 1, [THREE]),
        (lambda x: x.round() == 3, [ONE]),
        (lambda x, y: (x > 3) & (y < -3), [ONE, ONE]),
        (lambda x: x.sum() > 1000, [MANY]),
        (lambda x: x.norm() < 1e-6, [MANY]),
        (lambda x: x == x.flip(0), [THREE[:2]]),
        (lambda x: ((x > 1) & (x < 1.5)).all(), [MANY]),
        (lambda x, i: i < 0, [THREE, WHOLE]),
        (lambda x, i: i > 100, [THREE, WHOLE]),
        (lambda x, i: i == -100, [THREE, WHOLE]),
        (lambda x, i: i > 10**6, [THREE, WHOLE]),
        (lambda x, m: m.all(), [THREE, MASK]),
        (lambda x, m: ~m.any(), [THREE, MASK]),
    ],
    ids=[
        "large",
        "tiny",
        "band",
        "nested band",
        "rounds to 3",
        "corner",
        "large sum",
        "small norm",
        "ties",
        "all in a band",
    ]
    + ["negative integer", "large integer", "one integer", "huge integer", "all true", "all false"],
)
def test_a_derivative_that_is_wrong_on_one_side_of_a_comparison_fails(is_wrong, inputs, seed):
    assert vjp_claim(square_wrong_where(is_wrong), *inputs, seed=seed).verdict is Verdict.FAIL


def test_a_gradient_that_is_clipped_far_out_fails():
    class Clipped(SavesInputs):
        @staticmethod
        def forward(x):
            return x * x

        @staticmethod
        def backward(ctx, g):
            return (2 * ctx.saved_tensors[0] * g).clamp(-1e4, 1e4)

    assert vjp_claim(Clipped.apply, THREE).verdict is Verdict.FAIL


def test_a_comparison_with_one_possible_outcome_is_inconclusive_and_named():
    claim = vjp_claim(square_wrong_where(lambda x: x.abs() < 0), THREE)
    assert claim.verdict is Verdict.INCONCLUSIVE
    assert claim.details["one_sided"] == ["lt"]
    assert "lt had only one outcome at all of them" in claim.message


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.normalize(x, dim=-1),
        lambda x: x.sigmoid().clamp(1e-7, 1 - 1e-7).log(),
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).clamp(min=1e-8)),
        lambda x: x.clamp(-1e4, 1e4) + x.clamp(max=100.0),
        lambda x: torch.where(x != x, torch.zeros_like(x), x),
    ],
    ids=["normalize", "clamped sigmoid", "clamped root", "wide clamps", "no NaN"],
)
def test_clamps_and_guards_of_models_are_conclusive(fn):
    g = graphs_of(fn, [torch.randn(3, 4)])
    for claim in check_derivatives(g.forward, g.jvp, g.vjp, differentiable=g.differentiable):
        assert claim.verdict is Verdict.PASS, claim


ROW, FEW, LOGITS, TARGETS = torch.randn(4), torch.tensor([0, 1]), torch.randn(4, 3), torch.tensor([0, 1, 2, 1])


@pytest.mark.parametrize(
    ("f", "g", "inputs", "verdict"),
    [
        (lambda x: x.clamp(max=100.0), lambda x: x * 1, [THREE], Verdict.FAIL),
        (lambda x: x.abs().clamp(min=1e-6), lambda x: x.abs(), [THREE], Verdict.FAIL),
        (lambda x, m: torch.where(m.all(), x * 2, x), lambda x, m: x * 1, [THREE, MASK], Verdict.FAIL),
        (lambda x, i: x[i.abs()], lambda x, i: x[i], [ROW, FEW], Verdict.FAIL),
        # Where the first differs, the second is out of range.
        (lambda x, i: x[i.clamp(max=3)], lambda x, i: x[i], [ROW, FEW], Verdict.INCONCLUSIVE),
        (F.cross_entropy, lambda x, i: F.cross_entropy(x, i, ignore_index=-1), [LOGITS, TARGETS], Verdict.INCONCLUSIVE),
        (F.cross_entropy, F.cross_entropy, [LOGITS, TARGETS], Verdict.PASS),
        (lambda x: torch.where(x >= 0, x, -x), lambda x: torch.where(x > 0, x, -x), [THREE], Verdict.PASS),
    ],
    ids=["clamp", "small clamp", "all true", "negative indices", "clamped indices", "ignored", "targets", "at zero"],
)
def test_graphs_that_differ_on_one_side_of_a_comparison_are_not_taken_for_equal(f, g, inputs, verdict):
    assert same(f, g, *inputs).verdict is verdict


SMALL = torch.tensor([3])


@pytest.mark.parametrize(
    ("f", "g", "x", "verdict"),
    [
        (lambda i: i.to(torch.int8).long(), lambda i: i * 1, SMALL, Verdict.FAIL),
        (lambda i: i.to(torch.int32).long(), lambda i: i * 1, SMALL, Verdict.FAIL),
        (lambda i: (i + i).long(), lambda i: i.long() * 2, SMALL.to(torch.uint8), Verdict.FAIL),
        (lambda i: (i.to(torch.int16) * i.to(torch.int16)).long(), lambda i: i * i, SMALL, Verdict.FAIL),
        (lambda i: (i.abs() < 0).long(), lambda i: (i == -128).long(), SMALL.to(torch.int8), Verdict.PASS),
        (lambda i: i * i * i, lambda i: i**3, SMALL.to(torch.int32), Verdict.PASS),
    ],
    ids=["to int8", "to int32", "sums of uint8", "products of int16", "the lowest int8", "powers of int32"],
)
def test_narrow_integers_wrap_around_as_in_torch(f, g, x, verdict):
    assert same(f, g, x).verdict is verdict


def test_floats_out_of_the_range_of_an_integer_are_unsupported():
    claim = same(lambda x: x.to(torch.uint8).long(), lambda x: x.long(), THREE)
    assert claim.verdict is Verdict.INCONCLUSIVE
    assert "floats out of range of torch.uint8" in claim.message


CACHE = torch.randn(6, 4)


@pytest.mark.parametrize(
    ("fn", "inputs"),
    [
        (lambda c, n, i: c.index_put((i,), n), [torch.randn(5, 4), torch.tensor([1, 2, 3, 0, 5])]),
        (lambda c, n, i: c.scatter(1, i, n), [torch.randn(6, 3), torch.tensor([[0, 1, 2]] * 6)]),
        (lambda c, n, i: c.scatter(0, i, n), [torch.randn(5, 4), torch.arange(5)[:, None].expand(5, 4).contiguous()]),
        (lambda c, n, i, j: c.index_put((i, j), n), [torch.randn(4), torch.arange(4), torch.arange(4)]),
        (lambda c, n, i: torch.ops.aten.index_put(c, (None, i), n), [torch.randn(6, 3), torch.tensor([1, 0, 2])]),
    ],
    ids=["rows", "along rows", "along columns", "single elements", "columns"],
)
def test_writes_at_indices_pass_since_distinct_indices_are_drawn(fn, inputs):
    g = graphs_of(fn, [CACHE, *inputs])
    for claim in check_derivatives(g.forward, g.jvp, g.vjp, differentiable=g.differentiable):
        assert claim.verdict is Verdict.PASS, claim


def test_two_writes_to_one_position_are_inconclusive():
    g = graphs_of(lambda c, n, i: c.index_put((i * 0,), n), [CACHE, torch.randn(2, 4), FEW])
    for claim in check_derivatives(g.forward, g.jvp, g.vjp, differentiable=g.differentiable):
        assert claim.verdict is Verdict.INCONCLUSIVE
        assert "two writes to one position" in claim.message


def test_thresholds_are_the_numbers_that_a_graph_compares_with():
    gm = traced(lambda x, i: [x.clamp(-2.0, 7.0) * (i == 5), F.hardswish(x)], [THREE, WHOLE])
    targets = find_targets(gm)
    assert targets.thresholds == (-7.0, -5.0, -3.0, -2.0, 0.0, 2.0, 3.0, 5.0, 7.0)
    assert targets.equalities == (5.0,)


def test_integer_leaves_that_index_other_tensors_are_found():
    gm = traced(lambda x, i, j: [x[i + 1] * (j > 0)], [THREE, FEW[:1], FEW[:1]])
    assert index_leaves([THREE, FEW, FEW], gm) == {1}


@pytest.mark.parametrize("number", [0, 1, *range(9, 30)])
def test_in_every_mode_elements_stand_for_their_real_numbers(number):
    field, targets = PrimeField(2**31 - 249, 1), Targets((-4.0, -0.5, 0.0, 0.5, 4.0), (0.5,))
    x = Sampler(field, number, targets).elements("leaf 0", (50,))
    assert x.element.tolist() == [field.number(Fraction(real)) for real in x.real.tolist()]


def test_all_modes_are_used():
    field = PrimeField(2**31 - 249, 1)
    assert {Sampler(field, number).distribution("leaf 0").mode for number in range(200)} == set(Mode)


EIGHT = torch.randn(8)


def last():
    """1 for the last of eight elements."""
    return torch.tensor([0.0, 0, 0, 0, 0, 0, 0, 1])


def last_of(index):
    """1 if an index is 7, else 0, without a comparison."""
    return last().index_select(0, index.reshape(1))


def gradient_plus(term, f=lambda x: x * x):
    """A function whose gradient has a term too many."""

    class Wrong(SavesInputs):
        @staticmethod
        def forward(x):
            return f(x)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return vjp(f, x)[1](g)[0] + term(x)

    return Wrong.apply


WRONG_BEHIND = {
    "trunc": lambda x: (x / 100).trunc(),
    "floor, zero at -1 and 0": lambda x: (x / 1000).floor() * ((x / 1000).floor() + 1),
    "ceil": lambda x: (x.abs() / 500).ceil() - 1,
    "round": lambda x: (x / 300).round(),
    "an integer": lambda x: (x / 300).to(torch.int64).to(x.dtype),
    "a narrow integer": lambda x: (x / 100).clamp(-9, 9).to(torch.int8).to(x.dtype),
    "argmax": lambda x: last_of(x.argmax()) * x,
    "argmin": lambda x: last_of(x.argmin()) * x,
    "the index of max": lambda x: last_of(x.max(0).indices) * x,
    "the index of min": lambda x: last_of(x.min(0).indices) * x,
    "the indices of sort": lambda x: last_of(x.sort(descending=True).indices[5]) * x,
    "the indices of topk": lambda x: last_of(x.topk(2).indices[1]) * x,
    "a threshold of one element": lambda x: (x > last() * 1000).to(x.dtype) * last() * x,
    "a lower threshold of one element": lambda x: (x < last() * -700).to(x.dtype) * last() * x,
    "one element that is equal": lambda x: (x == x.roll(1)).to(x.dtype) * last(),
    "the position of a maximum": lambda x: (x == x.amax()).to(x.dtype) * last(),
}


@pytest.mark.parametrize("name", WRONG_BEHIND)
def test_a_derivative_that_is_wrong_behind_a_step_or_an_index_fails(name):
    assert vjp_claim(gradient_plus(WRONG_BEHIND[name]), EIGHT).verdict is Verdict.FAIL


WRONG_WHERE_NOT_FINITE = {
    "isinf": lambda x: x.isinf().to(x.dtype),
    "isnan": lambda x: x.isnan().to(x.dtype),
    "isfinite": lambda x: (~x.isfinite()).to(x.dtype),
    "equal to infinity": lambda x: (x == torch.inf).to(x.dtype),
    "unequal to itself": lambda x: (x != x).to(x.dtype),
    "overflow of float16": lambda x: x.to(torch.float16).isinf().to(x.dtype),
    "nan_to_num": lambda x: x.nan_to_num(1.0) - x,
}


@pytest.mark.parametrize("name", WRONG_WHERE_NOT_FINITE)
def test_a_derivative_that_is_wrong_where_numbers_are_not_finite_does_not_pass(name):
    assert vjp_claim(gradient_plus(WRONG_WHERE_NOT_FINITE[name]), EIGHT).verdict is Verdict.INCONCLUSIVE


RIGHT_WHERE_NOT_FINITE = {
    "isinf": lambda x: torch.where(x.isinf(), 0.0, x * x),
    "isfinite": lambda x: torch.where(x.log().isfinite(), x.log(), 0.0),
    "nan_to_num": lambda x: (x * x).nan_to_num(1.0, 2.0, 3.0),
    "masked rows": lambda x: torch.softmax(x.masked_fill(x > 1, -torch.inf), -1).nan_to_num(0.0),
    "nansum": lambda x: x.nansum(),
}


@pytest.mark.parametrize("name", RIGHT_WHERE_NOT_FINITE)
def test_a_branch_behind_a_test_for_infinity_is_evaluated_on_both_sides(name):
    assert vjp_claim(RIGHT_WHERE_NOT_FINITE[name], EIGHT[:4]).verdict is Verdict.PASS


def test_an_outcome_at_zero_alone_does_not_count():
    """Where all numbers are zero, a wrong factor of the derivative of x² does not show."""
    for condition in (lambda x: x[:1] + x[1:2] == x[2:3], lambda x: x.isinf(), lambda x: x.sum() == 0):
        claim = vjp_claim(gradient_plus(lambda x, condition=condition: torch.where(condition(x), x, 0.0)), EIGHT)
        assert claim.verdict is not Verdict.PASS


def test_a_derivative_that_is_wrong_in_a_narrow_interval_between_two_shifts_fails():
    claim = vjp_claim(gradient_plus(lambda x: (x - 2).relu() * (2.01 - x).relu()), EIGHT)
    assert claim.verdict is Verdict.FAIL


def test_equal_elements_share_the_derivative_of_the_median_of_all():
    claims = compile_out(lambda x: x.median() * x, EIGHT[:5], backend="eager").certify("algebraic").claims
    assert {claim.verdict for claim in claims if claim.layer == "algebraic"} == {Verdict.PASS}


def test_a_step_that_no_point_takes_is_inconclusive():
    claim = vjp_claim(gradient_plus(lambda x: (x.tanh() / 3).round()), EIGHT)
    assert claim.verdict is Verdict.INCONCLUSIVE
    assert claim.details["one_sided"] == ["round_1"]


def test_a_position_that_is_masked_needs_not_be_chosen():
    masked = lambda x: (x + torch.tensor([0.0, 0, -torch.inf, 0])).amax() * x  # noqa: E731
    assert same(masked, masked, torch.randn(4)).verdict is Verdict.PASS


@pytest.mark.parametrize("padding", [3, 64, 99, 4999])
def test_a_padding_row_is_found_wherever_it_is(padding):
    ids, weight = torch.arange(6), torch.randn(max(100, padding + 1), 3)
    lookup = lambda w, i: torch.nn.functional.embedding(i, w, padding_idx=padding)  # noqa: E731
    forward = traced(lambda w, i: [lookup(w, i)], [weight, ids])
    pull = traced(
        lambda w, i, g: [lookup(w, i), *vjp(lambda w: lookup(w, i), w)[1](g)], [weight, ids, torch.ones(6, 3)]
    )
    (claim,) = check_derivatives(forward, None, pull, differentiable=[True, False])
    assert claim.verdict is Verdict.FAIL


def test_both_values_of_each_element_of_a_mask_are_tried():
    f, g = (lambda x, m, factor=factor: torch.where(m, x, x * (1 + factor * last())) for factor in (0, 1))
    assert same(f, g, EIGHT, torch.ones(8, dtype=torch.bool)).verdict is Verdict.FAIL


def test_primes_depend_on_the_graph_so_that_none_can_be_made_for_them():
    honest = traced(lambda x: [x * 1.0], [EIGHT])
    first = random.Random(f"0 {_digest(honest)} {_digest(honest)}")
    drawn = []
    for _ in range(4):
        drawn.append(draw_prime(first))
        first.getrandbits(48)

    def gamed(x):
        term = x
        for prime in drawn:
            term = term * float(prime)
        return x + term

    assert same(lambda x: x * 1.0, gamed, EIGHT).verdict is Verdict.FAIL


def test_a_maximum_that_cancels_out_needs_no_outcomes():
    def attention(x, w):
        return F.softmax(x @ w @ x.mT, -1) @ x

    graphs = graphs_of(attention, [torch.randn(48, 4), torch.randn(4, 4)])
    assert any("amax" in str(node.target) for node in graphs.jvp.graph.nodes)
    claims = check_derivatives(graphs.forward, graphs.jvp, graphs.vjp, differentiable=[True] * 2)
    assert [claim.verdict for claim in claims] == [Verdict.PASS] * 2


@pytest.mark.parametrize(
    "is_wrong",
    [
        lambda x: (x.amax() - torch.cat([x[:1], x[2:]])).prod() != 0,
        lambda x: x[1] == x.amax(),
        lambda x: x.argmax() == 1,
        lambda x: ((x - x.amax()).exp() == 1)[1],
    ],
    ids=["polynomial", "equal", "index", "exponential"],
)
def test_a_derivative_that_is_wrong_where_one_position_is_the_largest_fails(is_wrong):
    assert vjp_claim(square_wrong_where(is_wrong), torch.randn(4)).verdict is Verdict.FAIL


def test_a_derivative_with_a_term_that_is_zero_unless_one_position_is_the_largest_fails():
    class Square(SavesInputs):
        @staticmethod
        def forward(x):
            return x * x

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return 2 * x * g + (x.amax() - torch.cat([x[:1], x[2:]])).prod() * g

    assert vjp_claim(Square.apply, torch.randn(4)).verdict is Verdict.FAIL
