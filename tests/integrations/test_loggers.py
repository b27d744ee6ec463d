"""What goes bad, in TensorBoard and other loggers, and as a metric."""

import pytest
import torch
from torch import nn

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
