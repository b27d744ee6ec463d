"""No sample is accused of what it did not do, and where it cannot be told who did it, nobody is."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import MinMaxObserver, MovingAverageMinMaxObserver

from torchguard import Retry

B = 8
nan, inf = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def backward(model, closure, batch, **options):
    return Retry(model, **options).backward(closure, batch)


def squares(outputs):
    return outputs.square().flatten(1).mean(1)


@pytest.mark.parametrize("has_batch_norm", [False, True])
def test_imputed_nan_in_inputs_is_legitimate(has_batch_norm):
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4) if has_batch_norm else nn.Identity())
    x = torch.randn(B, 4)
    x[1, 0] = x[3, 2] = x[6] = nan
    x[5] = 1e300
    report = backward(model, lambda x: squares(model(torch.cat([x.nan_to_num(), x.isnan().double()], 1))), x)
    assert report.bad == [5]


def test_masks_of_minus_inf_in_inputs_are_legitimate():
    model, x, mask = nn.Linear(4, 4), torch.randn(B, 5, 4), torch.zeros(B, 5, 5)
    mask[:, :, 3:] = -inf
    x[2] = 1e200

    def closure(b):
        q = model(b["x"])
        return squares(torch.softmax(q @ q.mT + b["mask"], -1) @ q)

    assert backward(model, closure, {"x": x, "mask": mask}).bad == [2]


@pytest.mark.parametrize("fault", [nan, 1e300])
@pytest.mark.parametrize("move", [lambda x: x.roll(3, 0), lambda x: x.flip(0), lambda x: x[torch.randperm(len(x))]])
def test_a_fault_that_shows_in_the_loss_of_another_sample(move, fault):
    model, x = nn.Linear(4, 2), torch.randn(B, 4)
    x[3] = fault
    assert backward(model, lambda x: squares(model(move(x))), x).bad == [3]


def test_samples_that_are_bad_only_together_are_a_group():
    model, x = nn.Linear(4, 3), torch.randn(B, 4)
    x[5] = x[2]

    def closure(x):
        distances = (x[:, None] - x).square().sum(-1) + torch.eye(len(x))
        return squares(model(x)) + (1 / distances).sum(1)

    report = backward(model, closure, x)
    assert report.groups == [[2, 5]]
    assert report.bad == [2, 5]
    assert report.because[2] == "bad only together with [5]"


def test_gradients_that_overflow_only_in_their_sum_are_a_group():
    model = nn.Linear(1, 1, bias=False).half()
    x = torch.ones(B, 1).half()
    x[[2, 5]] = 4e4
    report = backward(model, lambda x: B * model(x).float().squeeze(1), x)
    assert report.groups == [[2, 5]]


def test_a_fault_that_is_not_reproduced_accuses_nobody_and_the_step_counts(tmp_path):
    model, calls = nn.Linear(4, 1), tmp_path / "calls"  # a file is not restored
    calls.touch()

    def closure(x):
        calls.write_text(calls.read_text() + "x")
        return squares(model(x)) * (nan if len(calls.read_text()) == 1 else 1)

    report = backward(model, closure, torch.randn(B, 4))
    assert (report.bad, report.skipped, report.ok, report.runs) == ([], False, False, 2)
    assert "not reproduced" in str(report)
    assert model.weight.grad is not None


def every_loss(losses, draw):
    return losses * nan if draw() < 128 else losses


def some_losses(losses, draw):
    return losses * torch.tensor([nan if draw() < 26 else 1.0 for _ in losses])


@pytest.mark.parametrize("fault", [every_loss, some_losses])
def test_a_fault_that_comes_and_goes_with_the_time_accuses_nobody(fault, tmp_path):
    numbers = tmp_path / "numbers"  # a file is not put back
    numbers.write_bytes(random.Random(0).randbytes(1 << 16))
    with numbers.open("rb") as drawn:
        for number in range(60):
            model = nn.Linear(4, 1)
            closure = lambda x, model=model: fault(squares(model(x)), lambda: drawn.read(1)[0])  # noqa: E731
            assert not backward(model, closure, torch.randn(4 + number % 8, 4)).bad


@pytest.mark.parametrize("seed", range(6))
def test_a_fault_that_random_numbers_decide_accuses_nobody(seed):
    model = nn.Linear(4, 1)
    torch.manual_seed(seed)
    x = torch.randn(B, 4)

    def closure(x):
        return squares(model(x)) / (torch.rand(len(x)) > 0.15)

    report = backward(model, closure, x)
    assert not report.bad
    assert report.ok or report.skipped


def test_a_fault_of_pythons_random_numbers_accuses_nobody():
    model = nn.Linear(4, 1)
    random.seed(2)  # 0.95, 0.94, 0.05
    report = backward(model, lambda x: squares(model(x)) * (nan if random.random() > 0.9 else 1), torch.randn(B, 4))
    assert not report.bad
    assert report.skipped


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_norm_over_one_sample_is_no_fault_of_the_sample(count):
    model, x = nn.Linear(4, 3), torch.randn(count, 4)
    x[1] = nan

    def closure(x):
        z = model(x)
        return squares((z - z.mean(0)) / z.std(0))

    report = backward(model, closure, x)
    assert report.bad == ([1] if count > 2 else [])
    assert report.skipped == (count == 2)


def test_batch_norm_that_raises_for_the_one_sample_that_is_left():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(3, 4)
    x[[1, 2]] = nan
    report = backward(model, lambda x: squares(model(x)), x)
    assert report.skipped
    assert 0 not in report.bad


def supervised_contrastive(model):
    def closure(b):
        x, y = b
        z = F.normalize(model(x))
        other = ~torch.eye(len(z), dtype=torch.bool)
        positive = (y[:, None] == y) & other
        logs = torch.log_softmax((z @ z.mT).masked_fill(~other, -1e9), -1)
        return -(logs * positive).sum(1) / positive.sum(1)

    return closure


@pytest.mark.parametrize("fault", [nan, 0.0])
def test_the_last_of_a_class_is_not_trained_and_not_accused(fault):
    model, x, y = nn.Linear(4, 3, bias=False), torch.randn(B, 4), torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
    x[4] = fault  # a vector of length zero has no direction, and its norm no derivative
    closure = supervised_contrastive(model)

    def with_direction(b):
        return closure(b) + (model(b[0]).norm(dim=1) if fault == 0 else 0)

    report = backward(model, lambda b: with_direction(b) / (b[0].norm(dim=1) > 0), (x, y))
    assert (report.bad, report.left_out) == ([4], [0])
    assert "not bad, but not trained: 0" in str(report)


def test_other_classes_keep_their_partners():
    model, x, y = nn.Linear(4, 3), torch.randn(9, 4), torch.arange(9) % 3
    x[4] = nan
    report = backward(model, supervised_contrastive(model), (x, y))
    assert (report.bad, report.left_out) == ([4], [])


def test_a_part_without_a_labelled_token_is_no_fault():
    model, x, y = nn.Linear(4, 3), torch.randn(B, 4), torch.tensor([-100, -100, -100, -100, 1, 0, -100, 2])
    x[5] = 1e308
    report = backward(model, lambda b: F.cross_entropy(model(b[0]) * 10, b[1]), (x, y))
    assert report.bad == [5]


def test_samples_that_raise_in_small_parts_are_not_accused():
    model, x = nn.Linear(4, 1), torch.randn(B, 4)
    x[5] = 1e300

    def closure(x):
        if len(x) < 3:
            raise ValueError("too few")
        return squares(model(x)).mean()

    assert backward(model, closure, x).bad == [5]


class NeedsMany(torch.autograd.Function):
    """A derivative that needs six samples."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *gradients):
        if len(gradients[0]) < 6:
            raise ValueError("fewer than six samples")
        return gradients[0]


