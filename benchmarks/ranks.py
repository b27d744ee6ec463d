"""A step's digest at 8, 1,024 and 16,384 ranks: measured parts, and a simulation of the messages.

Measured here: what a rank computes for a digest of a group of that size, by the real function in a group whose
collectives send nothing; the bytes that it would send; and small reductions of gloo on the loopback device, by size.

Also measured: what `name_failures` asks of a TCPStore that has the notes of that many ranks.

Simulated: a reduction by recursive doubling, as NCCL's trees need log2(ranks) rounds too, against a gather in a ring,
which needs ranks - 1 rounds. Assumed of the network: a message takes `--latency` microseconds, and its bytes at
`--bandwidth`; ranks arrive up to `--jitter` microseconds apart. The time of a digest is what a rank computes, and the
time from the arrival of the last rank until all ranks have the result.
"""

import argparse
import math
import time
import timeit
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from record import RESULTS, environment, write
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchguard import distributed, err
from torchguard.distributed import _digest, _failures
from torchguard.testing import run_ranks

RANKS = (8, 1_024, 16_384)
BATCHES = (32, 1_024)
MESSAGES = (8, 1_024, 4_096, 65_536)  # bytes


def flags(batch: int) -> torch.Tensor:
    return err.push(err.new_t(batch), err.NAN, location=200, where=torch.arange(batch) == 3)


def part_bytes() -> int:
    """What each rank would send to a gather of the same content: counts, its first error, the step, the table."""
    return 8 * (len(_digest._counts(flags(1))) + 3)


def measured_locally(ranks: int) -> dict[str, Any]:
    """Microseconds of a digest in a group of `ranks` ranks that sends nothing, and the bytes that it would send."""
    dist.init_process_group("fake", rank=ranks - 1, world_size=ranks, store=FakeStore())
    try:
        sent: list[int] = []
        reduce = dist.all_reduce
        dist.all_reduce = lambda x, **options: sent.append(x.nbytes)
        distributed.digest(flags(32), step=0)
        dist.all_reduce = reduce
        times = {batch: _fastest(lambda f: distributed.digest(f, step=0), flags(batch)) for batch in BATCHES}
    finally:
        dist.destroy_process_group()
    (size,) = sent
    return {"bytes": size, "us by samples": {str(batch): round(us) for batch, us in times.items()}}


def measured_on_gloo(size: int) -> dict[str, float]:
    """Microseconds of reductions by their bytes, and of calls of ours with 32 samples, on local gloo ranks."""

    def measure() -> dict[str, float]:
        sent = [torch.zeros(count // 8, dtype=torch.float64) for count in MESSAGES]
        found = {f"{x.nbytes} bytes": _fastest(dist.all_reduce, x) for x in sent}
        calls = (distributed.agree, distributed.digest, distributed.gather_flags)
        return found | {call.__name__: _fastest(call, flags(32)) for call in calls}

    found = run_ranks(measure, size=size, timeout=300)
    return {name: round(float(np.median([one[name] for one in found]))) for name in found[0]}


def measured_store(ranks: int) -> dict[str, float]:
    """What `name_failures` asks of the store with the notes of many ranks: a TCPStore of this process."""
    board = object.__new__(_failures._Board)
    board.rank, board._others, board._prefix = 0, [*range(1, ranks)], f"block of {ranks}"
    board._store = dist.TCPStore("127.0.0.1", 0, 1, True)
    process = _failures._own_process()
    for rank in range(ranks):
        board._store.set(board._key(rank), f"alive 0 {process}")

    def sign_of_life() -> None:
        board._store.set(board._key(0), f"alive 1 {process}")
        board._store.check(["found"])

    return {
        "sign of life, us": round(min(timeit.repeat(sign_of_life, number=500, repeat=3)) / 500 * 1e6),
        "notes of all ranks, us": round(min(timeit.repeat(board._notes, number=1, repeat=5)) * 1e6),
    }


def _fastest(call: Any, x: torch.Tensor, rounds: int = 300, repeat: int = 2) -> float:
    """Microseconds of a call, in the fastest of some rounds."""
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeat):
            call(x)
        found.append((time.perf_counter() - start) / repeat * 1e6)
    return min(found)


def doubling(arrival: np.ndarray, message: float) -> np.ndarray:
    """When each rank has the result of a reduction by recursive doubling."""
    times, ranks = arrival.copy(), np.arange(len(arrival))
    for level in range(int(math.log2(len(arrival)))):
        times = np.maximum(times, times[ranks ^ (1 << level)]) + message
    return times


def ring(arrival: np.ndarray, message: float) -> np.ndarray:
    """When each rank has the parts of all others, each of which travels around the ring."""
    times = arrival.copy()
    for _ in range(len(arrival) - 1):
        times = np.maximum(times, np.roll(times, 1)) + message
    return times


def simulated(ranks: int, sent: int, assumed: dict[str, float]) -> dict[str, float]:
    """Microseconds from the arrival of the last rank until all have the result: reduced, and gathered in a ring."""
    arrival = np.random.default_rng(0).uniform(0, assumed["us between first and last rank"], ranks)
    rate = 1e3 * assumed["GB/s between two ranks"]  # bytes a microsecond
    latency, part = assumed["us a message"], part_bytes()
    return {
        "reduced, us": round(float(doubling(arrival, latency + sent / rate).max() - arrival.max()), 1),
        "gathered, us": round(float(ring(arrival, latency + part / rate).max() - arrival.max()), 1),
        "gathered, bytes": part * ranks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--latency", type=float, default=5.0, help="microseconds of one message")
    parser.add_argument("--bandwidth", type=float, default=12.5, help="gigabytes a second between two ranks")
    parser.add_argument("--jitter", type=float, default=200.0, help="microseconds between the first and last rank")
    parser.add_argument("result", nargs="?", type=Path, default=RESULTS / "ranks.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    assumed = {
        "us a message": options.latency,
        "GB/s between two ranks": options.bandwidth,
        "us between first and last rank": options.jitter,
    }
    on_gloo = {str(size): measured_on_gloo(size) for size in (2, 4)}
    digests = {}
    for ranks in RANKS:
        own = measured_locally(ranks)
        digests[str(ranks)] = {**own, **simulated(ranks, own["bytes"], assumed)}
        print(f"{ranks:>6} ranks: {digests[str(ranks)]}")
    stores = {str(ranks): measured_store(ranks) for ranks in RANKS}
    print(f"store: {stores}")
    for size, found in on_gloo.items():
        print(f"gloo, {size} ranks, us: {found}")
    found = {"digest": digests, "gloo, us": on_gloo, "store": stores}
    write({"environment": environment(), "assumed": assumed, **found}, options.result)


if __name__ == "__main__":
    main()
