"""`torchguard run --watch` of a script that compiles nothing."""

import copy
import json
import pickle

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from torchguard import guards
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


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.second(self.first(x).relu())


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


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_between_calls_the_model_is_the_scripts_own(watcher, copied):
    model = TwoLayers()
    before = {name: value for name, value in vars(model).items() if not name.startswith("_")}
    model(batch(1))
    assert type(model) is TwoLayers
    assert {name: value for name, value in vars(model).items() if not name.startswith("_")} == before
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    copied(model)(batch(2))
    assert [one.incident.sample for log in watcher.logs for one in log.incidents] == [1, 2]


def test_a_forward_that_the_script_replaces_is_watched(watcher):
    model = TwoLayers()
    model(batch(1))
    plain = model.forward
    model.forward = lambda x: plain(x * 1)
    model(batch(2))
    (log,) = watcher.logs
    assert [(one.call, one.incident.sample) for one in log.incidents] == [(1, 1), (2, 2)]
    assert "_watch" not in vars(model)


@pytest.mark.parametrize("quarantine", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_recompute_what_the_call_computed(monkeypatch, quarantine, use_reentrant):
    class Checkpointed(TwoLayers):
        def forward(self, x):
            return self.second(checkpoint(self.first, x, use_reentrant=use_reentrant))

    monkeypatch.setattr(nn.Module, "__call__", nn.Module.__call__)
    watcher = Watcher(quarantine)
    watcher.eager_models.install()
    model = Checkpointed()
    model(torch.ones(3, 4, requires_grad=True)).sum().backward()
    assert all(one.grad.isfinite().all() for one in model.parameters())
    assert [log.calls for log in watcher.logs] == [1]


def test_a_model_that_is_compiled_after_eager_calls_is_watched_on(watcher, monkeypatch):
    monkeypatch.setattr(torch, "compile", torch.compile)
    monkeypatch.setattr(nn.Module, "compile", nn.Module.compile)
    watcher.install()
    model = TwoLayers()
    model(batch(1))
    torch.compile(model, backend="eager")(batch(2))
    watcher.finish()
    assert [(log.calls, log.incidents[0].incident.sample) for log in watcher.logs] == [(1, 1), (1, 2)]
    assert [bool(log.problem) for log in watcher.logs] == [True, False]  # eager calls are no longer watched


def test_what_other_code_put_in_place_of_the_call_stays(monkeypatch):
    monkeypatch.setattr(nn.Module, "__call__", nn.Module.__call__)
    eager = Watcher().eager_models
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
