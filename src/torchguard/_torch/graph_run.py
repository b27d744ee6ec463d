"""A run of a graph that Dynamo is building on fake tensors, with something done about each node.

All of it is required and the same in torch 2.11 to 2.15; what cannot be run raises `CannotRunError`, which callers have
to expect.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torchguard._torch.dispatch import DispatchMode
from torchguard._torch.symbols import CannotRunError, Numbers, hints, is_item
from torchguard._torch.tracing import leave_transforms, transform_depth

RUN = object()

# The number of elements of a tensor from which on its values are not computed, for other numbers than the hints.
_LARGE = 1 << 20


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


def run(graph: fx.Graph, attribute: Callable[[str], Any], intercept: Intercept, number: Numbers) -> None:
    """Run the nodes of a graph on fake tensors.

    Tensors that the graph makes of constants are real, so that their values are known; large ones are not for other
    numbers than the hints. Gradients are off, and modes and transforms that the graph enters are left again.

    Args:
        attribute: the modules and graphs that nodes refer to, by name.
        number: the number that a symbol stands for.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    one = _Run(attribute, intercept, number, FakeTensorMode(allow_non_fake_inputs=True))
    depth = transform_depth()
    with torch.no_grad():
        try:
            one.run(graph, one.input)
        finally:
            one.leave_autocast()
            leave_transforms(depth)


class _Run:
    """One run of a graph, and of those that it calls."""

    def __init__(self, attribute: Callable[[str], Any], intercept: Intercept, number: Numbers, fake: Any) -> None:
        self._attribute, self._intercept, self._number, self._fake = attribute, intercept, number, fake
        self._entered: list[Any] = []

    def run(self, graph: fx.Graph, given: Callable[[fx.Node], Any]) -> Any:
        values: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                with self._intercept.mode:
                    values[node] = given(node)
                continue
            if node.op == "get_attr":
                values[node] = self._attribute_at(node.target)
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "output":
                return args[0]
            steps = self._intercept.steps(node)
            if steps is not None:
                with self._intercept.mode:
                    values |= _inlined(node, steps, args, kwargs, values, self._intercept)
                continue
            result = self._intercept(node, args, kwargs)
            if result is RUN:
                result = self._call(node, args, kwargs)
                self._intercept.ran(node, args, kwargs, result)
            values[node] = result
        return None

    def input(self, node: fx.Node) -> Any:
        """An input of the graph: a fake tensor without symbols, or a number."""
        value = node.meta.get("example_value")
        if not isinstance(value, Tensor):
            return self._number(value)
        if type(value).__name__ != "FakeTensor":
            raise CannotRunError(f"{node.name} is a {type(value).__name__}")
        shape, stride = ([self._number(one) for one in sizes] for sizes in (value.shape, value.stride()))
        with torch.inference_mode(False), self._fake:
            return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)

    def leave_autocast(self) -> None:
        for autocast in reversed(self._entered):
            torch.amp.autocast_mode._exit_autocast(autocast)

    def _call(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target: Any = node.target
        if isinstance(target, torch._ops.HigherOrderOperator):
            if target.name() == "flex_attention":
                with self._intercept.mode:
                    return _attention(*args)
            return self._call_graph(target.name(), args)
        if self._is_large(node):
            if not any(isinstance(one, Tensor) for one in pytree.arg_tree_leaves(*args, **kwargs)):
                with self._fake:
                    return self._call_node(node, args, kwargs)
            args, kwargs = pytree.tree_map_only(Tensor, self._faked, (args, kwargs))
        with self._intercept.mode:
            return self._call_node(node, args, kwargs)

    def _is_large(self, node: fx.Node) -> bool:
        """Whether a node makes a large tensor, for other numbers than the hints."""
        if self._number is hints:
            return False
        found = [one for one in pytree.tree_leaves(node.meta.get("example_value")) if isinstance(one, Tensor)]
        made = [one for one in found if not one.is_nested and not one._is_view()]
        return any(math.prod(map(self._number, one.shape)) > _LARGE for one in made)

    def _faked(self, z: Tensor) -> Tensor:
        return self._fake.from_tensor(z) if type(z) is Tensor else z

    def _call_node(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target: Any = node.target
        if is_item(node):
            if (value := node.meta.get("example_value")) is None:
                raise CannotRunError("what the model does depends on values")
            return self._number(value)
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        if node.op == "call_module":
            return self._attribute(target)(*args, **kwargs)
        name = _name_of(target)
        if name == "_set_grad_enabled":
            return None
        if name == "_enter_autocast":
            entered = target(*args, **kwargs)
            self._entered.append(entered)
            return entered
        if name == "_exit_autocast":
            self._entered.remove(args[0])
        return target(*args, **kwargs)

    def _call_graph(self, name: str, args: tuple[Any, ...]) -> Any:
        if name not in _CALLS_GRAPH:
            raise CannotRunError(f"{name} cannot be followed")
        module = next(one for one in args if isinstance(one, fx.GraphModule))
        given = iter(args[_CALLS_GRAPH[name] :])
        outside, self._attribute = self._attribute, lambda path: getattr(module, path)
        try:
            return self.run(module.graph, lambda node: next(given))
        finally:
            self._attribute = outside

    def _attribute_at(self, path: Any) -> Any:
        first, *rest = path.split(".")
        return functools.reduce(getattr, rest, self._attribute(first))


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
