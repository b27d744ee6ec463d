"""Random fault schedules on four ranks: no deadlock, no disagreement, the weights of one process with good samples."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.distributed.schedules import RANKS, run_many, run_retry, run_with_a_death

from torchguard.testing import run_ranks
from torchguard.testing._processes import outcomes


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_some_schedules(kind):
    assert run_ranks(run_many, kind, range(8), size=RANKS, timeout=120) == [[]] * RANKS


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_many_schedules(kind):
    assert run_ranks(run_many, kind, range(400), size=RANKS, timeout=500) == [[]] * RANKS


@pytest.mark.long
def test_many_schedules_with_retry():
    assert run_ranks(run_retry, range(150), size=RANKS, timeout=500) == [[]] * RANKS


def check_death(seed: int) -> None:
    kind = "ddp" if seed % 2 else "fsdp2"
    dead = random.Random(seed).randrange(RANKS)
    found = outcomes(run_with_a_death, kind, seed, size=RANKS, timeout=60)
    assert found[dead][0] == "died", (seed, found)
    for rank in {*range(RANKS)} - {dead}:
        how, named = found[rank]
        # A rank that gets no CPU for three signs of life is named, too: a test must not depend on the machine's load.
        assert how == "returned", (seed, rank, found)
        assert dead in named, (seed, rank, found)


@pytest.mark.long
def test_ranks_that_are_killed():
    with ThreadPoolExecutor(4) as pool:
        [*pool.map(check_death, range(50))]