def test_a_backward_pass_that_raises_in_small_parts_accuses_nobody_else():
    x, weight = torch.randn(8, 4), torch.nn.Parameter(torch.randn(4))
    x[3] = 0  # the square root of zero has no derivative
    model = torch.nn.ParameterList([weight])
    report = Retry(model).backward(lambda b: NeedsMany.apply(b * weight).square().sum(1).sqrt(), x)
    assert report.bad == [3]


def test_a_number_of_a_model_that_becomes_nan_is_bad():
    model = torch.nn.Linear(4, 1)
    model.mean = 0.0
    x = torch.randn(6, 4)
    x[2] = float("nan")

    def closure(b):
        model.mean = 0.9 * model.mean + 0.1 * float(b.mean())
        return model(b.nan_to_num()).squeeze(1).square()

    assert Retry(model).backward(closure, x).bad == [2]
    assert model.mean == pytest.approx(0.1 * x[[0, 1, 3, 4, 5]].mean().item())


def test_a_closure_that_takes_only_whole_batches_accuses_nobody():
    model, x = nn.Linear(4, 1), torch.randn(B, 4)
    x[5] = nan

    def closure(x):
        if len(x) < B:
            raise ValueError("too few")
        return squares(model(x))

    report = backward(model, closure, x)
    assert (report.bad, report.skipped) == ([], True)


def test_no_part_is_smaller_than_min_batch():
    model, x, sizes = nn.Linear(4, 1), torch.randn(B, 4), set()
    x[5] = 1e300
    model.register_forward_hook(lambda module, inputs, output: sizes.add(len(output)))
    assert backward(model, lambda x: squares(model(x)).mean(), x, min_batch=4).bad == [5]
    assert min(sizes) >= 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_norm_of_gradients_that_overflows_is_not_bad(dtype):
    model = nn.Linear(4, 3).to(dtype)
    largest = torch.finfo(dtype).max / 2
    report = backward(model, lambda x: model(x).double().sum(1) * largest, torch.ones(B, 4, dtype=dtype))
    assert report.ok
    assert report.runs == 1
    assert largest < report.grad_norm < inf


