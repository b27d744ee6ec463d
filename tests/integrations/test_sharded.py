"""FSDP2 in Hugging Face's Trainer and in accelerate: two ranks train as one process without the bad samples."""

import pytest
import torch
from tests.integrations.launch import become_rank, shard_on_the_cpu
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from torchguard import Retry, distributed, watch
from torchguard.exceptions import RetryError
from torchguard.testing import run_ranks

pytest.importorskip("accelerate")
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import GradientAccumulationPlugin
from tests.integrations import test_transformers as of_trainer

pytestmark = pytest.mark.long


def trained(model, of_rank, *args):
    """The weights by name that a function has after training on two ranks, and what else it returns."""

    def train():
        become_rank()
        shard_on_the_cpu()
        sharded, found = of_rank(model, *args)
        weights = {name: one.full_tensor().detach() for name, one in sharded.named_parameters()}
        assert all(isinstance(one, DTensor) for one in sharded.parameters())
        return weights, found

    return run_ranks(train, timeout=200)


def assert_equal_weights(weights, want):
    for name, one in want.named_parameters():
        torch.testing.assert_close(weights[name], one, rtol=1e-9, atol=1e-8)


def train_by_trainer(model, way, rows, folder, accumulate, layer, settings):
    config = {"transformer_layer_cls_to_wrap": [layer]}
    how = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulate, "fsdp": True}
    args = of_trainer.arguments(folder, fsdp_config=config, **how, **settings)
    trainer = of_trainer.guarded_trainer(way, model, args, rows)
    trainer.train()
    assert trainer.accelerator.is_fsdp2
    is_retry = way == "retry"
    found = sum(len(one.bad) for one in trainer.guard.history) if is_retry else trainer.model.run_report().total
    return trainer.model, (found, of_trainer.logged_losses(trainer))


EACH = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
GPT2 = of_trainer.lm, of_trainer.tokens, "GPT2Block", True
VIT = of_trainer.vit, of_trainer.images, "ViTLayer", False


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # torch's, of a view that ViT's embeddings return
@pytest.mark.parametrize(
    ("case", "way", "accumulate", "settings"),
    [
        (GPT2, "retry", 2, {}),
        (GPT2, "watch", 2, {}),
        (VIT, "retry", 1, {}),
        (VIT, "watch", 2, {}),
        (VIT, "watch", 2, EACH),  # gradients are reduced after each micro-batch, and not after the last
    ],
)
def test_trainer(case, way, accumulate, settings, tmp_path):
    make, data, layer, shift = case
    bad = [2, 5]  # on rank 1 and on rank 0
    rows = data(bad)[:8]
    want, losses = of_trainer.trained_without(make(), rows, bad, shift, window=4 * accumulate)
    for weights, (found, logged) in trained(make(), train_by_trainer, way, rows, tmp_path, accumulate, layer, settings):
        assert_equal_weights(weights, want)
        assert found == 2
        assert logged == losses or not logged


def samples():
    x = torch.randn(16, of_trainer.LENGTH, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[[5, 11], 2, 3] = torch.nan
    return x


def losses_of(model, x):
    return model(inputs_embeds=x).logits.square().mean((1, 2))


def train_by_accelerate(model, way, accumulation):
    policy = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"]}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **policy)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=accumulation, fsdp_plugin=plugin)
    guarded = watch(model, quarantine=True, returns="output") if way == "watch" else model
    optimizer = torch.optim.SGD(guarded.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(guarded, optimizer, DataLoader(samples(), 2))
    guard = Retry(model, optimizer) if way == "retry" else None
    for x in loader:
        with accelerator.accumulate(model):
            if guard is not None:
                guard.backward(lambda x: losses_of(model, x) / accumulation.num_steps, x)
            else:
                losses = losses_of(model, x)
                accelerator.backward(distributed.mean_ok(guarded.flags, losses))
            optimizer.step()
            optimizer.zero_grad()
    return model, sum(len(one.bad) for one in guard.history) if way == "retry" else guarded.run_report().total


ONE, TWO = GradientAccumulationPlugin(1), GradientAccumulationPlugin(2)


@pytest.mark.parametrize(
    ("way", "accumulation"),
    [("retry", ONE), ("watch", TWO), ("retry", GradientAccumulationPlugin(2, sync_each_batch=True))],
)
def test_accelerate(way, accumulation):
    want, x = of_trainer.llama(), samples()
    optimizer = torch.optim.SGD(want.parameters(), lr=0.1, momentum=0.9)
    for number, rows in enumerate([[0, 1, 2, 3], [4, 6, 7], [8, 9, 10], [12, 13, 14, 15]], 1):
        (losses_of(want, x[rows]).mean() / accumulation.num_steps).backward()
        if number % accumulation.num_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
    for weights, found in trained(of_trainer.llama(), train_by_accelerate, way, accumulation):
        assert_equal_weights(weights, want)
        assert found == 1


def test_gradients_that_are_not_reduced_are_refused():
    def train():
        become_rank()
        shard_on_the_cpu()
        with pytest.raises(RetryError, match=r"set_requires_gradient_sync\(False\).*Give the micro-batches as a list"):
            train_by_accelerate(of_trainer.llama(), "retry", TWO)

    run_ranks(train)
