"""What guards cost a call: all of them, filtered, and audited. `python benchmarks/guarded.py [RESULT.json]`.

The model is BERT-base with random weights. The backend returns the output of its first call again, so a call consists
of the guards and a constant part, which the variant `skip_all()` measures. The variants share the model and the
process, and alternate on one thread.

- "Back to back": a turn has 500 calls, in which an audit checks five times; minima over the turns.
- "Swept": 8 MiB are overwritten before each call, since a running model leaves little of the guards in the caches. A
  turn has 100 calls, in which an audit checks once; the mean over the calls of the minimum that each took.
- "By hand": Dynamo's own check of all guards in every 100th call, and nothing else. No audit can cost less.
"""

import argparse
import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import transformers
from record import RESULTS, environment, write
from transformers import BertConfig, BertModel

import torchguard
from torchguard import guards
from torchguard._torch.dynamo import entries_of, frame_of
from torchguard._torch.words import can_read_words
from torchguard.guards._guard_tree import tree_of

EVERY = 100
CHECKS = 5  # in a turn back to back: the first check finds its guards evicted from the caches by the other variants
ROUNDS, SWEPT_ROUNDS, COMPILES = 100, 20, {"returns at once": 6, "aot_eager": 3}
SWEEP = 8 << 20  # bytes: more than the second-level cache; with 64 MiB, two equal variants differed by 8%
MODULES = guards.skip_nn_modules()
# Drops most guards that can be dropped; the input tensors, their shapes and the global state are still checked.
FILTER = guards.skip_nn_modules() & guards.skip_globals()
FULL, CONSTANT, INSPECTED = "full", "skip_all()", "filtered, after inspect()"
BY_HAND = "filtered + check by hand"
# Variant, baseline, and the largest ratio to reach (None: for comparison only).
TARGETS = (
    ("filtered", FULL, 0.35),
    ("filtered + audit", "filtered", 1.06),
    ("filtered + audit", BY_HAND, None),
    ("modules", FULL, 0.35),
    ("modules + audit", "modules", 1.06),
    (INSPECTED, "filtered", 1.00),
)
COMPILE_TARGET = 1.25

Call = Callable[[], Any]


