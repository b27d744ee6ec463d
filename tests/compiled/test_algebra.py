"""Derivative graphs against torchguard's rules, in exact arithmetic."""

import copy
import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.breadth import breadth
from tests.compiled.autograd_functions import SavesInputs
from tests.compiled.programs import BINARY, UNARY
from tests.compiled.zoo import ZOO, attention_block, attention_block_inputs, graphs, graphs_of, traced
from torch.fx.experimental.proxy_tensor import make_fx

from torchguard.compiled.certify import ALGEBRAIC_OPS, GraphMismatchError, Verdict, check_derivatives
from torchguard.compiled.certify.algebra._closed_form import closed_form
from torchguard.compiled.certify.algebra._evaluate import evaluate
from torchguard.compiled.certify.algebra._field import PrimeField, draw_prime
from torchguard.compiled.certify.algebra._sampling import Sampler
from torchguard.compiled.certify.algebra._values import Value, integers

aten = torch.ops.aten
PRIMES = [draw_prime(random.Random(seed)) for seed in range(12)]
FIELD = PrimeField(PRIMES[0], key=1)

# Functions of the zoo with a claim that is inconclusive. Torch's gradient of a determinant, traced without gradients
# enabled, needs that it is the product of the singular values.
INCONCLUSIVE = {("determinant", "vjp")}


def claims(g, seed=0):
    return {
        c.subject: c for c in check_derivatives(g.forward, g.jvp, g.vjp, differentiable=g.differentiable, seed=seed)
    }


def vjp_claim(g, vjp, seed=0):
    (claim,) = check_derivatives(g.forward, None, vjp, differentiable=g.differentiable, seed=seed)
    return claim


def element(field, numbers):
    return Value(field, torch.tensor([field.number(n) for n in numbers]))


@pytest.mark.parametrize("name", breadth(ZOO, *[*ZOO][1::6]))
def test_torchs_derivatives_pass_and_what_is_inconclusive_is_known_by_name(name):
    for subject, claim in claims(graphs(name)).items():
        expected = Verdict.INCONCLUSIVE if (name, subject) in INCONCLUSIVE else Verdict.PASS
        assert claim.verdict is expected, claim


def test_the_zoo_is_as_large_as_promised():
    conclusive = {name for name in ZOO if not {(name, "jvp"), (name, "vjp")} & INCONCLUSIVE}
    assert len(ZOO) >= 70
    assert len(conclusive) >= 68


@pytest.mark.long
def test_an_attention_block_passes():
    g = graphs_of(attention_block, attention_block_inputs(2, 16, 64))
    assert {c.verdict for c in claims(g).values()} == {Verdict.PASS}


@pytest.mark.long
def test_a_claim_is_the_same_for_the_same_seed():
    assert claims(graphs("conv_net"), seed=3) == claims(graphs("conv_net"), seed=3)


def test_a_factor_of_one_plus_1e_7_in_the_last_gradient_fails_and_names_the_leaf():
    g = graphs("mlp")
    wrong = copy.deepcopy(g.vjp)
    (output,) = wrong.graph.find_nodes(op="output")
    last = output.args[0][-1]
    with wrong.graph.inserting_before(output):
        off = wrong.graph.call_function(aten.mul.Tensor, (last, 1 + 1e-7))
    output.args = ([*output.args[0][:-1], off],)
    claim = vjp_claim(g, wrong)
    assert claim.verdict is Verdict.FAIL
    assert claim.message == "Wrong: gradient of leaf 4."


def scaled_relu(factor):
    class Scaled(SavesInputs):
        @staticmethod
        def forward(x):
            return torch.where(x > 0, x, 0.1 * x)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return torch.where(x > 0, g, 0.1 * factor * g)

        @staticmethod
        def jvp(ctx, t):
            (x,) = ctx.saved_tensors
            return torch.where(x > 0, t, 0.1 * factor * t)

    return Scaled.apply


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [(1.0, Verdict.PASS), (1.001, Verdict.FAIL), (1 + 1e-7, Verdict.FAIL), (-1.0, Verdict.FAIL)],
    ids=["right", "off by 1e-3", "off by 1e-7", "wrong sign in one branch"],
)
@pytest.mark.parametrize("size", [1, 5])
def test_a_custom_function_is_held_to_what_it_computes(factor, verdict, size):
    found = claims(graphs_of(scaled_relu(factor), [torch.randn(size)], functional=False))
    assert {c.verdict for c in found.values()} == {verdict}


