"""4 GPT blocks on a GPU, with 24 checks and with none: `python benchmarks/gpu.py [RESULT.json]`.

The variants alternate in one run, and each figure is a ratio of medians. With `.benchmark-peers/torchguard-1.1.0` on
`PYTHONPATH` instead of `src`, this measures the published package on the same work.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from models import Gpt
from record import environment

from torchguard import flag_nan, flag_nan_and_inf

CHECKS = {"unguarded": None, "flag_nan": flag_nan, "flag_nan_and_inf": flag_nan_and_inf}
ROUNDS, CALLS = 25, 4


def inference(model, x):
    def step() -> None:
        with torch.no_grad():
            model(x)

    return step


def training(model, x):
    def step() -> None:
        out = model(x)
        out = out[0] if isinstance(out, tuple) else out
        out.float().square().mean().backward()
        model.zero_grad(set_to_none=True)

    return step


def milliseconds(step) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(CALLS):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / CALLS


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 1024, 1024, device="cuda", dtype=torch.bfloat16)
    torch.compile(lambda x: x.sin() + 1)(x)  # loads the toolchain
    found: dict = {
        **environment("cuda"),
        "work": "4 GPT blocks, D=1024, T=1024, B=8, bf16, 24 checks, torch.compile(fullgraph=True)",
        "milliseconds": {},
        "compile seconds": {},
        "ratios": {},
    }
    for mode in (inference, training):
        torch._dynamo.reset()
        steps = {}
        for name, check in CHECKS.items():
            torch.manual_seed(0)
            model = torch.compile(Gpt(check).to("cuda", torch.bfloat16), fullgraph=True)
            steps[name] = mode(model, x)
            start = time.perf_counter()
            steps[name]()
            torch.cuda.synchronize()
            found["compile seconds"][f"{mode.__name__}: {name}"] = round(time.perf_counter() - start, 1)
            milliseconds(steps[name])
        took: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(ROUNDS):
            for name, step in steps.items():
                took[name].append(milliseconds(step))
        medians = {name: statistics.median(times) for name, times in took.items()}
        for name, median in medians.items():
            found["milliseconds"][f"{mode.__name__}: {name}"] = round(median, 4)
            found["ratios"][f"{mode.__name__}: {name}"] = round(median / medians["unguarded"], 4)
        print({name: ratio for name, ratio in found["ratios"].items() if name.startswith(mode.__name__)}, flush=True)
        written = [argument for argument in sys.argv[1:] if argument.endswith(".json")]
        if written:
            Path(written[0]).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