def returns_at_once(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
    """A backend whose code takes no time: it runs the graph once, and then returns the same output again."""
    before: list[Any] = []

    def run(*inputs: Any) -> Any:
        if not before:
            before.append(graph(*inputs))
        return before[0]

    return run


BACKENDS: dict[str, Any] = {"returns at once": returns_at_once, "aot_eager": "aot_eager"}


def turns(calls: dict[str, Call], rounds: int, take: Callable[[Call], list[float]]) -> dict[str, float]:
    """Microseconds a call of each variant: minima over the rounds. Each round starts with another variant."""
    names, least = list(calls), {}
    for i in range(rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            took = take(calls[name])
            least[name] = [min(pair) for pair in zip(took, least.get(name, took), strict=True)]
    return {name: 1e6 * statistics.mean(least[name]) for name in names}


def back_to_back(call: Call) -> list[float]:
    start = time.perf_counter()
    for _ in range(CHECKS * EVERY):
        call()
    return [(time.perf_counter() - start) / (CHECKS * EVERY)]


def swept(call: Call, filler: torch.Tensor) -> list[float]:
    took = []
    for _ in range(EVERY):
        filler.add_(1)
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    return took


def check_alone(tree: Any, f_locals: dict[str, Any]) -> float:
    """Microseconds of one check of a guard tree, with warm caches."""
    rounds = []
    for _ in range(50):
        start = time.perf_counter()
        for _ in range(EVERY):
            tree.check(f_locals)
        rounds.append(time.perf_counter() - start)
    return 1e6 * min(rounds) / EVERY


def calls_of(model: BertModel, inputs: dict[str, torch.Tensor], found: dict) -> dict[str, Call]:
    """The variants, each with its own compiled frame."""
    audits = {"filtered + audit": guards.audit(FILTER, every=EVERY), "modules + audit": guards.audit(MODULES, EVERY)}
    filters = {FULL: None, "modules": MODULES, "filtered": FILTER, **audits, CONSTANT: guards.skip_all()}
    compiled = {}
    for name, filter in filters.items():
        compiled[name] = guards.compile(model, filter=filter, backend=returns_at_once, fullgraph=True)
        compiled[name](**inputs)
    found["before inspect()"] = turns({"filtered": lambda: compiled["filtered"](**inputs)}, ROUNDS, back_to_back)
    with guards.inspect():
        compiled[INSPECTED] = guards.compile(model, filter=FILTER, backend=returns_at_once, fullgraph=True)
        compiled[INSPECTED](**inputs)
    for name, one in compiled.items():
        frame = frame_of(one, (), inputs)
        assert frame is not None
        ((_, tree),) = entries_of(frame.cache)
        found["guards"][name] = sum(1 for _ in tree_of(tree).all_guards())
        if name not in audits:  # for an audit, this check would count as a call
            found["microseconds"]["check alone"][name] = check_alone(tree, frame.f_locals)
    found["audits"] = audits
    calls = {name: lambda one=one: one(**inputs) for name, one in compiled.items()}
    return {**calls, BY_HAND: checked_by_hand(calls["filtered"], compiled[FULL], inputs)}


def checked_by_hand(call: Call, full: Any, inputs: dict[str, torch.Tensor]) -> Call:
    """A call that checks all guards by Dynamo's own tree, one time in `EVERY`."""
    frame = frame_of(full, (), inputs)
    assert frame is not None
    ((_, tree),) = entries_of(frame.cache)
    counted = itertools.cycle(range(EVERY))

    def checked() -> Any:
        if next(counted) == 0:
            assert tree.check(frame.f_locals)
        return call()

    return checked


def measure_calls(model: BertModel, inputs: dict[str, torch.Tensor], found: dict) -> None:
    calls = calls_of(model, inputs, found)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    filler = torch.zeros(SWEEP, dtype=torch.uint8)
    found["microseconds"]["back to back"] = turns(calls, ROUNDS, back_to_back)
    found["microseconds"]["swept"] = turns(calls, SWEPT_ROUNDS, lambda call: swept(call, filler))
    recompiled = torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs
    reports = {name: audit.report() for name, audit in found.pop("audits").items()}
    checks = ROUNDS * CHECKS + SWEPT_ROUNDS
    for name, report in reports.items():
        assert not report.violations, f"{name}: {report}"
        assert (report.calls, report.checks) == (checks * EVERY, checks), f"{name}: {report}"
    assert recompiled == 0, f"{recompiled} graphs were recompiled while measuring"
    found["dropped"] = {name: report.dropped for name, report in reports.items()}


def compile_seconds(backend: str, model: BertModel, inputs: dict[str, torch.Tensor]) -> dict[str, float]:
    """Minimum over the rounds of the first call, which compiles. Each round compiles from scratch."""
    makes: dict[str, Callable[[], Any]] = {
        FULL: lambda: None,
        "filtered": lambda: FILTER,
        "filtered + audit": lambda: guards.audit(FILTER, every=EVERY),
    }
    least = dict.fromkeys(makes, float("inf"))
    for _ in range(COMPILES[backend]):
        for name, make in makes.items():
            torch._dynamo.reset()
            gc.collect()
            call = guards.compile(model, filter=make(), backend=BACKENDS[backend], fullgraph=True)
            start = time.perf_counter()
            call(**inputs)
            least[name] = min(least[name], time.perf_counter() - start)
    return least


def rows_of(found: dict) -> list[dict[str, Any]]:
    rows = []
    for regime in ("back to back", "swept"):
        took = found["microseconds"][regime]
        for name, base, target in TARGETS:
            constant = took[CONSTANT]
            net = (took[name] - constant) / (took[base] - constant)
            work = f"{name} / {base}, {regime}"
            rows.append({"work": work, "to reach": target, "ours": took[name] / took[base], "less the constant": net})
    before, after = found["before inspect()"]["filtered"], found["microseconds"]["back to back"]["filtered"]
    rows.append({"work": "filtered, after / before inspect()", "to reach": 1.0, "ours": after / before})
    for backend, seconds in found["compile seconds"].items():
        ratio = seconds["filtered + audit"] / seconds["filtered"]
        work = f"compiling with / without audit, {backend}"
        rows.append({"work": work, "to reach": COMPILE_TARGET, "ours": ratio})
    return rows


def table(found: dict) -> None:
    print(f"\n{'work':<58}{'target':>10}{'ratio':>8}{'without constant':>20}")
    for row in found["ratios"]:
        net = f"{row['less the constant']:>20.3f}" if "less the constant" in row else ""
        target = "" if row["to reach"] is None else f"<= {row['to reach']:.2f}"
        print(f"{row['work']:<58}{target:>10}{row['ours']:>8.3f}{net}")
    print(f"\n{'us a call':<30}{'guards':>8}{'back to back':>15}{'swept':>10}{'check alone':>14}")
    times = found["microseconds"]
    for name in times["swept"]:
        count = found["guards"].get(name, "")
        alone = f"{times['check alone'][name]:>14.2f}" if name in times["check alone"] else ""
        print(f"{name:<30}{count:>8}{times['back to back'][name]:>15.2f}{times['swept'][name]:>10.2f}{alone}")
    for backend, seconds in found["compile seconds"].items():
        print(f"compile, {backend}: " + ", ".join(f"{name} {took:.3f} s" for name, took in seconds.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", nargs="?", type=Path, default=RESULTS / "guards.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = BertModel(BertConfig()).eval()
    inputs = {"input_ids": torch.randint(0, 1000, (1, 16)), "attention_mask": torch.ones(1, 16, dtype=torch.int64)}
    found: dict[str, Any] = {
        **environment(),
        "transformers": transformers.__version__,
        "torchguard": torchguard.__version__,
        "quick": can_read_words(),  # False: this Python has no version words, and an audit checks Dynamo's whole tree
        "work": f"BertModel, 12 layers of 768, eval, no_grad; filtered: {FILTER!r}; modules: {MODULES!r}; audit: "
        f"every={EVERY}; {ROUNDS} turns of {CHECKS * EVERY} calls back to back, {SWEPT_ROUNDS} of {EVERY} swept",
        "guards": {},
        "microseconds": {"check alone": {}},
    }
    with torch.no_grad():
        measure_calls(model, inputs, found)
        found["compile seconds"] = {backend: compile_seconds(backend, model, inputs) for backend in BACKENDS}
    found["ratios"] = rows_of(found)
    table(found)
    write(found, options.result)


if __name__ == "__main__":
    main()
