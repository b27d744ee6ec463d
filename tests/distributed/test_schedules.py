"""Random fault schedules on four ranks: no deadlock, no disagreement, the weights of one process with good samples."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.distributed.schedules import POINTS, POLICIES, RANKS, Death, Schedule, run_many, run_with_a_death

from torchguard.testing import run_ranks
from torchguard.testing._processes import outcomes

# Seeds of a thousand schedules, each of another one.
SEEDS = {
    ("watch", "ddp"): range(550),
    ("watch", "fsdp2"): range(550, 850),
    ("Retry", "ddp"): range(850, 920),
    ("Retry", "fsdp2"): range(920, 940),
}
DEATHS = range(940, 1000)


@pytest.mark.long
def test_all_schedules_are_different():
    seeds = [seed for some in (*SEEDS.values(), DEATHS) for seed in some]
    assert seeds == [*range(1000)]
    assert len({repr(Schedule.of(seed, smallest=seed % 2)) for seed in seeds}) == 1000
    steps = [step for seed in seeds for step in Schedule.of(seed, smallest=seed % 2).steps]
    assert sum(not len(step.good()) for step in steps) > 100
    deaths = [(seed, Schedule.of(seed, smallest=1)) for seed in DEATHS]
    assert {schedule.policy for _, schedule in deaths} == {*POLICIES}
    assert {Death.of(*one).point for one in deaths} == {*POINTS}


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_some_schedules(kind):
    assert run_ranks(run_many, "watch", kind, SEEDS["watch", kind][:8], size=RANKS, timeout=120) == [[]] * RANKS


@pytest.mark.long
@pytest.mark.parametrize(("how", "kind"), SEEDS)
def test_many_schedules(how, kind):
    assert run_ranks(run_many, how, kind, SEEDS[how, kind], size=RANKS, timeout=500) == [[]] * RANKS


def check_death(seed: int) -> None:
    how, kind = "Retry" if seed % 6 == 0 else "watch", "ddp" if seed % 2 else "fsdp2"
    dead = Death.of(seed, Schedule.of(seed, smallest=1)).rank
    found = outcomes(run_with_a_death, how, kind, seed, size=RANKS, timeout=60)
    assert found.pop(dead)[0] == "died", (seed, found)
    assert found == [("returned", [dead])] * (RANKS - 1), (seed, dead)


@pytest.mark.long
def test_ranks_that_are_killed():
    with ThreadPoolExecutor(4) as pool:
        [*pool.map(check_death, DEATHS)]
