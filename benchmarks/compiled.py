"""Compiled functions against `torch.compile` and `autograd.grad`: `python benchmarks/compiled.py [RESULT.json]`.

The variants alternate in one process on one thread, and each figure is a minimum over the turns. "Whole VJP" is the
value and the gradients with respect to every leaf. With `--device cuda` there are no targets, and a turn ends when the
device is idle. A measurement that fails is recorded as failed, and the others still run.
"""

import argparse
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.nn.functional as F
from record import RESULTS, environment, write

import torchguard
from torchguard import compiled
from torchguard.compiled._leaves import matcher

TURNS, SECONDS_A_TURN = 60, 0.01
# The most that a value and VJP may take, relative to torch.compile and autograd.grad.
TARGETS = {
    "tiny MLP": 0.4,
    "attention, D=64": 0.7,
    "attention, D=128": 0.9,
}
COTANGENT_TARGET, CHECK_TARGET, CERTIFICATE_TARGET = 0.7, 3.0, 1.0

Call = Callable[[], Any]


def mlp(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w + b) @ v


def attention(x: torch.Tensor, wq: torch.Tensor, wk: torch.Tensor, wv: torch.Tensor, wo: torch.Tensor) -> torch.Tensor:
    q, k, v = x @ wq, x @ wk, x @ wv
    weights = torch.softmax(q @ k.transpose(-1, -2) / x.shape[-1] ** 0.5, dim=-1)
    return F.gelu(F.layer_norm(x + (weights @ v) @ wo, (x.shape[-1],)))


def workloads(device: str) -> dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]]:
    draw = lambda *shape: torch.randn(*shape, device=device) / shape[-1] ** 0.5  # noqa: E731
    found = {
        "tiny MLP": (mlp, (draw(8, 16), draw(16, 32), draw(32), draw(32, 4))),
        "attention, D=64": (attention, (draw(2, 64, 64), *(draw(64, 64) for _ in range(4)))),
        "attention, D=128": (attention, (draw(4, 128, 128), *(draw(128, 128) for _ in range(4)))),
    }
    if device == "cuda":
        found["attention, D=1024"] = (attention, (draw(8, 1024, 1024), *(draw(1024, 1024) for _ in range(4))))
    return found


def turns(calls: dict[str, Call], device: str) -> dict[str, float]:
    """Microseconds a call of each variant: minima over the turns. Each turn starts with another variant."""
    names, least, repeats = list(calls), {}, {}
    for name in names:
        for _ in range(5):
            calls[name]()
        repeats[name] = max(1, int(SECONDS_A_TURN / _took(calls[name], 1, device)))
    for i in range(TURNS):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            took = _took(calls[name], repeats[name], device) / repeats[name]
            least[name] = min(least.get(name, took), took)
    return {name: 1e6 * took for name, took in least.items()}


def _took(call: Call, times: int, device: str) -> float:
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()  # for work that other calls queued
    start = time.perf_counter()
    for _ in range(times):
        call()
    wait()
    return time.perf_counter() - start


def measure(f: Callable[..., torch.Tensor], x: tuple[torch.Tensor, ...], device: str) -> dict[str, float]:
    """Microseconds of a value with gradients by torch.compile and by `compiled`, in one call and in two."""
    c = compiled.compile_out(f, *x)
    w = torch.randn_like(c(*x))
    by_torch = torch.compile(f, fullgraph=True, dynamic=False)
    tracked = tuple(leaf.clone().requires_grad_() for leaf in x)

    def by_autograd() -> Any:
        y = by_torch(*tracked)
        return y, torch.autograd.grad(y, tracked, w)

    torch.testing.assert_close(c.value_and_vjp(x, w), by_autograd(), rtol=1e-3, atol=1e-4)
    _, pullback = c.vjp(x)
    calls: dict[str, Call] = {
        "torch.compile + autograd.grad": by_autograd,
        "whole VJP": lambda: c.value_and_vjp(x, w),
        "value and pullback": lambda: c.vjp(x)[1](w),
        "further seed": lambda: pullback(w),
        "forward": lambda: c(*x),
        "jvp": lambda: c.jvp(x, x),
    }
    return turns(calls, device)


