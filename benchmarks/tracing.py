"""What `watch` adds to the time that Dynamo takes to trace a model: `python benchmarks/tracing.py`.

Seconds of the processor for the first call under `torch.compile(fullgraph=True, backend="eager")`, which traces, builds
guards and runs the graph once. This part of compiling is the same for every device. The models are those of
`families.py` in their tiny sizes: sizes do not matter here, the number of layers does. Variants alternate; minima of
five rounds. "traced" has Dynamo trace the hooks, as it does where they cannot be called (`_torch/hook_calls.py`).
"""

import copy
import gc
import os
import time
from collections.abc import Callable
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from families import FAMILIES, Family
from record import RESULTS, environment, write
from torch import nn

import torchguard
from torchguard._torch import hook_calls
from torchguard._watch import watch

ROUNDS, TRACED = 5, ", traced"
VARIANTS: dict[str, Callable[[nn.Module], Any]] = {
    "unwatched": lambda model: model,
    "modules": lambda model: watch(model),
    "quarantine": lambda model: watch(model, quarantine=True),
}
NAMES = [name + how for how in ("", TRACED) for name in VARIANTS if not (how and name == "unwatched")]


def seconds(name: str, family: Family, trains: bool) -> float:
    called = hook_calls._hooks_of
    if name.endswith(TRACED):
        hook_calls._hooks_of = lambda tx, variable: None
    torch.compiler.reset()
    model = VARIANTS[name.removesuffix(TRACED)](copy.deepcopy(family.model).train(trains))
    gc.collect()
    start = time.process_time()
    try:
        with torch.set_grad_enabled(trains):
            torch.compile(model, fullgraph=True, backend="eager")(**family.inputs)
    finally:
        hook_calls._hooks_of = called
    return time.process_time() - start


def measured(family: Family, trains: bool) -> dict[str, dict[str, float]]:
    rounds = [{name: seconds(name, family, trains) for name in NAMES} for _ in range(ROUNDS + 1)][1:]
    least = {name: min(one[name] for one in rounds) for name in NAMES}
    return {name: {"seconds": round(took, 3), "ratio": took / least["unwatched"]} for name, took in least.items()}


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {**environment(), "torchguard": torchguard.__version__, "models": {}}
    for name, new in FAMILIES.items():
        torch.manual_seed(0)
        family = new(False)
        found["models"][name] = {"work": family.work}
        for case, trains in {"inference": False, "training": True}.items():
            found["models"][name][case] = measured(family, trains)
            print(name, case, {one: round(got["ratio"], 2) for one, got in found["models"][name][case].items()})
    write(found, RESULTS / "tracing.json")


if __name__ == "__main__":
    main()
