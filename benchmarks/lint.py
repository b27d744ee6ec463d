"""How long `torchguard lint` takes, beside TorchFix: `python benchmarks/lint.py [--torchfix COMMAND] DIR...`.

Each DIR is an unpacked package. Times the whole command, in a process of its own, on two cores: without its cache, and
once more with it. TorchFix is timed on the same files if its command, in an environment of its own, is given. The
commands alternate, and the result is the minimum over the rounds.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import RESULTS, environment, write

import torchguard

JOBS = 2
TARGET = 60.0  # seconds, for all of transformers


def lines_of(folder: Path) -> tuple[int, int]:
    """The number of Python files and of their lines."""
    files = [*folder.rglob("*.py")]
    return len(files), sum(file.read_bytes().count(b"\n") for file in files)


def timed(command: list[str], **variables: str) -> float:
    start = time.perf_counter()
    ran = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, **variables})
    took = time.perf_counter() - start
    if ran.returncode not in (0, 1):
        raise SystemExit(f"{command[0]} failed: {ran.stderr.decode()[-1000:]}")
    return took


def measure(folder: Path, torchfix: str | None, rounds: int) -> dict[str, Any]:
    """Seconds of each command, the least of all rounds."""
    ours = [sys.executable, "-m", "torchguard", "lint", "--jobs", str(JOBS), "--statistics"]
    seconds: dict[str, float] = {}

    def note(name: str, took: float) -> None:
        seconds[name] = min(took, seconds.get(name, took))

    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            note("torchguard, every rule", timed([*ours, "--no-cache", "--select", "TG", str(folder)]))
            note("torchguard, first run", timed([*ours, str(folder)], XDG_CACHE_HOME=cache))
            note("torchguard, from the cache", timed([*ours, str(folder)], XDG_CACHE_HOME=cache))
        if torchfix is not None:
            note("torchfix", timed([torchfix, "-j", str(JOBS), str(folder)]))
    files, lines = lines_of(folder)
    return {"package": folder.name, "files": files, "lines": lines, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--torchfix", help="the command of TorchFix 0.7")
    parser.add_argument("--torchfix-limit", type=int, default=10**9, help="no TorchFix on packages with more lines")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--result", type=Path, default=RESULTS / "lint.json")
    parser.add_argument("--note", help="what else the machine was doing")
    options = parser.parse_args()
    found: dict[str, Any] = {**environment(), "torchguard": torchguard.__version__, "processes": JOBS}
    found["rounds"] = options.rounds
    if options.note:
        found["note"] = options.note
    found["packages"] = []
    for folder in options.folders:
        is_small = lines_of(folder)[1] <= options.torchfix_limit
        measured = measure(folder, options.torchfix if is_small else None, options.rounds)
        found["packages"].append(measured)
        for name, took in measured["seconds"].items():
            print(f"{measured['package']}: {name}: {took:.1f} s, {measured['lines'] / took:,.0f} lines a second")
        if "torchfix" in measured["seconds"]:
            measured["torchfix / ours"] = measured["seconds"]["torchfix"] / measured["seconds"]["torchguard, first run"]
            print(f"{measured['package']}: TorchFix takes {measured['torchfix / ours']:.1f} times as long")
    write(found, options.result)


if __name__ == "__main__":
    main()