def test_a_custom_rule_with_a_small_error_that_gradcheck_lets_pass_fails():
    class Cubed(SavesInputs):
        @staticmethod
        def forward(x):
            return x * x * x

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * 3 * x * x * (1 + 1e-3)

    x = torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(Cubed.apply, x, rtol=1e-2)
    forward = make_fx(lambda v: [Cubed.apply(v)], tracing_mode="fake")(x.detach())
    pulled = lambda v, w: [Cubed.apply(v), *torch.func.vjp(Cubed.apply, v)[1](w)]  # noqa: E731
    vjp = make_fx(pulled, tracing_mode="fake")(x.detach(), x.detach())
    (claim,) = check_derivatives(forward, None, vjp, differentiable=[True], seed=0)
    assert claim.verdict is Verdict.FAIL


def test_a_gradient_stopped_in_the_derivative_alone_fails():
    g = graphs_of(lambda x, y: x * y.exp(), [torch.randn(3), torch.randn(3)])
    stopped = graphs_of(lambda x, y: x * y.detach().exp(), [torch.randn(3), torch.randn(3)])
    claim = vjp_claim(g, stopped.vjp)
    assert claim.verdict is Verdict.FAIL
    assert claim.message == "Wrong: gradient of leaf 1."
    assert claims(stopped)["vjp"].verdict is Verdict.PASS


def test_an_operator_without_a_rule_is_inconclusive_and_named():
    g = graphs_of(lambda x: torch.special.bessel_j0(x).detach() + x, [torch.randn(3)])
    for claim in claims(g).values():
        assert claim.verdict is Verdict.INCONCLUSIVE
        assert claim.details["unsupported"] == ["aten.special_bessel_j0.default"]
        assert "aten.special_bessel_j0.default" in claim.message


def test_a_gradient_that_torch_leaves_out_on_purpose_fails_with_the_reason():
    ids, weight = torch.tensor([0, 1, 2]), torch.randn(3, 2)
    g = graphs_of(lambda ids, w: torch.nn.functional.embedding(ids, w, padding_idx=0), [ids, weight])
    found = claims(g)
    assert found["jvp"].verdict is Verdict.PASS
    assert found["vjp"].verdict is Verdict.FAIL
    assert "padding_idx" in found["vjp"].message


def test_a_gradient_that_torch_symmetrises_on_purpose_fails_with_the_reason():
    free = graphs_of(lambda a: torch.linalg.cholesky_ex(a).L, [2 * torch.eye(3)])
    assert claims(free)["jvp"].verdict is Verdict.PASS
    assert claims(free)["vjp"].verdict is Verdict.FAIL
    assert "Take the factor of (a + a.mT) / 2." in claims(free)["vjp"].message
    symmetric = graphs_of(lambda a: torch.linalg.cholesky_ex((a + a.mT) / 2).L, [2 * torch.eye(3)])
    assert claims(symmetric)["vjp"].verdict is Verdict.PASS


