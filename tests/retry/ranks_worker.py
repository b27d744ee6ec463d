"""One of several processes that guard steps together: every case runs on all of them, and compares with one process.

A case that fails on one rank would leave the others waiting, so the first failure ends the process. It leaves by
`os._exit`: gloo's destructor may wait for a thread that waits for the interpreter.
"""

import contextlib
import datetime
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from torchguard import distributed
from torchguard._health import check_grads, check_params, local
from torchguard._retry import Retry, RetryError, RetryReport

NAN = float("nan")
HIDDEN = 7.0  # as the first number of a sample: its loss is finite, and its gradient is not
Bad = dict[int, list[int]]
CASES: dict[str, Callable[[str], None]] = {}


def case(function: Callable[[str], None]) -> Callable[[str], None]:
    CASES[function.__name__] = function
    return function


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def everywhere(value: Any) -> list[Any]:
    found: list[Any] = [None] * size()
    dist.all_gather_object(found, value)
    return found


def equal(got: Sequence[Any], want: Sequence[Any]) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


# Models, batches, losses.


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()


def wrapped(kind: str, model: nn.Module, **options: Any) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model, **options)
    mesh = dist.init_device_mesh("cpu", (size(),))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh, **options)


def values(tensors: Any) -> list[Tensor]:
    """Copies, whole."""
    return [
        one.full_tensor().detach().clone() if hasattr(one, "full_tensor") else one.detach().clone() for one in tensors
    ]


