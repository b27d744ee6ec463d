"""`torchguard run --watch` of a script that compiles nothing."""

import json

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from torchguard import guards
from torchguard.cli._eager_models import EagerModels
from torchguard.cli._watched import Watcher

SCRIPT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.second(self.first(x).relu())

net, loss = Net(), nn.MSELoss()
for call in range(3):
    x = torch.ones(4, 4)
    x[call] = float("nan") if call else 1.0
    loss(net(x), torch.zeros(4, 1))
assert type(net).__name__ == "Net" and isinstance(net, Net)
"""


@pytest.fixture
def watcher(monkeypatch):
    """Replaces `nn.Module.__call__`, as `--watch` does, for one test."""
    monkeypatch.setattr(nn.Module, "__call__", nn.Module.__call__)
    watcher = Watcher()
    watcher.eager_models.install()
    return watcher


def batch(bad):
    x = torch.ones(3, 4)
    x[bad] = float("nan")
    return x


def test_a_script_that_compiles_nothing_is_watched(command, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    ran = command("run", "--watch", "--report", "run.json", "train.py")
    assert ran.returncode == 0, ran.stderr
    (log,) = json.loads((tmp_path / "run.json").read_text())["watched"]
    assert (log["model"], log["calls"]) == ("Net", 3)
    assert [(one["call"], one["sample"]) for one in log["incidents"]] == [(2, 1), (3, 2)]
    assert log["incidents"][0]["locations"] == ["input x", "first", "second", "Net"]


def test_the_outermost_module_with_parameters_is_the_model(watcher):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    out = model(batch(1))
    nn.MSELoss()(out, torch.zeros(3, 2))
    (log,) = watcher.logs
    assert log.model is model
    assert [one.incident.sample for one in log.incidents] == [1]


def test_values_are_those_of_an_unwatched_run(watcher):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), batch(1)
    watched = model(x)
    watcher.eager_models.remove()
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    other.load_state_dict(model.state_dict())
    assert torch.equal(watched.nan_to_num(7), other(x).nan_to_num(7))


def test_dynamo_does_not_meet_the_replaced_call(watcher):
    model = nn.Linear(4, 2)

    def step(x):
        return model(x) * 2

    watcher.eager_models.remove_before_compilations()
    with guards.inspect() as seen:
        torch.compile(step, backend="eager")(batch(1))
    assert [one.function for one in seen.frames] == [step.__qualname__]
    assert nn.Module.__call__ is watcher.eager_models._original


def test_calls_under_transforms_and_traces_are_left_alone(watcher):
    model = nn.Linear(4, 2)
    torch.func.vmap(model)(torch.ones(3, 4))
    make_fx(model)(torch.ones(3, 4))
    assert not watcher.logs
    model(batch(2))
    assert len(watcher.logs) == 1


def test_a_call_without_samples_runs_unwatched_and_says_why(watcher):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, times):
            return self.weight * times

    assert torch.equal(Counts()(3), torch.full((2,), 3.0))
    assert "no samples" in watcher.unwatched["Counts"]


def test_a_model_that_torchguard_watches_already_is_left_alone(watcher):
    from torchguard import watch

    guarded = watch(nn.Linear(4, 2), returns="output")
    guarded(batch(1))
    assert not watcher.logs
    assert [one.sample for one in guarded.history] == [1]


def test_what_other_code_put_in_place_of_the_call_stays(monkeypatch):
    monkeypatch.setattr(nn.Module, "__call__", nn.Module.__call__)
    eager = EagerModels(lambda model: None, {})
    eager.install()

    def other(*args, **kwargs):
        return None

    nn.Module.__call__ = other
    eager.remove()
    assert nn.Module.__call__ is other


def test_a_script_with_retry_is_reported_by_retry_alone(command, tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch\nfrom torch import nn\nfrom torchguard import Retry\n"
        "model = nn.Linear(4, 1)\nguard = Retry(model, torch.optim.SGD(model.parameters(), 0.1))\n"
        "x = torch.ones(4, 4)\nx[2] = float('nan')\n"
        "assert guard.step(lambda b: model(b).square().squeeze(-1), x).bad == [2]\n"
    )
    ran = command("run", "--watch", "--report", "run.json", "train.py")
    assert ran.returncode == 0, ran.stderr
    (problem,) = json.loads((tmp_path / "run.json").read_text())["problems"]
    assert problem.startswith("No model was watched.")


def test_a_strict_run_that_checked_nothing_does_not_pass(command, tmp_path):
    (tmp_path / "train.py").write_text("import torch\ntorch.nn.Linear(4, 2)(torch.ones(3, 4))\n")
    ran = command("run", "--strict", "--device", "edge-npu", "train.py")
    assert ran.returncode == 4
    assert "The device was not checked" in ran.stderr
