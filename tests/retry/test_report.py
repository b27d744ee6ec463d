"""The report of a step, its history, and errors for input that `Retry` cannot work with."""

import collections
import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import torchguard
from torchguard import Retry, RetryError, check_grads, check_params, is_retrying
from torchguard.exceptions import RetryWarning

B = 6
nan, inf = float("nan"), float("inf")


def losses(model, x):
    return model(x).squeeze(1).square()


def bad_batch(*rows):
    x = torch.randn(B, 4)
    x[list(rows)] = nan
    return x


@pytest.fixture
def model():
    return nn.Linear(4, 1)


def test_a_finite_step(model):
    x = torch.randn(B, 4)
    report = Retry(model).backward(lambda x: losses(model, x), x)
    assert (report.ok, report.bad, report.runs, report.skipped, report.note) == (True, [], 1, False, "")
    assert report.loss == pytest.approx(losses(model, x).mean().item())
    assert report.grad_norm == pytest.approx(
        torch.cat([one.grad.flatten() for one in model.parameters()]).norm().item()
    )
    assert str(report) == f"step 0: loss {report.loss:.4g}"


def test_a_step_with_bad_samples(model):
    x = bad_batch(1, 4)
    report = Retry(model).backward(lambda x: losses(model, x), x)
    good = [0, 2, 3, 5]
    assert (report.ok, report.bad, report.skipped) == (False, [1, 4], False)
    assert report.loss == pytest.approx(losses(model, x[good]).mean().item())
    assert report.because == dict.fromkeys([1, 4], "NaN or Inf in the input and in the loss")
    assert str(report).splitlines()[1] == "  sample 1: NaN or Inf in the input and in the loss"


def test_one_bad_sample_that_shows_takes_two_runs_more(model):
    assert Retry(model).backward(lambda x: losses(model, x), bad_batch(3)).runs == 3


def test_why_no_part_could_be_run_is_in_the_note(model):
    hidden = torch.randn(B, 1)
    report = Retry(model).backward(lambda x: (model(x) * hidden).square().mean(), bad_batch(3))
    assert report.skipped
    assert "raised RuntimeError: The size of tensor a (5) must match the size of tensor b (6)" in report.note


def test_losses_whose_weights_add_up_to_zero(model):
    report = Retry(model).backward(lambda x: (losses(model, x) * 0, torch.zeros(B)), torch.randn(B, 4))
    assert (report.skipped, report.runs, model.weight.grad) == (True, 1, None)
    assert report.note.startswith("the weights of the losses add up to 0")


@pytest.mark.parametrize("fault", [nan, inf])
def test_gradients_that_were_not_finite_before_the_step_are_named(model, fault):
    model.weight.grad, model.bias.grad = torch.full((1, 4), fault), torch.ones(1)
    report = Retry(model).backward(lambda x: losses(model, x), torch.randn(B, 4))
    assert (report.skipped, report.bad, model.bias.grad.item()) == (True, [], 1)
    assert report.note.startswith("the gradients of before the step are not finite: weight (")
    model.weight.grad = torch.full((1, 4), 1e30)  # whose norm overflows
    assert Retry(model).backward(lambda x: losses(model, x), torch.randn(B, 4)).ok


@pytest.mark.parametrize("name", ["index", "sample_id", "ids"])
@pytest.mark.parametrize("kind", [torch.tensor, list, np.array])
def test_ids_are_found_in_the_batch(model, name, kind):
    batch = {"x": bad_batch(2), name: kind([10, 11, 12, 13, 14, 15])}
    report = Retry(model).backward(lambda b: losses(model, b["x"]), batch)
    assert report.ids == [12]
    assert "sample 2 (id 12)" in str(report)


def test_ids_of_a_name_of_ones_own_or_a_function(model):
    batch = {"x": bad_batch(2), "name": [*"abcdef"]}
    assert Retry(model, ids="name").backward(lambda b: losses(model, b["x"]), batch).ids == ["c"]
    ids = lambda b: [one.upper() for one in b["name"]]  # noqa: E731
    assert Retry(model, ids=ids).backward(lambda b: losses(model, b["x"]), batch).ids == ["C"]


