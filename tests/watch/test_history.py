"""`guarded.history` and `run_report`: what happened in a run, without waiting for it."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from torchguard import watch
from torchguard._watch.history import HALF
from torchguard.exceptions import WatchError

NAN, INF = float("nan"), float("inf")


class OptionalScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, pixel_values, *, scale=None):
        h = self.first(pixel_values)
        return self.second(h if scale is None else h * scale[:, None])


def batch(size=4, **bad):
    x = torch.ones(size, 3)
    for name, value in bad.items():
        x[int(name[1:])] = value
    return x


def seen(guarded):
    return [(one.step, one.sample, one.id, one.where) for one in guarded.history]


@pytest.fixture(params=["python", "table"])
def store(request, monkeypatch):
    """Where entries are recorded: read at once, as on the CPU, or written to a table, as on other devices."""
    if request.param == "table":
        from torchguard._watch.history import History

        allocate = History.allocate
        monkeypatch.setattr(History, "allocate", lambda self, device: allocate(self, device, on_device=True))
    return request.param


class TestHistory:
    @pytest.mark.inductor
    @pytest.mark.parametrize("quarantine", [pytest.param(False, marks=pytest.mark.long), True])
    def test_it_has_the_faults_of_all_calls(self, run, store, quarantine):
        guarded = watch(OptionalScale(), quarantine=quarantine)
        call = run(guarded)
        call(batch())
        call(batch(s1=NAN), sample_ids=torch.tensor([7, 8, 9, 10]))
        call(batch())
        call(batch(), scale=torch.tensor([1.0, 1.0, INF, 1.0]))
        call(batch(s0=NAN, s3=INF))
        assert seen(guarded) == [
            (1, 1, 8, "input pixel_values"),
            (3, 2, None, "input scale"),
            (4, 0, None, "input pixel_values"),
            (4, 3, None, "input pixel_values"),
        ]
        assert [one.code for one in guarded.history] == [1, 2, 1, 2]
        assert seen(guarded)[0] == (1, 1, 8, "input pixel_values")  # reading it does not empty it

    def test_no_call_recompiles_or_waits_for_it(self, store):
        counter = CompileCounterWithBackend("aot_eager")
        guarded = watch(OptionalScale())
        compiled = torch.compile(guarded, backend=counter, fullgraph=True)
        for step in range(5):
            compiled(batch(s2=NAN if step % 2 else 1.0))
        assert counter.frame_count == 1
        assert [one.step for one in guarded.history] == [1, 3]
        compiled(batch(s2=NAN))
        assert [one.step for one in guarded.history] == [1, 3, 5]

    def test_of_a_long_run_it_has_the_beginning_and_the_end(self, store):
        guarded = watch(nn.Linear(1, 1))
        steps, size = 5, 300
        for _ in range(steps):
            guarded(torch.full((size, 1), NAN))
        kept = [(one.step, one.sample) for one in guarded.history]
        every = [(step, sample) for step in range(steps) for sample in range(size)]
        assert kept == every[:HALF] + every[-HALF:]
        report = guarded.run_report()
        assert (report.calls, report.total, report.lost) == (steps, steps * size, steps * size - 2 * HALF)
        assert report.since == 0

    def test_a_batch_of_more_faults_than_there_is_room_for(self, store):
        guarded = watch(nn.Linear(1, 1))
        guarded(torch.full((3000, 1), NAN))
        assert [one.sample for one in guarded.history] == [*range(HALF), *range(3000 - HALF, 3000)]
        guarded(torch.full((2, 1), NAN))
        assert [one.sample for one in guarded.history][-2:] == [0, 1]

    def test_threads_lose_nothing(self):
        guarded, start = watch(nn.Linear(1, 1)), threading.Barrier(4)

        def call():
            start.wait(60)
            for _ in range(20):
                guarded(torch.tensor([[1.0], [NAN]]))

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(one.step for one in guarded.history) == [*range(80)]

    @pytest.mark.filterwarnings("ignore::torchguard.exceptions.MixedRowsWarning")  # once for each class of models
    def test_transforms_and_backward_passes_are_no_calls(self, store):
        guarded = watch(nn.Linear(2, 2), quarantine=True)
        torch.func.jacrev(guarded, has_aux=True)(torch.ones(3, 2))
        out, _ = torch.utils.checkpoint.checkpoint(guarded, torch.ones(3, 2, requires_grad=True), use_reentrant=False)
        out.sum().backward()
        assert guarded.run_report().calls == 1

    def test_a_checkpoint_around_it_in_a_graph(self, store):
        guarded = watch(OptionalScale(), quarantine=True)

        @torch.compile(backend="aot_eager", fullgraph=True)
        def step(x):
            return torch.utils.checkpoint.checkpoint(guarded, x, use_reentrant=False)

        step(batch(s1=NAN).requires_grad_())[0].sum().backward()
        assert seen(guarded) == [(0, 1, None, "input pixel_values")]

    def test_copies_begin_a_history_of_their_own(self):
        guarded = watch(OptionalScale())
        guarded(batch(s1=NAN))
        for other in (copy.deepcopy(guarded), pickle.loads(pickle.dumps(guarded))):
            assert other.history == []
            other(batch(s2=NAN))
            assert [one.sample for one in other.history] == [2]
        assert [one.sample for one in guarded.history] == [1]

    def test_moving_the_model_keeps_it(self, store):
        guarded = watch(OptionalScale())
        guarded(batch(s1=NAN))
        guarded.double().float()
        guarded(batch(s2=NAN))
        assert [(one.step, one.sample) for one in guarded.history] == [(0, 1), (1, 2)]

    def test_inference_mode_and_back(self, run_light, store):
        model = OptionalScale()
        with torch.inference_mode():
            guarded = watch(model)
            run_light(guarded)(batch(s1=NAN))
        run_light(guarded)(batch(s2=NAN))
        assert [one.sample for one in guarded.history] == [1, 2]


class TestIds:
    def test_a_report_names_them(self, run_light):
        guarded = watch(OptionalScale())
        run_light(guarded)(batch(s1=NAN), sample_ids=torch.tensor([7, 8, 9, 10]))
        (incident,) = guarded.report()
        assert str(incident).startswith("sample 1 (id 8): NAN at input pixel_values")
        run_light(guarded)(batch(s1=NAN))
        assert guarded.report()[0].id is None

    def test_they_may_be_a_list(self):
        guarded = watch(OptionalScale())
        guarded(batch(s1=NAN), sample_ids=[7, 8, 9, 10])
        assert guarded.history[0].id == 8

    @pytest.mark.parametrize("ids", [[1, 2], [[1, 2, 3, 4]], [1.0, 2.0, 3.0, 4.0]])
    def test_one_integer_for_each_sample(self, ids):
        with pytest.raises(WatchError, match="sample_ids"):
            watch(OptionalScale())(batch(), sample_ids=ids)

    def test_a_model_that_takes_them_gets_them(self):
        class Named(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(3, 2)

            def forward(self, x, sample_ids):
                return self.layer(x) + sample_ids[:, None]

        out, _ = watch(Named())(batch(), sample_ids=torch.arange(4))
        assert out.shape == (4, 2)


class TestOrigins:
    def test_in_quarantine_a_fault_between_modules_is_in_the_input_of_the_next(self, run_light):
        class Between(OptionalScale):
            def forward(self, x):
                return self.second(self.first(x).log())

        model = Between()
        model.first.weight.data.fill_(1.0)
        model.first.bias.data.zero_()
        guarded = watch(model, quarantine=True)
        run_light(guarded)(batch(s2=-1.0))
        assert [(one.path, one.argument, one.where) for one in guarded.report()] == [("second", "", "input of second")]
        assert str(guarded.report()[0]).startswith("sample 2: NAN at input of second, position 0")

    def test_arguments_without_a_name(self):
        class Any(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(3, 2)

            def forward(self, *args, **kwargs):
                return self.layer(args[0] if args else kwargs["x"])

        guarded = watch(Any())
        guarded(batch(s1=NAN))
        guarded(x=batch(s1=NAN))
        assert [one.where for one in guarded.history] == ["input", "input"]


class TestParameters:
    @pytest.mark.parametrize("quarantine", [False, True])
    def test_a_parameter_that_became_nan_is_named_with_its_step(self, run_light, quarantine):
        guarded = watch(OptionalScale(), quarantine=quarantine)
        call = run_light(guarded)
        for step in range(6):
            if step == 3:
                guarded.first.weight.data[0, 0] = NAN
            call(batch())
        report = guarded.run_report()
        assert (report.calls, report.since, report.parameters) == (6, 3, {"first.weight": "NaN"})
        assert str(report).splitlines() == [
            "6 calls, 12 samples bad",
            "  NAN at first: 12 samples in steps 3 to 5",
            "  every sample is bad since step 3",
            "  parameter first.weight is NaN since step 3",
        ]
        assert report.bad_since == {"first.weight": 3}
        assert {one.cause for one in guarded.report()} == {"parameter first.weight is NaN since step 3"}

    def test_the_parameter_that_went_bad_first_is_named_first(self):
        guarded = watch(OptionalScale())
        for step in range(4):
            if step == 1:
                guarded.second.weight.data[0, 0] = NAN
            if step == 3:
                guarded.first.weight.data.fill_(NAN)  # as an optimizer does after a step with NaN gradients
            guarded(batch())
        lines = str(guarded.run_report()).splitlines()
        assert lines[-2:] == ["  parameter second.weight is NaN since step 1", "  parameter first.weight is NaN"]

    def test_a_bad_sample_is_not_blamed_on_a_parameter(self):
        guarded = watch(OptionalScale())
        guarded(batch(s1=NAN))
        guarded.first.weight.data.fill_(NAN)  # as an optimizer would do after this call
        assert [one.cause for one in guarded.report()] == [""]
        assert guarded.run_report().since is None

    def test_a_clean_run(self):
        guarded = watch(OptionalScale())
        guarded(batch())
        report = guarded.run_report()
        assert report.ok
        assert str(report) == "1 calls, 0 samples bad"
