"""What a retried step restores, and what is refused because it cannot be."""

import argparse
import array
import collections
import contextvars
import copy
import dataclasses
import functools
import multiprocessing
import queue
import random
import string
import sys
import types
import weakref
from collections import ChainMap
from threading import local as Local

import numpy as np
import pytest
import torch
from torch import nn

from torchguard import Retry, RetryError
from torchguard._retry import python_state
from torchguard._retry.random_state import _python_state as python_random_state
from torchguard._retry.reach import reach

B = 6
COUNT = 0
counted_module = types.ModuleType("counted_module")  # a module of the user's own
sys.modules["counted_module"] = counted_module
LOG = []
STATE = torch.zeros(2)


def bad_batch(row=2):
    x = torch.randn(B, 4)
    x[row] = float("nan")
    return x


def losses(model, x):
    return model(x).squeeze(1).square()


def step(closure, model, batch=None, **options):
    guard = Retry(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    report = guard.step(closure, bad_batch() if batch is None else batch)
    assert report.bad == [2]
    assert report.runs >= 3
    return guard


# Each makes a closure that counts its calls in some place, and a function that reads the count.


def in_attribute(model):
    model.calls = 0

    def closure(x):
        model.calls += 1
        return losses(model, x)

    return closure, lambda: model.calls


def in_buffer(model):
    model.register_buffer("calls", torch.zeros(()))

    def closure(x):
        model.calls += 1
        return losses(model, x)

    return closure, lambda: model.calls.item()


def in_buffer_by_data(model):
    model.register_buffer("calls", torch.zeros(3))

    def closure(x):
        model.calls.data.add_(1)
        return losses(model, x)

    return closure, lambda: model.calls[0].item()


def in_replaced_buffer(model):
    model.register_buffer("calls", torch.zeros(()))

    def closure(x):
        model.calls = model.calls + 1
        return losses(model, x)

    return closure, lambda: model.calls.item()


def in_lazy_buffer(model):
    def closure(x):
        if not hasattr(model, "calls"):
            model.register_buffer("calls", torch.zeros(()))
        model.calls += 1
        return losses(model, x)

    return closure, lambda: model.calls.item()


def in_frozen_parameter(model):
    model.calls = nn.Parameter(torch.zeros(()), requires_grad=False)

    def closure(x):
        model.calls.data += 1
        return losses(model, x)

    return closure, lambda: model.calls.item()


def in_module_of_closure(model):
    other = nn.BatchNorm1d(4)

    def closure(x):
        return losses(model, other(x))

    return closure, lambda: other.num_batches_tracked.item()


def in_plain_tensor(model):
    model.calls = torch.zeros(())

    def closure(x):
        model.calls.data.add_(1)
        return losses(model, x)

    return closure, lambda: model.calls.item()


def in_expanded_tensor(model):
    model.calls = torch.zeros(1).expand(3)

    def closure(x):
        model.calls.data[:1] += 1
        return losses(model, x)

    return closure, lambda: model.calls[1].item()


def in_cell(model):
    calls = 0

    def closure(x):
        nonlocal calls
        calls += 1
        return losses(model, x)

    return closure, lambda: calls


def in_global(model):
    global COUNT
    COUNT = 0

    def closure(x):
        global COUNT
        COUNT += 1
        return losses(model, x)

    return closure, lambda: COUNT


def in_global_list(model):
    LOG.clear()
    return lambda x: (LOG.append(1), losses(model, x))[1], lambda: len(LOG)


def in_global_tensor(model):
    STATE.zero_()
    return lambda x: (STATE.add_(1), losses(model, x))[1], lambda: STATE[0].item()


def in_function_it_calls(model):
    calls = [0]

    def count():
        calls[0] += 1

    return lambda x: (count(), losses(model, x))[1], lambda: calls[0]


def in_long_containers(model):
    items, table = [0] * 5000, dict.fromkeys(range(5000))

    def closure(x):
        items.append(0)
        table[len(table)] = 0
        return losses(model, x)

    return closure, lambda: (len(items) + len(table) - 10_000) / 2


def in_default(model):
    def closure(x, calls=[]):  # noqa: B006 (what is tested)
        calls.append(1)
        return losses(model, x)

    return closure, lambda: len(closure.__defaults__[0])


def in_nested_containers(model):
    held = {"a": ({"b": [0]}, collections.deque(maxlen=2), set())}

    def closure(x):
        first, queue, seen = held["a"]
        first["b"][0] += 1
        queue.append(len(queue))
        seen.add(len(seen))
        return losses(model, x)

    return closure, lambda: (held["a"][0]["b"][0] + len(held["a"][1]) + len(held["a"][2])) / 3


def in_object(model):
    class Counter:
        def __init__(self):
            self.calls = 0

        def count(self):
            self.calls += 1

    counter = Counter()
    return lambda x: (counter.count(), losses(model, x))[1], lambda: counter.calls


def behind_weak_reference(model):
    owner = argparse.Namespace(calls=0)
    reference = weakref.ref(owner)

    def closure(x):
        reference().calls += 1
        return losses(model, x)

    return closure, lambda: owner.calls


def in_slots(model):
    @dataclasses.dataclass(slots=True)
    class Counter:
        calls: int = 0

    counter = Counter()

    def closure(x):
        counter.calls += 1
        return losses(model, x)

    return closure, lambda: counter.calls


def in_namespaces(model):
    one, other = types.SimpleNamespace(calls=0), argparse.Namespace(calls=0)

    def closure(x):
        one.calls += 1
        other.calls += 1
        return losses(model, x)

    return closure, lambda: (one.calls + other.calls) / 2


def in_numpy_array(model):
    calls = np.zeros(2)

    def closure(x):
        calls[1] += 1
        return losses(model, x)

    return closure, lambda: calls[1]


def in_bound_method(model):
    class Trainer:
        def __init__(self):
            self.calls, self.model = 0, model

        def closure(self, x):
            self.calls += 1
            return losses(self.model, x)

    trainer = Trainer()
    return trainer.closure, lambda: trainer.calls


def in_function_attribute(model):
    def closure(x):
        closure.calls += 1
        return losses(model, x)

    closure.calls = 0
    return closure, lambda: closure.calls


def in_imported_module(model):
    counted_module.calls = 0

    def closure(x):
        counted_module.calls += 1
        return losses(model, x)

    return closure, lambda: counted_module.calls


def in_private_slot(model):
    class Counter:
        __slots__ = ("__calls",)

        def __init__(self):
            self.__calls = 0

        def count(self):
            self.__calls += 1

        def read(self):
            return self.__calls

    counter = Counter()

    def closure(x):
        counter.count()
        return losses(model, x)

    return closure, counter.read


def in_arrays_of_the_standard_library(model):
    one, other = array.array("i", [0]), bytearray(1)

    def closure(x):
        one[0] += 1
        other[0] += 1
        return losses(model, x)

    return closure, lambda: (one[0] + other[0]) / 2


class Meter(dict):
    """A user's subclass of a container, which has attributes and methods of its own."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def clear(self):
        raise AssertionError("a method of the user's is called")


class Recent(collections.deque):
    calls = 0


class Generator(random.Random):
    calls = 0


class Point(collections.namedtuple("Point", "x y")):
    pass


def in_subclasses_of_containers(model):
    holders = [Meter(), Recent(maxlen=2), Generator(3), Point(1, 2), np.zeros(2).view(type("Own", (np.ndarray,), {}))]
    holders[3].calls = holders[4].calls = 0

    def closure(x):
        for one in holders:
            one.calls += 1
        holders[0]["calls"] = holders[0].calls
        holders[1].append(holders[1].calls)
        return losses(model, x) * holders[2].random()

    return closure, lambda: sum(one.calls for one in holders) / 5


def in_objects_of_torch(model):
    prior = torch.distributions.Normal(torch.zeros(2), torch.ones(2))
    engine, bits = torch.quasirandom.SobolEngine(2), np.random.PCG64(1)
    first = np.random.PCG64(1).random_raw(2).tolist()

    def closure(x):
        prior.loc.add_(1)
        prior.scale = prior.scale + 1
        bits.random_raw()
        return losses(model, x + engine.draw(1).mean())

    def count():
        counts = [*prior.loc.tolist(), *(prior.scale - 1).tolist(), engine.num_generated]
        assert len({*counts}) == 1
        assert copy.deepcopy(bits).random_raw() == first[int(counts[0])]
        return counts[0]

    return closure, count


def in_hook_of_a_tensor(model):
    weight, calls = torch.ones(4, requires_grad=True), [0]

    def hook(grad):
        calls[0] += 1
        return grad / calls[0]

    weight.register_hook(hook)
    return lambda x: losses(model, x * weight), lambda: calls[0]


def in_guard_of_the_closure(model):
    critic = nn.Linear(4, 1)
    guard = Retry(critic, torch.optim.Adam(critic.parameters()))

    def closure(x):
        guard.step(lambda x: losses(critic, x), x.nan_to_num())
        return losses(model, x)

    return closure, lambda: guard.optimizers[0].state[critic.bias]["step"].item() if guard.history else 0


def in_classes_of_the_standard_library(model):
    waiting, weak, chained, of_thread = queue.Queue(), weakref.WeakKeyDictionary(), ChainMap({"calls": 0}), Local()
    weak[model], of_thread.calls = 0, 0

    def closure(x):
        waiting.put(1)
        weak[model] += 1
        chained["calls"] += 1
        of_thread.calls += 1
        return losses(model, x)

    return closure, lambda: (waiting.qsize() + weak[model] + chained["calls"] + of_thread.calls) / 4


def in_context_variable(model):
    variable = contextvars.ContextVar("calls")
    variable.set(0)

    def closure(x):
        variable.set(variable.get() + 1)
        return losses(model, x)

    return closure, variable.get


def in_optimizer_of_the_closure(model):
    """Of a critic that is trained inside of the closure, with a scheduler."""
    critic = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(critic.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def closure(x):
        critic(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        return losses(model, x)

    return (
        closure,
        lambda: ((optimizer.state[critic.weight]["step"].item() if optimizer.state else 0) + schedule.last_epoch) / 2,
    )


def in_hooks_that_take_part(model):
    """Of a module and of a parameter: what they return or change is part of what is computed."""

    def of_module(module, args, output):
        state["outputs"] += 1
        return output * 2

    def of_gradient(gradient):
        state["gradients"] += 1
        return gradient * 2

    def in_place(module, args, output):
        state["places"] += 1
        output *= 2
        output.data.mul_(0.5)

    state = {"outputs": 0, "gradients": 0, "places": 0}
    model.register_forward_hook(of_module)
    model.register_forward_hook(in_place)
    model.weight.register_hook(of_gradient)
    return lambda x: losses(model, x), lambda: sum(state.values()) / 3


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.names, self.last = 0, [0], torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.names.append(1)
        self.last = self.last + 1
        return x * self.calls


def in_torchscript(model):
    scripted = torch.jit.script(Scripted())
    count = lambda: (scripted.calls + len(scripted.names) - 1 + scripted.last.item()) / 3  # noqa: E731
    return lambda x: losses(model, scripted(x)), count


def in_decorator(model):
    calls = [0]

    def counted(function):
        @functools.wraps(function)
        def call(x):
            calls[0] += 1
            return function(x)

        return call

    return torch.enable_grad()(counted(lambda x: losses(model, x))), lambda: calls[0]


PLACES = [
    in_attribute, in_buffer, in_buffer_by_data, in_replaced_buffer, in_lazy_buffer, in_frozen_parameter,
    in_module_of_closure, in_plain_tensor, in_expanded_tensor, in_cell, in_global, in_global_list, in_global_tensor,
    in_function_it_calls, in_long_containers, in_default, in_nested_containers, in_object, in_slots,
    behind_weak_reference,
    in_namespaces, in_numpy_array, in_bound_method, in_function_attribute, in_imported_module, in_private_slot,
    in_arrays_of_the_standard_library, in_classes_of_the_standard_library, in_context_variable,
    in_optimizer_of_the_closure, in_hooks_that_take_part, in_torchscript, in_decorator, in_subclasses_of_containers,
    in_objects_of_torch, in_hook_of_a_tensor, in_guard_of_the_closure,
]  # fmt: skip


# Without an optimizer, all parameters count as trained, and must not change.
NOT_IN_BACKWARD = [in_lazy_buffer, in_optimizer_of_the_closure, in_guard_of_the_closure]


@pytest.mark.parametrize("place", PLACES)
def test_a_retried_step_counts_once(place):
    model = nn.Linear(4, 1)
    closure, count = place(model)
    step(closure, model)
    assert count() == 1


def test_state_of_dynamo_is_not_followed():
    model = nn.Linear(4, 1)
    compiled = torch.compile(lambda x: losses(model, x), backend="eager")
    names = {name for name, _ in reach({"closure": compiled}).states}
    assert "model" in names
    assert not any("dynamo" in name for name in names)


def test_a_hook_that_is_registered_after_the_first_step_is_restored():
    model = nn.Linear(4, 1)
    guard = Retry(model, torch.optim.SGD(model.parameters(), lr=0.1))
    guard.step(lambda x: losses(model, x), torch.randn(B, 4))
    closure, count = in_hooks_that_take_part(model)
    guard.step(closure, bad_batch())
    assert count() == 1


def test_a_hook_of_all_modules_that_takes_part_is_restored():
    calls = [0]

    def count(module, args, output):
        calls[0] += 1
        return output * 2

    handle = nn.modules.module.register_module_forward_hook(count)
    try:
        model = nn.Linear(4, 1)
        step(lambda x: losses(model, x), model)
    finally:
        handle.remove()
    assert calls == [1]


def test_hooks_that_only_observe_see_every_run():
    model, seen = nn.Linear(4, 1), []

    def observe(module, args, output):
        seen.append(len(output))

    model.register_forward_hook(observe)
    model.register_forward_hook(lambda module, args, output: seen.append(output.mean().item()))
    step(lambda x: losses(model, x), model)
    assert len(seen) == 2 * 3


def test_the_state_of_pythons_generator_is_that_of_getstate():
    random.seed(3)
    draws = [random.random, random.random, lambda: random.gauss(0, 1), lambda: random.gauss(0, 1), lambda: None]
    for draw in [*draws, lambda: random.setstate(random.Random(5).getstate()), *draws]:
        draw()
        assert python_random_state() == random.getstate()


@pytest.mark.parametrize("place", [in_attribute, in_lazy_buffer, in_nested_containers, in_object])
def test_a_python_without_versions_of_dicts_reads_their_values(place, monkeypatch):
    monkeypatch.setattr(python_state, "can_read_dict_versions", lambda: False)
    model = nn.Linear(4, 1)
    closure, count = place(model)
    step(closure, model)
    assert count() == 1


def test_an_attribute_that_changes_in_every_step_is_restored_in_every_bad_step():
    model = nn.Linear(4, 1)
    closure, count = in_attribute(model)
    guard = Retry(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(40):
        guard.step(closure, bad_batch() if number % 3 else torch.randn(B, 4))
        assert count() == number + 1


@pytest.mark.parametrize("place", [place for place in PLACES if place not in NOT_IN_BACKWARD])
def test_a_step_that_is_skipped_counts_nothing(place):
    model = nn.Linear(4, 1)
    closure, count = place(model)
    report = Retry(model).backward(closure, torch.full((B, 4), float("nan")))
    assert report.skipped
    assert count() == 0


class CountingModule(nn.Module):
    calls = 0
    log: list[int] = []  # noqa: RUF012 (what is tested)

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 1)

    def forward(self, x):
        global COUNT
        COUNT += 1
        type(self).calls += 1
        self.log.append(1)
        return self.a(x)


def test_globals_and_class_attributes_that_a_forward_pass_changes():
    global COUNT
    COUNT = CountingModule.calls = 0
    CountingModule.log.clear()
    model = CountingModule()
    step(lambda x: losses(model, x), model)
    assert (COUNT, CountingModule.calls, len(CountingModule.log)) == (1, 1, 1)


def test_a_teacher_that_follows_only_in_some_steps():
    model = nn.Linear(4, 1)
    teacher = copy.deepcopy(model).requires_grad_(False)
    calls = [0]

    def closure(x):
        calls[0] += 1
        if calls[0] % 3 == 0:
            teacher.weight.data.mul_(0.5)
        return (model(x) - teacher(x)).squeeze(1).square()

    guard = Retry(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = teacher.weight.clone()
    for number in range(1, 7):
        guard.step(closure, bad_batch() if number == 6 else torch.randn(B, 4))
    torch.testing.assert_close(teacher.weight.data, before / 4)


def test_a_teacher_that_requires_gradients_but_is_not_trained():
    model = nn.Linear(4, 1)
    teacher = copy.deepcopy(model)
    before = teacher.weight.detach().clone()

    def closure(x):
        teacher.weight.data.mul_(0.5)
        with torch.no_grad():
            wanted = teacher(x)
        return (model(x) - wanted).squeeze(1).square()

    step(closure, model)
    torch.testing.assert_close(teacher.weight.detach(), before / 2)


def train_gan(critic, batches):
    """A GAN whose closure trains the critic, with its own optimizer, on what a bad sample makes non-finite."""
    torch.manual_seed(0)
    generator, optimizer = nn.Linear(3, 4).double(), torch.optim.Adam(critic.parameters())
    guard = Retry([generator, critic], torch.optim.SGD(generator.parameters(), lr=0.1))

    def closure(x):
        optimizer.zero_grad()
        fake = generator(torch.randn(len(x), 3).double())
        (critic(x) - critic(fake.detach())).square().mean().backward()
        optimizer.step()
        return critic(fake).squeeze(1)

    found = [guard.step(closure, x).bad for x in batches]
    return found, [*generator.parameters(), *critic.parameters()]


@pytest.mark.parametrize("width", [8, 20_000], ids=["small", "large"])
def test_a_critic_that_a_bad_sample_makes_non_finite_is_restored(width):
    critic = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1)).double()
    spoilt = [torch.randn(B, 4).double() for _ in range(4)]
    for x in spoilt[1::2]:
        x[2] = float("nan")
    good = [x[x.isfinite().all(1)] for x in spoilt]
    found, weights = train_gan(copy.deepcopy(critic), spoilt)
    assert found == [[], [2], [], [2]]
    torch.testing.assert_close(weights, train_gan(critic, good)[1], rtol=1e-9, atol=0)


@pytest.mark.parametrize("batch", [torch.full((B, 4), float("nan")), bad_batch()], ids=["all", "one"])
def test_a_large_critic_that_changes_for_the_first_time_in_a_bad_step_is_named(batch):
    critic = nn.Sequential(nn.Linear(4, 20_000), nn.Tanh(), nn.Linear(20_000, 1))
    model = nn.Linear(4, 1)
    optimizer, calls = torch.optim.SGD(critic.parameters(), lr=0.1), [0]

    def closure(x):
        calls[0] += 1
        if calls[0] > 2:
            critic(x).mean().backward()
            optimizer.step()
        return losses(model, x) + critic(x).squeeze(1).detach()

    guard = Retry(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        guard.step(closure, torch.randn(B, 4))
    with pytest.raises(RetryError, match=r"changes critic\.0\.weight.*which it did not before"):
        guard.step(closure, batch)


def test_a_retry_in_the_closure_that_reads_parameters_which_the_outer_one_trains():
    model, critic = nn.Linear(4, 1), nn.Linear(4, 1)
    inner = Retry(critic, torch.optim.SGD(critic.parameters(), lr=0.1))

    def closure(x):
        report = inner.step(lambda x: (critic(x) - model(x).detach()).square()[:, 0], x)
        assert report.bad == [2]
        return losses(model, x.nan_to_num()) + critic(x.nan_to_num())[:, 0].detach()

    assert Retry(model, torch.optim.SGD(model.parameters(), lr=0.1)).step(closure, bad_batch()).ok


def test_a_module_on_the_meta_device_gets_its_values_from_elsewhere():
    model = nn.Linear(4, 1)
    shape = copy.deepcopy(model).to("meta")
    x = bad_batch()
    guard = Retry(model)
    report = guard.backward(
        lambda x: torch.func.functional_call(shape, dict(model.named_parameters()), x).square()[:, 0], x
    )
    assert report.bad == [2]


def test_generators_of_random_numbers():
    own, theirs, numpy = torch.Generator().manual_seed(3), random.Random(3), np.random.default_rng(3)
    drawn = []

    def draw():
        return [
            torch.rand(1).item(), torch.rand(1, generator=own).item(), random.random(), theirs.random(),
            np.random.rand(), numpy.random(),
        ]  # fmt: skip

    model = nn.Linear(4, 1)

    def closure(x):
        drawn.append(draw())
        return losses(model, x)

    def seed():
        torch.manual_seed(0)
        own.manual_seed(3)
        random.seed(0)
        theirs.seed(3)
        np.random.seed(0)
        numpy.bit_generator.state = np.random.default_rng(3).bit_generator.state

    batch = bad_batch()
    seed()
    wanted = [draw(), draw()]
    seed()
    Retry(model).backward(closure, batch)
    assert [*drawn, draw()] == wanted  # the list is restored, too, and the generators are one draw further


def test_gradients_of_before_are_kept_when_a_step_is_skipped():
    model = nn.Linear(4, 1)
    guard = Retry(model)
    guard.backward(lambda x: losses(model, x), torch.randn(B, 4))
    before = [one.grad.clone() for one in model.parameters()]
    guard.backward(lambda x: losses(model, x), torch.full((B, 4), float("nan")))
    assert all(torch.equal(one.grad, other) for one, other in zip(model.parameters(), before, strict=True))


def test_a_batch_whose_entries_the_closure_takes_out():
    model = nn.Linear(4, 1)

    def closure(b):
        target = b.pop("y")
        return (model(**b).squeeze(1) - target).square()

    batch = {"input": bad_batch(), "y": torch.randn(B)}
    assert Retry(model).backward(closure, batch).bad == [2]
    assert [*batch] == ["input", "y"]


def test_an_input_that_requires_gradients_keeps_its_own():
    model, x = nn.Linear(4, 1), bad_batch().requires_grad_()
    assert Retry(model).backward(lambda x: losses(model, x), x).bad == [2]
    assert x.grad is None


@pytest.mark.parametrize(
    ("before", "after"),
    [({"a": True}, {"b": True}), ([[1, 2], []], [[1], [2]]), ({"a": [1], "b": [2]}, {"b": [1], "a": [2]})],
)
def test_what_changed_between_two_steps_stays_as_it_is(before, after):
    model, held = nn.Linear(4, 1), {"it": before}
    closure = lambda x: losses(model, x) + len(held["it"])  # noqa: E731
    guard = Retry(model)
    guard.backward(closure, torch.randn(B, 4))
    if isinstance(before, list):
        before[1].append(before[0].pop())
    else:
        before.clear()
        before.update(after)
    assert guard.backward(closure, bad_batch()).bad == [2]
    assert held["it"] == after


def test_hooks_that_a_model_registers_in_its_first_call_are_registered_once():
    class Capturing(nn.Linear):
        captures = False

        def forward(self, x):
            if not self.captures:  # as models of transformers do to return router logits
                self.register_forward_hook(lambda module, args, output: captured.append(output.detach()))
                self.captures = True
            return super().forward(x)

    model, captured = Capturing(4, 1), []
    model.register_forward_hook(lambda *_: None)
    guard = Retry(model)
    assert guard.backward(lambda x: model(x)[:, 0], bad_batch()).bad == [2]
    assert (len(model._forward_hooks), len(captured)) == (2, 1)
    model.register_forward_hook(lambda *_: None)  # between two steps: it stays
    assert guard.backward(lambda x: model(x)[:, 0], bad_batch()).bad == [2]
    assert len(model._forward_hooks) == 3


class Stop(BaseException):
    pass


@pytest.mark.parametrize("at_run", [1, 2, 3])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, Stop, RetryError])
def test_an_exception_leaves_model_gradients_and_optimizer_as_before(at_run, kind, tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    guard = Retry(model, optimizer)
    guard.step(lambda x: losses(model, x), torch.randn(B, 4))
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    runs = tmp_path / "runs"  # a file is not restored
    runs.touch()

    def closure(x):
        runs.write_text(runs.read_text() + "x")
        found = losses(model, x)
        if len(runs.read_text()) == at_run:
            raise kind("stop")
        return found

    batch = bad_batch()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
    with pytest.raises(kind):
        guard.backward(closure, batch)
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()), before)
    assert all(torch.equal(one.grad, torch.ones_like(one)) for one in model.parameters())


def test_an_exception_in_the_first_run_is_the_users():
    model = nn.BatchNorm1d(4)
    before = copy.deepcopy(model.state_dict())

    def closure(x):
        model(x)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        Retry(model).backward(closure, torch.randn(B, 4))
    torch.testing.assert_close(model.state_dict(), before)


def test_tensors_of_earlier_steps_are_not_kept_alive():
    model, held = nn.Linear(4, 4), {"h": torch.zeros(4)}

    def closure(x):
        out = torch.tanh(model(x) + held["h"])
        held["h"] = out.mean(0).detach()
        return out.sum(1)

    guard = Retry(model)
    for _ in range(5):
        guard.backward(closure, torch.randn(B, 4))
    assert len(guard.tensors._constant) == 2  # weight and bias


# Refused by name.


def test_an_optimizer_that_steps_in_backward_is_refused():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(RetryError, match=r"model\.weight has a hook"):
        Retry(model).backward(lambda x: losses(model, x), torch.randn(B, 4))


def test_an_optimizer_in_backward_that_is_attached_later_is_refused():
    model = nn.Linear(4, 1)
    guard = Retry(model)
    guard.backward(lambda x: losses(model, x), torch.randn(B, 4))
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(RetryError, match=r"model\.weight"):
        guard.backward(lambda x: losses(model, x), torch.randn(B, 4))


@pytest.mark.parametrize("batch", [torch.randn(B, 4), torch.full((B, 4), float("nan"))], ids=["good", "bad"])
@pytest.mark.parametrize(
    "change", [lambda w: w.data.clamp_(-0.01, 0.01), lambda w: w.detach().mul_(0.5)], ids=["data", "detach"]
)
def test_a_closure_that_changes_a_trained_parameter_is_refused(change, batch):
    model = nn.Linear(4, 1)

    def closure(x):
        change(model.weight)
        return losses(model, x)

    with pytest.raises(RetryError, match=r"model\.weight"):
        Retry(model, torch.optim.SGD(model.parameters())).step(closure, batch)


def test_lazy_modules_are_refused():
    model = nn.LazyLinear(1)
    with pytest.raises(RetryError, match="model has parameters that are not initialized"):
        Retry(model).backward(lambda x: losses(model, x), torch.randn(B, 4))


def test_an_iterator_is_refused():
    model, noise = nn.Linear(4, 1), iter([1.0, 2.0])
    with pytest.raises(RetryError, match="noise, an iterator"):
        Retry(model).backward(lambda x: losses(model, x) * next(noise), torch.randn(B, 4))
    model.noise = noise
    with pytest.raises(RetryError, match=r"model\.noise, an iterator"):
        Retry(model).backward(lambda x: losses(model, x) * next(model.noise), torch.randn(B, 4))


def test_a_simple_queue_is_refused():
    model, waiting = nn.Linear(4, 1), queue.SimpleQueue()
    with pytest.raises(RetryError, match="waiting, an iterator or queue"):
        Retry(model).backward(lambda x: losses(model, x) * waiting.get_nowait(), torch.randn(B, 4))


def test_a_batch_that_the_closure_changes_in_place_is_refused():
    model = nn.Linear(4, 1)
    with pytest.raises(RetryError, match="changes a tensor of the batch in place"):
        Retry(model).backward(lambda x: losses(model, x.mul_(2)), torch.randn(B, 4))


def a_large_list(model):
    return [0] * 10_000, lambda value: value.__setitem__(5, value[5] + 1)


def a_large_dict(model):
    return dict.fromkeys(range(10_000), 0), lambda value: value.__setitem__(5, value[5] + 1)


def a_large_set(model):
    return {*range(10_000)}, lambda value: value.add(len(value))


def a_large_array(model):
    return np.zeros(2_000_000), lambda value: value.__setitem__(5, value[5] + 1)


def an_array_of_objects(model):
    return np.array([0, None], dtype=object), lambda value: value.__setitem__(0, value[0] + 1)


def a_sparse_buffer(model):
    model.register_buffer("value", torch.eye(3).to_sparse())
    return model.value, lambda value: value.mul_(2)


def values_of_a_sparse_tensor(model):
    return torch.eye(3).to_sparse().coalesce(), lambda value: value.values().mul_(2)


def an_attribute_of_a_tensor(model):
    return torch.zeros(1), lambda value: setattr(value, "calls", getattr(value, "calls", 0) + 1)


def an_iterator_of_an_object(model):
    return types.SimpleNamespace(source=iter(range(100))), lambda value: next(value.source)


def a_generator_of_an_object(model):
    return types.SimpleNamespace(source=(number for number in range(100))), lambda value: next(value.source)


def a_value_of_several_processes(model):
    return multiprocessing.Value("i", 0), lambda value: setattr(value, "value", value.value + 1)


def an_object_of_the_standard_library(model):
    return string.Template("x"), lambda value: setattr(value, "calls", getattr(value, "calls", 0) + 1)


def a_seed_sequence(model):
    return np.random.SeedSequence(1), lambda value: value.spawn(1)


UNSAVED = [
    a_large_list, a_large_dict, a_large_set, a_large_array, an_array_of_objects, a_sparse_buffer,
    values_of_a_sparse_tensor, an_attribute_of_a_tensor, an_iterator_of_an_object, a_generator_of_an_object,
    a_value_of_several_processes, an_object_of_the_standard_library, a_seed_sequence,
]  # fmt: skip


@pytest.mark.parametrize("kind", UNSAVED)
def test_what_is_not_saved_and_changes_is_refused_by_name(kind):
    model = nn.Linear(4, 1)
    value, change = kind(model)

    def closure(x):
        change(value)
        return losses(model, x)

    guard = Retry(model)
    with pytest.raises(RetryError, match=r"changes (model\.)?value"):
        guard.backward(closure, bad_batch())


@pytest.mark.parametrize("kind", UNSAVED)
def test_what_is_not_saved_and_does_not_change_is_no_reason_to_refuse(kind):
    model = nn.Linear(4, 1)
    value, _ = kind(model)
    assert Retry(model).backward(lambda x: (value, losses(model, x))[1], bad_batch()).bad == [2]


def test_random_numbers_of_the_system_are_refused():
    model, source = nn.Linear(4, 1), random.SystemRandom()
    with pytest.raises(RetryError, match="source draws its random numbers from the system"):
        Retry(model).backward(lambda x: losses(model, x) * source.random(), bad_batch())


def test_an_optimizer_that_runs_a_closure_itself_is_refused():
    model = nn.Linear(4, 1)
    with pytest.raises(RetryError, match="LBFGS runs a closure itself"):
        Retry(model, torch.optim.LBFGS(model.parameters()))


def test_without_waiting_only_optimizers_that_skip_on_the_device():
    model = nn.Linear(4, 1)
    guard = Retry(model, torch.optim.SGD(model.parameters(), lr=0.1), wait=False)
    with pytest.raises(RetryError, match=r"wait=False needs optimizers that skip a step on the device\. SGD"):
        guard.step(lambda x: losses(model, x), torch.randn(B, 4))


def test_without_waiting_no_python_state_may_change():
    model, calls = nn.Linear(4, 1), []

    def closure(x):
        calls.append(1)
        return losses(model, x)

    guard = Retry(model, torch.optim.AdamW(model.parameters(), fused=True), wait=False)
    guard.step(closure, torch.randn(B, 4))  # the first step waits
    with pytest.raises(RetryError, match=r"must not change Python state.*calls"):
        guard.step(closure, torch.randn(B, 4))


def test_without_waiting_no_scaler():
    model = nn.Linear(4, 1)
    guard = Retry(model, torch.optim.AdamW(model.parameters(), fused=True), wait=False)
    with pytest.raises(RetryError, match="GradScaler"):
        guard.step(lambda x: losses(model, x), torch.randn(B, 4), scaler=torch.amp.GradScaler("cpu"))
