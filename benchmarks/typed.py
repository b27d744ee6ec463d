"""`make bench`: what `@tensorcheck` costs a call, against `jaxtyped(typechecker=beartype)` on the same signature.

Three arguments and a return, in one process, one thread, the contestants taking turns; minima over the rounds.
"""

import json
import os
import timeit

os.environ["OMP_NUM_THREADS"] = "1"

import beartype
import jaxtyping
import torch
from jaxtyping import Float, jaxtyped
from record import RESULTS, environment

from torchguard.typing import Tensor, float32_t, tensorcheck

ROUNDS, CALLS = 40, 2_000
Values, Weights = Float[torch.Tensor, "batch seq hidden"], Float[torch.Tensor, "hidden"]
OurValues, OurWeights = Tensor[float32_t, ("batch", "seq", "hidden")], Tensor[float32_t, ("hidden",)]


def plain(x, residual, weight):
    return x


def theirs(x: Values, residual: Values, weight: Weights) -> Values:
    return x


def ours(x: OurValues, residual: OurValues, weight: OurWeights) -> OurValues:
    return x


def small(x: OurValues, residual: OurValues, weight: OurWeights) -> OurValues:
    return (x + residual) * weight


def main() -> None:
    torch.set_num_threads(1)
    eager = {
        "no check": plain,
        "jaxtyped(typechecker=beartype)": jaxtyped(typechecker=beartype.beartype)(theirs),
        "tensorcheck, jaxtyping's annotations": tensorcheck(theirs),
        "tensorcheck, our annotations": tensorcheck(ours),
    }
    compiled = {
        "compiled, no check": torch.compile(small, fullgraph=True),
        "compiled, tensorcheck": torch.compile(tensorcheck(small), fullgraph=True),
    }
    arguments = torch.randn(8, 16, 64), torch.randn(8, 16, 64), torch.randn(64)
    took = {name: float("inf") for name in eager | compiled}
    for _ in range(ROUNDS):
        for name, fn in (eager | compiled).items():
            seconds = timeit.timeit(lambda fn=fn: fn(*arguments), number=CALLS) / CALLS
            took[name] = min(took[name], 1e6 * seconds)
    peer = took["jaxtyped(typechecker=beartype)"]
    rows = [
        ("tensorcheck, our annotations / jaxtyped", "<= 0.4", took["tensorcheck, our annotations"] / peer),
        ("tensorcheck, jaxtyping's / jaxtyped", "<= 0.4", took["tensorcheck, jaxtyping's annotations"] / peer),
        ("compiled call, tensorcheck / no check", "", took["compiled, tensorcheck"] / took["compiled, no check"]),
    ]
    print(f"\n{'work':<52}{'to reach':>10}{'ours':>10}")
    for name, goal, ratio in rows:
        print(f"{name:<52}{goal:>10}{ratio:>10.2f}")
    for name, microseconds in took.items():
        print(f"{name:<52}{'':>10}{microseconds:>10.2f} us")
    found = {
        **environment(),
        "jaxtyping": jaxtyping.__version__,
        "beartype": beartype.__version__,
        "ratios": [{"work": name, "to reach": goal, "ours": ratio} for name, goal, ratio in rows],
        "microseconds": took,
    }
    (RESULTS / "typing.json").write_text(json.dumps(found, indent=2) + "\n")
    print("\nwritten to benchmarks/results/typing.json")


if __name__ == "__main__":
    main()
