"""What a closure reaches by other ways than cells, attributes and items, is restored, too."""

import contextlib
import ctypes
import functools
import importlib
import sys
import types

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchguard import Retry, RetryError
from torchguard._retry.reach import reach

B = 6
VALUES = types.ModuleType("values_of_test_reach")  # a module of the user's own
sys.modules[VALUES.__name__] = VALUES


def losses(model, x):
    return model(x).squeeze(1).square()


# Each makes a closure that counts its calls in some place, and a function that reads the count.


def through_a_property(model):
    calls = []

    class Owner:
        @property
        def factor(self):
            calls.append(1)
            return 1.0

    owner = Owner()
    return lambda x: losses(model, x) * owner.factor, lambda: len(calls)


def through_a_cached_property(model):
    calls = []

    class Owner:
        @functools.cached_property
        def factor(self):
            calls.append(1)
            return 1.0

    return lambda x: losses(model, x) * Owner().factor, lambda: len(calls)


def through_a_metaclass(model):
    calls = []

    class Meta(type):
        def factor(cls):
            calls.append(1)
            return 1.0

    class Owner(metaclass=Meta):
        pass

    return lambda x: losses(model, x) * Owner.factor(), lambda: len(calls)


def through_a_dispatch_by_type(model):
    calls = []

    @functools.singledispatch
    def factor(x):
        return 1.0

    @factor.register
    def _(x: torch.Tensor):
        calls.append(1)
        return 1.0

    return lambda x: losses(model, x) * factor(x), lambda: len(calls)


def through_a_cache(model):
    calls = []

    @functools.lru_cache
    def factor(step):
        calls.append(1)
        return 1.0

    def closure(x):
        factor.cache_clear()
        return losses(model, x) * factor(0)

    return closure, lambda: len(calls)


def through_a_view_of_memory(model):
    memory = bytearray(4)
    view = memoryview(memory)

    def closure(x):
        view[0] += 1
        return losses(model, x)

    return closure, lambda: memory[0]


def through_an_operator(model):
    calls = []

    @torch.library.custom_op("test_reach::count", mutates_args=())
    def count(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.clone()

    return lambda x: losses(model, torch.ops.test_reach.count(x)), lambda: len(calls)


def through_setattr(model):
    VALUES.count = 0

    def closure(x):
        setattr(VALUES, "count", VALUES.count + 1)  # noqa: B010 (what is tested)
        return losses(model, x)

    return closure, lambda: VALUES.count


def through_an_import(model):
    VALUES.count = 0

    def closure(x):
        values = importlib.import_module("values_of_test_reach")
        values.count += 1
        return losses(model, x)

    return closure, lambda: VALUES.count


def through_a_hook_of_several_gradients(model):
    state = {"count": 0}

    def hook(gradients):
        state["count"] += 1
        for gradient in gradients:
            gradient.mul_(1 + 0.1 * state["count"])

    torch.autograd.graph.register_multi_grad_hook([*model.parameters()], hook)
    return lambda x: losses(model, x), lambda: state["count"]


@pytest.mark.parametrize(
    "place",
    [
        through_a_property,
        through_a_cached_property,
        through_a_metaclass,
        through_a_dispatch_by_type,
        through_a_cache,
        through_a_view_of_memory,
        through_an_operator,
        through_setattr,
        through_an_import,
        through_a_hook_of_several_gradients,
    ],
)
def test_a_bad_step_counts_once(place):
    model = nn.Linear(4, 1)
    closure, count = place(model)
    assert step(model, closure).bad == [2]
    assert count() == 1


def step(model, closure):
    x = torch.randn(B, 4)
    x[2] = float("nan")
    return Retry(model, torch.optim.SGD(model.parameters(), lr=0.1)).step(closure, x)


class Functions(torch.overrides.TorchFunctionMode):
    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func is nn.functional.linear
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [Functions, Operations])
def test_a_mode_around_the_step_counts_once(kind):
    model = nn.Linear(4, 1)
    with kind() as mode:
        step(model, lambda x: losses(model, x))
    assert mode.count == 1


def test_a_mode_that_is_entered_later_counts_once():
    model, mode = nn.Linear(4, 1), Functions()
    guard = Retry(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for manager in (contextlib.nullcontext(), mode):
        x = torch.randn(B, 4)
        x[2] = float("nan")
        with manager:
            guard.step(lambda x: losses(model, x), x)
    assert mode.count == 1


def test_memory_of_ctypes_that_changes_is_refused_by_name():
    model, counter = nn.Linear(4, 1), ctypes.c_int(0)

    def closure(x):
        counter.value += 1
        return losses(model, x)

    with pytest.raises(RetryError, match="changes counter, which is not saved"):
        step(model, closure)


def test_a_key_that_is_a_tensor_is_named_by_its_kind():
    key = nn.Parameter(torch.zeros(3))
    names = [name for name, _ in reach({"state": {key: torch.ones(2), "lr": torch.ones(1)}}).tensors]
    assert {"state[Parameter]", "state['lr']"} <= {*names}
