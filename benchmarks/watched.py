"""What `watch` costs an unmodified model: `python benchmarks/watched.py cpu`, `... gpu [RESULT.json]`.

`... families cpu`, `... families cuda RESULT.json` measure transformers' models: see `family_costs.py`. The rest of
this file measures models written here.

Each figure is a ratio to the unwatched model. All variants are compiled, have the same weights, and alternate call by
call in one process. CPU figures are minima on one thread; GPU figures are medians between CUDA events.

- "Bare" variants do the least that can be done in the graph, by hooks on the same modules. They take the maximum of
  each output; with `where` also of each input, and replace values with zeros where the maximum is not finite. They
  record no location and mask no gradients. Only their compile time is measured: any `watch` takes at least that.
- "Once" variants compile blocks that are alike once.
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

import family_costs
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
    """The minimum that any `watch` has to compute; with `replaces`, that any quarantine has to."""

    def __init__(self, model: nn.Module, replaces: bool = False) -> None:
        super().__init__()
        self.model, self.replaces = model, replaces
        self.found: list[Tensor] = []
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                if replaces:
                    module.register_forward_pre_hook(lambda _, args: (self.check(args[0]),))
                module.register_forward_hook(lambda _, args, out: self.check(out))

    def check(self, z: Tensor) -> Tensor:
        largest = z.abs().amax(-1, keepdim=True)
        self.found.append(largest)
        return torch.where(largest < math.inf, z, 0) if self.replaces else z

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.found = []
        out = self.model(x)
        found, self.found = self.found, []
        return out, (torch.cat(found, -1) < math.inf).flatten(1).all(-1)


class Once(nn.Module):
    """An unwatched model whose blocks are nested compile regions."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        protect_regions()  # as `watch` does: gradients would be wrong
        run = torch.compiler.nested_compile_region(type(model.blocks[0]).forward)
        for block in model.blocks:
            block.forward = functools.partial(run, block)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.model(x), None


VARIANTS: dict[str, Callable[[nn.Module], Any]] = {
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
# By device and work. Stages with CUDA graphs have the targets of the same work without them.
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
    """One table: which variants do which work, in which mode of the compiler."""

    name: str
    work: str
    names: tuple[str, ...] = tuple(VARIANTS)
    mode: str | None = None
    compiles: int = 1


Step = Callable[[], None]


def step_of(stage: Stage, variant: str, model: nn.Module, x: Tensor) -> Step:
    watched = VARIANTS[variant](copy.deepcopy(model))

    def call(x: Tensor) -> Any:
        return watched(x)

    # Dynamo stores compiled code, and which sizes are dynamic, by code object: each variant needs its own.
    code = call.__code__.replace(co_name="call_" + variant.replace(" + ", "_").replace(", ", "_"))
    own = types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
    compiled = torch.compile(own, fullgraph=True, mode=stage.mode)

    def inference() -> None:
        with torch.no_grad():
            compiled(x)

    def training() -> None:
        out = compiled(x)
        out = out if variant == BASE else out[0]
        out.float().square().mean().backward()
        watched.zero_grad(set_to_none=True)

    work = {"inference": inference, "training": training}[stage.work]

    def with_graphs() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        work()

    return with_graphs if stage.mode else work


def compile_seconds(step: Step, x: Tensor) -> float:
    # An empty cache: it finds kernels by their source, and the variants share most kernels of the model.
    with fresh_cache():
        start = time.perf_counter()
        step()
        if x.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start


def turns(steps: dict[str, Step], rounds: int):
    """Whether a call counts, its variant and its step. Each round starts with another variant."""
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
        # The host does not synchronize between steps, so that the GPU never waits for a launch.
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        if counts:
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: [start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}


def run(stage: Stage, model: nn.Module, x: Tensor, rounds: int, found: dict) -> None:
    """Measure a stage, and add its figures to `found`."""
    compiled: dict[str, float] = {}
    steps: dict[str, Step] = {}
    for _ in range(stage.compiles):
        torch._dynamo.reset()
        for name in stage.names:
            try:
                steps[name] = step_of(stage, name, model, x)
                seconds = compile_seconds(steps[name], x)
            except Exception as error:  # the others are still measured
                if name == BASE:
                    raise
                steps.pop(name, None)
                found["failed"][f"{stage.name}: {name}"] = f"{type(error).__name__}: {error}"[:2000]
                print(f"{stage.name}: {name} failed: {type(error).__name__}: {str(error)[:500]}", flush=True)
                continue
            compiled[name] = min(seconds, compiled.get(name, seconds))
            print(f"{stage.name}: {name} compiled in {seconds:.1f} s", flush=True)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    # Keep the garbage collector from scanning the objects that the compiler leaves behind.
    gc.collect()
    gc.freeze()
    # Bare variants are not timed: the weights of one more model would evict those of the others from the caches.
    timed = {name: step for name, step in steps.items() if name not in BARE}
    took = (times_on_gpu if x.is_cuda else times_on_cpu)(timed, rounds)
    recompiled = torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs
    if recompiled:
        print(f"{stage.name}: {recompiled} graphs were recompiled while measuring", flush=True)
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
        seconds, compile_ratio = (found[key][stage.name][name] for key in ("compile seconds", "compile ratios"))
        kind = name.removesuffix(ONCE)
        limits = [targets[stage.work].get(kind), targets["compile"].get(kind)]
        goals = ["" if limit is None else f"<= {limit:.2f}" for limit in limits]
        print(f"  {name:<32}{ms:>10.3f}{ratio:>9.3f}{goals[0]:>9}{seconds:>12.2f}{compile_ratio:>9.2f}{goals[1]:>9}")
    print(flush=True)


def measure(
    stages: list[Stage], small: nn.Module, model: nn.Module, x: Tensor, found: dict, options: argparse.Namespace
) -> None:
    result, rounds, only = options.result, options.rounds, options.only
    named = {name for stage in stages for name in stage.names}
    selected = named & {BASE, *(options.variant or VARIANTS)}
    for variant in selected:  # loads the toolchain, and what the compiler imports on first use
        with fresh_cache():
            step_of(Stage("warm up", "training"), variant, small, x)()
    torch._dynamo.reset()
    for stage in (stage for stage in stages if only is None or stage.name in only):
        names = tuple(name for name in stage.names if name in selected)
        run(stage._replace(names=names), model, x, rounds, found)
        table(stage, found)
        if result:  # after each stage, so that an interrupted run loses only one
            result.parent.mkdir(exist_ok=True)
            result.write_text(as_json(found) + "\n")
    if result:
        print(f"written to {result.name}")


def as_json(found: dict) -> str:
    """Indented JSON, with the raw times of each variant on one line."""
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
    names = tuple(name for name in VARIANTS if not name.endswith(ONCE))  # blocks of one Linear gain nothing
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
        kind.add_argument("--only", action="append", metavar="STAGE", help="only this stage; may be repeated")
        kind.add_argument("--variant", action="append", metavar="NAME", help="only this one and the unwatched model")
    gpu.add_argument("--device", default="cuda")
    for name, default in {"blocks": 24, "width": 1024, "length": 1024, "batch": 8}.items():
        gpu.add_argument(f"--{name}", type=int, default=default)
    family_costs.add_arguments(kinds.add_parser("families"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    {"cpu": on_cpu, "gpu": on_gpu, "families": family_costs.run}[options.kind](options)


if __name__ == "__main__":
    main()