@given(st.integers(0, 10**6))
@settings(max_examples=settings.default.max_examples // 10)
def test_torchs_derivatives_of_random_programs_pass(seed):
    rng = random.Random(seed)
    steps = [
        (rng.choice(UNARY), None) if rng.random() < 0.6 else (rng.choice(BINARY), rng.randrange(4)) for _ in range(4)
    ]

    def program(x, y):
        values = [x, y]
        for fn, other in steps:
            values.append(fn(values[-1]) if other is None else fn(values[-1], values[other % len(values)]))
        return values[-1]

    g = graphs_of(program, [torch.randn(3, 4), torch.randn(3, 4)])
    for claim in claims(g, seed).values():
        # Such a program may well ask for the sign of a square.
        assert claim.verdict is (Verdict.INCONCLUSIVE if "one_sided" in claim.details else Verdict.PASS)


def test_uninitialised_memory_that_reaches_a_gradient_fails():
    g = graphs("polynomial")
    wrong = copy.deepcopy(g.vjp)
    (output,) = wrong.graph.find_nodes(op="output")
    last = output.args[0][-1]
    with wrong.graph.inserting_before(output):
        empty = wrong.graph.call_function(aten.empty_like.default, (last,))
    output.args = ([*output.args[0][:-1], empty],)
    assert vjp_claim(g, wrong).verdict is Verdict.FAIL


def test_a_difference_of_functions_that_divide_by_zero_everywhere_is_inconclusive():
    forward = make_fx(lambda x: [x / (x - x)], tracing_mode="fake")(torch.randn(3))
    jvp = make_fx(lambda x, t: [x / (x - x), t], tracing_mode="fake")(torch.randn(3), torch.randn(3))
    (claim,) = check_derivatives(forward, jvp, None, differentiable=[True])
    assert claim.verdict is Verdict.INCONCLUSIVE
    assert "divides by zero" in claim.message


def test_a_comparison_with_one_outcome_is_inconclusive_and_named():
    g = graphs_of(lambda x: x.relu().abs(), [torch.randn(4)])
    claim = claims(g)["jvp"]
    assert claim.verdict is Verdict.INCONCLUSIVE
    assert claim.message.endswith("but abs_1, sgn had only one outcome at all of them.")
    assert claim.details["one_sided"] == ["abs_1", "sgn"]


def test_graphs_that_do_not_belong_together_are_refused():
    g, other = graphs("mlp"), graphs("softmax")
    with pytest.raises(GraphMismatchError, match="forward takes 5 leaves, but differentiable has 1"):
        check_derivatives(g.forward, g.jvp, None, differentiable=[True])
    with pytest.raises(GraphMismatchError, match="vjp takes 3 values"):
        check_derivatives(g.forward, None, other.vjp, differentiable=g.differentiable)


# Value rules against torch itself, on numbers that floats hold exactly.
EXACT = [
    *("linear", "bilinear_einsum", "conv1d", "conv2d_groups", "conv_transpose2d", "upsample_nearest", "pad_flip_roll"),
    *("gather", "scatter_add", "index_select", "index_put", "masks", "embedding"),
]


def whole(x, seed):
    if not x.is_floating_point():
        return x
    return torch.randint(-9, 10, x.shape, generator=torch.Generator().manual_seed(seed)).to(x.dtype)


@pytest.mark.parametrize("graph", ["forward", "vjp"])
@pytest.mark.parametrize("name", EXACT)
def test_on_integers_the_rules_give_what_torch_computes(name, graph):
    g = graphs(name)
    gm = getattr(g, graph)
    leaves = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    given_ = [
        g.inputs[i] if not leaf.is_floating_point() else whole(torch.empty(leaf.shape), i)
        for i, leaf in enumerate(leaves)
    ]
    results = evaluate(
        gm, [Value(FIELD, FIELD.tensor(x)) if x.is_floating_point() else integers(FIELD, x) for x in given_], FIELD
    )
    for result, expected in zip(results, gm(*given_), strict=True):
        assert torch.equal(result.as_elements().element, FIELD.tensor(expected))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.nn.functional.avg_pool2d(x, 2, 2, padding=1),
        lambda x: torch.nn.functional.avg_pool2d(x, 2, 1, ceil_mode=True),
        lambda x: torch.nn.functional.adaptive_avg_pool2d(x, 2),
        lambda x: torch.nn.functional.interpolate(x, scale_factor=2, mode="bilinear"),
        lambda x: torch.nn.functional.interpolate(x, size=(7, 7), mode="bilinear", align_corners=True),
        lambda x: x.cumsum(2).tril(1).flip(3),
        lambda x: x.prod(1).mean(2),
        lambda x: x.unfold(2, 2, 1).sum((0, 4)),
    ],
    ids=["average", "average, partial", "adaptive", "bilinear", "bilinear, corners", "shapes", "products", "unfold"],
)
def test_on_halves_and_quarters_the_rules_give_what_torch_computes(fn):
    gm = make_fx(lambda x: [fn(x)], tracing_mode="fake")(torch.empty(2, 2, 4, 4, dtype=torch.float64))
    x = whole(torch.empty(2, 2, 4, 4, dtype=torch.float64), 5)
    (result,) = evaluate(gm, [Value(FIELD, FIELD.tensor(x))], FIELD)
    assert torch.equal(result.element, FIELD.tensor(gm(x)[0]))


def test_linear_solves_and_determinants_are_those_of_rationals():
    a, b = torch.tensor([[2, 1, 0], [1, 3, 1], [0, 1, 4]]), torch.tensor([[1], [2], [3]])
    g = graphs("solve")
    (x,) = evaluate(g.forward, [Value(FIELD, FIELD.tensor(t)) for t in (a, b)], FIELD)
    assert torch.equal(FIELD.matmul(FIELD.tensor(a), x.element), FIELD.tensor(b))
    (det,) = evaluate(graphs("determinant").forward, [Value(FIELD, FIELD.tensor(a))], FIELD)
    assert int(det.element) == 18


