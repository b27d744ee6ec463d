"""What `Retry` costs a training step: `python benchmarks/retry.py cpu`, `... gpu [RESULT.json]`.

The models are transformers' own, with random weights. The baseline clears gradients, computes the losses, their mean,
the gradients, the norm of the gradients, and steps a fused AdamW. All variants train one model through one compiled
closure, each with an optimizer of its own, and alternate in one process. Times are medians, ratios medians of the
ratios of the rounds. On the CPU it is the CPU time of a step on one thread, on the GPU the time of eight steps back to
back. A bad step has a NaN in the input of one sample. "plain, waiting" reads the norm before the optimizer steps. On a
GPU, "plain, ahead" launches the optimizer with a flag on the device, and then waits for the flag.
"""

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.nn.functional as F
from families import new_llama
from record import RESULTS, environment
from torch import Tensor, nn

from torchguard import Retry

Step = Callable[[Any], Any]
TARGETS = {"gpu": {"wait=True": 1.03, "wait=False": 1.005}, "cpu": {"wait=True": 1.02, "wait=False": 1.02}}


def llama(is_large: bool) -> tuple[nn.Module, Callable[[], Any], Callable[[nn.Module], Step]]:
    width, layers, length, vocabulary = (2048, 8, 1024, 32_000) if is_large else (128, 4, 64, 1000)

    def losses(model: nn.Module) -> Step:
        def of(batch: dict[str, Tensor]) -> Tensor:
            logits = model(inputs_embeds=batch["noise"] + model.get_input_embeddings()(batch["ids"])).logits
            targets = batch["ids"][:, 1:].flatten()
            flat = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, reduction="none")
            return flat.view(len(logits), -1).mean(1)

        return of

    def batch() -> dict[str, Tensor]:
        return {"ids": torch.randint(vocabulary, (4, length)), "noise": torch.zeros(4, length, width)}

    return new_llama(width, layers, vocabulary, is_large), batch, losses


def vit(is_large: bool) -> tuple[nn.Module, Callable[[], Any], Callable[[nn.Module], Step]]:
    from transformers import ViTConfig, ViTForImageClassification

    width, size, count = (768, 224, 64) if is_large else (96, 64, 8)
    config = ViTConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=8 if is_large else 4,
        num_attention_heads=12 if is_large else 4,
        image_size=size,
        num_labels=100,
    )

    def losses(model: nn.Module) -> Step:
        return lambda batch: F.cross_entropy(
            model(pixel_values=batch["noise"]).logits.float(), batch["y"], reduction="none"
        )

    def batch() -> dict[str, Tensor]:
        return {"noise": torch.randn(count, 3, size, size), "y": torch.randint(100, (count,))}

    return ViTForImageClassification(config), batch, losses


MODELS = {"Llama": llama, "ViT": vit}


def steps_of(model: nn.Module, of: Step) -> dict[str, Step]:
    """For each variant a function that takes a step."""
    found: dict[str, Step] = {}
    for name in ("plain", "plain, waiting", "wait=True", "wait=False"):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
        if name.startswith("plain"):

            def plain(batch: Any, optimizer: Any = optimizer, waits: bool = name.endswith("waiting")) -> None:
                optimizer.zero_grad(set_to_none=True)
                of(batch).mean().backward()
                norm = nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])
                if not waits or norm.item() < float("inf"):
                    optimizer.step()

            found[name] = plain
        else:
            guard = Retry(model, optimizer, wait=name == "wait=True")
            found[name] = lambda batch, guard=guard: guard.step(of, batch)
    if next(model.parameters()).is_cuda:
        found["plain, ahead"] = ahead_step(model, of)
    return found


def ahead_step(model: nn.Module, of: Step) -> Step:
    """The least that waiting for each outcome takes: a fused optimizer is launched with a flag, which is waited for."""
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    on_host, event = torch.empty((), pin_memory=True), torch.cuda.Event()

    def step(batch: Any) -> None:
        optimizer.zero_grad(set_to_none=True)
        of(batch).mean().backward()
        norm = nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])
        flag = (~norm.isfinite()).to(torch.float32)
        on_host.copy_(flag, non_blocking=True)
        event.record()
        if optimizer.state:
            optimizer.found_inf, optimizer.grad_scale = flag, None
        optimizer.step()
        event.synchronize()
        assert not on_host.item()

    return step


def measured(device: str, rounds: int, kind: str, model_name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model, make, losses = MODELS[model_name](device != "cpu")
    model = model.to(device, torch.float32 if device == "cpu" else torch.bfloat16).train()
    dtype = next(model.parameters()).dtype
    batches = [
        {key: one.to(device, dtype) if one.is_floating_point() else one.to(device) for key, one in make().items()}
        for _ in range(2)
    ]
    clock = time.process_time if device == "cpu" else time.perf_counter
    steps = steps_of(model, torch.compile(losses(model), fullgraph=True))
    memory, times = {}, {name: [] for name in steps}
    for name, step in steps.items():
        for number in range(3):
            step(batches[number % 2])
        if device != "cpu":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step(batches[0])
            torch.cuda.synchronize()
            memory[name] = torch.cuda.max_memory_allocated() - before
    repeats = 1 if device == "cpu" else 8  # GPU steps back to back
    for _ in range(rounds):
        for name, step in steps.items():
            start = clock()
            for number in range(repeats):
                step(batches[number % 2])
            if device != "cpu":
                torch.cuda.synchronize()
            times[name].append((clock() - start) / repeats)
    median = {name: statistics.median(one) for name, one in times.items()}
    ratios = {
        name: statistics.median(one / plain for one, plain in zip(found, times["plain"], strict=True))
        for name, found in times.items()
        if name != "plain"
    }
    bad = {key: one.clone() for key, one in batches[0].items()}
    bad["noise"][1].view(-1)[0] = float("nan")
    step = steps["wait=True"]
    step(bad)
    start = clock()
    report = step(bad)
    bad_time = clock() - start
    assert report.bad == [1], report
    result = {
        "ms": {name: round(1e3 * one, 3) for name, one in median.items()},
        "ratio": {name: round(one, 4) for name, one in ratios.items()},
        "targets": TARGETS[kind],
        "bad step": {"runs": report.runs, "ratio": round(bad_time / median["plain"], 2), "retries": "eager"},
    }
    if memory:
        base = memory["plain"]
        result["memory"] = {"plain MiB": base // 2**20} | {
            name: round(one / base, 4) for name, one in memory.items() if name != "plain"
        }
    del steps, model
    gc.collect()
    torch._dynamo.reset()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["cpu", "gpu"])
    parser.add_argument("result", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--models", nargs="+", default=[*MODELS])
    arguments = parser.parse_args()
    device = "cpu" if arguments.kind == "cpu" else "cuda"
    torch.set_num_threads(1)
    results = {"environment": environment(device)}
    for name in arguments.models:
        results[name] = measured(device, arguments.rounds or (100 if device == "cpu" else 30), arguments.kind, name)
        print(name, json.dumps(results[name]), flush=True)
    path = arguments.result or RESULTS / f"retry-{'cpu' if device == 'cpu' else 'h200'}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
