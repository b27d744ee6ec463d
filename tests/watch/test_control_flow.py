"""Operators that call functions (`torch.cond`, `while_loop`, `map`, `scan`) in a watched model, with modules inside."""

import copy

import pytest
import torch
from torch import nn
from torch._higher_order_ops import map as map_rows
from torch._higher_order_ops import while_loop
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.scan import scan
from torch.utils.checkpoint import checkpoint

from torchguard import err
from torchguard._watch import watch
from torchguard.exceptions import MixedRowsWarning

# Torch warns when it compiles such an operator for the plain model in eager mode.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
GOOD = [0, 1, 3]


class Model(nn.Module):
    def __init__(self, step):
        super().__init__()
        self.first, self.inner, self.last = (nn.Linear(4, 4).double() for _ in range(3))
        self.scale = nn.Parameter(torch.rand(4).double())
        self.register_buffer("count", torch.tensor(3))
        self.step = step

    def forward(self, x):
        return self.last(self.step(self, self.first(x)))


def by_count(model, h):
    return torch.cond(model.count > 2, lambda h: model.inner(h) * model.scale, torch.sin, (h,))


def by_value(model, h):
    return torch.cond(h.sum() > 1e9, torch.sin, lambda h: model.inner(h) * model.scale, (h,))


def loop(model, h):
    return while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, model.inner(h) * model.scale), (torch.tensor(0), h))[1]


def each_row(model, h):
    return map_rows(lambda row: model.inner(row) * model.scale, h)


def scanned(model, h):
    start = torch.zeros(len(h)).double()
    carry, out = scan(lambda c, z: (c + z, {"sum": c + z * model.scale[0]}), start, h, dim=1)
    return model.inner(out["sum"]) + carry[:, None]


def prefix_sums(model, h):
    return model.inner(associative_scan(lambda a, b: a + b, h, dim=1, combine_mode="generic"))


def in_checkpoint(model, h):
    return checkpoint(lambda h: by_count(model, h).tanh(), h, use_reentrant=False)


STEPS = [by_count, by_value, loop, each_row, scanned, prefix_sums, in_checkpoint]
# In a graph all of them count as mixing samples. In eager mode only a branch that is chosen by values of samples does,
# and a parameter that is used in a checkpoint.
MIXING = {"plain": [by_value, in_checkpoint], "aot_eager": STEPS}
LONG = pytest.mark.long
CASES = [pytest.param(step, "plain", marks=() if step in (by_count, loop) else LONG) for step in STEPS]
# Torch does not compile an operator that calls functions in a checkpoint.
CASES += [pytest.param(step, "aot_eager", marks=LONG) for step in STEPS if step is not in_checkpoint]


def gradients(model, losses):
    model.zero_grad()
    losses.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore::torchguard.exceptions.MixedRowsWarning")
@pytest.mark.parametrize(("step", "mode"), CASES)
def test_the_watched_model_does_as_the_model_and_a_fault_is_exact_or_declared(step, mode):
    torch.manual_seed(0)
    model = Model(step)
    plain, guarded = copy.deepcopy(model), watch(model, quarantine=True)
    call = guarded if mode == "plain" else torch.compile(guarded, backend=mode, fullgraph=True)
    x = torch.randn(4, 4).double()
    for _ in range(2):
        out, f = call(x)
        assert torch.equal(out, plain(x))
        assert not err.is_err(f).any()
        found, want = gradients(model, out.square().mean()), gradients(plain, plain(x).square().mean())
        for name in want:
            torch.testing.assert_close(found[name], want[name], rtol=1e-9, atol=1e-14)
    x[2, 1] = float("nan")
    for _ in range(2):
        out, f = call(x)
        found = gradients(model, err.mean_ok(f, out.square().mean(-1)))
        assert all(grad.isfinite().all() for grad in found.values())
        if step in MIXING[mode]:
            assert err.is_err(f).all()
            assert not out.any()
            continue
        assert err.is_err(f).tolist() == [False, False, True, False]
        want = gradients(plain, plain(x[GOOD]).square().mean())
        torch.testing.assert_close(out[GOOD], plain(x[GOOD]), rtol=1e-9, atol=1e-14)
        for name in want:
            torch.testing.assert_close(found[name], want[name], rtol=1e-9, atol=1e-14)


def test_a_loop_of_no_steps_returns_its_arguments():
    def step(model, h):
        return while_loop(lambda i, _: i < 0, lambda i, h: (i + 1, h * 5), (torch.tensor(0), h))[1]

    guarded, x = watch(Model(step), returns="output"), torch.randn(4, 4).double()
    out = guarded(x)
    assert torch.equal(out, guarded.last(guarded.first(x)))
    (grad,) = torch.autograd.grad(out.sum(), guarded.first.bias)  # of the operator itself, torch's is 5 times as large
    torch.testing.assert_close(grad, guarded.last.weight.sum(0) * len(x))


def test_without_quarantine_modules_in_a_branch_are_watched_in_eager_mode():
    guarded = watch(Model(by_count))
    x = torch.randn(4, 4).double()
    guarded(x)
    guarded.inner.weight.data[0] = float("inf")
    _, f = guarded(x)
    assert err.is_err(f).all()
    assert {incident.path for incident in guarded.report()} == {"inner"}


def test_a_branch_in_a_graph_is_said_to_mix_samples():
    guarded = torch.compile(watch(Model(by_count), quarantine=True), backend="eager", fullgraph=True)
    with pytest.warns(MixedRowsWarning, match="cond cannot be followed"):
        guarded(torch.randn(4, 4).double())


def test_the_plain_model_calls_the_operators_of_torch():
    model = Model(each_row)
    x = torch.randn(4, 4).double()
    want = model(x)
    watch(model)(x)
    assert torch.equal(model(x), want)