def batches(bad: Bad, count: int = 1, start: int = 3, fault: float = NAN, seed: int = 1) -> list[list[Tensor]]:
    """For each rank its micro-batches: rank 0 has 3 samples in each, rank 1 has 4, and so on."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(size()):
        own = [torch.randn(start + number, 4, dtype=torch.float64, generator=generator) for _ in range(count)]
        for row in bad.get(number, []):
            own[row // (start + number)][row % (start + number), 0] = fault
        found.append(own)
    return found


def good_parts(of_ranks: list[list[Tensor]], bad: Bad) -> list[list[Tensor]]:
    found = []
    for number, own in enumerate(of_ranks):
        start, parts = 0, []
        for batch in own:
            rows = [row for row in range(len(batch)) if start + row not in bad.get(number, [])]
            parts.append(batch[rows])
            start += len(batch)
        found.append(parts)
    return found


def per_sample(model: nn.Module, x: Tensor) -> Tensor:
    """NaN in a sample shows in its loss; HIDDEN only in its gradient, the derivative of a root at 0."""
    out = model(x).squeeze(1) * (x[:, 0] != HIDDEN)
    return (out.square() + 0.0).sqrt() + out.square()


def weighted(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    weights = 1 + x[:, 1].abs().nan_to_num().round().long()
    return per_sample(model, x) * weights, weights


def scalar(model: nn.Module, x: Tensor) -> Tensor:
    return per_sample(model, x).mean()


def joined(model: nn.Module, loss: Any, parts: list[Tensor]) -> Tensor:
    """The loss of one process over all parts as one batch; of a model with BatchNorm each part apart."""
    parts = [part for part in parts if len(part)]
    if not any(isinstance(one, nn.BatchNorm1d) for one in model.modules()):
        parts = [torch.cat(parts)]
    found = [loss(model, part) for part in parts]
    if isinstance(found[0], tuple):
        return sum(sums.sum() for sums, _ in found) / sum(weights.sum() for _, weights in found)
    samples = sum(map(len, parts))
    if not found[0].ndim:
        return sum(one * len(part) for one, part in zip(found, parts, strict=True)) / samples
    return sum(one.sum() for one in found) / samples


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def check_report(report: RetryReport, bad: Bad) -> None:
    assert report.bad == bad.get(rank(), []), report
    assert report.elsewhere == {number: rows for number, rows in bad.items() if number != rank()}, report
    assert not report.skipped, report
    assert len(set(everywhere(report.runs))) == 1, report
    assert len(set(everywhere((report.loss, report.grad_norm)))) == 1, report


def compare(
    kind: str,
    bad: Bad,
    loss: Any = per_sample,
    make: Callable[[], nn.Module] = mlp,
    count: int = 1,
    steps: int = 2,
    fault: float = NAN,
    start: int = 3,
    clip: float | None = None,
    wrap: dict[str, Any] | None = None,
    empty: int | None = None,
    **options: Any,
) -> list[RetryReport]:
    """Guard some steps, the first with bad samples, and do the same in one process without the bad samples.

    Args:
        empty: a rank whose batches have no samples.
    """
    model, single = wrapped(kind, make(), **(wrap or {})), make()
    guard, optimizer = Retry(model, sgd(model), **options), sgd(single)
    reports = []
    for number in range(steps):
        now = bad if number == 0 else {}
        of_ranks = batches(now, count, start, fault, seed=number)
        if empty is not None:
            of_ranks[empty] = [one[:0] for one in of_ranks[empty]]
        own = of_ranks[rank()]
        report = guard.step(lambda x: loss(model, x), own if count > 1 else own[0], clip=clip, window=count > 1)
        check_report(report, now)
        reports.append(report)
        optimizer.zero_grad()
        whole = joined(single, loss, [part for parts in good_parts(of_ranks, now) for part in parts])
        whole.backward()
        norm = nn.utils.clip_grad_norm_(single.parameters(), clip or float("inf"))
        optimizer.step()
        equal([report.loss, report.grad_norm], [whole.item(), norm.item()])
    equal(values(model.parameters()), values(single.parameters()))
    return reports


# Cases for DDP and FSDP2.


@case
def a_sample_that_shows(kind: str) -> None:
    reports = compare(kind, {1: [2]})
    assert reports[0].runs == 3, reports[0]
    assert "rank 1: samples 2" in str(reports[0]) or rank() == 1


@case
def a_sample_that_shows_only_in_the_gradient(kind: str) -> None:
    compare(kind, {1: [2]}, fault=HIDDEN)


@case
def bad_samples_on_every_rank(kind: str) -> None:
    compare(kind, {number: [number, number + 2] for number in range(size())}, clip=0.1)


@case
def a_rank_without_good_samples(kind: str) -> None:
    compare(kind, {0: [0, 1, 2]})
    compare(kind, {size() - 1: [*range(size() + 2)], 0: [1]}, fault=HIDDEN)


@case
def an_empty_batch(kind: str) -> None:
    for loss in (per_sample, weighted, scalar):
        compare(kind, {1: [2]}, loss, empty=0)
    compare(kind, {0: [1]}, weighted, fault=HIDDEN, empty=1, count=2)


@case
def empty_batches_on_all_ranks(kind: str) -> None:
    for loss in (per_sample, weighted, scalar):
        model = wrapped(kind, mlp())
        guard, before = Retry(model, sgd(model)), values(model.parameters())
        report = guard.step(lambda x, model=model, loss=loss: loss(model, x), torch.zeros(0, 4, dtype=torch.float64))
        assert report.skipped, report
        assert "the batch of every rank is empty" in str(report), report
        equal(values(model.parameters()), before)


@case
def loaders_of_different_lengths(kind: str) -> None:
    """A rank that has no batch left gives an empty one, for as long as another has one."""
    model, single = wrapped(kind, mlp()), mlp()
    guard, optimizer = Retry(model, sgd(model)), sgd(single)
    lengths = [3 + number % 2 for number in range(size())]
    of_steps = [batches({1: [2]} if number == 3 else {}, seed=number) for number in range(max(lengths))]
    loader = iter([of_ranks[rank()][0] for of_ranks in of_steps[: lengths[rank()]]])
    x, steps = torch.empty(0, 4, dtype=torch.float64), 0
    while distributed.agree((batch := next(loader, None)) is not None):
        x = x[:0] if batch is None else batch
        report = guard.step(lambda x: per_sample(model, x), x)
        assert not report.skipped, report
        steps += 1
    assert steps == len(of_steps)
    for number, of_ranks in enumerate(of_steps):
        parts = good_parts(of_ranks, {1: [2]} if number == 3 else {})
        optimizer.zero_grad()
        joined(single, per_sample, [part[0] for part, n in zip(parts, lengths, strict=True) if number < n]).backward()
        optimizer.step()
    equal(values(model.parameters()), values(single.parameters()))


@case
def weighted_losses_over_micro_batches(kind: str) -> None:
    compare(kind, {0: [1, 5]}, weighted, count=3)
    compare(kind, {1: [4, 5, 6, 7]}, weighted, count=3)  # a micro-batch without good samples
    compare(kind, {1: [2]}, weighted, fault=HIDDEN, count=2)


@case
def scalar_losses(kind: str) -> None:
    compare(kind, {1: [1]}, scalar)
    compare(kind, {0: [0, 1, 2]}, scalar, fault=HIDDEN, count=2)


@case
def running_statistics(kind: str) -> None:
    """Those of a rank are of its own good samples. DDP starts each forward pass with those of rank 0."""
    for bad in ({0: [1]}, {0: [0, 1, 2, 3]}, {1: [0, 1, 2, 3, 4]}):
        compare(kind, bad, make=normed, start=4, steps=1)
        model, single = wrapped(kind, normed()), normed()
        guard, before, now = Retry(model), batches({}, start=4), batches(bad, start=4)
        for of_ranks in (before, now):
            guard.backward(lambda x, model=model: per_sample(model, x), of_ranks[rank()][0])
        single(before[0 if kind == "ddp" else rank()][0])
        part = good_parts(now, bad)[rank()][0]
        if len(part):
            single(part)
        equal(values(model.buffers()), values(single.buffers()))


@case
def micro_batches_leave_no_statistics_of_other_ranks(kind: str) -> None:
    bad = {1: [5, 6, 7, 8, 9]}  # its second micro-batch
    model, single = wrapped(kind, normed()), normed()
    of_ranks = batches(bad, count=2, start=4)
    check_report(Retry(model, sgd(model)).step(lambda x: per_sample(model, x), of_ranks[rank()], window=True), bad)
    for part in good_parts(of_ranks, bad)[rank()]:
        if len(part):
            single(part)
    equal(values(model.buffers()), values(single.buffers()))


@case
def exceptions_on_one_rank(kind: str) -> None:
    def raises_after(model: nn.Module, x: Tensor) -> Tensor:
        found = per_sample(model, x)
        if len(x) < 3:
            raise ValueError("too few")
        return found

    def raises_before(model: nn.Module, x: Tensor) -> Tensor:
        if len(x) < 3:
            raise ValueError("too few")
        return per_sample(model, x)

    for loss in (raises_after, raises_before):
        compare(kind, {1: [3]}, loss, make=normed, start=5, fault=HIDDEN)
        compare(kind, {1: [3]}, loss, start=5)


class NeedsThree(torch.autograd.Function):
    """Raises in its backward pass for fewer than three samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if len(gradient) < 3:
            raise ValueError("too few")
        return gradient


