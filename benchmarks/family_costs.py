"""What `watch` costs the models of `families.py`: `python benchmarks/watched.py families cuda Llama --case inference`.

Every variant has its own copy of the model, is compiled on its own with all caches cold, and is measured in rounds that
alternate with those of the others. For each variant a result has

- `latency`: milliseconds of a call that is waited for;
- `back to back`: milliseconds of a call in a row of ten;
- `host`: microseconds until a call returns, with an idle device;
- `guards`: how many guards Dynamo checks before a call; `guards a module`: how many more than the unwatched model, for
  each watched module;
- `launches`: the kernels that one call launches on a GPU; on the CPU, the operations that compiled code calls;
- `peak memory`: MiB above what is allocated between calls, on a GPU;
- `compile`: seconds of the first call.

Ratios are medians of the ratios of rounds, milliseconds are medians on a GPU and minima on the CPU.
"""

import argparse
import copy
import gc
import json
import statistics
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from families import FAMILIES, Family, Inputs
from record import RESULTS, environment
from torch import nn
from torch._inductor.utils import fresh_cache

import torchguard
from torchguard._torch.dynamo import cache_of, entries_of
from torchguard._torch.guards import children_of, leaves_of
from torchguard._watch import watch

BASE, ROW = "unwatched", 10
VARIANTS: dict[str, Callable[[nn.Module], Any]] = {
    BASE: lambda model: model,
    "blocks": lambda model: watch(model, level="blocks"),
    "modules": lambda model: watch(model),
    "quarantine": lambda model: watch(model, quarantine=True),
}
Step = Callable[[], Any]


class Case(NamedTuple):
    """What is done with a model."""

    trains: bool = False
    decodes: bool = False
    mode: str | None = None


CASES = {
    "inference": Case(),
    "CUDA graphs": Case(mode="reduce-overhead"),
    "decoding": Case(decodes=True),
    "decoding, CUDA graphs": Case(decodes=True, mode="reduce-overhead"),
    "training": Case(trains=True),
}


class Compiled(NamedTuple):
    """One variant: a function that does the work once, and what is known about the compiled code."""

    step: Step
    facts: dict[str, float]
    modules: int


def compiled(name: str, family: Family, case: Case) -> Compiled:
    model = VARIANTS[name](copy.deepcopy(family.model).train(case.trains))
    inputs: Inputs = family.decoding if case.decodes and family.decoding is not None else family.inputs

    def call(**inputs: Any) -> Any:
        return model(**inputs)

    # Dynamo stores compiled code, and which sizes are dynamic, by code object: each variant needs its own.
    code = call.__code__.replace(co_name=f"call_{name}")
    own = types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
    run = torch.compile(own, fullgraph=True, mode=case.mode)

    def inference() -> None:
        with torch.no_grad():
            run(**inputs)

    def training() -> None:
        output = run(**inputs)
        family.loss(output if name == BASE else output[0]).backward()
        model.zero_grad(set_to_none=True)

    work = training if case.trains else inference

    def in_graphs() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        work()

    step = in_graphs if case.mode else work
    with fresh_cache():
        start = time.perf_counter()
        step()
        _wait()
        seconds = time.perf_counter() - start
    state = getattr(model, "_watch", None)
    return Compiled(step, {"compile": seconds, "guards": _guards(run)}, len(state.paths) - 2 if state else 0)


def _guards(compiled: Any) -> int:
    """The number of guards that Dynamo checks before a call."""

    def count(manager: Any) -> int:
        return len(leaves_of(manager)) + sum(map(count, children_of(manager)))

    cache = cache_of(compiled)
    return sum(count(guards.root) for _, guards in entries_of(cache)) if cache else 0


def _launches(step: Step) -> int:
    """The kernels that a call launches; on the CPU, the operations that it calls."""
    kind = torch.profiler.ProfilerActivity.CUDA if torch.cuda.is_available() else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profile:
        step()
        _wait()
    device = kind.name
    skipped = ("Memcpy", "Memset", "aten::empty", "aten::as_strided", "Torch-Compiled", "TorchDynamo", "[memory]")
    events = [event for event in profile.events() or () if event.device_type.name == device]
    return sum(not event.name.startswith(skipped) for event in events)


