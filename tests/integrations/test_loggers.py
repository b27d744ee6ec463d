"""What goes bad, in TensorBoard and other loggers, and as a metric."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from torchguard import Retry, err, flag_nan, watch
from torchguard.integrations.loggers import LayerHealth, TensorBoard, flags_values, retry_values, run_values

pytest.importorskip("tensorboard")


class Recorder:
    """The smallest logger."""

    def __init__(self):
        self.logged = {}

    def log(self, values, step):
        self.logged[step] = values


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def test_tensorboard_has_rate_errors_and_origins(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    guarded, board = watch(net()), TensorBoard(tmp_path)
    for step in range(3):
        x = torch.randn(4, 4)
        x[2, 0] = torch.nan if step == 1 else 0.0
        guarded(x)
        board.log(run_values(guarded), step)
    board.writer.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [one.value for one in events.Scalars("torchguard/bad_sample_rate")] == [0.0, 0.25, 0.0]
    assert [one.value for one in events.Scalars("torchguard/errors/input/NAN")] == [1.0]
    (first, _) = events.Tensors("torchguard/origins/text_summary")
    assert b"NAN at input: 1 sample in step 1" in first.tensor_proto.string_val[0]


def test_any_logger_takes_flags_and_reports_of_retry():
    model, recorder = net(), Recorder()
    guard = Retry(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(4, 4)
    x[1] = torch.inf
    report = guard.step(lambda x: model(x).square().sum(1), x)
    recorder.log(retry_values(report), 0)
    assert recorder.logged[0]["torchguard/bad_samples"] == 1
    assert "sample 1" in recorder.logged[0]["torchguard/origins"]
    f = flag_nan(torch.tensor([[torch.nan], [1.0]]), "head", err.new_t(2))
    assert flags_values(f) == {"torchguard/bad_sample_rate": 0.5, "torchguard/errors/head/NAN": 1.0}


def test_health_of_layers_comes_from_inside_the_graph(compiled):
    model = net()
    health = LayerHealth(model)
    x = torch.randn(16, 4)
    run = compiled(model)
    run(x)
    run(x * 2)
    first, last = model[0](x * 2), model(x * 2)
    values = health.values()
    assert values["health/0/rms"] == pytest.approx(first.square().mean().sqrt().item(), rel=1e-5)
    assert values["health/2/largest"] == pytest.approx(last.abs().max().item(), rel=1e-5)
    health.remove()
    assert not model[0]._forward_hooks


def test_the_rate_of_bad_samples_is_a_metric():
    from torchguard.integrations.torchmetrics import BadSampleRate

    metric = BadSampleRate()
    for bad in (0, 2):
        metric.update(err.push(err.new_t(4), err.NAN, 1, where=torch.arange(4) < bad))
    assert metric.compute().item() == pytest.approx(2 / 8)
    warned = err.push(err.new_t(4), err.ZERO_OUTPUT, 1, where=torch.arange(4) < 1)  # the same samples as for loggers
    metric.reset()
    metric.update(warned)
    assert metric.compute().item() == flags_values(warned)["torchguard/bad_sample_rate"] == 0.25
    metric.reset()
    metric.update(err.new_t(0))
    assert metric.compute() == 0


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    """MLflow, with its runs in a folder."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # its databases take SQLAlchemy
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow

    mlflow.set_tracking_uri(f"file:{tmp_path}/runs")
    return mlflow


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """W&B without its server."""
    for name, value in {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path), "ERROR_REPORTING": "false"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    import wandb

    wandb.teardown()  # settings of an earlier run in this process
    yield wandb
    wandb.teardown()


def log_three_steps(logger):
    """Log three steps, the second of which has a bad sample. What is logged, step by step."""
    model, logged = net(), []
    health = LayerHealth(model)
    guarded = watch(model)
    for step in range(3):
        x = torch.randn(4, 4)
        x[2, 0] = torch.nan if step == 1 else 0.0
        guarded(x)
        logged.append({**run_values(guarded), **health.values()})
        logger.log(logged[-1], step)
    return logged


@pytest.mark.long
def test_mlflow_has_every_number(mlflow):
    class MLflow:  # as in the docs
        def log(self, values, step):
            mlflow.log_metrics({k: v for k, v in values.items() if not isinstance(v, str)}, step=step)

    with mlflow.start_run() as run:
        logged = log_three_steps(MLflow())
    client = mlflow.MlflowClient()
    names = client.get_run(run.info.run_id).data.metrics
    found = {name: {one.step: one.value for one in client.get_metric_history(run.info.run_id, name)} for name in names}
    want = {}
    for step, values in enumerate(logged):
        for name, value in values.items():
            if not isinstance(value, str):
                want.setdefault(name, {})[step] = value
    assert {*found} == {*want}
    for name, by_step in want.items():
        assert found[name] == pytest.approx(by_step, nan_ok=True), name
    assert found["torchguard/bad_sample_rate"] == {0: 0.0, 1: 0.25, 2: 0.0}
    assert found["torchguard/errors/input/NAN"] == {1: 1.0}
    assert math.isnan(found["health/0/rms"][1])


@pytest.mark.long
def test_wandb_has_every_number_and_text(wandb):
    class Wandb:  # as in the docs
        def log(self, values, step):
            wandb.log(values, step=step)

    run = wandb.init(project="torchguard", mode="offline")
    logged = log_three_steps(Wandb())
    wandb.finish()
    (file,) = Path(run.dir).parent.glob("*.wandb")
    found = [{name: one for name, one in values.items() if name[0] != "_"} for values in history_of(file)]
    assert len(found) == 3
    for got, want in zip(found, logged, strict=True):
        assert {*got} == {*want}
        for name, value in want.items():
            assert got[name] == (value if isinstance(value, str) else pytest.approx(value, nan_ok=True)), name
    assert [one["torchguard/bad_sample_rate"] for one in found] == [0.0, 0.25, 0.0]
    assert "NAN at input: 1 sample in step 1" in found[1]["torchguard/origins"]


def history_of(file):
    """What W&B wrote to the file of a run, step by step: a log of LevelDB, of which one block is enough here."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, steps = file.read_bytes(), 7, []
    assert len(data) < 2**15
    while at < len(data):
        length = int.from_bytes(data[at + 4 : at + 6], "little")
        record = Record.FromString(data[at + 7 : at + 7 + length])
        at += 7 + length
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            steps.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return steps


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "error"),
    [({"log_freq": 1}, "data-dependent"), ({"log_freq": 1000}, "recompile limit|fullgraph=True")],
    ids=["each call logs", "few calls log"],
)
def test_only_health_from_inside_leaves_the_graph_whole(how, error, wandb):
    """The hooks of `wandb.watch` read parameters on the host, and count the calls."""
    model = net()
    LayerHealth(model)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)

    def run_ten_times():
        for _ in range(10):
            run(torch.randn(3, 4))

    run_ten_times()
    with wandb.init(project="torchguard", mode="offline"):
        wandb.watch(model, log="parameters", **how)
        torch._dynamo.reset()
        with pytest.raises((TorchDynamoException, FailOnRecompileLimitHit), match=error):
            run_ten_times()
