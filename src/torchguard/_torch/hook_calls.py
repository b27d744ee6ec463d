"""Hooks of torchguard's own while Dynamo traces: called, not traced.

Dynamo traces a call of a module with hooks through `nn.Module._call_impl`, which loops over hooks of every kind, and
then instruction by instruction through the hooks. For a check that is one node of the graph this takes 6 to 12 ms, with
quarantine 14 to 20 (`benchmarks/tracing.py`). So a call of a module that has no hooks but torchguard's is intercepted
where Dynamo would begin to trace `_call_impl`. The hooks are asked for what they do to the graph (`HookCall`), before
and after Dynamo has traced `forward`, as it does for modules without hooks.

What the hooks put into the graph is what tracing them would have put there, node for node. Where they cannot say
(`CannotCall`), Dynamo traces them as before: under transforms, within operators that call functions, and if the code
after a graph break inside the module is to be compiled on its own (`nested_graph_breaks`), which would lose the hook
that runs after the module.

Names of Dynamo's variables are those of torch 2.11 to 2.15. Degraded where one is missing: hooks are traced. All this
can be removed when Dynamo can be told what a hook does.
"""

import itertools
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_torch

from torchguard._torch.hook_guards import IDENTITY
from torchguard._torch.process import patch_function

_HOOKS, _OTHER_HOOKS = ("_forward_hooks", "_forward_pre_hooks"), ("_backward_hooks", "_backward_pre_hooks")


class CannotCall(Exception):  # noqa: N818 (not an error: the hooks are traced then)
    """A hook cannot be called in place of being traced."""


class HookCall:
    """What a hook can do while Dynamo traces a call of its module. Values of the graph are Dynamo's variables."""

    def __init__(self, tx: Any, module: Any) -> None:
        self._tx, self._module = tx, module
        self.module: nn.Module = module.value
        self.num_regions = _num_regions(tx) or 0  # how many nested regions the module is called in

    def written_to(self, owner: Any, name: str) -> Any:
        """What the code that is traced has written to an attribute of an object that exists."""
        effects = self._tx.output.side_effects
        if owner not in effects:
            raise CannotCall
        return self.attribute(effects[owner], name)

    def attribute(self, owner: Any, name: str) -> Any:
        """What the code that is traced has written to an attribute."""
        written = self._tx.output.side_effects.store_attr_mutations.get(owner, {})
        if name not in written:
            raise CannotCall
        return realized(written[name])

    def constant(self, owner: Any, name: str) -> Any:
        """The same, as a Python value."""
        found = _constant(self.attribute(owner, name))
        if found is CannotCall:
            raise CannotCall
        return found

    def append(self, to: Any, value: Any) -> None:
        """Append to a list."""
        to.call_method(self._tx, "append", [self._variable(value)], {})

    def is_simple(self, value: Any) -> bool:
        """Whether a value is a number, a string, None, or a tensor in memory as usual that is not complex."""
        z = _tensor(value)
        if z is not None:
            return z.layout == torch.strided and not z.is_nested and not z.is_complex()
        return isinstance(_constant(value), (int, float, str, type(None)))

    def is_none(self, value: Any) -> bool:
        return _constant(value) is None

    def tensor(self, value: Any) -> Any:
        """The fake tensor that a value is; None if it is something else, or a tensor of a subclass."""
        return _tensor(value)

    def is_float(self, value: Any) -> bool:
        """Whether a value is a tensor of floating-point numbers."""
        z = _tensor(value)
        return z is not None and z.is_floating_point()

    def is_same(self, one: Any, other: Any) -> bool:
        """Whether two values are the same tensor."""
        return _tensor(one) is _tensor(other) is not None

    def items(self, value: Any) -> Sequence[Any] | None:
        """The items of a tuple; None if it is no tuple."""
        from torch._dynamo.variables import TupleVariable

        return [*map(realized, value.items)] if type(value) is TupleVariable else None

    def new_tuple(self, items: Sequence[Any]) -> Any:
        from torch._dynamo.variables import TupleVariable

        return TupleVariable([*items])

    def call(self, operator: Any, *args: Any) -> Any:
        """A call of an operator. Several results are a tuple of Python's."""
        from torch._dynamo.variables import VariableTracker

        nodes = self._tx.output.current_tracer.graph.nodes
        before = len(nodes)
        result = VariableTracker.build(self._tx, operator).call_function(self._tx, [*map(self._variable, args)], {})
        # The line of a node tells what `watch` put into a graph.
        frame = sys._getframe(1)
        line = traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        for node in itertools.islice(reversed(nodes), len(nodes) - before):
            node.stack_trace = (node.stack_trace or "") + "".join(traceback.StackSummary.from_list([line]).format())
        items = self.items(result)
        return result if items is None else tuple(items)

    def trace(self, hooks: str, args: Sequence[Any]) -> Any:
        """Trace the hook that the module has in one of its dicts."""
        found = _read(self._tx, self._module, hooks)
        (key,) = getattr(self._module.value, hooks)
        hook = found.call_method(self._tx, "__getitem__", [self._variable(key)], {})
        return hook.call_function(self._tx, [self._module, *args], {})

    def _variable(self, value: Any) -> Any:
        from torch._dynamo.variables import VariableTracker

        return value if isinstance(value, VariableTracker) else VariableTracker.build(self._tx, value)