@case
def exceptions_in_backward_on_one_rank(kind: str) -> None:
    """With DDP a part that raises in its backward pass is unknown: it is run without communication."""
    compare(kind, {1: [3]}, lambda model, x: NeedsThree.apply(per_sample(model, x)), start=5, fault=HIDDEN)


@case
def a_smallest_part(kind: str) -> None:
    compare(kind, {1: [0]}, make=normed, start=4, fault=HIDDEN, min_batch=2)


@case
def all_bad(kind: str) -> None:
    for fault in (NAN, HIDDEN):
        model = wrapped(kind, normed())
        guard = Retry(model, sgd(model))
        of_ranks = batches({number: [*range(number + 3)] for number in range(size())}, fault=fault)
        before = values(model.parameters()), values(model.buffers()), torch.get_rng_state()
        report = guard.step(lambda x, model=model: per_sample(model, x), of_ranks[rank()][0])
        assert report.skipped, report
        assert report.bad == ([*range(rank() + 3)] if fault is NAN else []), report
        assert len(set(everywhere(report.runs))) == 1
        equal(values(model.parameters()), before[0])
        equal(values(model.buffers()), before[1])
        assert torch.equal(torch.get_rng_state(), before[2])
        assert guard.step(lambda x, model=model: per_sample(model, x), batches({})[rank()][0]).ok


