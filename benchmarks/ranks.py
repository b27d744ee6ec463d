"""A step's digest at 8, 1,024 and 16,384 ranks: measured parts, and a simulation of the messages.

Measured here: what a rank computes for its digest, and one small reduction of gloo on the loopback device. Simulated:
a reduction by recursive doubling, as NCCL's trees need log2(ranks) rounds too, against a gather in a ring, which needs
ranks - 1 rounds. A message takes `--latency` microseconds, and its bytes at `--bandwidth`; ranks arrive up to
`--jitter` microseconds apart. What is reported is the time from the arrival of the last rank until all ranks have the
result.
"""

import argparse
import math
import time

import numpy as np
import torch
import torch.distributed as dist

from torchguard import distributed, err
from torchguard.testing import run_ranks

COUNTS, STEP_AND_TABLE, RANKS_PER_NUMBER = 19, 128, 45  # of a digest: see `torchguard.distributed.digest`
GATHERED = COUNTS + 3  # what each rank would send to a gather: counts, its first error, the step, the table


def digest_bytes(ranks: int) -> int:
    return 8 * (COUNTS + STEP_AND_TABLE + math.ceil(ranks / RANKS_PER_NUMBER))


def measured_locally(batch: int) -> float:
    """Microseconds of `digest` without a process group."""
    f = err.push(err.new_t(batch), err.NAN, location=200, where=torch.arange(batch) == 3)
    return min(_timed(lambda: distributed.digest(f), 20) for _ in range(10))


def measured_on_gloo(size: int) -> tuple[float, float, float]:
    """Microseconds of one small reduction, of a digest, and of a gather of 32 samples' flags, on local gloo ranks."""

    def measure() -> tuple[float, float, float]:
        numbers, f = torch.zeros(digest_bytes(size) // 8, dtype=torch.float64), err.new_t(32)
        calls = (
            lambda: dist.all_reduce(numbers),
            lambda: distributed.digest(f),
            lambda: distributed.gather_flags(f, rows=32),
        )
        return tuple(min(_timed(call, 20) for _ in range(5)) for call in calls)  # pyright: ignore[reportReturnType]

    return tuple(np.median(run_ranks(measure, size=size, timeout=300), axis=0).tolist())


def _timed(call, repeat: int) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - start) / repeat * 1e6


def doubling(arrival: np.ndarray, latency: float) -> np.ndarray:
    """When each rank has the result of a reduction by recursive doubling."""
    times, ranks = arrival.copy(), np.arange(len(arrival))
    for level in range(int(math.log2(len(arrival)))):
        times = np.maximum(times, times[ranks ^ (1 << level)]) + latency
    return times


def ring(arrival: np.ndarray, latency: float) -> np.ndarray:
    """When each rank has the parts of all others, each of which travels around the ring."""
    times = arrival.copy()
    for _ in range(len(arrival) - 1):
        times = np.maximum(times, np.roll(times, 1)) + latency
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--latency", type=float, default=5.0, help="microseconds of one message")
    parser.add_argument("--bandwidth", type=float, default=12.5, help="gigabytes a second between two ranks")
    parser.add_argument("--jitter", type=float, default=200.0, help="microseconds between the first and last rank")
    options = parser.parse_args()
    for batch in (32, 1024):
        print(f"digest of {batch} samples on one rank: {measured_locally(batch):.0f} us")
    for size in (2, 4, 8):
        reduction, digest, gather = measured_on_gloo(size)
        print(f"gloo, {size} ranks: reduction {reduction:.0f} us, digest {digest:.0f} us, gather_flags {gather:.0f} us")
    generator = np.random.default_rng(0)
    print(f"simulated, {options.latency:g} us a message, {options.jitter:g} us of jitter:")
    for ranks in (8, 1_024, 16_384):
        arrival = generator.uniform(0, options.jitter, ranks)
        sent, part = digest_bytes(ranks), 8 * GATHERED
        rate = 1e3 * options.bandwidth  # bytes a microsecond
        reduced = doubling(arrival, options.latency + sent / rate).max() - arrival.max()
        gathered = ring(arrival, options.latency + part / rate).max() - arrival.max()
        print(
            f"{ranks:>6} ranks: digest {reduced:.0f} us, {sent} bytes a rank; gathered in a ring {gathered:.0f} us, "
            f"{part * ranks} bytes a rank"
        )


if __name__ == "__main__":
    main()