def test_ids_of_a_window_are_counted_over_it(model):
    batches = [{"x": bad_batch(), "id": torch.arange(6)}, {"x": bad_batch(5), "id": torch.arange(6, 12)}]
    report = Retry(model).backward(lambda b: losses(model, b["x"]), batches)
    assert (report.bad, report.ids) == ([11], [11])


def test_history_is_bounded_and_on_bad_is_called_for_bad_steps_only(model):
    told = []
    guard = Retry(model, history=3, on_bad=told.append)
    for rows in ((), (1,), (), (2, 3), ()):
        guard.backward(lambda x: losses(model, x), bad_batch(*rows))
    assert [report.step for report in guard.history] == [2, 3, 4]
    assert [(report.step, report.bad) for report in told] == [(1, [1]), (3, [2, 3])]


def test_a_guard_says_what_it_guards_and_has_found(model):
    optimizer = torch.optim.AdamW(model.parameters())
    guard = Retry([model, nn.ReLU()], optimizer)
    assert repr(guard) == "Retry(Linear, ReLU, AdamW): no steps yet"
    guard.step(lambda x: losses(model, x), bad_batch())
    assert str(guard) == "Retry(Linear, ReLU, AdamW): 1 step, all finite"
    for rows in ((1,), range(B), ()):
        guard.step(lambda x: losses(model, x), bad_batch(*rows))
    assert str(guard) == "Retry(Linear, ReLU, AdamW): 4 steps, 2 not finite (7 bad samples, 1 step skipped)"


def test_a_guard_that_does_not_wait_says_so_and_reads_nothing(model):
    guard = Retry(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), wait=False)
    for rows in ((), (), (1,)):
        guard.step(lambda x: losses(model, x), bad_batch(*rows))
    assert str(guard) == "Retry(Linear, SGD): 2 steps, all finite; one more is not read yet"
    guard.finish()
    assert str(guard) == "Retry(Linear, SGD): 3 steps, 1 not finite (1 bad sample)"


def test_hooks_can_ask_whether_a_step_is_retried(model):
    seen = []
    model.register_forward_hook(lambda *_: seen.append(is_retrying()))
    Retry(model).backward(lambda x: losses(model, x), bad_batch(2))
    assert seen == [False, True, True]
    assert not is_retrying()


def test_is_retrying_is_false_again_after_an_exception(model):
    def closure(x):
        if is_retrying():
            raise KeyboardInterrupt
        return losses(model, x)

    with pytest.raises(KeyboardInterrupt):
        Retry(model).backward(closure, bad_batch(2))
    assert not is_retrying()


@pytest.mark.parametrize(("max_bad", "is_skipped"), [(1, True), (2, False), (0.2, True), (0.5, False), (None, False)])
def test_more_bad_samples_than_allowed_skip_the_step(model, max_bad, is_skipped):
    guard = Retry(model, torch.optim.SGD(model.parameters(), lr=0.1), max_bad=max_bad)
    before = copy.deepcopy(model.state_dict())
    report = guard.step(lambda x: losses(model, x), bad_batch(0, 1))
    assert (report.bad, report.skipped) == ([0, 1], is_skipped)
    assert is_skipped == torch.equal(model.weight, before["weight"])
    assert ("max_bad" in str(report)) == is_skipped


@pytest.mark.parametrize("max_runs", range(1, 12))
def test_the_limit_of_runs_holds(max_runs):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    x = torch.randn(B, 4)
    x[3] = 1e30
    before = copy.deepcopy(model.state_dict())
    report = Retry(model, max_runs=max_runs).backward(lambda x: losses(model, x), x)
    assert report.runs <= max_runs
    if report.skipped:
        assert "limit of runs" in str(report)
        torch.testing.assert_close(model.state_dict(), before)
    else:
        assert report.bad == [3]


# Batches of many kinds.


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    table: torch.Tensor


