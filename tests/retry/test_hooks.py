"""Hooks that take part in what a step computes are restored like the model; those that only observe see every run."""

import collections
import functools
import logging
import operator
import types
from operator import imul as scaled

import numpy as np
import pytest
import torch
from torch import nn

import torchguard
from torchguard import Retry, RetryError, is_retrying

B = 6
CALLS = 0
NOTES = []
logger = logging.getLogger("test_hooks")


class Holder:
    """What the hooks below count in."""

    def __init__(self):
        self.count, self.seen, self.last, self.notes = 0, [], 0, {}

    def factor(self):
        self.count += 1
        return 1 + 0.1 * self.count

    def scale(self, output):
        output.mul_(self.factor())

    def rename(self, module, args):
        self.count += 1
        self, _ = module, args
        self.factor = 1.1

    def __call__(self, module, args, output):
        self.scale(output)


def scale(output, factor):
    output.mul_(factor)


def raised(state):
    state["count"] += 1
    return 1 + 0.1 * state["count"]


def attach(output, hook):
    output.register_hook(hook)


# Each registers a hook that scales something by a count, and returns a function that reads the count.


def method_of_an_object(model):
    holder = Holder()
    model[0].register_forward_hook(holder)
    return lambda: holder.count


def method_that_calls_a_method(model):
    holder = Holder()
    model[0].register_forward_hook(lambda module, args, output: holder.scale(output))
    return lambda: holder.count


def function_that_calls_a_function(model):
    state = {"count": 0}

    def hook(module, args, output):
        scale(output, raised(state))

    model[0].register_forward_hook(hook)
    return lambda: state["count"]


def partial(model):
    state = {"count": 0}

    def hook(state, module, args, output):
        scale(output, raised(state))

    model[0].register_forward_hook(functools.partial(hook, state))
    return lambda: state["count"]


def decorated(model):
    state = {"count": 0}

    @torch.no_grad()
    def hook(module, args, output):
        scale(output.detach(), raised(state))

    model[0].register_forward_hook(hook)
    return lambda: state["count"]


def nested_functions(model):
    count = 0

    def outer():
        def inner(output):
            nonlocal count
            count += 1
            torch.mul(output, 1 + 0.1 * count, out=output)

        return inner

    inner = outer()
    model[0].register_forward_hook(lambda module, args, output: inner(output.detach()))
    return lambda: count


def items_of_the_output(model):
    state = {"count": 0}

    def hook(module, args, output):
        state["count"] += 1
        output.data[0] = 0.1 * state["count"]

    model[0].register_forward_hook(hook)
    return lambda: state["count"]


def either_of_two_targets(model):
    state, other = {"count": 0}, [0.0]

    def hook(module, args, output):
        state["count"] += 1
        (output.data if state["count"] else other)[0] = 0.1 * state["count"]

    model[0].register_forward_hook(hook)
    return lambda: state["count"]


def attribute_of_the_module(model):
    state = {"count": 0}

    def hook(module, args):
        state["count"] += 1
        module.factor = 1 + 0.1 * state["count"]

    model[0].register_forward_pre_hook(hook)
    model[2].register_forward_hook(lambda module, args, output: output * model[0].factor)
    return lambda: state["count"]


def other_object_named_self(model):
    holder = Holder()
    model[0].register_forward_pre_hook(holder.rename)
    return lambda: holder.count


def hook_of_the_output(model):
    state = {"count": 0}
    model[0].register_forward_hook(
        lambda module, args, output: attach(output, lambda grad: grad * raised(state)),
    )
    return lambda: state["count"]


def gradient_of_a_parameter(model):
    state = {"count": 0}

    def hook(grad):
        scale(grad, raised(state))

    model[0].weight.register_hook(hook)
    return lambda: state["count"]


def alias_that_another_hook_keeps(model):
    holder = Holder()

    def keep(module, args, output):
        holder.last = output

    def change(module, args):
        holder.count += 1
        holder.last += 0.01

    model[0].register_forward_hook(keep)
    model[1].register_forward_pre_hook(change)
    return lambda: holder.count


def object_with_operators(model):
    class Scale(Holder):
        def __lshift__(self, output):
            self.scale(output)

    scales = Scale()

    def hook(module, args, output):
        scales << output

    model[0].register_forward_hook(hook)
    return lambda: scales.count


def constructor(model):
    state = {"count": 0}

    class Scaled:
        def __init__(self, output):
            output.mul_(raised(state))

    def hook(module, args, output):
        Scaled(output)

    model[0].register_forward_hook(hook)
    return lambda: state["count"]


def functions_in_a_list(model):
    state = {"count": 0}
    functions = [lambda output: output.mul_(raised(state))]

    def hook(module, args, output):
        functions[0](output)

    model[0].register_forward_hook(hook)
    return lambda: state["count"]


def function_of_c(model):
    state = {"count": 0}

    def hook(module, args, output):
        operator.imul(output.detach(), raised(state))

    model[0].register_forward_hook(hook)
    return lambda: state["count"]


def function_under_another_name(model):
    count = 0

    def hook(module, args, output):
        nonlocal count
        count += 1
        scaled(output.detach(), 1 + 0.1 * count)

    model[0].register_forward_hook(hook)
    return lambda: count


