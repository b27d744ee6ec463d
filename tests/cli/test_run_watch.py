"""`torchguard run --watch`: the report says which samples of unmodified models went bad."""

import copy
import io
import json
import pickle

import pytest
import torch
from torch import nn

from torchguard import guards
from torchguard.cli import _views
from torchguard.cli._run_report import values_of
from torchguard.cli._terminal import console
from torchguard.cli._watched import Watcher
from torchguard.guards._section import inspection_data


class TwoLayersAndRelu(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.second(self.first(x).relu())


class Trainer:
    def __init__(self, net):
        self.net = net

    def step(self, x):
        return self.net(x)


def batch(*bad):
    x = torch.ones(6, 4)
    x[list(bad)] = float("nan")
    return x


@pytest.fixture
def watcher(monkeypatch):
    """Replaces `torch.compile`, as `--watch` does, for one test."""
    monkeypatch.setattr(torch, "compile", torch.compile)
    monkeypatch.setattr(nn.Module, "compile", nn.Module.compile)
    watcher = Watcher()
    watcher.install()
    return watcher


@pytest.fixture
def model():
    return TwoLayersAndRelu()


def bad(log):
    return [(one.call, one.incident.sample, one.incident.path) for one in log.incidents]


def in_place(model):
    model.compile(backend="eager", fullgraph=True)
    return model


def as_closure(model):
    return torch.compile(lambda x: model(x).sum(), backend="eager", fullgraph=True)


def as_global_made_later(model):
    @torch.compile(backend="eager", fullgraph=True)
    def step(x):
        return late(x)

    globals()["late"] = model
    return step


def as_argument(model):
    @torch.compile(backend="eager", fullgraph=True)
    def step(net, x):
        return net(x)

    return lambda x: step(model, x)


def as_forward(model):
    return torch.compile(model.forward, backend="eager", fullgraph=True)


def as_bound_method(model):
    return torch.compile(Trainer(model).step, backend="eager", fullgraph=True)


def as_decorated_method(model):
    class Own(Trainer):
        step = torch.compile(Trainer.step, backend="eager", fullgraph=True)

    return Own(model).step


def as_module(model):
    return torch.compile(model, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize(
    "compiled",
    [
        as_module,
        in_place,
        as_closure,
        as_global_made_later,
        as_argument,
        as_forward,
        as_bound_method,
        as_decorated_method,
    ],
    ids=lambda way: way.__name__,
)
def test_models_are_watched_however_they_are_compiled(watcher, model, compiled):
    step = compiled(model)
    for x in (batch(), batch(2, 4), batch()):
        step(x)
    (log,) = watcher.logs
    watcher.finish()
    assert bad(log) == [(2, 2, "input"), (2, 4, "input")]
    assert (log.name, log.calls, log.bad_calls, log.problem) == ("TwoLayersAndRelu", 3, 1, "")
    assert watcher.unwatched == {}


def test_what_is_returned_is_what_the_model_returns(watcher, model):
    expected = model(batch())
    assert torch.equal(torch.compile(model, backend="eager")(batch()), expected)


def test_a_model_that_is_compiled_twice_is_watched_once(watcher, model):
    torch.compile(model, backend="eager")(batch(1))
    torch.compile(torch.compile(model, backend="aot_eager"), backend="eager")(batch(2))
    (log,) = watcher.logs
    assert {sample for _, sample, _ in bad(log)} == {1, 2}
    assert watcher.unwatched == {}


def test_blocks_compiled_one_by_one_are_watched_each(watcher):
    blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for block in blocks:
        block.compile(backend="eager")
    with torch.no_grad():
        blocks(batch(5))
    assert [bad(log) for log in watcher.logs] == [[(1, 5, "input")]] * 3


def test_a_part_of_a_watched_model_is_not_watched_again(watcher, model):
    torch.compile(model, backend="eager")(batch(1))
    torch.compile(model.first, backend="eager")(batch(2))
    (log,) = watcher.logs
    assert bad(log) == [(1, 1, "input")]


def test_a_loss_without_parameters_is_not_watched(watcher, model):
    loss = nn.MSELoss()
    torch.compile(lambda x: loss(model(x), torch.zeros(6, 2)), backend="eager")(batch())
    assert [log.name for log in watcher.logs] == ["TwoLayersAndRelu"]


def test_a_model_with_a_compiled_method_is_named_as_not_watched(watcher):
    class Decorated(TwoLayersAndRelu):
        forward = torch.compile(TwoLayersAndRelu.forward, backend="eager")

    assert Decorated()(batch(1)).shape == (6, 2)
    assert watcher.logs == []
    assert "Compile the module" in watcher.unwatched["Decorated"]


def test_a_model_that_cannot_be_watched_runs_unwatched(watcher):
    class Own(TwoLayersAndRelu):
        def report(self):
            return "mine"

    compiled = torch.compile(Own(), backend="eager")
    assert compiled(batch(1)).shape == (6, 2)
    assert compiled.report() == "mine"
    assert "'report'" in watcher.unwatched["Own"]


def test_functions_that_are_compiled_inside_others_stay_in_one_graph(watcher, model):
    double = torch.compile(lambda x: x * 2, backend="eager")
    step = torch.compile(lambda x: double(model(x)), backend="eager", fullgraph=True)
    assert step(batch()).shape == (6, 2)


def test_training_saving_and_copying_work_as_before(watcher, model):
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(compiled.parameters(), 0.1)
    for x in (batch(), batch()):
        optimizer.zero_grad()
        compiled(x).sum().backward()
        optimizer.step()
    compiled.eval()
    torch.save(compiled.state_dict(), io.BytesIO())
    assert "_orig_mod.first.weight" in compiled.state_dict()
    assert isinstance(compiled._orig_mod, TwoLayersAndRelu)
    assert copy.deepcopy(model)(batch()).shape == (6, 2)
    assert watcher.logs[0].calls == 2


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickled, saved], ids=lambda way: way.__name__)
def test_a_model_watched_in_place_is_copied_and_pickled_with_its_own_class(watcher, model, copied):
    step = as_closure(model)
    step(batch())
    copy_of_model = copied(model)
    assert type(copy_of_model) is TwoLayersAndRelu
    assert "_watch" not in vars(copy_of_model)
    assert torch.equal(copy_of_model(batch()), model(batch()))
    step(batch(3))
    copy_of_model(batch(1))
    assert bad(watcher.logs[0]) == [(2, 3, "input")]


