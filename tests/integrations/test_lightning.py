"""Lightning's `Trainer` with planted faults: training survives, equals that without the bad samples, and says so."""

import copy
import logging
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.integrations.launch import become_rank
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from torchguard import distributed, err, watch
from torchguard.exceptions import RetryError, WatchError
from torchguard.testing import run_ranks

pytest.importorskip("lightning")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy

    from torchguard.integrations.lightning import RetryMixin, TorchGuardCallback

SIZE, BATCH, BAD = 10, 4, 5  # batches of 4, 4 and 2; the bad sample is in the second


@pytest.fixture(autouse=True)
def quiet(recwarn):
    warnings.simplefilter("ignore")  # Lightning's, about numbers of workers and missing loggers
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def samples():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SIZE, 4, generator=generator, dtype=torch.float64)
    x[BAD] = torch.nan
    return [{"x": x[i], "y": torch.tensor(i % 3)} for i in range(SIZE)]


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()


class Base(LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Guarded(RetryMixin, Base):
    def training_step(self, batch, batch_idx):
        losses = F.cross_entropy(self.net(batch["x"]), batch["y"], reduction="none")
        self.log("loss", losses.mean(), on_step=False, on_epoch=True)
        return losses


def trained_without(net, accumulate=1):
    """The network after a plain loop over the good samples, and the mean of the losses of its batches."""
    net, data, losses = copy.deepcopy(net), samples(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    starts = [*range(0, SIZE, BATCH)]
    for number, start in enumerate(starts):
        rows = [data[i] for i in range(start, min(start + BATCH, SIZE)) if i != BAD]
        loss = F.cross_entropy(net(torch.stack([r["x"] for r in rows])), torch.stack([r["y"] for r in rows]))
        (loss / accumulate).backward()
        losses += [loss.item()] * len(rows)
        if (number + 1) % accumulate == 0 or number + 1 == len(starts):
            optimizer.step()
            optimizer.zero_grad()
    return net, sum(losses) / len(losses)


def trainer(folder, **settings):
    how = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    how |= {"enable_model_summary": False, "accelerator": "cpu", "default_root_dir": folder}
    return Trainer(**(how | settings))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_retry_trains_as_without_the_bad_sample_and_logs_once(accumulate, tmp_path, caplog):
    net = layers()
    want, loss = trained_without(net, accumulate)
    model = Guarded(net)
    fit = trainer(tmp_path, accumulate_grad_batches=accumulate)
    with caplog.at_level(logging.WARNING, "torchguard"):
        fit.fit(model, DataLoader(samples(), BATCH))
    for (name, one), two in zip(net.state_dict().items(), want.state_dict().values(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
    assert [report.bad for report in model.guard.history] == [[], [1], []]
    assert fit.callback_metrics["loss"].item() == pytest.approx(loss, rel=1e-6)
    assert "sample 1: NaN or Inf in the input" in caplog.text


def test_a_watched_model_trains_as_without_the_bad_sample(tmp_path, caplog):
    class Watched(Base):
        def training_step(self, batch, batch_idx):
            losses = F.cross_entropy(self.net(batch["x"]), batch["y"], reduction="none")
            return err.mean_ok(self.net.flags, losses)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3)).double()
    want, _ = trained_without(net)
    guarded = watch(net, quarantine=True, returns="output")
    fit = trainer(tmp_path, callbacks=[TorchGuardCallback(guarded)])
    with caplog.at_level(logging.WARNING, "torchguard"):
        fit.fit(Watched(guarded), DataLoader(samples(), BATCH))
    for one, two in zip(net.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)
    assert fit.callback_metrics["bad_sample_rate_epoch"].item() == pytest.approx(1 / SIZE)
    assert "NAN at input" in caplog.text


class InDict(RetryMixin, Base):
    def training_step(self, batch, batch_idx):
        return {"loss": F.cross_entropy(self.net(batch["x"]), batch["y"], reduction="none")}


class WithoutIndex(RetryMixin, Base):
    def training_step(self, batch):
        return F.cross_entropy(self.net(batch["x"]), batch["y"], reduction="none")


@pytest.mark.parametrize("module", [InDict, WithoutIndex])
def test_other_forms_of_a_step(module, tmp_path):
    net = layers()
    want, _ = trained_without(net)
    trainer(tmp_path).fit(module(net), DataLoader(samples(), BATCH))
    for one, two in zip(net.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


def test_a_step_that_returns_a_mean_is_refused(tmp_path):
    class Mean(RetryMixin, Base):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch["x"]), batch["y"])

    with pytest.raises(RetryError, match=r"the loss of each sample .* got a tensor of 0 dims"):
        trainer(tmp_path).fit(Mean(layers()), DataLoader(samples(), BATCH))


def test_the_callback_asks_for_a_watched_model():
    with pytest.raises(WatchError, match="expected what watch returned"):
        TorchGuardCallback(layers())


class Sharded:
    """`fully_shard`, which Lightning has the module do itself."""

    def configure_model(self):
        from torch.distributed.fsdp import fully_shard

        if not isinstance(self.net[0].weight, DTensor):
            for layer in self.net:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize(("way", "accumulate"), [("retry", 1), ("retry", 2), ("watch", 1)])
def test_two_ranks_train_as_one_without_the_bad_sample(way, accumulate, strategy, tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3)).double()
    data = samples()[:8]  # of which each rank has every other one, in batches of two
    want = copy.deepcopy(net)
    optimizer = torch.optim.SGD(want.parameters(), lr=0.1)
    for number, rows in enumerate([[0, 1, 2, 3], [4, 6, 7]], 1):
        x, y = (torch.stack([data[i][name] for i in rows]) for name in ("x", "y"))
        (F.cross_entropy(want(x), y) / accumulate).backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()

    class Watched(Base):
        def training_step(self, batch, batch_idx):
            losses = F.cross_entropy(self.net(batch["x"]), batch["y"], reduction="none")
            return distributed.mean_ok(self.net.flags, losses)

    def train():
        become_rank()
        of_way = Guarded if way == "retry" else Watched
        guarded = net if way == "retry" else watch(net, quarantine=True, returns="output")
        module = (of_way if strategy == "ddp" else type("Module", (Sharded, of_way), {}))(guarded)
        how = {"devices": 2, "use_distributed_sampler": False, "accumulate_grad_batches": accumulate}
        how["strategy"] = "ddp" if strategy == "ddp" else ModelParallelStrategy(2, 1)
        how["callbacks"] = [TorchGuardCallback(guarded)] if way == "watch" else []
        fit = trainer(tmp_path / str(dist.get_rank()), **how)
        fit.fit(module, DataLoader(data, 2, sampler=DistributedSampler(data, shuffle=False)))
        assert fit.world_size == 2
        assert isinstance(net[0].weight, DTensor) == (strategy == "fsdp2")
        weights = [one.full_tensor() if isinstance(one, DTensor) else one.detach() for one in net.parameters()]
        if way == "retry":
            return weights, [report.bad for report in module.guard.history]
        rates = [fit.callback_metrics[name].item() for name in ("bad_sample_rate", "bad_sample_rate_epoch")]
        return weights, rates

    for rank, (weights, found) in enumerate(run_ranks(train, timeout=200)):
        for one, two in zip(weights, want.parameters(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)
        want_found = [[], [0] if rank else []] if way == "retry" else [0.5 if rank else 0.0, 1 / 8]
        assert found == want_found
