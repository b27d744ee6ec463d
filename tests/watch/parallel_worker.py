"""One of two processes: a watched model under DDP or FSDP, a bad sample in the batch of each.

It leaves by `os._exit`: gloo's destructor may wait for a thread that waits for the interpreter.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from torchguard import err, flags
from torchguard._watch import watch

BAD = 1


def model_and_batches() -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, [torch.randn(3, 4), torch.randn(3, 4)]


def wrapped(kind: str, model: nn.Module) -> nn.Module:
    if kind.startswith("ddp"):
        return DistributedDataParallel(model)
    if kind == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    return fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))


def whole(kind: str, parallel: nn.Module) -> list[list[float]]:
    """The parameters after a step, as plain numbers."""
    if kind == "fsdp1":
        with FullyShardedDataParallel.summon_full_params(parallel):
            return [p.detach().flatten().tolist() for p in parallel.parameters()]
    full = (p.full_tensor() if kind == "fsdp2" else p for p in parallel.parameters())
    return [p.detach().flatten().tolist() for p in full]


def main(kind: str, backend: str, rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model, batches = model_and_batches()
    x = batches[rank]
    x[BAD, 0] = float("nan")
    blocks = ["0", "2"] if kind == "ddp, once" else False
    parallel = wrapped(kind, watch(model, quarantine=True, compile_once=blocks))
    call = parallel if backend == "plain" else torch.compile(parallel, backend=backend)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    out, f = call(x)
    err.mean_ok(f, out.square().mean(-1)).backward()
    optimizer.step()
    found = {"flags": flags.repr(f), "parameters": whole(kind, parallel)}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
