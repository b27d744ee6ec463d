"""Random schedules of faults on four ranks: who has how many samples, which of them are bad, who is slow, who dies.

Each rank derives the whole schedule from its seed, so each can compute what one process would have done.
"""

import os
import random
import signal
import time
from dataclasses import dataclass

import torch
import torch._dynamo  # before processes are forked, not in each of them
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from torchguard import Retry, distributed, watch

RANKS = 4
POINTS = ("forward", "decision", "backward", "optimizer")
POLICIES = ("any", "majority", 0.5, 1.0, "never")


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
        return cls(POLICIES[seed % len(POLICIES)], steps)

    def is_skipped(self, step: Step) -> bool:
        if self.policy == "without good samples":
            return not len(step.good())
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


def same(found: list[Tensor], want: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(found, want, strict=True))


def parallel(kind: str, model: nn.Module) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Trainer:
    """A model under DDP or FSDP2 that starts anew for each schedule."""

    def __init__(self, kind: str, model: nn.Module) -> None:
        self.model = parallel(kind, model)
        self.start = [p.detach().clone() for p in self.model.parameters()]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def run(self, schedule: Schedule) -> tuple[list[object], list[Tensor]]:
        """What each step returns, and the weights after the last."""
        self.optimizer.state.clear()
        with torch.no_grad():
            for p, value in zip(self.model.parameters(), self.start, strict=True):
                p.copy_(value)
        return [self.step(step, schedule.policy) for step in schedule.steps], weights(self.model)

    def step(self, step: Step, policy: str | float, die: str = "") -> object:
        raise NotImplementedError


class Watching(Trainer):
    """A watched model in quarantine: a step is skipped if the ranks agree on it."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind, watch(network(), quarantine=True))

    def explains(self, decisions: list[object], schedule: Schedule) -> bool:
        return decisions == [schedule.is_skipped(step) for step in schedule.steps]

    def step(self, step: Step, policy: str | float, die: str = "") -> bool:
        wait_if_slow(step)
        self.optimizer.zero_grad()
        die_at(die, "forward")
        out, f = self.model(step.batches[dist.get_rank()])
        die_at(die, "decision")
        is_skipped = policy != "never" and bool(distributed.agree(f, policy))
        if not is_skipped:
            loss = distributed.mean_ok(f, loss_of(out))
            if die == "backward":
                out.register_hook(lambda _: die_at(die, "backward"))
            loss.backward()
            die_at(die, "optimizer")
            self.optimizer.step()
        elif hasattr(self.model, "reshard"):  # FSDP2 keeps the parameters of the last module gathered for backward
            self.model.reshard()
        return is_skipped


class Retrying(Trainer):
    """A step is run again without its bad samples, and skipped if there are no others."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind, network())
        self.guard = Retry(self.model, self.optimizer)

    def explains(self, decisions: list[tuple[list[int], bool]], schedule: Schedule) -> bool:
        """Where all samples are bad and not each loss shows it, nobody is accused: the cause may be the model."""
        return all(
            is_skipped == (not len(step.good())) and (bad == step.bad[dist.get_rank()] or (is_skipped and not bad))
            for (bad, is_skipped), step in zip(decisions, schedule.steps, strict=True)
        )

    def step(self, step: Step, policy: str | float, die: str = "") -> tuple[list[int], bool]:
        wait_if_slow(step)

        def losses(x: Tensor) -> Tensor:
            die_at(die, "forward")
            out = self.model(x)
            die_at(die, "decision")
            if die == "backward":
                out.register_hook(lambda _: die_at(die, "backward"))
            return loss_of(out)

        report = self.guard.step(losses, step.batches[dist.get_rank()])
        die_at(die, "optimizer")
        return report.bad, report.skipped


def wait_if_slow(step: Step) -> None:
    if step.slow == dist.get_rank():
        time.sleep(0.002)


def die_at(chosen: str, point: str) -> None:
    if chosen == point:
        os.kill(os.getpid(), signal.SIGKILL)


TRAINERS = {"watch": Watching, "Retry": Retrying}


def run_many(how: str, kind: str, seeds: range) -> list[tuple[int, str]]:
    """Run schedules one after the other; returns those that went wrong."""
    trainer, wrong = TRAINERS[how](kind), []
    for seed in seeds:
        # An empty batch leaves FSDP2's and DDP's collectives in place, too.
        schedule = Schedule.of(seed, smallest=seed % 2)
        if how == "Retry":
            schedule.policy = "without good samples"
        decisions, found = trainer.run(schedule)
        if not trainer.explains(decisions, schedule):
            wrong.append((seed, f"decided {decisions}"))
        # One rank compares: all have the same weights.
        if seed % RANKS == dist.get_rank() and not same(found, wanted(schedule)):
            wrong.append((seed, "weights differ"))
    return wrong


@dataclass
class Death:
    """Which rank dies, in which step, at which point of it."""

    rank: int
    step: int
    point: str

    @classmethod
    def of(cls, seed: int, schedule: Schedule) -> "Death":
        choose = random.Random(seed)
        rank, step, point = choose.randrange(RANKS), choose.randrange(3), choose.choice(POINTS)
        is_skipped = schedule.is_skipped(schedule.steps[step % len(schedule.steps)])
        return cls(rank, step, "decision" if is_skipped and point in ("backward", "optimizer") else point)


def run_with_a_death(how: str, kind: str, seed: int) -> list[int]:
    """Steps in which one rank is killed: returns the ranks that the error of this one names."""
    schedule = Schedule.of(seed, smallest=1)
    death, trainer = Death.of(seed, schedule), TRAINERS[how](kind)
    try:
        with distributed.name_failures(interval=1.0):
            for number in range(6):
                step = schedule.steps[number % len(schedule.steps)]
                is_last = dist.get_rank() == death.rank and number == death.step
                trainer.step(step, schedule.policy, death.point if is_last else "")
    except distributed.RankFailedError as error:
        return [*error.ranks]
    return []