# The field

residues = st.integers(0, PRIMES[0] - 1)


@given(
    st.lists(st.lists(residues, min_size=3, max_size=3), min_size=2, max_size=2),
    st.lists(residues, min_size=3, max_size=3),
)
def test_matrix_products_are_exact(a, b):
    product = FIELD.matmul(torch.tensor(a), torch.tensor(b).unsqueeze(1)).flatten().tolist()
    assert product == [sum(p * q for p, q in zip(row, b, strict=True)) % FIELD.prime for row in a]


def test_long_matrix_products_are_exact():
    n = 2**20 + 3
    most = torch.full((1, n), FIELD.prime - 1)
    assert int(FIELD.matmul(most, most.t())) == n % FIELD.prime


@pytest.mark.parametrize("prime", PRIMES)
def test_each_prime_is_one_and_has_the_roots_it_promises(prime):
    assert all(pow(base, prime - 1, prime) == 1 for base in (2, 3, 5, 7, 11, 13))
    field = PrimeField(prime, key=0)
    for n in (2, 3, 5, 7, 11, 13, 48, 80):
        root = field.number(math.sqrt(n))
        assert root * root % prime == n
        assert pow(field.number(n**-0.25), 4, prime) * n % prime == 1


@pytest.mark.parametrize(
    ("number", "rational"),
    [(0.1, Fraction(1, 10)), (1e-5, Fraction(1, 100000)), (0.044715, Fraction(8943, 200000)), (2.5, Fraction(5, 2))],
    ids=str,
)
def test_the_closed_form_of_a_short_decimal_is_that_decimal(number, rational):
    assert closed_form(number).rational == rational
    assert closed_form(number).is_rational


@given(st.floats(1e-6, 1e6), st.floats(1e-9, 1e-3))
def test_no_closed_form_is_further_from_its_float_than_rounding_so_none_hides_a_factor(number, error):
    form = closed_form(number)
    value = float(form.rational) * float(form.radical) ** 0.25 * math.pi ** (form.root_pi / 2)
    value *= math.log(2) ** form.ln2 * math.log(10) ** form.ln10
    assert abs(value - number) <= 6 * math.ulp(number)
    assert closed_form(number * (1 + error)) != form


@pytest.mark.parametrize("number", [0.1, 1e-5, math.sqrt(0.5), 2 / math.sqrt(math.pi), 48**-0.25, 1 / 3, math.log(2)])
def test_a_constant_off_by_1e_7_is_another_element(number):
    assert FIELD.number(number) != FIELD.number(number * (1 + 1e-7))


def test_the_laws_that_torchs_formulas_use_hold():
    x = Value(FIELD, FIELD.random("x", (50,)))
    y = Value(FIELD, FIELD.random("y", (50,)))
    same = lambda a, b: torch.equal(a.element, b.element)  # noqa: E731
    assert same((-x).exp() * x.exp(), x.eq(x).as_elements())
    assert same(x.sin() * x.sin() + x.cos() * x.cos(), x.eq(x).as_elements())
    assert same((x - y.log()).exp(), x.exp() / y)
    assert same((-x).erf(), -x.erf())
    assert same(1 - x.sigmoid(), (-x).sigmoid())
    assert not same(x.exp() * y.exp(), (x + y).exp())


def test_comparisons_go_the_way_they_go_for_real_numbers():
    x = torch.linspace(-5, 5, 9)
    gm = traced(lambda x: [x > 1.5, (2 * x + 3).exp() > 1, x.argmax(), x.sort().indices, (x * 0.9).long()], [x])
    given_ = Value(FIELD, FIELD.tensor(x), real=x.double())
    for result, expected in zip(evaluate(gm, [given_], FIELD), gm(x), strict=True):
        assert torch.equal(result.element, expected)


def test_elements_stand_for_the_real_numbers_drawn_with_them():
    x = Sampler(FIELD).elements("x", (1000,))
    assert torch.equal(x.element, torch.tensor([FIELD.number(Fraction(r)) for r in x.real.tolist()]))
    assert float(x.real.abs().max()) > 20
    assert float((x.real.abs() < 4).double().mean()) > 0.5
    assert len(set(x.element.tolist())) > 990


def test_the_table_of_operators_is_the_documented_one():
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs" / "certificates.md").read_text()
    table = page.split("<!-- algebraic -->")[1]
    assert set(table.split("`")[1::2]) == ALGEBRAIC_OPS
