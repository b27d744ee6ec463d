"""Four ranks train with FSDP2, and rank 2 meets a broken sample. Three ways to go on, and the run without that sample.

Run it with `python examples/the_step_that_never_hurt.py`: it forks its own gloo ranks, and needs no GPU.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from torchguard import distributed, watch
from torchguard.testing import run_ranks

RANKS, STEPS, BAD_STEP, BAD_RANK = 4, 6, 3, 2


def batch(rank: int, step: int, *, is_broken: bool) -> Tensor:
    """Eight samples of a rank. In one step of one rank, sample 5 is broken; or it was never there."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)
    if (rank, step) != (BAD_RANK, BAD_STEP):
        return x
    if is_broken:
        x[5, 3] = float("nan")
        return x
    return x[[0, 1, 2, 3, 4, 6, 7]]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1)).double()


def train(how: str) -> Tensor:
    """What each rank does; returns all weights."""
    rank, mesh, end = dist.get_rank(), dist.init_device_mesh("cpu", (RANKS,)), dist.new_group()
    model = network() if how in ("skip", "ignore") else watch(network(), quarantine=True)
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(STEPS):
        x = batch(rank, step, is_broken=how != "without the sample")
        if how == "skip" and not x.isfinite().all():
            continue  # from now on, this rank is one step ahead of the others
        if how in ("skip", "ignore"):
            loss = model(x).square().mean()
        else:
            out, f = model(x)
            loss = distributed.mean_ok(f, out.square().squeeze(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.barrier(end)
    return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])


def main() -> None:
    try:
        run_ranks(train, "skip", size=RANKS, timeout=30)
        raise AssertionError("skipping on one rank alone should not work")
    except distributed.RankFailedError as error:
        is_timeout = "Timed out" in str(error) or "no result within the timeout" in str(error)
        print(f"{'skip':>18}: {'hangs until the timeout' if is_timeout else error}")
    found = {
        how: run_ranks(train, how, size=RANKS, timeout=120) for how in ("ignore", "torchguard", "without the sample")
    }
    for how, (weights, *_) in found.items():
        print(f"{how:>18}: {int((~weights.isfinite()).sum())} of {len(weights)} weights are not finite")
    _, ours, without = found.values()
    difference = max((one - two).abs().max().item() for one, two in zip(ours, without, strict=True))
    print(f"torchguard's weights differ by {difference:.1e} from those of the run without the sample")
    assert is_timeout
    assert not any(weights.isfinite().all() for weights in found["ignore"])
    assert difference < 1e-9


if __name__ == "__main__":
    main()