def _peak(step: Step) -> float:
    _wait()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    _wait()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(steps: dict[str, Step], rounds: int) -> dict[str, dict[str, list[float]]]:
    """By figure and variant, the times of all rounds. Each round begins with another variant."""
    figures = ("latency", "back to back", "host")
    found: dict[str, dict[str, list[float]]] = {figure: {name: [] for name in steps} for figure in figures}
    names = [*steps]
    for round in range(rounds + 2):
        first = round % len(names)
        for name in names[first:] + names[:first]:
            step = steps[name]
            step()
            _wait()
            start = time.perf_counter()
            for _ in range(ROW):
                step()
            _wait()
            row = (time.perf_counter() - start) / ROW
            single, host = [], []
            for _ in range(3):
                start = time.perf_counter()
                step()
                host.append(time.perf_counter() - start)
                _wait()
                single.append(time.perf_counter() - start)
            if round >= 2:
                found["back to back"][name].append(1e3 * row)
                found["latency"][name].append(1e3 * statistics.median(single))
                found["host"][name].append(1e6 * statistics.median(host))
    return found


def measured(family: Family, case: Case, variants: list[str], rounds: int) -> dict[str, Any]:
    """The figures of one case, by variant."""
    torch._dynamo.reset()
    on_gpu = torch.cuda.is_available()
    found: dict[str, dict[str, float]] = {}
    steps: dict[str, Step] = {}
    for name in variants:
        one = compiled(name, family, case)
        found[name], steps[name] = one.facts, one.step
        if one.modules:
            found[name]["guards a module"] = (one.facts["guards"] - found[BASE]["guards"]) / one.modules
        for _ in range(3):  # CUDA graphs are recorded in the second call
            one.step()
        found[name]["launches"] = _launches(one.step)
        if on_gpu:
            found[name]["peak memory"] = _peak(one.step)
    # Keep the garbage collector from scanning the objects that the compiler leaves behind.
    gc.collect()
    gc.freeze()
    times = timed(steps, rounds)
    typical = statistics.median if on_gpu else min
    for figure, by_name in times.items():
        for name in variants:
            found[name][figure] = typical(by_name[name])
            pairs = zip(by_name[name], by_name[BASE], strict=True)
            found[name][f"{figure}, ratio"] = statistics.median(one / base for one, base in pairs)
    for name in variants:
        for figure in ("compile", "peak memory"):
            if base := found[BASE].get(figure):
                found[name][f"{figure}, ratio"] = found[name][figure] / base
    gc.unfreeze()
    return {name: {key: round(value, 4) for key, value in sorted(one.items())} for name, one in found.items()}


def run(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    is_large = options.device != "cpu"
    placed = {"device": options.device, "dtype": torch.bfloat16 if is_large else torch.float32}
    found: dict[str, Any] = {**environment(options.device), "torchguard": torchguard.__version__, "models": {}}
    variants = [BASE, *(name for name in VARIANTS if name in options.variant)]
    small = _placed(FAMILIES["GPT of ours"](False), **placed)
    for name in variants:  # loads the toolchain, and what the compiler imports on first use
        compiled(name, small, CASES["training"])
    for name in options.model or FAMILIES:
        family = _placed(FAMILIES[name](is_large), **placed)
        of_model: dict[str, Any] = {"work": family.work}
        found["models"][name] = of_model
        for label in options.case or CASES:
            case = CASES[label]
            if (case.decodes and family.decoding is None) or (case.mode and not is_large):
                continue
            start = time.perf_counter()
            try:
                of_model[label] = measured(family, case, variants, options.rounds)
            except Exception as error:  # the other cases are still measured
                of_model[label] = {"failed": f"{type(error).__name__}: {error}"[:2000]}
            print(f"{name}, {label}: {time.perf_counter() - start:.0f} s", flush=True)
            print(json.dumps(of_model[label], indent=1), flush=True)
            gc.collect()
            if is_large:
                torch.cuda.empty_cache()
            options.result.write_text(json.dumps(found, indent=1) + "\n")  # an interrupted run loses one case


def _placed(family: Family, device: str, dtype: torch.dtype) -> Family:
    def move(inputs: Inputs) -> Inputs:
        return {key: z.to(device, dtype) if z.is_floating_point() else z.to(device) for key, z in inputs.items()}

    model, decoding = family.model.to(device, dtype), family.decoding
    return family._replace(model=model, inputs=move(family.inputs), decoding=decoding and move(decoding))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("device", choices=["cpu", "cuda"])
    parser.add_argument("result", type=Path, nargs="?", default=RESULTS / "families-cpu.json")
    parser.add_argument("--model", action="append", choices=[*FAMILIES], help="may be repeated; all if left out")
    parser.add_argument("--case", action="append", choices=[*CASES], help="may be repeated; all if left out")
    parser.add_argument("--variant", nargs="+", choices=[*VARIANTS], default=["modules", "quarantine"])
    parser.add_argument("--rounds", type=int, default=15)