Pair = collections.namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    ("wrap", "read"),
    [
        (lambda x: x, lambda b: b),
        (lambda x: {"a": {"x": x}, "n": 3}, lambda b: b["a"]["x"]),
        (lambda x: [x, torch.arange(B)], lambda b: b[0]),
        (lambda x: (x, "text", None), lambda b: b[0]),
        (lambda x: Pair(x, [*"abcdef"]), lambda b: b.x[: len(b.y)]),
        (lambda x: Sample(x, torch.zeros(3, 2)), lambda b: b.x + b.table.sum()),
        (lambda x: collections.OrderedDict(x=x, names=tuple("abcdef")), lambda b: b["x"][: len(b["names"])]),
        (lambda x: torch.nested.nested_tensor([*x], layout=torch.jagged), lambda b: torch.stack([*b.unbind()])),
    ],
)  # fmt: skip
def test_a_batch_is_any_pytree(model, wrap, read):
    report = Retry(model).backward(lambda b: losses(model, read(b)), wrap(bad_batch(2)))
    assert report.bad == [2]


def test_one_dimensional_inputs_and_batches_of_one(model):
    one = nn.Linear(1, 1)
    assert Retry(one).backward(lambda x: losses(one, x[:, None]), torch.tensor([1.0, nan, 2.0])).bad == [1]
    assert Retry(model).backward(lambda x: losses(model, x), torch.randn(1, 4)).ok
    report = Retry(model).backward(lambda x: losses(model, x), torch.full((1, 4), nan))
    assert (report.bad, report.skipped) == ([0], True)


def test_a_table_of_as_many_rows_is_shared_where_it_is_named(model):
    table = torch.randn(B, 4)
    batch = {"x": bad_batch(2), "table": table}

    def closure(b):
        assert torch.equal(b["table"], table)
        return losses(model, b["x"] + b["table"].sum(0))

    assert Retry(model, shared="table").backward(closure, batch).bad == [2]


class Graph:
    """A batch that is no pytree."""

    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize("batch", ["select", "numpy"])
def test_what_a_closure_does_to_its_batch_is_undone_before_it_is_run_again(model, batch):
    x = bad_batch(3)
    if batch == "select":
        given, options = Graph(x), {"select": lambda b, rows: Graph(b.x[rows]), "size": lambda b: len(b.x)}
    else:
        given, options = {"x": x, "scale": np.ones(len(x))}, {}

    def closure(b):
        if batch == "select":
            b.x = b.x * 2
            return losses(model, b.x)
        b["scale"] *= 2
        return losses(model, b["x"] * torch.from_numpy(b["scale"]).to(x.dtype)[:, None])

    report = Retry(model, **options).backward(closure, given)
    wanted = losses(model, 2 * x[[row for row in range(len(x)) if row not in report.bad]]).mean()
    assert report.bad
    assert report.loss == pytest.approx(wanted.item())


def test_one_loss_for_a_batch_whose_samples_are_not_clear_is_refused(model):
    ragged = {"x": [torch.randn(5, 4), torch.randn(7, 4), torch.randn(7, 4)]}
    two_sizes = {"table": torch.randn(3, 4), "x": torch.randn(8, 4)}

    def of_list(b):
        return torch.stack([losses(model, one).mean() for one in b["x"]]).mean()

    with pytest.raises(RetryError, match="do not tell which are samples"):
        Retry(model).backward(of_list, ragged)
    with pytest.raises(RetryError, match="do not tell which are samples"):
        Retry(model).backward(lambda b: losses(model, b["x"]).mean() + b["table"].sum(), two_sizes)
    ragged["x"][1][2] = nan
    assert Retry(model, size=lambda b: len(b["x"])).backward(of_list, ragged).bad == [1]
    two_sizes["x"][4] = nan
    report = Retry(model, shared="table").backward(lambda b: losses(model, b["x"]).mean(), two_sizes)
    assert report.bad == [4]


@pytest.mark.parametrize("weight", [nan, float("inf")])
def test_a_weight_that_is_not_finite_is_bad(model, weight):
    weights = torch.ones(6)
    weights[2] = weight
    report = Retry(model).backward(lambda b: (losses(model, b["x"]), b["w"]), {"x": torch.randn(6, 4), "w": weights})
    assert report.bad == [2]
    assert report.runs == 3


