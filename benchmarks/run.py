"""`make bench`: the error channel against the published 1.1.0 and against no checks, on one CPU thread.

Each figure is a ratio of two minima from one run in which the variants alternate. The published package has the same
import name, so it is installed into its own directory and measured by its own process.
"""

import os
import subprocess
import sys
from pathlib import Path

from record import HERE, RESULTS, environment, write

PEER = HERE.parent / ".benchmark-peers" / "torchguard-1.1.0"
RESULT = RESULTS / "cpu.json"
ROUNDS = 8


class Worker:
    def __init__(self, package: Path) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": f"{package}{os.pathsep}{HERE}",
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
            "PYTHONWARNINGS": "ignore",
        }
        self.process = subprocess.Popen(
            [sys.executable, HERE / "worker.py"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def measure(self, name: str) -> float:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{name}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the worker died measuring {name!r}")
        return float(answer)


def install_peer() -> None:
    if not PEER.exists():
        print("bench: installing the published torchguard 1.1.0 into .benchmark-peers")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", PEER, "torchguard==1.1.0"], check=True)


def minima(workers: dict[str, Worker], names: list[str], rounds: int) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for _ in range(rounds):
        for name in names:
            for who, worker in workers.items():
                took = worker.measure(name)
                found[who, name] = min(took, found.get((who, name), took))
    return found


def main() -> None:
    install_peer()
    workers = {"ours": Worker(HERE.parent / "src"), "published": Worker(PEER)}
    eager = [
        "bare isnan(x).any(-1)",
        "flag_nan, clean",
        "flag_nan, 2 bad rows",
        "flag_nan, 2 rows that were bad before",
        "flag_nan_and_inf, clean",
        "flag_nan_and_inf, 2 bad rows",
        "merge(2), clean",
        "merge(2), errors in different rows",
        "merge(2), errors in the same rows",
        "summary, 16 slots",
        "summary, 256 slots",
        "is_ok",
        "new",
    ]
    took = minima(workers, eager, ROUNDS)
    for worker in workers.values():
        worker.measure("warm up")
    took |= minima(workers, ["compile unguarded", "compile guarded", "compile fused"], rounds=2)
    took |= minima(workers, ["run unguarded", "run guarded", "run fused"], ROUNDS)

    def ratio(name: str, base: str):
        return [took[who, name] / took[who, base] for who in workers]

    def faster(name: str):
        return [took["published", name] / took["ours", name], None]

    bare = "bare isnan(x).any(-1)"
    rows = [
        ("eager flag_nan, clean batch / bare check", "<= 0.6", ratio("flag_nan, clean", bare)),
        ("eager flag_nan, 2 bad rows / bare check", "<= 2.5", ratio("flag_nan, 2 bad rows", bare)),
        ("... rows that were bad before / bare check", "", ratio("flag_nan, 2 rows that were bad before", bare)),
        ("eager flag_nan_and_inf / flag_nan, clean", "<= 1.4", ratio("flag_nan_and_inf, clean", "flag_nan, clean")),
        ("... 2 bad rows", "", ratio("flag_nan_and_inf, 2 bad rows", "flag_nan, 2 bad rows")),
        ("merge(2), clean: times faster than published", ">= 3", faster("merge(2), clean")),
        ("merge(2), different rows: times faster", ">= 3", faster("merge(2), errors in different rows")),
        ("merge(2), same rows: times faster", ">= 3", faster("merge(2), errors in the same rows")),
        ("summary, 16 slots: times faster", "", faster("summary, 16 slots")),
        ("summary, 256 slots: times faster", ">= 40", faster("summary, 256 slots")),
        ("compile time, 12 x (Linear, GELU, check)", "<= 2", ratio("compile guarded", "compile unguarded")),
        ("compiled run, the same", "<= 1.10", ratio("run guarded", "run unguarded")),
        ("compile time, flag_nan_and_inf as the check", "", ratio("compile fused", "compile unguarded")),
        ("compiled run, the same", "", ratio("run fused", "run unguarded")),
    ]
    report(rows, took)


def report(rows, took) -> None:
    print(f"\n{'work':<52}{'target':>10}{'2.0':>10}{'published':>11}")
    for name, target, (ours, published) in rows:
        print(f"{name:<52}{target:>10}{ours:>10.2f}{'' if published is None else f'{published:.2f}':>11}")
    found = {
        **environment(),
        "shape": [32, 512],
        "slots": 16,
        "ratios": [
            {"work": name, "to reach": target, "ours": ours, "published": published}
            for name, target, (ours, published) in rows
        ],
        "microseconds": {f"{who}: {name}": value for (who, name), value in took.items()},
    }
    write(found, RESULT)


if __name__ == "__main__":
    main()