def call_hooks_while_tracing() -> bool:
    """Have Dynamo call torchguard's hooks instead of tracing them.

    Patches `BaseUserFunctionVariable.call_function`, which calls functions and methods. Degraded where torch lacks it,
    or one of the names that are used: hooks are traced.

    Returns:
        Whether torch has all of them.
    """
    from torch._dynamo import variables  # here, because loading it takes seconds
    from torch._dynamo.variables import functions

    needed = ("ConstantVariable", "TensorVariable", "TupleVariable", "UnspecializedNNModuleVariable", "VariableTracker")
    if not all(hasattr(variables, name) for name in needed):
        return False
    function = getattr(functions, "BaseUserFunctionVariable", None)
    return patch_function(function, "call_function", globals(), "_call_function")


def _call_function(original: Callable[..., Any], self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Replaces `BaseUserFunctionVariable.call_function`."""
    is_call = function_of(self) is nn.Module._wrapped_call_impl  # `nn.Module.__call__`, unless it was patched
    called_with = arguments_of(self, args) if is_call else []
    hooks = _hooks_of(tx, called_with[0]) if called_with and IDENTITY in attributes_of(called_with[0]) else None
    if hooks is None:
        return original(self, tx, args, kwargs)
    module, *given = map(realized, called_with)
    try:
        checks = hooks.in_dynamo(HookCall(tx, module))
        given, named = checks.before(given, {name: realized(value) for name, value in kwargs.items()})
    except CannotCall:
        return original(self, tx, args, kwargs)
    # Reading has Dynamo guard on the identity, and on the number of hooks: others may be added later. (Dynamo itself
    # guards on no dict of hooks that is empty, see its `skip_nnmodule_hook_guards`.)
    for name in (IDENTITY, *_HOOKS):
        _read(tx, module, name)
    output = _read(tx, module, "forward").call_function(tx, given, named)
    return checks.after(given, realized(output))


def function_of(variable: Any) -> Any:
    """The Python function that a call runs; None for functions that are made while tracing."""
    return getattr(getattr(variable, "im_func", variable), "fn", None)  # `im_func`: of a method, since torch 2.15


def arguments_of(function: Any, args: Sequence[Any]) -> list[Any]:
    """The arguments of a call, with the object of a method first: `block.forward(x)` is `forward(block, x)`.

    Degraded where torch has no `self_args`: a method has no object, and what is done for modules is left undone.
    """
    return [*getattr(function, "self_args", list)(), *args]


def attributes_of(variable: Any) -> dict[str, Any]:
    """The attributes of the module that a variable stands for; none if it stands for something else."""
    from torch._dynamo.variables import UnspecializedNNModuleVariable

    return vars(variable.value) if isinstance(variable, UnspecializedNNModuleVariable) else {}


def _hooks_of(tx: Any, variable: Any) -> Any:
    """The object whose methods are all hooks of a module; None if its call has to be traced."""
    module: nn.Module = variable.value
    found = [getattr(hook, "__self__", None) for name in _HOOKS for hook in getattr(module, name).values()]
    hooks = found[0] if found else None
    is_usual = (
        hasattr(hooks, "in_dynamo")
        and all(one is hooks for one in found)
        and not any(getattr(module, name) for name in _OTHER_HOOKS)
        and module._compiled_call_impl is None
        and getattr(module._call_impl, "__globals__", None) is vars(of_torch)  # neither overridden nor patched
        and _num_regions(tx) is not None
        and not torch._dynamo.config.nested_graph_breaks
    )
    return hooks if is_usual and not _has_global_hooks(tx.output, tx) else None


def _num_regions(tx: Any) -> int | None:
    """In how many nested regions Dynamo is; None if it traces for another operator that calls functions as well."""
    tracer, found = tx.output.current_tracer, 0
    while tracer.parent is not None:
        if str(getattr(tracer, "source_target", None)) != "invoke_subgraph":
            return None
        tracer, found = tracer.parent, found + 1
    return found


def _has_global_hooks(graph: Any, tx: Any) -> bool:
    """Whether there are hooks for all modules. Tracing the question has Dynamo guard on it, once for each graph."""
    if not hasattr(graph, "_torchguard_has_global_hooks"):
        from torch._dynamo.variables import VariableTracker

        graph._torchguard_has_global_hooks = _constant(
            VariableTracker.build(tx, _any_global_hooks).call_function(tx, [], {})
        )
    return graph._torchguard_has_global_hooks


def _any_global_hooks() -> bool:
    # Not `len`: Dynamo guards on a dict of hooks that is empty only if its items are read.
    hooks = (
        *of_torch._global_forward_hooks.items(),
        *of_torch._global_forward_pre_hooks.items(),
        *of_torch._global_backward_hooks.items(),
        *of_torch._global_backward_pre_hooks.items(),
    )
    return hooks != ()


def _read(tx: Any, variable: Any, name: str) -> Any:
    """An attribute, as traced code reads it."""
    from torch._dynamo.variables import ConstantVariable, VariableTracker

    return realized(VariableTracker.build(tx, getattr).call_function(tx, [variable, ConstantVariable.create(name)], {}))


def _tensor(variable: Any) -> Any:
    """The fake tensor that a variable stands for; None if it stands for something else, or for a subclass."""
    from torch._dynamo.variables import TensorVariable

    return variable.as_proxy().node.meta["example_value"] if type(variable) is TensorVariable else None


def _constant(variable: Any) -> Any:
    """The Python value that a variable stands for, or `CannotCall`."""
    return variable.as_python_constant() if variable.is_python_constant() else CannotCall


def realized(variable: Any) -> Any:
    return variable.realize() if hasattr(variable, "realize") else variable
