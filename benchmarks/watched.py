"""What `watch` costs a model nobody edited: `python benchmarks/watched.py cpu`, `... gpu [RESULT.json]`.

Ratios to the unwatched model. All is compiled; the contestants have the same weights, live in one process and take
turns call by call. Minima on the CPU, one thread; medians between CUDA events on a GPU.

"Bare" contestants do the least that can be done in the graph, by hooks on the same modules: a maximum of what each puts
out; with `where`, of what goes in as well, each replaced by zeros where that is not finite. They tell no place and stop
no gradients, and are compiled only: what that takes is what the compiler takes, whoever asks for it. Those "once" have
their blocks compiled once for all.
"""

import argparse
import copy
import functools
import gc
import json
import math
import os
import statistics
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

import torch
from models import Gpt, Mlp
from record import RESULTS, environment
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

import torchguard
from torchguard._torch.settings import protect_regions
from torchguard._watch import watch

BASE, BARE, ONCE = "unwatched", ("bare maxima", "bare maxima + where"), ", once"


class Bare(nn.Module):
    """The least that watching can be, and with `replaces` quarantine."""

    def __init__(self, model: nn.Module, replaces: bool = False) -> None:
        super().__init__()
        self.model, self.replaces = model, replaces
        self.found: list[Tensor] = []
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                if replaces:
                    module.register_forward_pre_hook(lambda _, args: (self.seen(args[0]),))
                module.register_forward_hook(lambda _, args, out: self.seen(out))

    def seen(self, z: Tensor) -> Tensor:
        largest = z.abs().amax(-1, keepdim=True)
        self.found.append(largest)
        return torch.where(largest < math.inf, z, 0) if self.replaces else z

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.found = []
        out = self.model(x)
        found, self.found = self.found, []
        return out, (torch.cat(found, -1) < math.inf).flatten(1).all(-1)