def test_tensors_of_one_kind_in_a_list_are_ambiguous(model):
    guard, batches = Retry(model), [bad_batch(), bad_batch(1)]
    with pytest.raises(RetryError, match="window=True"):
        guard.backward(lambda x: losses(model, x), batches)
    assert guard.backward(lambda x: losses(model, x), batches, window=True).bad == [B + 1]


# Without waiting.


def test_without_waiting_the_good_samples_are_trained_after_the_next_step():
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
        return model, torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)

    (model, optimizer), (other, plain) = make(), make()
    batches = [torch.randn(B, 4, dtype=torch.float64) for _ in range(6)]
    spoilt = [x.clone() for x in batches]
    spoilt[2][1] = spoilt[5][4] = nan
    guard = Retry(model, optimizer, wait=False)
    reports = [guard.step(lambda x: losses(model, x), x, clip=0.5) for x in spoilt]
    guard.finish()
    for x in [*batches[:2], batches[3], batches[2][[0, 2, 3, 4, 5]], batches[4], batches[5][[0, 1, 2, 3, 5]]]:
        plain.zero_grad()
        losses(other, x).mean().backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        plain.step()
    assert [report.bad for report in reports] == [[], [], [1], [], [], [4]]
    assert [report.step for report in guard.history] == [*range(6)]
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-9, atol=1e-12)


def test_without_waiting_reading_a_report_trains_its_good_samples_at_once():
    model = nn.Linear(4, 1)
    told = []
    guard = Retry(model, torch.optim.AdamW(model.parameters(), fused=True), wait=False, on_bad=told.append)
    guard.step(lambda x: losses(model, x), torch.randn(B, 4))
    before = model.weight.detach().clone()
    report = guard.step(lambda x: losses(model, x), bad_batch(3))
    assert torch.equal(model.weight, before)
    assert report.bad == [3]
    assert not torch.equal(model.weight, before)
    guard.finish()
    assert [(one.step, one.bad) for one in told] == [(1, [3])]


def test_without_waiting_masks_of_inf_are_no_reason_to_retry():
    model = nn.Linear(4, 1)
    model.register_buffer("mask", torch.full((3, 3), -inf).triu(1))
    guard = Retry(model, torch.optim.AdamW(model.parameters(), fused=True), wait=False)
    reports = [guard.step(lambda x: losses(model, x), torch.randn(B, 4)) for _ in range(3)]
    guard.finish()
    assert all(report.ok and report.runs == 1 for report in reports)


# Parameters and gradients.


def test_check_params_and_check_grads_name_what_is_not_finite():
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1).half(), nn.Embedding(3, 2, sparse=True))
    assert check_params(model).ok
    assert check_grads(model).names == ()
    nn.init.constant_(model[0].bias, inf)
    with torch.no_grad():
        model[1].weight[0, 1] = nan
    model[2](torch.tensor([1, 1])).sum().backward()
    assert check_params(model).bad == {"0.bias": "Inf", "1.weight": "NaN"}
    health = check_grads(model)
    assert health.ok
    assert dict(zip(health.names, health.norms.tolist(), strict=True)) == {"2.weight": pytest.approx(8**0.5)}
    assert str(check_params(model)) == "2 of 5 tensors are not finite: 0.bias (Inf), 1.weight (NaN)"


def test_norms_of_large_parameters_do_not_overflow():
    model = nn.ParameterList(
        [torch.full((8,), 6e4).half(), torch.full((8,), 3e38), torch.full((8,), 1e308, dtype=torch.float64)]
    )
    health = check_params(model)
    assert health.ok
    assert health.norms[:2].tolist() == pytest.approx([6e4 * 8**0.5, 3e38 * 8**0.5], rel=1e-3)


# Errors.


