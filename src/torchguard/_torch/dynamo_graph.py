"""The graph that Dynamo is building: its nodes, and what it writes to.

While Dynamo traces, functions that are constant in graphs (`tracing.constant_in_graphs`) run as plain Python. They find
the graph so far at the translator that is at work, `InstructionTranslator.current_tx()`. All of it is required and the
same in torch 2.11 to 2.15.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from torchguard._torch.process import patch_function
from torchguard._torch.support import torch_is_at_least
from torchguard._torch.symbols import Symbols


def keep_writes_after_calls() -> bool:
    """Have Dynamo keep what is written to attributes after an operator that calls functions (`cond`, FlexAttention).

    For such an operator, Dynamo replaces its table of writes by a copy. In torch 2.13 and 2.14, what stands for the
    `__dict__` of an object goes on to write into the old one. Patches `SideEffectsProxyDict` there, which gets the
    current table instead. Before, attributes are written to the current table, and 2.15 does what the patch does.
    Degraded where a later torch lacks this class: False, and such models are refused.
    """
    from torch._dynamo.variables import dicts

    if not torch_is_at_least(2, 13):
        return True
    proxy = getattr(dicts, "SideEffectsProxyDict", None)
    if proxy is None:
        return False
    if not isinstance(vars(proxy).get("side_effects"), property):
        proxy.side_effects = property(_current_table, _note_graph)
    return True


def _current_table(proxy: Any) -> Any:
    return proxy._torchguard_graph().side_effects


def _note_graph(proxy: Any, table: Any) -> None:
    proxy._torchguard_graph = table.output_graph_weakref


def list_attributes_of_new_objects() -> bool:
    """Have Dynamo trace `value.__dict__.items()` of an object that the graph makes, as a model does that returns one.

    Dynamo of torch 2.11 knows the attributes that were written to such an object, but refuses to list them. Patches
    `GetAttrVariable.call_method` there. Degraded where torch 2.11 has other names: Dynamo refuses such a model.

    Returns:
        Whether Dynamo can list them.
    """
    from torch._dynamo import variables

    return torch_is_at_least(2, 12) or patch_function(
        getattr(variables, "GetAttrVariable", None), "call_method", globals(), "_call_method"
    )


def _call_method(original: Callable[..., Any], self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Replaces `GetAttrVariable.call_method` on torch 2.11."""
    from torch._dynamo import variables

    # An object from outside the graph also has attributes that nothing has written: Dynamo would have to guard on them.
    is_new = isinstance(getattr(self.obj, "mutation_type", None), variables.base.AttributeMutationNew)
    if not (is_new and name == "items" and self.name == "__dict__"):
        return original(self, tx, name, args, kwargs)
    written = tx.output.side_effects.store_attr_mutations.get(self.obj, {})
    return variables.TupleVariable(
        [
            variables.TupleVariable([variables.ConstantVariable.create(key), value])
            for key, value in written.items()
            if not isinstance(value, variables.DeletedVariable)
        ]
    )


class TracedGraph:
    """The graph that Dynamo is building where it is called, and the modules that its nodes refer to."""

    def __init__(self) -> None:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        output = InstructionTranslator.current_tx().output
        self.graph: fx.Graph = output.current_tracer.graph
        self._modules, self._side_effects = output.nn_modules, output.side_effects

    def symbols(self) -> Symbols:
        """The numbers for which the graph runs as well: other sizes, for example."""
        return Symbols(self._all_graphs())

    def attribute(self, name: str) -> Any:
        return self._modules[name]

    def with_regions(self) -> list[fx.Graph]:
        """The graph itself, and those of its nested regions."""
        region = torch.ops.higher_order.invoke_subgraph
        calls = [node for node in self.graph.nodes if node.target is region]
        return [self.graph, *(self.attribute(node.args[0].target).graph for node in calls)]

    def enables_gradients(self) -> bool:
        """Whether gradients are enabled now, or in a part of the graph or of one that it calls."""
        nodes = [node for graph in self._all_graphs() for node in graph.nodes]
        set_modes = [node for node in nodes if getattr(node.target, "__name__", "") == "_set_grad_enabled"]
        return torch.is_grad_enabled() or any(node.args[0] for node in set_modes)

    def stores_tensors(self, ours: str) -> bool:
        """Whether the code that is traced stores tensors in existing objects, other than those of a package.

        Dynamo does so when the graph has run.
        """
        from torch._dynamo.variables import TensorVariable
        from torch._dynamo.variables.base import VariableTracker

        effects, stored = self._side_effects, self._side_effects.store_attr_mutations
        existing = [
            one for one in effects.id_to_variable.values() if effects.is_modified(one) and one.source is not None
        ]
        left = [one for one in existing if not type(vars(one).get("value")).__module__.startswith(ours)]
        visited: dict[int, Any] = {}
        while left:
            found: list[Any] = []
            VariableTracker.visit(found.append, left, visited)
            if any(isinstance(one, TensorVariable) for one in found):
                return True
            left = [value for one in found for value in stored.get(one, {}).values()]
        return False

    def _all_graphs(self) -> list[fx.Graph]:
        called = [one for module in self._modules.values() if isinstance(module, nn.Module) for one in module.modules()]
        return [self.graph, *(module.graph for module in called if isinstance(module, fx.GraphModule))]
