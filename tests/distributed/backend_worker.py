"""What one rank runs on a backend: NCCL for "cuda", gloo for "cpu". Ranks are told by environment variables.

`python backend_worker.py CHECK DEVICE`. What NCCL returns is compared bit by bit with what gloo returns on the CPU.
"""

import faulthandler
import os
import signal
import sys
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.distributed.cases import everything, flags_with
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from torchguard import Retry, distributed, err, watch
from torchguard.distributed import _agree, _averages, _digest, _flags, _gather, _report

BAD = [[1], [0, 2]]  # of the samples of each rank


def rank_values(device):
    """Flags, losses, rows and step of this rank, which has more samples than the one before."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    losses = torch.rand(2 + rank, dtype=torch.float64, generator=generator)
    x = torch.rand(2, 3, generator=generator)
    f = flags_with(2 + rank, BAD[rank])
    return f.to(device), losses.to(device).requires_grad_(), x.to(device).requires_grad_(), torch.tensor(3).to(device)


def values_and_gradients(function, device):
    f, losses, x, step = rank_values(device)
    out = function(f, losses, x, step)
    (out[-2] + out[-1].square().sum()).backward()
    return [one.detach().cpu() for one in (*out, losses.grad, x.grad)]


def in_eager_mode(device):
    got = values_and_gradients(everything, device)
    assert_same(got, on_gloo(lambda: values_and_gradients(everything, "cpu")))
    assert_same(rows_and_gradients(device), on_gloo(lambda: rows_and_gradients("cpu")))
    assert_same(averages(device), on_gloo(lambda: averages("cpu")))
    if dist.get_world_size() > 1:
        with pytest.raises(distributed.RankMismatchError, match="rank 0 has 2, rank 1 has 3"):
            distributed.merge_flags(rank_values(device)[0])


def in_a_graph(device):
    for backend in ("aot_eager", "inductor"):
        compiled = torch.compile(everything, backend=backend, fullgraph=True)
        assert_same(values_and_gradients(compiled, device), values_and_gradients(everything, device))


def rows_and_gradients(device):
    """`all_gather` of different numbers of rows in every kind of dtype, and a loss over all of them."""
    rank, found = dist.get_rank(), []
    for dtype in (torch.bool, torch.int16, torch.float16, torch.bfloat16, torch.float64, torch.complex64):
        x = torch.ones(2 + rank, 3, dtype=dtype, device=device) * (rank + 1)
        x.requires_grad_(x.is_floating_point() or x.is_complex())
        out = distributed.all_gather(x)
        if x.requires_grad:
            out.abs().square().sum().backward()
        found += [out.detach(), *([x.grad] if x.requires_grad else [])]
    predictions = torch.ones(2 + rank, 3, dtype=torch.float64, device=device).requires_grad_()
    loss = distributed.calculate_loss_distributed(predictions, torch.full_like(predictions, 3.0 + rank))
    loss.backward()
    return [one.cpu() for one in (*found, loss.detach(), predictions.grad)]


def averages(device):
    rank = dist.get_rank()
    module = nn.ParameterList([torch.full((2,), 1.0 + rank, dtype=dtype, device=device) for dtype in FLOATS])
    for one in list(module)[rank:]:  # the first has a gradient on rank 0 alone
        one.grad = torch.full_like(one, 2.0 + rank)
    distributed.average_gradients(module)
    found = [one.grad.cpu() for one in module]
    return found + [distributed.all_reduce_parameter(one).detach().cpu() for one in module]


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)


def network(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1)).double().to(device)


def batch(rank, step):
    """Of each rank another sample is bad in the second of three steps; rank 1 has one sample more."""
    x = torch.randn(3 + rank, 4, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
    if step == 1:
        x[1 + rank, 0] = torch.nan
    return x


def trained_alone(device):
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        x = torch.cat([batch(rank, step) for rank in range(dist.get_world_size())]).to(device)
        optimizer.zero_grad()
        model(x[x.isfinite().all(1)]).square().mean().backward()
        optimizer.step()
    return [one.detach().cpu() for one in model.parameters()]


def training(device):
    """DDP and FSDP2, with `Retry` and watched: weights are those of one process without the bad samples."""
    want = trained_alone(device)
    for wrap in (DistributedDataParallel, sharded):
        for train in (train_with_retry, train_watched):
            got = train(wrap, device)
            for one, two in zip(got, want, strict=True):
                torch.testing.assert_close(one.cpu(), two, rtol=1e-9, atol=1e-9)


def sharded(model):
    fully_shard(model[0])
    return fully_shard(model)


def train_with_retry(wrap, device):
    net = network(device)
    model, rank = wrap(net), dist.get_rank()
    guard = Retry(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(3):
        report = guard.step(lambda x: model(x).square().mean(-1), batch(rank, step).to(device))
        assert report.bad == ([1 + rank] if step == 1 else [])
    return whole(net)


def train_watched(wrap, device):
    guarded = watch(network(device), quarantine=True)
    model, rank = wrap(guarded), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        out, f = model(batch(rank, step).to(device))
        assert err.is_err(f).nonzero().flatten().tolist() == ([1 + rank] if step == 1 else [])
        optimizer.zero_grad()
        distributed.mean_ok(f, out.square().mean(-1)).backward()
        optimizer.step()
        if step == 1:
            found = distributed.gather_report(guarded)
            assert [one.rank for one in found] == [*range(dist.get_world_size())]
            assert [one.global_sample for one in found] == [1, 5][: len(found)]
    return whole(guarded)


def whole(model):
    return [one.full_tensor() if hasattr(one, "full_tensor") else one.detach() for one in model.parameters()]


def a_rank_that_dies(device):
    """Rank 1 is killed between two collectives; rank 0 gets an error that names it."""
    one = torch.ones(1, device=device)
    failure = pytest.raises(distributed.RankFailedError, match=r"^rank 1 died: its process has ended")
    with failure as caught, distributed.name_failures(interval=0.2):
        dist.all_reduce(one)
        one.item()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(one)
        one.item()
    assert [*caught.value.ranks] == [1]


def assert_same(got, want):
    assert len(got) == len(want)
    for index, (one, two) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(one, two), (index, one, two)


def on_gloo(function):
    """Call a function in which the default group sends by gloo."""
    before, dist.group.WORLD = dist.group.WORLD, GLOO[0]
    try:
        return function()
    finally:
        dist.group.WORLD = before


GLOO = []
CHECKS = {
    "eager": in_eager_mode,
    "graph": in_a_graph,
    "training": training,
    "death": a_rank_that_dies,
}


def have_one_rank_send():
    """A group of one rank sends nothing. Here it sends to itself, so that the backend is given all that it would be."""
    for module in (_agree, _averages, _digest, _flags, _gather, _report):
        module.group_of = lambda who, group: dist.group.WORLD if group is None else group


def main(check, device):
    faulthandler.dump_traceback_later(60 if check == "death" else 150, exit=True)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    limit = timedelta(seconds=20 if check == "death" else 120)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=limit)
    GLOO.append(dist.new_group(backend="gloo"))
    if dist.get_world_size() == 1:
        have_one_rank_send()
    CHECKS[check](device)
    if device == "cuda":
        torch.cuda.synchronize()
    if check != "death":
        dist.barrier(GLOO[0])  # NCCL of a rank whose work is not done reports an end of the other as its failure


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # an ordinary end may wait for the other ranks
    os._exit(0)
