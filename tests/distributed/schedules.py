"""Random schedules of faults on four ranks: who has how many samples, which of them are bad, who is slow, who dies.

Each rank derives the whole schedule from its seed, so each can compute what one process would have done.
"""

import os
import random
import signal
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from torchguard import Retry, distributed, watch

RANKS = 4
POINTS = ("forward", "backward", "decision", "optimizer")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


@dataclass
class Step:
    """One step: the batch of each rank, its bad samples, the rank that is slow."""

    batches: list[Tensor]
    bad: list[list[int]]
    slow: int

    def good(self) -> Tensor:
        kept = [x[[i for i in range(len(x)) if i not in bad]] for x, bad in zip(self.batches, self.bad, strict=True)]
        return torch.cat(kept)


@dataclass
class Schedule:
    """Some steps, and how the ranks decide whether to take one."""

    policy: str | float
    steps: list[Step]

    @classmethod
    def of(cls, seed: int, smallest: int) -> "Schedule":
        generator, choose = torch.Generator().manual_seed(seed), random.Random(seed)
        steps = []
        for _ in range(choose.randint(1, 3)):
            sizes = [choose.randint(smallest, 4) for _ in range(RANKS)]
            chance = choose.choice([0, 0.2, 0.5, 1])
            bad = [[row for row in range(size) if choose.random() < chance] for size in sizes]
            batches = [torch.randn(size, 3, generator=generator, dtype=torch.float64) for size in sizes]
            for x, rows in zip(batches, bad, strict=True):
                for row in rows:
                    x[row, choose.randrange(3)] = choose.choice([float("nan"), float("inf"), float("-inf")])
            steps.append(Step(batches, bad, choose.randrange(-RANKS, RANKS)))
        return cls(choose.choice(["any", "majority", 0.5, 1.0, "never"]), steps)

    def is_skipped(self, step: Step) -> bool:
        votes = sum(map(bool, step.bad))
        needed = {"any": 1, "majority": 3, 0.5: 2, 1.0: 4, "never": 5}[self.policy]
        return votes >= needed


def loss_of(out: Tensor) -> Tensor:
    return out.square().mean(-1)


def wanted(schedule: Schedule) -> list[Tensor]:
    """The weights of one process that has all samples but the bad ones."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in schedule.steps:
        good = step.good()
        if schedule.is_skipped(step):
            continue
        optimizer.zero_grad()
        (loss_of(model(good)).mean() if len(good) else 0 * sum(p.sum() for p in model.parameters())).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def weights(model: nn.Module) -> list[Tensor]:
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in model.parameters()]


class Trainer:
    """A watched model under DDP or FSDP2 that starts anew for each schedule."""

    def __init__(self, kind: str) -> None:
        watched = watch(network(), quarantine=True)
        if kind == "ddp":
            self.model: nn.Module = DistributedDataParallel(watched)
        else:
            mesh = dist.init_device_mesh("cpu", (RANKS,))
            fully_shard(watched[0], mesh=mesh)
            self.model = fully_shard(watched, mesh=mesh)
        self.start = [p.detach().clone() for p in self.model.parameters()]

    def run(self, schedule: Schedule) -> tuple[list[bool], list[Tensor]]:
        """The decision of each step, and the weights after the last."""
        with torch.no_grad():
            for p, value in zip(self.model.parameters(), self.start, strict=True):
                p.copy_(value)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        decisions = [self.step(step, schedule.policy, optimizer) for step in schedule.steps]
        return decisions, weights(self.model)

    def step(self, step: Step, policy: str | float, optimizer: torch.optim.Optimizer, die: str = "") -> bool:
        rank = dist.get_rank()
        if step.slow == rank:
            time.sleep(0.002)
        optimizer.zero_grad()
        die_at(die, "forward")
        out, f = self.model(step.batches[rank])
        die_at(die, "decision")
        is_skipped = policy != "never" and bool(distributed.agree(f, policy))
        if not is_skipped:
            loss = distributed.mean_ok(f, loss_of(out))
            if die == "backward":
                out.register_hook(lambda _: die_at(die, "backward"))
            loss.backward()
            die_at(die, "optimizer")
            optimizer.step()
        elif hasattr(self.model, "reshard"):  # FSDP2 keeps the parameters of the last module gathered for backward
            self.model.reshard()
        return is_skipped


def die_at(chosen: str, point: str) -> None:
    if chosen == point:
        os.kill(os.getpid(), signal.SIGKILL)


def run_many(kind: str, seeds: range) -> list[tuple[int, str]]:
    """Run schedules one after the other; returns those that went wrong."""
    trainer, wrong = Trainer(kind), []
    for seed in seeds:
        # An empty batch leaves FSDP2's and DDP's collectives in place, too.
        schedule = Schedule.of(seed, smallest=seed % 2)
        decisions, found = trainer.run(schedule)
        if decisions != [schedule.is_skipped(step) for step in schedule.steps]:
            wrong.append((seed, f"decided {decisions}"))
        if seed % RANKS == dist.get_rank():  # one rank compares: all have the same weights
            want = wanted(schedule)
            if not all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(found, want, strict=True)):
                wrong.append((seed, "weights differ"))
    return wrong


def run_retry(seeds: range) -> list[tuple[int, str]]:
    """The same with `Retry`, which runs a step again without its bad samples, under DDP."""
    model = DistributedDataParallel(network())
    start, wrong = weights(model), []
    for seed in seeds:
        schedule = Schedule.of(seed, smallest=1)
        with torch.no_grad():
            for p, value in zip(model.parameters(), start, strict=True):
                p.copy_(value)
        guard = Retry(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        schedule.policy = "never"
        steps = [step for step in schedule.steps if len(step.good())]
        for step in steps:
            report = guard.step(lambda x: loss_of(model(x)), step.batches[dist.get_rank()])
            if report.bad != step.bad[dist.get_rank()]:
                wrong.append((seed, str(report)))
        if seed % RANKS == dist.get_rank():
            want = wanted(Schedule("never", steps))
            if not all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(weights(model), want, strict=True)):
                wrong.append((seed, "weights differ"))
    return wrong


def run_with_a_death(kind: str, seed: int) -> list[int]:
    """Steps in which one rank is killed: returns the ranks that the error of this one names."""
    choose = random.Random(seed)
    dead, point, at = choose.randrange(RANKS), choose.choice(POINTS), choose.randrange(3)
    trainer = Trainer(kind)
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    schedule = Schedule.of(seed, smallest=1)
    try:
        with distributed.name_failures(interval=1.0):
            for number in range(6):
                step = schedule.steps[number % len(schedule.steps)]
                is_last = dist.get_rank() == dead and number == at
                trainer.step(step, "never", optimizer, point if is_last else "")
    except distributed.RankFailedError as error:
        return [*error.ranks]
    return []