def test_what_a_closure_must_return(model):
    guard, x = Retry(model), torch.randn(B, 4)
    with pytest.raises(RetryError, match="the closure returned NoneType"):
        guard.backward(lambda x: None, x)
    with pytest.raises(RetryError, match=r"losses of shape \(6, 4\) for 6 samples"):
        guard.backward(lambda x: x * model.weight, x)
    with pytest.raises(RetryError, match=r"for 6 samples"):
        guard.backward(lambda x: (losses(model, x), torch.ones(3)), x)
    with pytest.raises(RetryError, match=r"losses of torch\.int64"):
        guard.backward(lambda x: losses(model, x).long(), x)
    with pytest.raises(RetryError, match="weights that require gradients"):
        guard.backward(lambda x: (losses(model, x), losses(model, x)), x)
    with pytest.raises(RetryError, match="requires no gradient"):
        guard.backward(lambda x: losses(model, x).detach(), x)
    with pytest.raises(RetryError, match=r"expected a closure .* got Tensor"):
        guard.backward(losses(model, x), x)


def test_what_a_batch_must_be(model):
    guard = Retry(model)
    with pytest.raises(RetryError, match="holds no tensor with samples along dim 0"):
        guard.backward(lambda b: b, {"n": 3})
    with pytest.raises(RetryError, match="PackedSequence"):
        guard.backward(lambda b: b, {"x": pack_sequence([torch.randn(2, 4), torch.randn(1, 4)])})
    with pytest.raises(RetryError, match="no 'name'"):
        Retry(model, ids="name").backward(lambda b: losses(model, b["x"]), {"x": bad_batch(1)})
    with pytest.raises(RetryError, match="a window needs a list"):
        guard.backward(lambda b: b, torch.randn(2, 4), window=True)
    with pytest.raises(RetryError, match="got an empty list"):
        guard.backward(lambda b: b, [])
    with pytest.raises(RetryError, match=r"size= has to return the number of samples, got str"):
        Retry(model, size=lambda b: "6").backward(lambda b: b, torch.randn(2, 4))
    with pytest.warns(RetryWarning, match="shared= names 'tabel', which the batch does not have"):
        Retry(model, shared=["tabel"]).backward(lambda b: losses(model, b["x"]), {"x": torch.randn(2, 4)})


def test_a_list_that_was_taken_for_micro_batches_is_said_beside_the_closures_own_exception(model):
    with pytest.raises(KeyError) as caught:
        Retry(model).backward(lambda b: losses(model, b[0]["x"]), [{"x": torch.randn(2, 4)}, {"x": torch.randn(2, 4)}])
    assert "window=False" in caught.value.__notes__[0]


def test_the_size_of_a_batch_may_be_a_tensor(model):
    guard = Retry(model, size=lambda x: torch.tensor(len(x)))
    assert guard.backward(lambda x: losses(model, x).mean(), bad_batch(3)).bad == [3]


def test_what_retry_takes(model):
    with pytest.raises(RetryError, match=r"expected an nn\.Module"):
        Retry("model")
    with pytest.raises(RetryError, match=r"expected an nn\.Module or several, got SGD"):
        Retry(torch.optim.SGD(model.parameters()), model)
    with pytest.raises(RetryError, match="expected an optimizer or several, got str"):
        Retry(model, "adam")
    for name in ("min_batch", "max_runs", "max_bad", "history"):
        with pytest.raises(RetryError, match=f"{name} is -1"):
            Retry(model, **{name: -1})
    with pytest.raises(RetryError, match="'eager' or 'compiled'"):
        Retry(model, retries="fast")
    with pytest.raises(RetryError, match="step needs an optimizer"):
        Retry(model).step(lambda x: losses(model, x), torch.randn(B, 4))
    assert issubclass(RetryError, torchguard.TorchGuardError)


def test_an_optimizer_clears_gradients_in_its_own_way():
    cleared = []

    class Optimizer(torch.optim.SGD):
        def zero_grad(self, set_to_none=True):
            cleared.append(set_to_none)
            super().zero_grad(set_to_none)

    model = nn.Linear(4, 1)
    guard = Retry(model, Optimizer(model.parameters(), lr=0.1))
    for _ in range(2):
        guard.step(lambda x: model(x).square()[:, 0], torch.randn(6, 4))
    assert cleared == [True, True]
