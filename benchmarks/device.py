"""How much longer compiling takes with a device check, and how long its report takes.

    python benchmarks/device.py [RESULT]

Times the first forward and backward of BERT-base with the backend `aot_eager` and with `mock_backend`. The variants
alternate, each round compiles from scratch, and each figure is a minimum over the rounds. Both wall-clock time and
processor time are reported; the latter depends less on other work of the machine. The check alone, of graphs that exist
already, is reported beside them: it is all that the mock backend adds.
"""

import argparse
import gc
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from record import RESULTS, environment, write
from transformers import BertConfig, BertForSequenceClassification

import torchguard
from torchguard.device import Device, MockBackend, check, mock_backend

ROUNDS, REPEATS = 5, 5
TARGET = 1.20
BASE = "aot_eager"
# Every rule has something to check, and many find a violation.
EVERYTHING = Device(
    name="everything",
    indices=["int32"],
    accumulators=["float32"],
    layouts=["contiguous"],
    alignment={-1: 16, -2: 8},
    max_memory="1GiB",
    deny=["aten.gelu", "aten.*dropout*"],
    max_rank=4,
    max_dim=30000,
)
DEVICES = {
    "default device": Device(),
    "every rule": EVERYTHING,
    "every rule, core decompositions": replace(EVERYTHING, decompositions="core"),
}


Seconds = tuple[float, float]


def compile_seconds(model: BertForSequenceClassification, inputs: dict[str, torch.Tensor], backend: Any) -> Seconds:
    """Wall-clock and processor seconds of the first forward and backward, with nothing compiled before."""
    torch._dynamo.reset()
    gc.collect()
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    start, start_cpu = time.perf_counter(), time.process_time()
    compiled(**inputs).loss.backward()
    return time.perf_counter() - start, time.process_time() - start_cpu


def measure(model: BertForSequenceClassification, inputs: dict[str, torch.Tensor], found: dict[str, Any]) -> None:
    makes: dict[str, Callable[[], Any]] = {BASE: lambda: BASE}
    makes |= {name: lambda device=device: mock_backend(device, mode="warning") for name, device in DEVICES.items()}
    rounds: dict[str, list[Seconds]] = {name: [] for name in makes}
    last = {}
    compile_seconds(model, inputs, BASE)  # loads what torch loads once in a process
    for turn in range(ROUNDS):
        names = list(makes)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            last[name] = makes[name]()
            rounds[name].append(compile_seconds(model, inputs, last[name]))
    clock, processor = ({name: min(took[i] for took in rounds[name]) for name in makes} for i in (0, 1))
    found["compile seconds"], found["processor seconds"], found["rounds"] = clock, processor, rounds
    alone = {name: check_seconds(last["default device"], device) for name, device in DEVICES.items()}
    found["check alone, processor seconds"] = alone
    found["ratios"] = [
        {
            "work": f"{name} / {BASE}",
            "to reach": TARGET if "core" not in name else None,
            "ours": clock[name] / clock[BASE],
            "of the processor": processor[name] / processor[BASE],
            "check alone": 1 + alone[name] / processor[BASE],
        }
        for name in makes
        if name != BASE
    ]
    found["reports"] = {name: facts_of(backend) for name, backend in last.items() if name != BASE}


def check_seconds(backend: MockBackend, device: Device) -> float:
    """The fewest processor seconds that a check of the graphs that ran takes."""
    forward, backward = (report.graph.module for report in backend.report().graphs)
    took = []
    for _ in range(REPEATS):
        start = time.process_time()
        check(forward, backward, device=device)
        took.append(time.process_time() - start)
    return min(took)


def facts_of(backend: MockBackend) -> dict[str, Any]:
    report = backend.report()
    start = time.perf_counter()
    text = report.to_json()
    return {
        "graphs": len(report.graphs),
        "nodes": sum(len(graph.graph.module.graph.nodes) for graph in report.graphs),
        "violations": len(report.violations),
        "by rule": report.by_rule(),
        "seconds to write": time.perf_counter() - start,
        "bytes": len(text),
    }


def table(found: dict[str, Any]) -> None:
    kinds = {"ours": "wall-clock ratio", "of the processor": "processor ratio", "check alone": "check alone"}
    titles = "".join(f"{title:>18}" for title in kinds.values())
    print(f"\n{'compile, forward and backward':<36}{'seconds':>9}{titles}")
    print(f"{BASE:<36}{found['compile seconds'][BASE]:>9.2f}")
    for row in found["ratios"]:
        name = row["work"].split(" / ")[0]
        target = f"  target: <= {row['to reach']:.2f}" if row["to reach"] else ""
        ratios = "".join(f"{row[kind]:>18.3f}" for kind in kinds)
        print(f"{name:<36}{found['compile seconds'][name]:>9.2f}{ratios}{target}")
    for name, facts in found["reports"].items():
        took = facts["seconds to write"]
        print(f"{name}: {facts['nodes']} nodes, {facts['violations']} violations, report {took:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", nargs="?", type=Path, default=RESULTS / "device.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig())
    inputs = {"input_ids": torch.randint(0, 1000, (2, 16)), "labels": torch.zeros(2, dtype=torch.int64)}
    found: dict[str, Any] = {
        **environment(),
        "transformers": transformers.__version__,
        "torchguard": torchguard.__version__,
        "work": "BertForSequenceClassification, 12 layers of 768, training, 2 by 16 tokens; "
        f"first forward and backward, minima over {ROUNDS} rounds; check alone, minima over {REPEATS}",
        "load": f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} processors when started",
    }
    measure(model, inputs, found)
    table(found)
    write(found, options.result)


if __name__ == "__main__":
    main()
