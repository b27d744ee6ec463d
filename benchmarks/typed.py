"""`make bench`: what `@tensorcheck` costs a call, against `jaxtyped(typechecker=beartype)` on the same signature.

Three arguments and a return value. The variants alternate in one process on one thread; minima over the rounds.
"""

import os
import timeit

os.environ["OMP_NUM_THREADS"] = "1"

import beartype
import jaxtyping
import torch
from jaxtyping import Float, jaxtyped
from record import RESULTS, environment, write

from torchguard.typing import Tensor, float32_t, tensorcheck

ROUNDS, CALLS = 40, 2_000
Values, Weights = Float[torch.Tensor, "batch seq hidden"], Float[torch.Tensor, "hidden"]
OwnValues, OwnWeights = Tensor[float32_t, ("batch", "seq", "hidden")], Tensor[float32_t, ("hidden",)]


def plain(x, residual, weight):
    return x


def jaxtyping_annotations(x: Values, residual: Values, weight: Weights) -> Values:
    return x


def own_annotations(x: OwnValues, residual: OwnValues, weight: OwnWeights) -> OwnValues:
    return x


def small(x: OwnValues, residual: OwnValues, weight: OwnWeights) -> OwnValues:
    return (x + residual) * weight


def main() -> None:
    torch.set_num_threads(1)
    eager = {
        "no check": plain,
        "jaxtyped(typechecker=beartype)": jaxtyped(typechecker=beartype.beartype)(jaxtyping_annotations),
        "tensorcheck, jaxtyping's annotations": tensorcheck(jaxtyping_annotations),
        "tensorcheck, our annotations": tensorcheck(own_annotations),
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
    print(f"\n{'work':<52}{'target':>10}{'ratio':>10}")
    for name, target, ratio in rows:
        print(f"{name:<52}{target:>10}{ratio:>10.2f}")
    for name, microseconds in took.items():
        print(f"{name:<52}{'':>10}{microseconds:>10.2f} us")
    found = {
        **environment(),
        "jaxtyping": jaxtyping.__version__,
        "beartype": beartype.__version__,
        "ratios": [{"work": name, "to reach": target, "ours": ratio} for name, target, ratio in rows],
        "microseconds": took,
    }
    write(found, RESULTS / "typing.json")


if __name__ == "__main__":
    main()
