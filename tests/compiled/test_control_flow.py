"""`torch.cond`, `scan` and `while_loop` inside a function: values, derivatives, certificates, and what is refused."""

import pytest
import torch
from torch._higher_order_ops import scan, utils, while_loop
from torch.func import jvp, vjp

from torchguard._torch import fakes
from torchguard.compiled import compile_out
from torchguard.exceptions import CompileError, ImpureFunctionError

X = torch.tensor([0.3, -1.2, 0.5], dtype=torch.float64)


def branches(x):
    return torch.cond(
        x.sum() > 0, lambda x: {"y": x.sin(), "n": x.sum()}, lambda x: {"y": x * x, "n": x.square().sum()}, (x,)
    )


def branches_by_hand(x):
    return {"y": x.sin(), "n": x.sum()} if x.sum() > 0 else {"y": x * x, "n": x.square().sum()}


def steps(x):
    step = lambda c, r: ({"h": (c["h"] * r).tanh() + x}, (c["h"].clone(), c["h"].sum()))  # noqa: E731
    return scan(step, {"h": x}, x.outer(x))


def steps_by_hand(x):
    h, rows = x, []
    for r in x.outer(x):
        rows.append((h, h.sum()))
        h = (h * r).tanh() + x
    return {"h": h}, tuple(map(torch.stack, zip(*rows, strict=True)))


def counted(x):
    return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 0.9 + y.sin()), (torch.tensor(0), x))[1]


def counted_by_hand(x):
    for _ in range(3):
        x = x * 0.9 + x.sin()
    return x


CASES = {"cond": (branches, branches_by_hand), "scan": (steps, steps_by_hand), "while": (counted, counted_by_hand)}


@pytest.mark.parametrize("x", [X, -X], ids=["one side", "the other"])
@pytest.mark.parametrize("name", CASES)
def test_values_and_derivatives_are_those_of_plain_python(name, x):
    f, by_hand = CASES[name]
    c = compile_out(f, X, backend="eager")
    torch.testing.assert_close(c(x), by_hand(x))
    torch.testing.assert_close(c.jvp(x, X), jvp(by_hand, (x,), (X,)))
    w = c(x)
    pullback = lambda x: vjp(by_hand, x)[1](w)[0]  # noqa: E731
    torch.testing.assert_close(c.vjp_with_seed(x, w), pullback(x))
    torch.testing.assert_close(c.hvp(x, X, w), jvp(pullback, (x,), (X,))[1])


@pytest.mark.parametrize("name", CASES)
def test_each_layer_of_a_certificate_passes(name):
    certificate = compile_out(CASES[name][0], X, backend="eager").certify("enclosure")
    assert {str(claim.verdict) for claim in certificate.claims} == {"pass"}, certificate


def test_control_flow_outside_works_as_before():
    compile_out(branches, X, backend="eager")
    torch.testing.assert_close(branches(X), branches_by_hand(X))


def test_branches_of_different_types_are_refused():
    with pytest.raises(CompileError, match=r"test_control_flow.py.* different types, torch.float64\[\] .*\[3\]"):
        compile_out(lambda x: torch.cond(x.sum() > 0, torch.sum, torch.sin, (x,)), X, backend="eager")


def test_a_branch_that_changes_its_operand_is_refused():
    f = lambda x: torch.cond(x.sum() > 0, lambda y: y.sin_(), lambda y: y * 2, (x + 0,))  # noqa: E731
    with pytest.raises(ImpureFunctionError, match="a branch changes its operand in place"):
        compile_out(f, X, backend="eager")


def test_a_loop_whose_steps_depend_on_a_leaf_is_refused():
    f = lambda x: while_loop(lambda y: y.sum() < 9, lambda y: (y + 1,), (x,))[0]  # noqa: E731
    with pytest.raises(ImpureFunctionError, match=r"number of steps is not known .* use scan"):
        compile_out(f, X, backend="eager")


def test_where_torch_has_no_such_seam_control_flow_is_refused(monkeypatch):
    monkeypatch.delattr(utils, "_hop_compile_and_call", raising=False)
    monkeypatch.setattr(fakes, "torch_is_at_least", lambda *version: True)  # torch 2.11 has another seam
    with pytest.raises(CompileError):
        compile_out(branches, X, backend="eager")