def test_the_report_has_bad_samples_and_device_violations(command, invoke, tmp_path):
    """The model has no source line in the script, and its graph has ops that watching added."""
    (tmp_path / "script.py").write_text(
        "import torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 2))\n"
        "compiled = torch.compile(model, backend='aot_eager', fullgraph=True)\n"
        "x = torch.ones(3, 4)\n"
        "compiled(x)\n"
        "x[1] = float('nan')\n"
        "print(compiled(x).shape)\n"
    )
    options = ("--watch", "--strict", "--device", "edge-npu", "--report", "report.json")
    ran = command("run", *options, "script.py")
    assert ran.returncode == 4
    assert ran.stdout == "torch.Size([3, 2])\n"
    assert "Sequential: samples went bad in 1 of 2 calls." in ran.stderr
    assert "call 2: sample 1: NAN at input" in ran.stderr
    assert " Sequential " in ran.stderr
    assert "forward_of" not in ran.stderr
    assert "Nothing was compiled" not in ran.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    (log,) = report["watched"]
    assert [one["text"] for one in log["incidents"]] == ["sample 1: NAN at input, position 0, seen at 3 locations"]
    found = [one for graph in report["device"]["graphs"] for one in graph["violations"]]
    assert {one["op"] for one in found} == {"aten.addmm.default"}
    assert {one["source_line"] for one in found} == {None}
    analyzed = invoke("analyze", "--type", "memory", "--dir", tmp_path / "debug_artifacts")
    assert analyzed.exit_code == 0, analyzed.output