def array_that_is_sorted(model):
    state = {"count": 0}

    def hook(module, args, output):
        state["count"] += 1
        output.detach().numpy().sort()

    model[0].register_forward_hook(hook)
    return lambda: state["count"]


def code_without_source(model):
    names = {"state": {"count": 0}}
    exec(
        "def hook(module, args, output):\n"
        "    state['count'] += 1\n"
        "    change(output)\n"
        "def change(output):\n"
        "    output.mul_(1 + 0.1 * state['count'])",
        names,
    )
    model[0].register_forward_hook(names["hook"])
    return lambda: names["state"]["count"]


def value_behind_an_append(model):
    holder = Holder()

    def second(_, output):
        return output * holder.factor()

    model[0].register_forward_hook(lambda module, args, output: second(holder.seen.append(1), output))
    return lambda: holder.count


def state_that_the_closure_reads(model):
    seen = model.seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(1))
    return lambda: len(seen)


TAKING_PART = [
    method_of_an_object,
    method_that_calls_a_method,
    function_that_calls_a_function,
    partial,
    decorated,
    nested_functions,
    items_of_the_output,
    either_of_two_targets,
    attribute_of_the_module,
    other_object_named_self,
    hook_of_the_output,
    gradient_of_a_parameter,
    alias_that_another_hook_keeps,
    object_with_operators,
    constructor,
    functions_in_a_list,
    function_of_c,
    function_under_another_name,
    array_that_is_sorted,
    code_without_source,
    value_behind_an_append,
    state_that_the_closure_reads,
]


def bad_step(register):
    """A step of three runs. Returns how often the hook counted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    read = register(model)
    x = torch.randn(B, 4)
    x[2] = float("nan")
    report = Retry(model, torch.optim.SGD(model.parameters(), lr=0.1)).step(lambda x: model(x).square()[:, 0], x)
    assert (report.bad, report.runs) == ([2], 3)
    return read()


@pytest.mark.parametrize("register", TAKING_PART)
def test_hooks_that_take_part_count_once(register):
    assert bad_step(register) == 1


def observing(hook, read):
    def register(model):
        model[0].register_forward_hook(hook)
        return read

    return register


def observers():
    seen, notes, counts, calls = [], {}, collections.Counter(), 0
    holder = types.SimpleNamespace(count=0, seen=[])
    name = "layer"

    def asks(module, args, output):
        seen.append(is_retrying())

    def counts_in_a_variable(module, args, output):
        nonlocal calls
        calls += 1

    def counts_in_an_attribute(module, args, output):
        holder.count += 1

    def counts_by_name(module, args, output):
        counts[name] += 1

    def calls_a_function(module, args, output):
        note(output)

    def notes_by_name(module, args, output):
        seen.append(len(seen))
        notes[name] = output.detach().norm().item()

    def logs(module, args, output):
        if torch.isfinite(output).any() or torchguard.is_retrying():
            logger.debug("mean %s", np.abs(output.detach().numpy()).mean())
        seen.append([one.shape for one in module.parameters()])

    length = functools.partial(len, seen)
    return {
        "asks": observing(asks, length),
        "a variable": observing(counts_in_a_variable, lambda: calls),
        "an attribute": observing(counts_in_an_attribute, lambda: holder.count),
        "a counter": observing(counts_by_name, lambda: counts["layer"]),
        "a global": observing(counts_globally, lambda: CALLS),
        "a function": observing(calls_a_function, lambda: len(NOTES)),
        "names": observing(notes_by_name, length),
        "a log": observing(logs, length),
        "a lambda": observing(lambda module, args, output: seen.append(output.mean()), length),
        "a method": observing(types.MethodType(record, holder), lambda: len(holder.seen)),
        "a last value": observing(types.MethodType(keep_last, holder), lambda: holder.count),
        "a comprehension": observing(lambda module, args, output: seen.append([one.mean() for one in args]), length),
    }


def note(output):
    NOTES.append(output.detach().mean().item())


def record(self, module, args, output):
    self.seen.append(output.shape)


def keep_last(self, module, args, output):
    for one in args:
        self.seen.append(one)
    self.last = output
    self.count += 1


def counts_globally(module, args, output):
    global CALLS
    CALLS += 1


@pytest.mark.parametrize("name", observers())
def test_hooks_that_only_observe_count_every_run(name):
    assert bad_step(observers()[name]) == 3


@pytest.mark.parametrize("name", ["register_hook", "register_prehook"])
def test_hooks_that_a_closure_registers_on_nodes_count_once(name):
    model, calls = nn.Linear(4, 1), [0]

    def hook(*gradients):
        calls[0] += 1

    def closure(x):
        out = model(x)
        getattr(out.grad_fn, name)(hook)
        return out.square()[:, 0]

    x = torch.randn(B, 4)
    x[2] = float("nan")
    assert Retry(model).backward(closure, x).bad == [2]
    assert calls == [1]


def test_a_kept_node_that_accumulates_gradients_is_refused():
    model = nn.Linear(4, 1)
    model.nodes = [torch.autograd.graph.get_gradient_edge(model.weight).node]
    model.nodes[0].register_prehook(lambda gradients: None)
    with pytest.raises(RetryError, match=r"model\.nodes\[0\] is the node of autograd"):
        Retry(model).backward(lambda x: model(x).square()[:, 0], torch.randn(B, 4))
