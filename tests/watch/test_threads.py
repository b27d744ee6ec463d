"""Several threads that call one watched model at the same time."""

import threading

import pytest
import torch
from torch import nn

from torchguard import err, watch

NAN = float("nan")


class Waiting(nn.Module):
    """Two layers; between them every thread waits for all others, unless a graph is traced."""

    def __init__(self, threads: int):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.barrier = threading.Barrier(threads)

    def forward(self, x):
        h = self.first(x)
        if not torch.compiler.is_compiling():
            self.barrier.wait(60)
        return self.second(h.relu())


def batches(count):
    """For each thread another batch size and, from the second on, another bad sample."""
    made = [torch.randn(count + 1 + i, 4) for i in range(count)]
    for i, x in enumerate(made[1:]):
        x[i] = NAN
    return made


def in_threads(count, call):
    """`call(number)` in threads that begin together; their results."""
    results, start = [None] * count, threading.Barrier(count)

    def run(number):
        start.wait(60)
        results[number] = call(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results


def check(model, given, results):
    for number, (out, f, flags, incidents) in enumerate(results):
        x = given[number]
        bad = [] if number == 0 else [number - 1]
        assert err.is_err(f).nonzero().flatten().tolist() == bad
        assert flags is None or torch.equal(flags, f)
        assert incidents is None or [one.sample for one in incidents] == bad
        good = [i for i in range(len(x)) if i not in bad]
        want = model.second(model.first(x[good]).relu())
        torch.testing.assert_close(out[good], want)


@pytest.mark.parametrize("quarantine", [False, True])
@pytest.mark.parametrize("count", [2, 4])
def test_each_thread_gets_its_own_flags_output_and_report(count, quarantine):
    model, given = Waiting(count), batches(count)
    guarded = watch(model, quarantine=quarantine)

    def call(number):
        for _ in range(5):
            out, f = guarded(given[number])
        return out, f, guarded.flags, guarded.report()

    check(model, given, in_threads(count, call))


@pytest.mark.parametrize("quarantine", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.long), 4])
def test_compiled_each_thread_gets_its_own_flags_and_output(count, quarantine):
    model, given = Waiting(count), batches(count)
    guarded = torch.compile(watch(model, quarantine=quarantine), backend="aot_eager", fullgraph=True)

    def call(number):
        for _ in range(5):
            out, f = guarded(given[number])
        return out, f, None, None

    check(model, given, in_threads(count, call))


def test_a_thread_may_call_the_plain_model_meanwhile():
    model, given = Waiting(2), batches(2)
    guarded = watch(model, quarantine=True)
    plain, watched = in_threads(2, lambda number: (guarded if number else model)(given[number]))
    assert isinstance(plain, torch.Tensor)
    assert err.is_err(watched[1]).nonzero().flatten().tolist() == [0]


def test_the_report_of_another_threads_call_can_be_read():
    guarded = watch(nn.Linear(2, 2))
    in_threads(1, lambda _: guarded(torch.tensor([[1.0, 1.0], [NAN, 1.0]])))
    assert [incident.sample for incident in guarded.report()] == [1]