class Once(nn.Module):
    """An unwatched model whose blocks are nested regions."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        protect_regions()  # as `watch` does: gradients would be wrong
        run = torch.compiler.nested_compile_region(type(model.blocks[0]).forward)
        for block in model.blocks:
            block.forward = functools.partial(run, block)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.model(x), None


CONTESTANTS: dict[str, Callable[[nn.Module], Any]] = {
    BASE: lambda model: model,
    "blocks": lambda model: watch(model, level="blocks"),
    "modules": lambda model: watch(model, level="modules"),
    "modules + quarantine": lambda model: watch(model, level="modules", quarantine=True),
    "unwatched, once": Once,
    "modules, once": lambda model: watch(model, level="modules", compile_once=True),
    "modules + quarantine, once": lambda model: watch(model, level="modules", quarantine=True, compile_once=True),
    BARE[0]: Bare,
    BARE[1]: lambda model: Bare(model, replaces=True),
}
# By device and stage; the stages with CUDA graphs are held to what the same work without them is.
TARGETS = {
    "cpu": {
        "inference": {"blocks": 1.05, "modules": 1.10, "modules + quarantine": 1.20},
        "training": {"blocks": 1.05, "modules": 1.10, "modules + quarantine": 1.20},
        "compile": {"modules": 1.5, "modules + quarantine": 1.5},
    },
    "gpu": {
        "inference": {"blocks": 1.01, "modules": 1.12, "modules + quarantine": 1.18},
        "training": {"blocks": 1.03, "modules": 1.05, "modules + quarantine": 1.12},
        "compile": {"modules": 1.2, "modules + quarantine": 1.5},
    },
}
WARM_UP = 3


class Stage(NamedTuple):
    """One column of the table: who does what, under which mode of the compiler."""

    name: str
    work: str
    names: tuple[str, ...] = tuple(CONTESTANTS)
    mode: str | None = None
    compiles: int = 1


Step = Callable[[], None]


def step_of(stage: Stage, contestant: str, model: nn.Module, x: Tensor) -> Step:
    watched = CONTESTANTS[contestant](copy.deepcopy(model))

    def call(x: Tensor) -> Any:
        return watched(x)

    # Compiled code, and what Dynamo takes for dynamic, belong to the code object: each contestant has its own.
    code = call.__code__.replace(co_name="call_" + contestant.replace(" + ", "_").replace(", ", "_"))
    own = types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
    compiled = torch.compile(own, fullgraph=True, mode=stage.mode)

    def inference() -> None:
        with torch.no_grad():
            compiled(x)

    def training() -> None:
        out = compiled(x)
        out = out if contestant == BASE else out[0]
        out.float().square().mean().backward()
        watched.zero_grad(set_to_none=True)

    work = {"inference": inference, "training": training}[stage.work]

    def with_graphs() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        work()

    return with_graphs if stage.mode else work


def compile_seconds(step: Step, x: Tensor) -> float:
    # With nothing compiled before: kernels are found again by their source, and most are those of the model.
    with fresh_cache():
        start = time.perf_counter()
        step()
        if x.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start


def turns(steps: dict[str, Step], rounds: int):
    """Who is next, each round starting with another one."""
    names = list(steps)
    for i in range(WARM_UP + rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            yield i >= WARM_UP, name, steps[name]


def times_on_cpu(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    took: dict[str, list[float]] = {name: [] for name in steps}
    for counts, name, step in turns(steps, rounds):
        start = time.perf_counter()
        step()
        if counts:
            took[name].append(1e3 * (time.perf_counter() - start))
    return took


def times_on_gpu(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in steps}
    for counts, name, step in turns(steps, rounds):
        # Nothing waits for the GPU between the turns, so that it waits for no launch.
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        if counts:
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: [start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}


def run(stage: Stage, model: nn.Module, x: Tensor, rounds: int, found: dict) -> None:
    """The stage, added to what was found."""
    compiled: dict[str, float] = {}
    steps: dict[str, Step] = {}
    for _ in range(stage.compiles):
        torch._dynamo.reset()
        for name in stage.names:
            try:
                steps[name] = step_of(stage, name, model, x)
                seconds = compile_seconds(steps[name], x)
            except Exception as error:  # the others are still worth measuring
                if name == BASE:
                    raise
                steps.pop(name, None)
                found["failed"][f"{stage.name}: {name}"] = f"{type(error).__name__}: {error}"[:2000]
                print(f"{stage.name}: {name} failed: {type(error).__name__}: {str(error)[:500]}", flush=True)
                continue
            compiled[name] = min(seconds, compiled.get(name, seconds))
            print(f"{stage.name}: {name} compiled in {seconds:.1f} s", flush=True)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    # What the compiler leaves behind is not to be gone through again whenever Python collects garbage.
    gc.collect()
    gc.freeze()
    # Weights of one more model are weights that push those of all others out of the caches.
    timed = {name: step for name, step in steps.items() if name not in BARE}
    took = (times_on_gpu if x.is_cuda else times_on_cpu)(timed, rounds)
    recompiled = torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs
    if recompiled:
        print(f"{stage.name}: {recompiled} graphs were compiled again while measuring", flush=True)
    typical = {name: statistics.median(times) if x.is_cuda else min(times) for name, times in took.items()}
    found["ratios"][stage.name] = {name: round(ms / typical[BASE], 4) for name, ms in typical.items()}
    found["milliseconds"][stage.name] = {name: round(ms, 4) for name, ms in typical.items()}
    found["compile ratios"][stage.name] = {name: round(s / compiled[BASE], 3) for name, s in compiled.items()}
    found["compile seconds"][stage.name] = {name: round(s, 2) for name, s in compiled.items()}
    found["recompiles while measuring"][stage.name] = recompiled
    found["raw milliseconds"][stage.name] = {name: [round(ms, 4) for ms in times] for name, times in took.items()}
    steps.clear()
    torch._dynamo.reset()
    gc.unfreeze()
    gc.collect()
    if x.is_cuda:
        torch.cuda.empty_cache()


def table(stage: Stage, found: dict) -> None:
    targets = found["targets"]
    print(f"\n{stage.name:<34}{'ms':>10}{'ratio':>9}{'target':>9}{'compile s':>12}{'ratio':>9}{'target':>9}")
    for name in found["compile seconds"][stage.name]:
        ms, ratio = (found[key][stage.name].get(name, math.nan) for key in ("milliseconds", "ratios"))
        seconds, more = found["compile seconds"][stage.name][name], found["compile ratios"][stage.name][name]
        kind = name.removesuffix(ONCE)
        goals = [targets[stage.work].get(kind), targets["compile"].get(kind)]
        shown = ["" if goal is None else f"<= {goal:.2f}" for goal in goals]
        print(f"  {name:<32}{ms:>10.3f}{ratio:>9.3f}{shown[0]:>9}{seconds:>12.2f}{more:>9.2f}{shown[1]:>9}")
    print(flush=True)


def measure(
    stages: list[Stage], small: nn.Module, model: nn.Module, x: Tensor, found: dict, options: argparse.Namespace
) -> None:
    result, rounds, only = options.result, options.rounds, options.only
    named = {name for stage in stages for name in stage.names}
    taking_part = named & {BASE, *(options.contestant or CONTESTANTS)}
    for contestant in taking_part:  # the toolchain, and what the compiler imports when it first needs it
        with fresh_cache():
            step_of(Stage("warm up", "training"), contestant, small, x)()
    torch._dynamo.reset()
    for stage in (stage for stage in stages if only is None or stage.name in only):
        names = tuple(name for name in stage.names if name in taking_part)
        run(stage._replace(names=names), model, x, rounds, found)
        table(stage, found)
        if result:  # after each stage: a run that is cut short loses one
            result.parent.mkdir(exist_ok=True)
            result.write_text(as_json(found) + "\n")
    if result:
        print(f"written to {result.name}")


def as_json(found: dict) -> str:
    """Indented, the raw times of a contestant on one line."""
    raw = found["raw milliseconds"]
    lines = {f"@{i}@": times for i, times in enumerate(t for stage in raw.values() for t in stage.values())}
    keys = iter(lines)
    marked = {stage: {name: next(keys) for name in times} for stage, times in raw.items()}
    text = json.dumps({**found, "raw milliseconds": marked}, indent=2)
    for key, times in lines.items():
        text = text.replace(f'"{key}"', json.dumps(times))
    return text


def about(kind: str, device: str, work: str) -> dict:
    return {
        **environment(device),
        "torchguard": torchguard.__version__,
        "work": work,
        "targets": TARGETS[kind],
        "ratios": {},
        "milliseconds": {},
        "compile ratios": {},
        "compile seconds": {},
        "recompiles while measuring": {},
        "failed": {},
        "raw milliseconds": {},
    }


def on_cpu(options: argparse.Namespace) -> None:
    model, x = Mlp(), torch.randn(32, 512)
    work = "12 x Linear(512)+GELU, batch 32, float32, torch.compile(fullgraph=True), minima"
    found = about("cpu", "cpu", work)
    names = tuple(name for name in CONTESTANTS if not name.endswith(ONCE))  # a region for one Linear is of no use
    stages = [Stage("inference", "inference", names, compiles=3), Stage("training", "training", names, compiles=3)]
    measure(stages, Mlp(depth=2), model, x, found, options)


def on_gpu(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    placed = {"device": device, "dtype": torch.bfloat16}
    x = torch.randn(options.batch, options.length, options.width, **placed)
    model, small = (Gpt(blocks=blocks, width=options.width).to(**placed) for blocks in (options.blocks, 1))
    sizes = f"D={options.width}, T={options.length}, B={options.batch}"
    work = f"{options.blocks} GPT blocks, {sizes}, bf16, {6 * options.blocks} activations at level modules, "
    found = about("gpu", options.device, f"{work}torch.compile(fullgraph=True), medians")
    few = (BASE, *(name + how for how in ("", ONCE) for name in ("modules", "modules + quarantine")))
    stages = [
        Stage("training", "training"),
        Stage("inference", "inference"),
        Stage("inference, reduce-overhead", "inference", few, "reduce-overhead"),
        Stage("training, reduce-overhead", "training", few, "reduce-overhead"),
    ]
    measure(stages, small, model, x, found, options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    cpu, gpu = kinds.add_parser("cpu"), kinds.add_parser("gpu")
    for kind, result, rounds in ((cpu, RESULTS / "watched-cpu.json", 1000), (gpu, None, 60)):
        kind.add_argument("result", nargs="?", type=Path, default=result)
        kind.add_argument("--rounds", type=int, default=rounds)
        kind.add_argument("--only", action="append", metavar="STAGE", help="this stage alone; may be repeated")
        kind.add_argument("--contestant", action="append", metavar="NAME", help="beside the unwatched, this one alone")
    gpu.add_argument("--device", default="cuda")
    for name, default in {"blocks": 24, "width": 1024, "length": 1024, "batch": 8}.items():
        gpu.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    {"cpu": on_cpu, "gpu": on_gpu}[options.kind](options)


if __name__ == "__main__":
    main()
