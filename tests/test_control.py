import pytest
import torch
from torch import nn

from torchguard import AND, HAS, IF, IS, NOT, OR, err, experimental, fix, flag_nan_and_inf
from torchguard.exceptions import BranchError

NAN, INF = float("nan"), float("inf")


def test_predicates(run):
    def fn(x):
        f = flag_nan_and_inf(x, 1, err.new(x))
        nan, inf = IS(err.NAN, f), IS(err.INF, f)
        return HAS(f), nan, inf, OR(nan, inf), AND(nan, inf), NOT(inf)

    answers = run(fn)(torch.tensor([[NAN], [1.0]]))
    assert [answer.tolist() for answer in answers] == [True, True, False, True, False, True]


@pytest.mark.parametrize(("value", "chosen"), [(1.0, "clean"), (NAN, "nan"), (INF, "inf")])
def test_the_first_branch_whose_condition_holds_is_chosen(run, value, chosen):
    def fn(x):
        f = flag_nan_and_inf(x, 1, err.new(x))
        return (
            IF(IS(err.NAN, f), lambda: (torch.full_like(x, -1.0), f.clone()))
            .ELIF(IS(err.INF, f), lambda: (torch.full_like(x, -2.0), f.clone()))
            .ELSE(lambda: (x.clone(), f.clone()))
        )

    out, f = run(fn)(torch.tensor([[value], [5.0]]))
    assert out.tolist() == {"clean": [[1.0], [5.0]], "nan": [[-1.0]] * 2, "inf": [[-2.0]] * 2}[chosen]
    assert err.is_err(f).tolist() == [chosen != "clean", False]


@pytest.mark.inductor
def test_a_condition_per_row_changes_only_its_rows(run):
    def fn(x):
        f = flag_nan_and_inf(x, 1, err.new(x))
        return IF(err.has_nan(f), lambda: torch.zeros_like(x)).ELIF(err.has_inf(f), lambda: x.sign()).ELSE(lambda: x)

    out = run(fn)(torch.tensor([[NAN, 1.0], [2.0, 3.0], [-INF, 4.0]]))
    assert out.tolist() == [[0.0, 0.0], [2.0, 3.0], [-1.0, 1.0]]


def test_row_and_batch_conditions_can_be_mixed(run):
    def fn(x, row, whole):
        return IF(AND(row, whole), lambda: x + 10).ELIF(whole, lambda: x + 1).ELSE(lambda: x)

    out = run(fn)(torch.zeros(2, 1), torch.tensor([True, False]), torch.tensor(True))
    assert out.tolist() == [[10.0], [1.0]]


def test_branches_return_pytrees(run):
    def fn(x):
        return IF(x.sum() > 0, lambda: {"a": [x], "b": None}).ELSE(lambda: {"a": [-x], "b": None})

    assert run(fn)(torch.tensor([-1.0]))["a"][0].tolist() == [1.0]


def test_every_branch_runs():
    ran = []
    IF(torch.tensor(True), lambda: ran.append("then")).ELSE(lambda: ran.append("else"))
    assert ran == ["then", "else"]


def test_gradients_reach_the_chosen_rows_only(run):
    linear = nn.Linear(2, 2)

    def fn(x):
        out = linear(x)
        f = flag_nan_and_inf(out, 1, err.new(x))
        return IF(err.is_err(f), lambda: torch.zeros_like(out)).ELSE(lambda: out), f

    x = torch.randn(3, 2)
    linear(x[:2]).sum().backward()
    want = linear.weight.grad.clone()
    linear.zero_grad()
    x[2] = INF  # overflow in row 2
    x, _ = fix(x, err.new(x), 1)
    x[2] = 3e38
    linear.weight.data[:, 0] *= 1e3
    out, _ = run(fn)(x)
    assert torch.isfinite(out).all()
    out.sum().backward()
    torch.testing.assert_close(linear.weight.grad, want)


def test_experimental_flags_work_with_every_helper(run):
    def fn(x):
        f = experimental.err.new(x)
        f = experimental.err.push(f, experimental.err.NAN, location=1, where=torch.isnan(x).any(-1))
        return experimental.IF(experimental.IS(err.NAN, f), lambda: fix(x, f, 2)).ELSE(lambda: (x.clone(), f.clone()))

    z, f = run(fn)(torch.tensor([[NAN], [2.0]]))
    assert z.tolist() == [[0.0], [2.0]]
    assert f.dtype == torch.float32
    assert experimental.err.find(err.FALLBACK_VALUE, f).tolist() == [True, False]


def test_experimental_carriers():
    from torchguard import CONFIG

    assert experimental.err.new_t(2).dtype == torch.float32
    assert experimental.err.from_code(err.NAN, 1, 2).dtype == torch.float32
    CONFIG.flag_dtype = torch.float64
    assert experimental.err.new_t(2).dtype == torch.float64


@pytest.mark.wrong_types
@pytest.mark.parametrize("cond", [True, torch.tensor(1.0), torch.zeros(2, 2, dtype=torch.bool)])
def test_conditions_are_bool_tensors_of_rank_0_or_1(cond):
    with pytest.raises(BranchError, match="a condition is a bool tensor of rank 0 or 1"):
        IF(cond, lambda: None)


@pytest.mark.parametrize(
    ("cond", "one", "two", "message"),
    [
        ([True, False], (2, 1), (2, 2), r"shapes \(2, 1\) and \(2, 2\)"),
        (True, (2, 1), (2, 2), r"shapes \(2, 1\) and \(2, 2\)"),
        (False, (2,), (3,), r"shapes \(2,\) and \(3,\)"),
        (True, (1, 2), (3, 2), r"shapes \(1, 2\) and \(3, 2\)"),
        ([True, False], (3,), (3,), "over 2 rows cannot choose within a value of"),
    ],
)
def test_branches_must_have_equal_shapes(run_light, cond, one, two, message):
    cond = torch.tensor(cond)
    with pytest.raises(Exception, match=message):
        run_light(lambda cond: IF(cond, lambda: torch.zeros(one)).ELSE(lambda: torch.zeros(two)))(cond)
    with pytest.raises(Exception, match=message):
        run_light(lambda cond: IF(cond, lambda: [torch.zeros(one)]).ELSE(lambda: [torch.zeros(two)]))(cond)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    "other",
    [lambda z: z, lambda z: (z, z), lambda z: {"a": z}, lambda z: 1.0, lambda z: None],
    ids=["tensor", "longer", "dict", "number", "none"],
)
def test_branches_must_have_equal_structures(run_light, whole, other):
    cond = torch.tensor(True) if whole else torch.tensor([True, False])
    with pytest.raises(Exception, match="which do not match"):
        run_light(lambda cond, z: IF(cond, lambda: (z,)).ELSE(lambda: other(z)))(cond, torch.zeros(2))


def test_an_elif_of_another_shape_raises_whatever_is_chosen(run_light):
    def fn(x):
        return IF(x.sum() > 0, lambda: x).ELIF(x.sum() > 1, lambda: x[:1]).ELSE(lambda: -x)

    for x in (torch.ones(2), -torch.ones(2)):
        with pytest.raises(Exception, match=r"branches return shapes"):
            run_light(fn)(x)


def test_branches_of_two_dtypes_are_promoted(run_light):
    def fn(x):
        return IF(x.sum() > 0, lambda: x).ELSE(lambda: x.double())

    assert run_light(fn)(torch.ones(2)).dtype == torch.float64


def test_predicates_need_a_condition():
    with pytest.raises(BranchError, match="no condition"):
        OR()
