"""How much longer compiling takes with `artifacts.capture`: `python benchmarks/captured.py [RESULT.json]`.

Times the first call and its backward pass of BERT-base with random weights on `aot_eager`, with and without a capture.
The two alternate on one thread, each round compiles from scratch, and the result is the ratio of the minima. Work at
the end of the `capture` block (none here, without Graphviz and exports) is not timed.
"""

import argparse
import gc
import os
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import transformers
from record import RESULTS, environment, write
from transformers import BertConfig, BertModel

import torchguard
from torchguard import artifacts
from torchguard._sizes import format_size

ROUNDS = 7
TARGET = 1.30
PLAIN, CAPTURED = "not captured", "captured"


def train(model: Any, inputs: dict[str, torch.Tensor]) -> None:
    model(**inputs).last_hidden_state.sum().backward()


def measure(model: BertModel, inputs: dict[str, torch.Tensor], found: dict[str, Any]) -> None:
    compiling = dict.fromkeys((PLAIN, CAPTURED), float("inf"))
    for i in range(ROUNDS):
        for name in (PLAIN, CAPTURED)[:: 1 if i % 2 else -1]:
            torch._dynamo.reset()
            gc.collect()
            with tempfile.TemporaryDirectory() as root:
                compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
                with artifacts.capture(root) if name == CAPTURED else nullcontext() as captured:
                    start = time.perf_counter()
                    train(compiled, inputs)
                    compiling[name] = min(compiling[name], time.perf_counter() - start)
                if captured is not None:
                    (artifact,) = captured.artifacts
                    assert artifact.state == "whole", artifact
                    assert not captured.problems, captured.problems
                    found["bytes"] = artifact.size
                    found["nodes"] = {graph["name"]: graph["nodes"] for graph in artifact.manifest()["graphs"]}
    assert set(found["nodes"]) == {"dynamo", "forward", "backward"}, found["nodes"]
    found["compile seconds"] = compiling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", nargs="?", type=Path, default=RESULTS / "artifacts.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = BertModel(BertConfig()).train()
    inputs = {"input_ids": torch.randint(0, 1000, (1, 16)), "attention_mask": torch.ones(1, 16, dtype=torch.int64)}
    found: dict[str, Any] = {
        **environment(),
        "transformers": transformers.__version__,
        "torchguard": torchguard.__version__,
        "work": f"BertModel, 12 layers of 768, training, aot_eager, forward and backward; minima over {ROUNDS} rounds",
    }
    measure(model, inputs, found)
    ratio = found["compile seconds"][CAPTURED] / found["compile seconds"][PLAIN]
    found["ratios"] = [{"work": "compiling, captured / not", "to reach": TARGET, "ours": ratio}]
    print(f"compiling, captured / not: {ratio:.3f}, target: <= {TARGET:.2f}")
    print("seconds: " + ", ".join(f"{name} {seconds:.3f}" for name, seconds in found["compile seconds"].items()))
    print(f"{found['nodes']} nodes, {format_size(found['bytes'])}")
    write(found, options.result)


if __name__ == "__main__":
    main()