def check_microseconds(x: tuple[torch.Tensor, ...]) -> float:
    """Microseconds of one check of four leaves."""
    c = compiled.compile_out(lambda a, b, c, d: a + b + c + d, *(x[0] for _ in range(4)), backend="eager")
    check, leaves = matcher(c.leaves), tuple(x[0] for _ in range(4))
    assert check(leaves)
    return min(_took(lambda: check(leaves), 1000, "cpu") for _ in range(50)) * 1e3


def certificate_seconds(f: Callable[..., torch.Tensor], x: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    """Seconds of the algebraic layer of a certificate, once its graphs exist."""
    from torchguard.compiled.certify.algebra import check_derivatives

    c = compiled.compile_out(f, *x, backend="eager")
    graphs = c.graphs.forward, c.graphs["jvp"], c.graphs["vjp"]
    start = time.perf_counter()
    claims = check_derivatives(*graphs, differentiable=[True] * len(x), seed=0)
    return {"seconds": time.perf_counter() - start, "verdicts": [claim.verdict.value for claim in claims]}


def attempt(name: str, measurement: Callable[..., Any], *args: Any) -> Any:
    """The result of a measurement, or how it failed, so that the others still run."""
    try:
        return measurement(*args)
    except Exception as error:
        traceback.print_exc()
        message = (str(error).strip().splitlines() or [""])[0]
        return {"failed": f"{name}: {type(error).__name__}: {message}"}


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The measured ratios, on a CPU with their targets."""
    on_cpu = found["device"] == "cpu"
    rows: list[dict[str, Any]] = []

    def add(work: str, target: float, measured: float) -> None:
        rows.append({"work": work, **({"to reach": target} if on_cpu else {}), "ours": measured})

    for work, took in found["microseconds"].items():
        if "failed" not in took:
            ratio = took["whole VJP"] / took["torch.compile + autograd.grad"]
            add(f"{work}: whole VJP / torch.compile", TARGETS.get(work, 1.0), ratio)
            add(f"{work}: further seed / whole VJP", COTANGENT_TARGET, took["further seed"] / took["whole VJP"])
    if isinstance(found["check of 4 leaves, us"], float):
        add("check of 4 leaves, us", CHECK_TARGET, found["check of 4 leaves, us"])
    if "seconds" in found["certificate"]:
        add("algebraic certificate of attention, s", CERTIFICATE_TARGET, found["certificate"]["seconds"])
    return rows


def failures(found: dict[str, Any]) -> list[str]:
    parts = [*found["microseconds"].values(), found["check of 4 leaves, us"], found["certificate"]]
    return [part["failed"] for part in parts if isinstance(part, dict) and "failed" in part]


def table(found: dict[str, Any]) -> None:
    print(f"\n{'work':<48}{'target':>10}{'measured':>10}")
    for row in found["rows"]:
        target = f"<= {row['to reach']:.2f}" if "to reach" in row else ""
        print(f"{row['work']:<48}{target:>10}{row['ours']:>10.3f}")
    for work, took in found["microseconds"].items():
        if "failed" not in took:
            print(f"\n{work}, us: " + ", ".join(f"{name} {us:.1f}" for name, us in took.items()))
    for failure in failures(found):
        print(f"\nFAILED {failure}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", nargs="?", type=Path)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tasks = workloads(options.device)
    found: dict[str, Any] = {
        **environment(options.device),
        "torchguard": torchguard.__version__,
        "device": options.device,
        "microseconds": {name: attempt(name, measure, f, x, options.device) for name, (f, x) in tasks.items()},
        "check of 4 leaves, us": attempt("check of 4 leaves", check_microseconds, tasks["tiny MLP"][1]),
        "certificate": attempt("certificate", certificate_seconds, *tasks["attention, D=64"]),
    }
    found["rows"] = rows_of(found)
    table(found)
    name = "compiled.json" if options.device == "cpu" else "compiled-cuda.json"
    result = options.result or RESULTS / name
    write(found, result)
    if failures(found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
