"""The graph that Dynamo is building: its nodes, and a run of it on fake tensors.

While Dynamo traces, functions that are constant in graphs (`tracing.constant_in_graphs`) run as plain Python. They find
the graph so far at the translator that is at work, `InstructionTranslator.current_tx()`. All of it is required and the
same in torch 2.11 to 2.15; what cannot be run raises `CannotRunError`, which callers have to expect.
"""

import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torchguard._torch.dispatch import DispatchMode
from torchguard._torch.nodes import hint
from torchguard._torch.process import patch_function
from torchguard._torch.support import torch_is_at_least
from torchguard._torch.tracing import leave_transforms, transform_depth

RUN = object()


class Intercept(Protocol):
    """What is done with the nodes of a graph that is run."""

    @property
    def mode(self) -> DispatchMode:
        """Is active while nodes run, and at no other time: it would see, and slow down, what is done about them."""
        ...

    def __call__(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a node, or `RUN` to have it run."""

    def ran(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """A node was run."""

    def steps(self, node: fx.Node) -> Callable[..., Any] | None:
        """A function that does what the node does by calls of torch, which are to take its place in the graph."""


# Higher-order operators that call a graph, and how many of their arguments come before those of the graph.
_CALLS_GRAPH = {"tag_activation_checkpoint": 1, "invoke_subgraph": 2, "wrap": 1, "wrap_with_set_grad_enabled": 2}


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


class CannotRunError(Exception):
    """A graph cannot be run on fake tensors; the message says why."""


class TracedGraph:
    """The graph that Dynamo is building where it is called, and the modules that its nodes refer to."""

    def __init__(self) -> None:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        output = InstructionTranslator.current_tx().output
        self.graph: fx.Graph = output.current_tracer.graph
        self._modules, self._side_effects = output.nn_modules, output.side_effects

    def has_symbols(self) -> bool:
        """Whether a size of the graph is a symbol: it then runs for other sizes as well."""
        values = [node.meta.get("example_value") for node in self.graph.nodes if node.op == "placeholder"]
        sizes = [size for value in values if isinstance(value, Tensor) for size in value.shape]
        return any(isinstance(one, torch.SymInt) for one in (*values, *sizes))

    def attribute(self, name: str) -> Any:
        return self._modules[name]

    def with_regions(self) -> list[fx.Graph]:
        """The graph itself, and those of its nested regions."""
        region = torch.ops.higher_order.invoke_subgraph
        calls = [node for node in self.graph.nodes if node.target is region]
        return [self.graph, *(self.attribute(node.args[0].target).graph for node in calls)]

    def enables_gradients(self) -> bool:
        """Whether gradients are enabled now, or in a part of the graph or of one that it calls."""
        called = [one for module in self._modules.values() if isinstance(module, nn.Module) for one in module.modules()]
        graphs = [self.graph, *(module.graph for module in called if isinstance(module, fx.GraphModule))]
        set_modes = [node for graph in graphs for node in graph.nodes if _name_of(node.target) == "_set_grad_enabled"]
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


def run(graph: fx.Graph, attribute: Callable[[str], Any], intercept: Intercept) -> None:
    """Run the nodes of a graph on fake tensors of the sizes that it is traced with.

    Tensors that the graph makes of constants are real. Gradients are off, and modes and transforms that the graph
    enters are left again.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    entered: list[Any] = []
    depth = transform_depth()
    with torch.no_grad():
        try:
            _run(graph, attribute, intercept, lambda node: _input(node, mode), entered)
        finally:
            for autocast in reversed(entered):
                torch.amp.autocast_mode._exit_autocast(autocast)
            leave_transforms(depth)


def _run(
    graph: fx.Graph,
    attribute: Callable[[str], Any],
    intercept: Intercept,
    given: Callable[[fx.Node], Any],
    autocasts: list[Any],
) -> Any:
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            with intercept.mode:
                values[node] = given(node)
            continue
        if node.op == "get_attr":
            values[node] = _attribute(attribute, node.target)
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "output":
            return args[0]
        steps = intercept.steps(node)
        if steps is not None:
            with intercept.mode:
                values |= _inlined(node, steps, args, kwargs, values, intercept)
            continue
        result = intercept(node, args, kwargs)
        if result is RUN:
            result = _call(node, args, kwargs, attribute, intercept, autocasts)
            intercept.ran(node, args, kwargs, result)
        values[node] = result
    return None


def _inlined(
    node: fx.Node,
    steps: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    values: dict[fx.Node, Any],
    intercept: Intercept,
) -> dict[fx.Node, Any]:
    """Put the calls that a function makes in place of a node that returns a tuple. Returns the values of new nodes."""
    recorder = _Recorder(node, values, intercept)
    with node.graph.inserting_before(node), recorder:
        result = steps(*args, **kwargs)
    for user in [*node.users]:
        user.replace_all_uses_with(recorder.nodes[id(result[user.args[1]])])  # pyright: ignore[reportArgumentType]
        node.graph.erase_node(user)
    node.graph.erase_node(node)
    return {one: recorder.values[id_] for id_, one in recorder.nodes.items()}


class _Recorder(TorchFunctionMode):
    """Records calls of torch as nodes in front of another node."""

    def __init__(self, node: fx.Node, values: dict[fx.Node, Any], intercept: Intercept) -> None:
        super().__init__()
        self.node, self.intercept = node, intercept
        known = {one: value for one, value in values.items() if isinstance(value, Tensor)}
        self.nodes = {id(value): one for one, value in known.items()}
        self.values = {id(value): value for value in known.values()}  # an id is reused once its object is gone

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        results = [*result] if isinstance(result, (tuple, list)) else [result]
        if not any(isinstance(one, Tensor) for one in results):
            return result
        given = pytree.tree_map_only(Tensor, lambda one: self.nodes[id(one)], (args, kwargs))
        node = self.node.graph.call_function(function, *given)
        node.meta["nn_module_stack"] = self.node.meta.get("nn_module_stack", {})
        is_grad = any(_requires_grad(one) for one in node.all_input_nodes)
        node.meta["example_value"] = pytree.tree_map_only(Tensor, lambda one: _example(one, is_grad), result)
        self.intercept.ran(node, args, kwargs, result)
        for i, one in enumerate(results):
            made = node
            if one is not result:
                made = self.node.graph.call_function(operator.getitem, (node, i))
                made.meta |= {**node.meta, "example_value": node.meta["example_value"][i]}
            self.nodes[id(one)], self.values[id(one)] = made, one
        return result


def _requires_grad(node: fx.Node) -> bool:
    example = node.meta.get("example_value")
    return isinstance(example, Tensor) and example.requires_grad


def _example(z: Tensor, requires_grad: bool) -> Tensor:
    return z.detach().requires_grad_(requires_grad and z.is_floating_point())


def _call(
    node: fx.Node,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    attribute: Callable[[str], Any],
    intercept: Intercept,
    autocasts: list[Any],
) -> Any:
    target: Any = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        if target.name() == "flex_attention":
            with intercept.mode:
                return _attention(*args)
        return _call_graph(target.name(), args, intercept, autocasts)
    with intercept.mode:
        return _call_node(node, args, kwargs, attribute, autocasts)


def _call_node(
    node: fx.Node,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    attribute: Callable[[str], Any],
    autocasts: list[Any],
) -> Any:
    target: Any = node.target
    if node.op == "call_method" and target == "item":
        return _known_value(node)
    if node.op == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    if node.op == "call_module":
        return attribute(target)(*args, **kwargs)
    name = _name_of(target)
    if name == "_set_grad_enabled":
        return None
    if name == "_enter_autocast":
        entered = target(*args, **kwargs)
        autocasts.append(entered)
        return entered
    if name == "_exit_autocast":
        autocasts.remove(args[0])
        return target(*args)
    return target(*args, **kwargs)


def is_operation(node: fx.Node) -> bool:
    """Whether a node calls an operation of torch: not a graph, nor an operator of torchguard."""
    if node.op == "call_method":
        return True
    is_other = isinstance(node.target, torch._ops.HigherOrderOperator) or str(node.target).startswith("torchguard")
    return node.op == "call_function" and node.target is not operator.getitem and not is_other


def _name_of(target: Any) -> str:
    return getattr(target, "__name__", "")


def _attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """What FlexAttention returns, as far as samples go: a score belongs to those of its query and its key.

    Functions that change scores may use other tensors. Integers such as the numbers of documents hold no fault.
    """
    if any(isinstance(one, Tensor) and one.is_floating_point() for one in pytree.arg_tree_leaves(*rest)):
        raise CannotRunError("flex_attention uses another floating-point tensor")
    groups = q.shape[1] // k.shape[1]
    k, v = (one.repeat_interleave(groups, 1).expand(q.shape[0], -1, -1, -1) for one in (k, v))
    scores = (q @ k.transpose(-1, -2)).softmax(-1)
    largest = scores.amax(-1).float()
    return scores @ v, largest, largest


def _call_graph(name: str, args: tuple[Any, ...], intercept: Intercept, autocasts: list[Any]) -> Any:
    if name not in _CALLS_GRAPH:
        raise CannotRunError(f"{name} cannot be followed")
    module = next(one for one in args if isinstance(one, fx.GraphModule))
    given = iter(args[_CALLS_GRAPH[name] :])
    return _run(module.graph, lambda path: _member(module, path), intercept, lambda node: next(given), autocasts)


def _attribute(attribute: Callable[[str], Any], name: Any) -> Any:
    first, *rest = name.split(".")
    value = attribute(first)
    for part in rest:
        value = getattr(value, part)
    return value


def _member(module: Any, path: str) -> Any:
    return getattr(module, path)


def _input(node: fx.Node, mode: Any) -> Any:
    """An input of the graph: a fake tensor without symbols, or a number."""
    value = node.meta.get("example_value")
    if isinstance(value, Tensor):
        if type(value).__name__ != "FakeTensor":
            raise CannotRunError(f"{node.name} is a {type(value).__name__}")
        shape, stride = ([_number(one) for one in sizes] for sizes in (value.shape, value.stride()))
        with torch.inference_mode(False), mode:
            return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    return _number(value) if isinstance(value, (int, torch.SymInt)) else value


def _known_value(node: fx.Node) -> Any:
    """What `item` returned while tracing: Dynamo passes numbers that may change as tensors."""
    value = node.meta.get("example_value")
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        value = value.node.hint if value.node.has_hint() else None
    if value is None:
        raise CannotRunError("what the model does depends on values")
    return value


def _number(size: int | torch.SymInt) -> int:
    known = hint(size)
    if known is None:
        raise CannotRunError("a size depends on values")
    return known
