"""One imperative program, run eagerly or compiled, with equal results."""

import pytest
import torch

from torchguard.compiled import CompileError, LeafTypeError, Session


def train(mode):
    """The same program in either mode."""
    torch.manual_seed(0)
    s = Session(mode=mode)
    w, b = s.param("w", torch.randn(3, 2)), s.param("b", torch.zeros(2))
    x, y = s.input("x", torch.randn(4, 3)), s.input("y", torch.randn(4, 2))
    loss = (torch.tanh(x @ w + b) - y).square().mean()
    losses = []
    for _ in range(3):
        s.backward(loss)
        s.sgd_step(0.1)
        s.set(x=torch.randn(4, 3))
        losses.append(s.value(loss))
    return losses, s.value(w), s.jvp(loss, w=torch.ones(3, 2)), s.backward(loss)


@pytest.mark.long
def test_both_modes_give_the_same():
    torch.testing.assert_close(train("compiled"), train("eager"))


def test_it_trains_as_torch_does():
    losses, w, *_ = train("eager")
    torch.manual_seed(0)
    v, b = torch.randn(3, 2, requires_grad=True), torch.zeros(2, requires_grad=True)
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    optimizer = torch.optim.SGD([v, b], lr=0.1)
    for i in range(3):
        optimizer.zero_grad()
        (torch.tanh(x @ v + b) - y).square().mean().backward()
        optimizer.step()
        x = torch.randn(4, 3)
        torch.testing.assert_close(losses[i], (torch.tanh(x @ v + b) - y).square().mean().detach())
    torch.testing.assert_close(w, v.detach())


def test_eager_mode_computes_at_once():
    s = Session(mode="eager")
    x = s.input("x", torch.tensor([1.0, 4.0]))
    root = x.sqrt()
    assert s.value(root).tolist() == [1.0, 2.0]
    s.set(x=torch.tensor([9.0, 16.0]))
    assert s.value(root).tolist() == [3.0, 4.0]


def test_values_are_copies():
    s, given = Session(mode="eager"), torch.ones(2)
    x = s.param("x", given)
    s.value(x).add_(1)
    given.add_(1)
    assert s.value(x).tolist() == [1.0, 1.0]


def test_gradients_are_not_accumulated():
    s = Session(mode="eager")
    loss = (s.param("w", torch.ones(2)) * 3).sum()
    assert s.backward(loss)["w"].tolist() == s.backward(loss)["w"].tolist() == [3.0, 3.0]


def test_leaves_may_be_added_later():
    s = Session(mode="eager")
    y = s.param("w", torch.ones(2)).sum()
    s.backward(y)
    z = y * s.input("k", torch.tensor(4.0))
    assert s.backward(z)["w"].tolist() == [4.0, 4.0]


def test_integers_have_no_gradient():
    s = Session(mode="eager")
    picked = s.param("w", torch.ones(3))[s.input("i", torch.tensor([0, 0]))].sum()
    assert s.backward(picked).keys() == {"w"}
    assert s.backward(picked)["w"].tolist() == [2.0, 0.0, 0.0]


def test_wrong_use_is_refused():
    s = Session(mode="eager")
    w = s.param("w", torch.ones(2))
    with pytest.raises(CompileError, match="call backward before sgd_step"):
        s.sgd_step(0.1)
    with pytest.raises(CompileError, match=r"backward: expected a loss of shape \[\], got shape \[2\]"):
        s.backward(w * 2)
    with pytest.raises(CompileError, match="there is no leaf 'v'"):
        s.set(v=torch.ones(2))
    with pytest.raises(LeafTypeError, match=r"Session: leaf w: expected f32\[2\], got f32\[3\]"):
        s.set(w=torch.ones(3))
    with pytest.raises(CompileError, match="there is no leaf 'v'"):
        s.jvp(w * 2, v=torch.ones(2))
    with pytest.raises(CompileError, match="mode: expected 'eager' or 'compiled', got 'fast'"):
        Session(mode="fast")
