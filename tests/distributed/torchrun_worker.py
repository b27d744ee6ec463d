"""A training step as `torchrun` runs it. Each rank writes its loss, gradients and decision as JSON; a rank may die."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchguard import distributed, watch


def batch(rank: int) -> torch.Tensor:
    x = torch.randn(2 + rank, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    if rank == 1:
        x[2, 0] = float("nan")
    return x


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def step(rank: int) -> dict:
    model = DistributedDataParallel(watch(new_model(), quarantine=True))
    out, f = model(batch(rank))
    loss = distributed.mean_ok(f, out.square().mean(-1))
    loss.backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    return {"loss": loss.item(), "gradients": gradients.tolist(), "skips": bool(distributed.agree(f, "any"))}


def die_in_the_middle(rank: int) -> dict:
    try:
        with distributed.name_failures(interval=0.2):
            dist.all_reduce(torch.ones(1))
            if rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(1))
    except distributed.RankFailedError as error:
        return {"failed": [*error.ranks], "message": str(error)}
    return {"failed": []}


def main(folder: str, what: str) -> None:
    # torchrun ends the other ranks as soon as one has died. They have to say first what they saw.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = die_in_the_middle(rank) if what == "dies" else step(rank)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    # Not by the end of the interpreter: on a busy machine, a thread of gloo then aborts the process ("terminate called
    # without an active exception"), with torch's own DistributedDataParallel alone as well, destroyed group or not.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
