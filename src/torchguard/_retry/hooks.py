"""Hooks of modules and parameters: those that a run registers, and those that take part in what a step computes.

A hook whose return value replaces an output or a gradient, or that changes it in place, is part of the model, and its
state is restored like that of the model. Any other observes: a metric, a logger, somebody who asks `is_retrying()`. It
runs in every run of a step and keeps what it has seen. Which of the two a hook is, is read off its code.
"""

import dis
import functools
import itertools
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import nn

from torchguard._torch.training import next_hook, remove_hooks

# Methods that change their object and return None: what a lambda that observes ends with.
_RETURN_NONE = frozenset({"add", "append", "appendleft", "extend", "insert", "update", "write", "writelines", "put"})
_LOG = frozenset({"debug", "info", "warning", "error", "log", "print", "add_scalar", "add_histogram"})
_METHODS = ("LOAD_METHOD", "LOAD_ATTR", "LOAD_GLOBAL")


def remove_new_hooks(modules: Iterable[tuple[str, nn.Module]], first: int, but: Collection[int]) -> None:
    """Remove hooks that were registered in a run. Some models do so in their first call, and note it as an attribute.

    Restoring that attribute alone would have them register the hooks once more.
    """
    if next_hook() != first:
        for _, module in modules:
            remove_hooks(module, first, but=but)


def takes_part(hook: Callable[..., Any]) -> bool:
    """Whether a hook may return something other than None, or change a tensor. True where its code cannot be read."""
    while not isinstance(hook, types.FunctionType):
        if isinstance(hook, functools.partial):
            hook = hook.func
        elif isinstance(hook, types.MethodType):
            hook = hook.__func__
        elif isinstance(call := vars(type(hook)).get("__call__"), types.FunctionType):
            hook = call
        else:
            return True
    return _returns_a_value(hook.__code__) or _changes_a_tensor(hook.__code__)


@functools.lru_cache(maxsize=4096)
def _returns_a_value(code: types.CodeType) -> bool:
    steps = [one for one in dis.get_instructions(code) if one.opname not in ("CACHE", "NOP", "RESUME")]
    for number, step in enumerate(steps):
        before = steps[number - 1]
        if step.opname == "RETURN_CONST":
            returns = step.argval is not None
        elif step.opname == "RETURN_VALUE":
            returns = before.opname != "LOAD_CONST" or before.argval is not None
        else:
            continue
        if returns and not (code.co_name == "<lambda>" and _ends_in_nothing(steps[:number])):
            return True
    return False


@functools.lru_cache(maxsize=4096)
def _changes_a_tensor(code: types.CodeType) -> bool:
    """Whether code calls a method such as `mul_`, or has `x *= 2` for a local variable."""
    steps = [one for one in dis.get_instructions(code) if one.opname != "CACHE"]
    for step, after in itertools.pairwise(steps):
        name = str(step.argval) if step.opname in _METHODS else ""
        if name.endswith("_") and not name.endswith("__"):
            return True
        if step.opname == "BINARY_OP" and step.argrepr.endswith("=") and after.opname.startswith("STORE_FAST"):
            return True
    return False


def _ends_in_nothing(steps: list[dis.Instruction]) -> bool:
    """Whether the expression of a lambda is a call of something that returns None."""
    if not steps or not steps[-1].opname.startswith("CALL"):
        return False
    return any(one.opname in _METHODS and one.argval in _RETURN_NONE | _LOG for one in steps)