def test_recompiles_of_watched_models_are_printed_without_those_of_torchguard(watcher):
    class Scaled(TwoLayersAndRelu):
        def __init__(self):
            super().__init__()
            self.scale = 1

        def forward(self, x):
            return super().forward(x) * self.scale

    with guards.inspect() as inspection:
        model, other = Scaled(), TwoLayersAndRelu()
        compiled = torch.compile(model, backend="eager", dynamic=False)
        compiled(batch())
        model.scale = 2
        compiled(batch())
        torch.compile(other, backend="eager")(batch())
    output = io.StringIO()
    console(output).print(*_views.compilation_views(inspection_data(inspection)), sep="\n")
    lines = output.getvalue().splitlines()
    assert [line.split()[1:3] for line in lines if " watched " in line and " s" in line] == [
        ["Scaled", "watched"],
        ["Scaled", "watched"],
        ["TwoLayersAndRelu", "watched"],
    ]
    assert "    - L['self'].scale == 1, but it is 2" in lines
    assert "_watch" not in output.getvalue()


class Rooted(nn.Module):
    """The gradient of its square root is Inf at 0, and then NaN: `first` gets it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.second((x * self.first(x)).abs().sqrt())


def train(model, steps=4):
    """Train with a sample of zeros in the second step."""
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x = torch.rand(3, 4) + 1
        if step == 1:
            x[2] = 0
        optimizer.zero_grad()
        compiled(x).square().mean().backward()
        optimizer.step()


def test_parameters_that_went_bad_are_named_instead_of_all_samples(watcher):
    train(Rooted())
    watcher.finish()
    (log,) = watcher.logs
    (one,) = log.incidents
    assert (one.call, one.incident.parameters) == (3, ("first.bias", "first.weight"))
    assert "first.bias and 1 more became non-finite between calls 1 and 3, and every sample is bad" in str(one.incident)
    assert log.bad_calls == 2
    assert one.to_dict()["text"] == str(one.incident)


def test_a_parameter_that_was_bad_from_the_start_is_named_beside_the_samples_that_it_makes_bad(watcher):
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight[7] = float("inf")  # a row that only one sample reads
    compiled = torch.compile(model, backend="aot_eager")
    compiled(torch.tensor([1, 2, 3]))
    compiled(torch.tensor([1, 7, 3]))
    (log,) = watcher.logs
    parameter, sample = (str(one.incident) for one in log.incidents)
    assert parameter.startswith("parameter 0.weight was non-finite before the first call, and of 3 samples 1 went bad")
    assert sample.startswith("sample 1: INF at 0")


def test_the_report_counts_samples_that_bad_parameters_made_bad(watcher):
    train(Rooted(), steps=5)
    watcher.finish()
    section = values_of(watcher.logs[0])
    answer, parameters, curve, where = section.blocks
    assert answer.text == "9 samples were bad in 3 of 5 calls."
    assert parameters.text.startswith("Call 3: parameter first.bias and 1 more became non-finite")
    assert curve.series[0].values == (0, 0, 3, 3, 3)
    assert where.rows == ("(origin not recorded)",)


def test_quarantine_names_the_sample_and_the_module_of_a_fault_created_in_backward(watcher):
    watcher._quarantine = True
    model = Rooted()
    train(model)
    watcher.finish()
    (log,) = watcher.logs
    (one,) = log.incidents
    assert (one.call, one.incident.sample, one.incident.path) == (2, 2, "first")
    assert str(one.incident) == "sample 2: NAN at first, created in backward"
    assert log.bad_calls == 1
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_fault_of_the_last_backward_pass_is_reported_at_the_end(watcher):
    watcher._quarantine = True
    train(Rooted(), steps=2)
    watcher.finish()
    assert [(one.call, one.incident.sample) for one in watcher.logs[0].incidents] == [(2, 2)]