@pytest.mark.parametrize("observer", [MinMaxObserver, MovingAverageMinMaxObserver])
def test_a_clamped_inf_in_an_observer_is_bad(observer):
    class Observed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.observer = nn.Linear(4, 1), observer()

        def forward(self, x):
            self.observer(x.float())
            return self.a(x.clamp(-1, 1))

    model = Observed()
    guard = Retry(model)
    closure = lambda x: squares(model(x))  # noqa: E731
    assert guard.backward(closure, torch.randn(B, 4)).ok  # whose limits are infinite before
    x = torch.randn(B, 4)
    x[3, 1] = inf
    assert guard.backward(closure, x).bad == [3]
    assert model.observer.max_val.isfinite()


@pytest.mark.parametrize("is_buffer", [False, True])
def test_nan_that_a_step_leaves_in_replaced_statistics_is_bad(is_buffer):
    class Statistics(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 1)
            self.register_buffer("mean", torch.zeros(4)) if is_buffer else setattr(self, "mean", torch.zeros(4))

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            return self.a(x.nan_to_num())

    model, x = Statistics(), torch.randn(B, 4)
    x[6, 0] = nan
    assert backward(model, lambda x: squares(model(x)), x).bad == [6]
    assert model.mean.isfinite().all()


def test_masks_and_activations_that_a_model_keeps_are_no_fault():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.mask = nn.Linear(4, 4), None
            self.register_buffer("causal", torch.full((5, 5), -inf).triu(1))

        def forward(self, x):
            q = self.a(x)
            if self.mask is None:
                self.mask = torch.full((5, 5), -inf).triu(1)
            self.scores = q @ q.mT + self.mask + self.causal
            return torch.softmax(self.scores, -1) @ q

    model = Attention()
    guard = Retry(model)
    for _ in range(3):
        report = guard.backward(lambda x: squares(model(x)), torch.randn(B, 5, 4))
        assert report.ok
        assert report.runs == 1


@pytest.mark.parametrize("value", [nan, inf])
def test_parameters_that_are_not_finite_are_named_and_nothing_else_is_run(value):
    model, calls = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), []
    model.register_forward_hook(lambda *_: calls.append(1))
    nn.init.constant_(model[1].bias, value)
    report = backward(model, lambda x: squares(model(x)), torch.randn(B, 4))
    assert report.parameters == [f"1.bias ({'NaN' if value != value else 'Inf'})"]
    assert (report.bad, report.skipped, len(calls)) == ([], True, 1)
    assert "1.bias" in str(report)


def test_nan_that_is_neither_in_samples_nor_in_parameters_accuses_nobody():
    model, weight = nn.Linear(4, 3), torch.tensor([1.0, nan, 1.0])
    batch = torch.randn(B, 4), torch.ones(B, dtype=torch.long)
    report = backward(model, lambda b: F.cross_entropy(model(b[0]), b[1], weight, reduction="none"), batch)
    assert (report.bad, report.skipped) == ([], True)
    assert "NaN before the step: weight" in str(report)


class TestScaler:
    def losses(self, model, x):
        return model(x).squeeze(1)

    def train(self, scaler, x, model=None):
        torch.manual_seed(0)
        model = nn.Linear(4, 1).float() if model is None else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        guard = Retry(model, optimizer)
        return model, guard.step(lambda x: self.losses(model, x), x, scaler=scaler)

    def test_an_overflow_due_to_the_scale_is_the_scalers(self):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        torch.manual_seed(0)
        before = nn.Linear(4, 1).float().weight
        model, report = self.train(scaler, 1e3 * torch.randn(B, 4).float())
        assert not report.bad
        assert scaler.get_scale() == 2.0**126
        assert torch.equal(model.weight, before)
        assert report.outcome.startswith("run on the whole batch")
        assert "the GradScaler skips the step" in str(report)

    @pytest.mark.parametrize("scale", [2.0**4, 2.0**127])
    def test_a_bad_sample_is_found_at_a_scale_of_one(self, scale):
        x = 1e3 * torch.randn(B, 4).float()
        x[1] = nan
        scaler, plain = (torch.amp.GradScaler("cpu", init_scale=scale) for _ in range(2))
        model, report = self.train(scaler, x)
        assert report.bad == [1]
        assert report.outcome.startswith("trained without 1" if scale < 100 else "run without 1")
        torch.manual_seed(0)
        other = nn.Linear(4, 1).float()
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        plain.scale(self.losses(other, x[[row for row in range(B) if row != 1]]).mean()).backward()
        norm = other.weight.grad.norm() / scale
        plain.step(optimizer)
        plain.update()
        assert scaler.state_dict() == plain.state_dict()
        torch.testing.assert_close(model.state_dict(), other.state_dict())
        if scale < 100:
            assert report.grad_norm == pytest.approx((norm**2 + 1).sqrt().item(), rel=1e-5)
