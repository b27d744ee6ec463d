"""Measures pieces of work with the torchguard on `PYTHONPATH`: reads one name a line, writes its microseconds.

`run.py` starts two of these, one with this version and one with the published package, and alternates between them.
"""

import sys
import time
from collections.abc import Callable

import torch

import torchguard as tg
from torchguard import err, flag_nan, flag_nan_and_inf, flags

torch.set_num_threads(1)


def best(fn: Callable[[], object], seconds: float = 0.15) -> float:
    """Minimum of the microseconds that a call takes, measured for about `seconds`."""
    fn()
    start = time.perf_counter()
    fn()
    calls = max(1, int(0.003 / (time.perf_counter() - start)))
    least, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        least = min(least, (time.perf_counter() - start) / calls)
    return least * 1e6


def eager_work() -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    clean = torch.randn(32, 512)
    bad, other = clean.clone(), clean.clone()
    bad[3, 4] = bad[9, 100] = float("nan")
    other[5, 4] = other[20, 100] = float("nan")
    empty = err.new(clean)
    at_1, at_2, elsewhere = flag_nan(bad, 1, empty), flag_nan(bad, 2, empty), flag_nan(other, 2, empty)
    wide = tg.ErrorConfig(num_slots=256)
    many = err.new_t(32, config=wide)
    for location in range(1, 41):
        many = flag_nan(bad, location, many, wide)
    return {
        "bare isnan(x).any(-1)": lambda: torch.isnan(clean).any(-1),
        "flag_nan, clean": lambda: flag_nan(clean, 3, empty),
        "flag_nan, 2 bad rows": lambda: flag_nan(bad, 3, empty),
        "flag_nan, 2 rows that were bad before": lambda: flag_nan(bad, 3, at_1),
        "flag_nan_and_inf, clean": lambda: flag_nan_and_inf(clean, 3, empty),
        "flag_nan_and_inf, 2 bad rows": lambda: flag_nan_and_inf(bad, 3, empty),
        "merge(2), clean": lambda: err.merge(empty, empty),
        "merge(2), errors in different rows": lambda: err.merge(at_1, elsewhere),
        "merge(2), errors in the same rows": lambda: err.merge(at_1, at_2),
        "summary, 16 slots": lambda: flags.summary(at_1),
        "summary, 256 slots": lambda: flags.summary(many, wide),
        "is_ok": lambda: err.is_ok(at_1),
        "new": lambda: err.new(clean),
    }


class Compiled:
    """12 x (Linear, GELU, check), compiled on first use. `compile` compiles it again and returns the microseconds."""

    def __init__(self, check) -> None:
        self.check = check
        self.x = torch.randn(32, 512)
        self.fn = None

    def compile(self) -> float:
        from models import Mlp

        torch._dynamo.reset()
        torch.manual_seed(0)
        self.fn = torch.compile(Mlp(self.check), fullgraph=True)
        start = time.perf_counter()
        self()
        return (time.perf_counter() - start) * 1e6

    def __call__(self) -> None:
        if self.fn is None:
            self.compile()
        with torch.no_grad():
            self.fn(self.x)


def take_turns(fns: dict[str, Callable[[], object]], seconds: float = 1.5) -> dict[str, float]:
    """Minimum of the microseconds of each; they alternate call by call, so that noise affects all alike."""
    least = dict.fromkeys(fns, float("inf"))
    for fn in fns.values():
        fn()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for name, fn in fns.items():
            start = time.perf_counter()
            fn()
            least[name] = min(least[name], time.perf_counter() - start)
    return {name: took * 1e6 for name, took in least.items()}


def main() -> None:
    eager = eager_work()
    runs: dict[str, float] = {}
    graphs = {"unguarded": Compiled(None), "guarded": Compiled(flag_nan), "fused": Compiled(flag_nan_and_inf)}
    for line in sys.stdin:
        name = line.strip()
        if name in eager:
            took = best(eager[name])
        elif name == "warm up":
            torch.compile(lambda x: x.sin() + 1)(torch.randn(7))
            took = 0.0
        else:
            what, which = name.split()
            if what == "run" and which == "unguarded":
                runs = take_turns(graphs)
            took = graphs[which].compile() if what == "compile" else runs[which]
        print(took, flush=True)


if __name__ == "__main__":
    main()