@case
def too_many_bad(kind: str) -> None:
    model = wrapped(kind, mlp())
    report = Retry(model, sgd(model), max_bad=1).step(
        lambda x: per_sample(model, x), batches({0: [1], 1: [1]})[rank()][0]
    )
    assert report.skipped, report
    assert "max_bad=1" in report.note, report


@case
def a_bad_parameter(kind: str) -> None:
    model = wrapped(kind, mlp())
    with torch.no_grad():
        first = next(model.parameters())
        if rank() == 0 or kind == "ddp":
            local(first)[0, 0] = NAN
    report = Retry(model, sgd(model)).step(lambda x: per_sample(model, x), batches({})[rank()][0])
    assert report.skipped, report
    assert report.runs == 1, report
    assert report.parameters == [("module." if kind == "ddp" else "") + "0.weight (NaN)"], report


@case
def optimizers_in_backward(kind: str) -> None:
    model = wrapped(kind, mlp())
    next(model.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
    refused(model, "runs in backward")


@case
def without_waiting(kind: str) -> None:
    """A bad step is skipped on the device. Its good samples are trained after the step that follows."""

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    model, single = wrapped(kind, normed()), normed()
    guard, optimizer = Retry(model, adam(model), wait=False), adam(single)
    faults: dict[int, Bad] = {2: {1: [2]}, 3: {number: [0] for number in range(size())}, 5: {0: [0, 1, 2]}}
    reports = []
    for number in range(6):
        x = batches(faults.get(number, {}), seed=number)[rank()][0]
        reports.append(guard.step(lambda x: per_sample(model, x), x, clip=0.5))
    guard.finish()
    for number, report in enumerate(reports):
        check_report(report, faults.get(number, {}))
        assert report.step == number
    for number in (0, 1, 2, 4, 3, 5):  # 2 is trained after 3 was skipped, and 3 after 4
        parts = good_parts(batches(faults.get(number, {}), seed=number), faults.get(number, {}))
        optimizer.zero_grad()
        joined(single, per_sample, [part for own in parts for part in own]).backward()
        nn.utils.clip_grad_norm_(single.parameters(), 0.5)
        optimizer.step()
    equal(values(model.parameters()), values(single.parameters()))


@case
def accumulation(kind: str) -> None:
    for options in ({}, {"gradient_as_bucket_view": True}) if kind == "ddp" else ({},):
        model, single = wrapped(kind, mlp(), **options), mlp()
        guard = Retry(model)
        warm_up(guard, model)
        for number, bad in enumerate(({}, {1: [2]}, {0: [0, 1, 2]})):
            of_ranks = batches(bad, seed=number)
            check_report(guard.backward(lambda x, model=model: per_sample(model, x), of_ranks[rank()][0]), bad)
            joined(single, per_sample, [part for own in good_parts(of_ranks, bad) for part in own]).backward()
        equal(values(one.grad for one in model.parameters()), values(one.grad for one in single.parameters()))


@case
def frozen_parameters(kind: str) -> None:
    def make() -> nn.Module:
        model = normed()
        model[0].requires_grad_(False)
        return model

    compare(kind, {0: [0]}, make=make, steps=1)
    compare(kind, {0: [0]}, make=make, steps=1, fault=HIDDEN)


@case
def interrupted(kind: str) -> None:
    """An exception in the first run, on every rank, leaves model and wrapper as before."""
    model = wrapped(kind, normed())
    guard, before = Retry(model, sgd(model)), values([*normed().parameters(), *normed().buffers()])
    for is_inside in (False, True):

        def fail(*_: Any) -> None:
            raise KeyboardInterrupt

        with contextlib.ExitStack() as stack:
            if is_inside:
                modules = dict(model.named_modules())
                stack.callback(modules["module.2" if kind == "ddp" else "2"].register_forward_hook(fail).remove)
            with contextlib.suppress(KeyboardInterrupt):
                guard.step(lambda x: (per_sample(model, x), fail()), batches({})[rank()][0])
        equal(values([*model.parameters(), *model.buffers()]), before)
    assert guard.step(lambda x: per_sample(model, x), batches({})[rank()][0]).ok


@case
def health(kind: str) -> None:
    model = wrapped(kind, mlp())
    per_sample(model, batches({0: [0]})[rank()][0]).sum().backward()
    assert check_params(model).ok
    if rank() == 0 or kind == "ddp":
        assert not check_grads(model).ok


@case
def samples_that_cannot_be_trained_alone(kind: str) -> None:
    """One good sample is left on rank 0, and BatchNorm refuses a batch of one: it is left out, and said so."""
    for fault in (NAN, HIDDEN) if kind == "ddp" else (HIDDEN,):
        model, single = wrapped(kind, normed()), normed()
        of_ranks = batches({0: [0, 1, 2]}, start=4, fault=fault)
        guard = Retry(model, min_batch=1 if kind == "ddp" else 2)
        report = guard.backward(lambda x, model=model: per_sample(model, x), of_ranks[rank()][0])
        check_report(report, {0: [0, 1, 2]})
        assert report.left_out == ([3] if rank() == 0 else []), report
        joined(single, per_sample, [own[0] for own in of_ranks[1:]]).backward()
        equal(values(one.grad for one in model.parameters()), values(one.grad for one in single.parameters()))


@case
def statistics_of_all_ranks(kind: str) -> None:
    """A rank without good samples runs those of another, which would enter the statistics of SyncBatchNorm twice."""
    model, shared = wrapped(kind, mlp()), nn.SyncBatchNorm(1)
    x = batches({0: [0, 1, 2]})[rank()][0]
    report = Retry(model).backward(lambda x: per_sample(model, x) * bool(shared), x)
    assert report.skipped, report
    assert all(one.grad is None for one in model.parameters())


@case
def twenty_steps(kind: str) -> None:
    """Momentum, weight decay, clipping and running statistics with faults in most steps."""
    model, single = wrapped(kind, mlp()), mlp()
    guard, optimizer = Retry(model, sgd(model)), sgd(single)
    for number in range(20):
        bad = [{}, {1: [0]}, {0: [0, 1, 2]}, {0: [2], 1: [1, 3]}][number % 4]
        of_ranks = batches(bad, fault=HIDDEN if number % 3 == 0 else NAN, seed=number)
        check_report(guard.step(lambda x: per_sample(model, x), of_ranks[rank()][0], clip=0.3), bad)
        optimizer.zero_grad()
        joined(single, per_sample, [part for own in good_parts(of_ranks, bad) for part in own]).backward()
        nn.utils.clip_grad_norm_(single.parameters(), 0.3)
        optimizer.step()
    equal(values(model.parameters()), values(single.parameters()))


# DDP alone.


@case
def no_sync(kind: str) -> None:
    """Gradients that were accumulated in `no_sync()` are reduced with those of the first step outside."""
    for is_guarded in (True, False):
        model, single = wrapped(kind, mlp(), gradient_as_bucket_view=is_guarded), mlp()
        guard = Retry(model)
        for number, bad in enumerate(({}, {1: [2]} if is_guarded else {}, {0: [0, 1, 2]})):
            of_ranks = batches(bad, seed=number)
            own = of_ranks[rank()][0]
            with model.no_sync() if number < 2 else contextlib.nullcontext():
                if is_guarded or number == 2:
                    guard.backward(lambda x, model=model: per_sample(model, x), own)
                else:
                    samples = sum(len(parts[0]) for parts in of_ranks)
                    (per_sample(model, own).sum() * size() / samples).backward()
            joined(single, per_sample, [part for parts in good_parts(of_ranks, bad) for part in parts]).backward()
        equal(values(one.grad for one in model.parameters()), values(one.grad for one in single.parameters()))


@case
def buffers_after_a_skipped_step(kind: str) -> None:
    """DDP copies the buffers of rank 0 in the step after one that was skipped, as after any."""
    model = wrapped(kind, normed())
    guard = Retry(model, sgd(model))
    for bad in ({}, {number: [*range(number + 3)] for number in range(size())}):
        guard.step(lambda x: per_sample(model, x), batches(bad, fault=HIDDEN)[rank()][0])
    assert model.will_sync_module_buffers()
    model.train(False)
    model(torch.zeros(1, 4, dtype=torch.float64))
    assert all(torch.equal(one, everywhere(one)[0]) for one in model.buffers())


@case
def parameters_without_gradients(kind: str) -> None:
    """A part of the batch may leave a parameter of a rank without a gradient. DDP raises an error in such a step."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 1).double() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            chosen = (x[:, 1] > 0).long()
            out = torch.zeros(len(x), 1, dtype=x.dtype)
            for number, expert in enumerate(self.experts):
                if (chosen == number).any():
                    rows = (chosen == number).nonzero().flatten()
                    out = out.index_add(0, rows, expert(x[rows]))
            return out

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Experts()

    of_ranks = batches({1: [2]}, fault=HIDDEN, start=6)
    for own in of_ranks:
        own[0][:, 1] = torch.arange(len(own[0])) % 2 - 0.5
    model, single = wrapped(kind, make()), make()
    guard = Retry(model)
    check_report(guard.backward(lambda x: per_sample(model, x), of_ranks[rank()][0]), {1: [2]})
    joined(single, per_sample, [part for own in good_parts(of_ranks, {1: [2]}) for part in own]).backward()
    equal(values(one.grad for one in model.parameters()), values(one.grad for one in single.parameters()))


@case
def an_overflow_by_the_scale(kind: str) -> None:
    """An overflow by the scale is left to the scaler, although DDP reuses the memory of gradients."""
    model = wrapped(kind, mlp().float(), gradient_as_bucket_view=True)
    guard, scaler = Retry(model, sgd(model)), torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=1)
    warm_up(guard, model)
    before = values(model.parameters())
    report = guard.step(lambda x: per_sample(model, x) * 1e4, batches({})[rank()][0].float(), scaler=scaler)
    assert "GradScaler" in report.note, report
    assert not report.bad, report
    assert scaler.get_scale() == 2.0**125
    equal(values(model.parameters()), before)


@case
def a_static_graph(kind: str) -> None:
    compare(kind, {1: [2]}, fault=HIDDEN, wrap={"static_graph": True}, steps=3)


@case
def unused_parameters(kind: str) -> None:
    compare(kind, {0: [0, 1, 2]}, count=2, wrap={"find_unused_parameters": True})


@case
def compiled(kind: str) -> None:
    plain = wrapped(kind, mlp())
    model, single = torch.compile(plain, backend="aot_eager"), mlp()
    guard, optimizer = Retry(model, sgd(plain)), sgd(single)
    for number, bad in enumerate(({}, {1: [2]}, {0: [0, 1, 2]}, {})):
        of_ranks = batches(bad, seed=number)
        check_report(guard.step(lambda x: per_sample(model, x), of_ranks[rank()][0]), bad)
        optimizer.zero_grad()
        joined(single, per_sample, [part for own in good_parts(of_ranks, bad) for part in own]).backward()
        optimizer.step()
    equal(values(plain.parameters()), values(single.parameters()))


@case
def hooks_with_state(kind: str) -> None:
    model = wrapped(kind, mlp())
    model.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
    refused(model, "PowerSGDState")


@case
def in_join(kind: str) -> None:
    model = wrapped(kind, mlp())
    guard = Retry(model)
    guard.backward(lambda x: per_sample(model, x), batches({})[rank()][0])
    with pytest.raises(RetryError, match="is in join"), model.join():
        guard.backward(lambda x: per_sample(model, x), batches({})[rank()][0])


@case
def a_batch_that_cannot_be_sent(kind: str) -> None:
    """A rank without good samples needs those of another. If these cannot be sent, every rank raises an error."""
    model = wrapped(kind, mlp())
    x = batches({0: [0, 1, 2]})[rank()][0]
    with pytest.raises(RetryError, match="cannot be sent"):
        Retry(model, sgd(model)).step(lambda b: per_sample(model, b["x"]), {"x": x, "f": lambda: 0})


@case
def a_closure_that_returns_something_else(kind: str) -> None:
    """An error of ours on one rank is raised on all of them."""
    model = wrapped(kind, mlp())

    def wrong(x: Tensor) -> Any:
        return per_sample(model, x) if len(x) > 3 or rank() else per_sample(model, x)[:1]

    own = batches({0: [1]}, start=4)[rank()][0]
    with pytest.raises(RetryError, match="another rank" if rank() else "for 3 samples"):
        Retry(model, sgd(model)).step(wrong, own)


# FSDP2 alone.


@case
def after_an_evaluation(kind: str) -> None:
    """A forward pass without a backward pass leaves the outermost module with whole parameters."""
    model, single = wrapped(kind, mlp()), mlp()
    guard, optimizer = Retry(model, sgd(model)), sgd(single)
    for number, bad in enumerate(({}, {0: [1]}, {1: [0]})):
        with torch.no_grad():
            model(torch.zeros(1, 4, dtype=torch.float64))
        of_ranks = batches(bad, seed=number)
        check_report(guard.step(lambda x: per_sample(model, x), of_ranks[rank()][0]), bad)
        optimizer.zero_grad()
        joined(single, per_sample, [part for own in good_parts(of_ranks, bad) for part in own]).backward()
        optimizer.step()
    equal(values(model.parameters()), values(single.parameters()))


@case
def gradients_that_are_not_averaged(kind: str) -> None:
    model = wrapped(kind, mlp())
    model.set_requires_gradient_sync(False)
    refused(model, "set_requires_gradient_sync")
    other = wrapped(kind, mlp())
    other.set_gradient_divide_factor(1.0)
    refused(other, "set_gradient_divide_factor")


@case
def older_sharding(kind: str) -> None:
    model = FullyShardedDataParallel(mlp(), use_orig_params=True, device_id=torch.device("cpu"))
    refused(model, "fully_shard")


@case
def an_exception_inside_of_a_pass(kind: str) -> None:
    """The other ranks wait for this one: an error names what to do. Here all ranks raise, so that nobody waits."""
    model = wrapped(kind, normed())
    x = batches({number: [0] for number in range(size())}, fault=HIDDEN)[rank()][0][:2]
    with pytest.raises(RetryError, match="min_batch="):
        Retry(model, sgd(model)).step(lambda x: per_sample(model, x), x)


def warm_up(guard: Retry, model: nn.Module) -> None:
    """Two steps, after which DDP keeps its buckets where they are."""
    x = batches({})[rank()][0].to(next(model.parameters()).dtype)
    for _ in range(2):
        guard.backward(lambda x: per_sample(model, x), x)
        model.zero_grad()


def refused(model: nn.Module, text: str) -> None:
    with pytest.raises(RetryError, match=text):
        Retry(model, sgd(model)).step(lambda x: per_sample(model, x), batches({})[rank()][0])


def main(number: int, count: int, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{folder}/store", timeout, count, number)
    found = {}
    for name in names:
        function, _, kind = name.partition(":")
        try:
            CASES[function](kind)
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
            break
    (folder / f"{number}.json").write_text(json.dumps(found))
    if all(not error for error in found.values()):
        dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
