"""Blocks of a model that Dynamo traces into nested regions, without a change to the block.

`torch.compiler.nested_compile_region` marks a function. A block is not marked, nor is its `forward` replaced: it has a
region as attribute `REGION`, and where Dynamo is about to trace `forward`, the region may name a function to be traced
instead, which calls `forward` in a marked one.

Some blocks cannot be regions: they return a view of an argument, write to an argument, or break the graph. torch finds
out when it traces them, or when AOTAutograd or the backend compiles the graph, and raises an error. Then the regions of
the graph are given up, and Dynamo begins anew with the frame, as it does after a graph break (`RestartAnalysis`).

torch compiles blocks wrongly, without an error, in two cases, which are kept from it:

- **Blocks that differ in an optional argument alone** are one region: to compare two graphs, torch flattens the
  arguments of each call and compares what both have. So `gelu(h)` is `gelu(h, approximate="tanh")`, and `clamp(min=0)`
  is `clamp(max=0)`. `are_same_graph_modules` is patched to compare names and numbers of arguments as well.
- **Blocks that write to an argument.** torch allows that in regions where there are no gradients, and Inductor's code
  then reads old values. Here it is an error.

Names are those of torch 2.11 to 2.15. Degraded where one is missing: there are no regions, or torch's error is raised.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import fx
from torch.fx.node import map_aggregate

from torchguard._torch.hook_calls import CannotCall, HookCall, arguments_of, attributes_of, function_of, realized
from torchguard._torch.process import patch_function
from torchguard._torch.tracing import autocast_dtypes

REGION = "_torchguard_region"
# Attributes of the graph that Dynamo builds: its regions, and the state of torch in which they are traced.
_REGIONS, _STATE = "_torchguard_regions", "_torchguard_region_state"
# What Dynamo raises that is no failure.
_CONTROL_FLOW = ("RestartAnalysis", "SkipFrame", "ObservedException", "StepUnsupported")


def trace_regions() -> bool:
    """Have Dynamo ask the region of a block what to trace.

    Patches `InstructionTranslator.run`, `BaseUserFunctionVariable.call_function` and `are_same_graph_modules`. Degraded
    where torch lacks one of them, or the class of calls of regions: False, and there are no regions.
    """
    from torch._dynamo import symbolic_convert  # here, because loading it takes seconds
    from torch._dynamo.variables import functions, higher_order_ops

    translator, function = (
        getattr(owner, name, None)
        for owner, name in ((symbolic_convert, "InstructionTranslator"), (functions, "BaseUserFunctionVariable"))
    )
    return (
        hasattr(_calls_of_regions(), "supports_input_mutation")
        and patch_function(translator, "run", globals(), "_run")
        and patch_function(function, "call_function", globals(), "_call_function")
        and patch_function(higher_order_ops, "are_same_graph_modules", globals(), "_are_same")
    )


def _calls_of_regions() -> Any:
    """Dynamo's class of calls of regions."""
    from torch._dynamo import variables

    homes = (getattr(variables, name, None) for name in ("invoke_subgraph", "higher_order_ops"))  # since 2.13; before
    found = [getattr(home, "InvokeSubgraphHigherOrderVariable", None) for home in homes]
    return next((one for one in found if one is not None), None)


def _run(original: Callable[..., Any], self: Any) -> Any:
    """Replaces `InstructionTranslator.run`, which traces a frame and has its graph compiled."""
    try:
        return original(self)
    except Exception as error:
        _begin_anew(self, error)


def _call_function(original: Callable[..., Any], self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Replaces `BaseUserFunctionVariable.call_function`."""
    called_with = arguments_of(self, args)
    region = attributes_of(called_with[0]).get(REGION) if called_with else None
    if region is None or function_of(self) is not type(called_with[0].value).forward:
        return original(self, tx, args, kwargs)
    block, *given = map(realized, called_with)
    named = {name: realized(value) for name, value in kwargs.items()}
    call = HookCall(tx, block)
    try:
        function = region.in_dynamo(call, [*given, *named.values()]) if call.num_regions == 0 else None
    except CannotCall:
        function = None
    if function is None or not _can_share(tx.output):
        return original(self, tx, args, kwargs)
    from torch._dynamo.variables import VariableTracker

    vars(tx.output).setdefault(_REGIONS, []).append(region)
    try:
        with _refusing_writes():
            return VariableTracker.build(tx, function).call_function(tx, [block, *given], named)
    except Exception as error:  # Dynamo could break the graph here instead
        _begin_anew(tx, error)


@contextlib.contextmanager
def _refusing_writes() -> Iterator[None]:
    """Have Dynamo refuse regions that write to an argument. One thread at a time traces."""
    calls = _calls_of_regions()
    before, calls.supports_input_mutation = calls.supports_input_mutation, False
    try:
        yield
    finally:
        calls.supports_input_mutation = before


def _are_same(original: Callable[..., bool], name: str, a: fx.GraphModule, b: fx.GraphModule, *args: Any) -> bool:
    """Replaces `are_same_graph_modules`."""
    return original(name, a, b, *args) and _arguments_in(a.graph) == _arguments_in(b.graph)


def _arguments_in(graph: fx.Graph) -> list[Any]:
    """The arguments of all nodes, each in its place. A node is its number, and any other value has its type."""
    numbers = {node: number for number, node in enumerate(graph.nodes)}

    def described(value: Any) -> tuple[Any, ...]:
        if isinstance(value, fx.Node):
            return (numbers[value],)
        return type(value), value.hex() if isinstance(value, float) else value  # 0.0 == -0.0

    return [map_aggregate((node.args, node.kwargs), described) for node in graph.nodes]


def _can_share(graph: Any) -> bool:
    """Whether a region that begins now may be one with those before it.

    torch compares their graphs, but not what is in force around them: gradients and autocast. Without AOTAutograd, in
    the backend "eager", regions have no gradients.
    """
    state = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast_dtypes()
    if state[0] and getattr(graph.compiler_fn, "compiler_name", None) == "eager":
        return False
    return vars(graph).setdefault(_STATE, state) == state


def _begin_anew(tx: Any, error: Exception) -> NoReturn:
    """Have Dynamo trace a frame again without the regions of its graph. Raises the error if it has none."""
    from torch._dynamo import exc, symbolic_convert

    regions = getattr(tx.output, _REGIONS, [])
    log: Any = getattr(tx, "speculation_log", None)
    is_failure = not any(isinstance(error, getattr(exc, name, ())) for name in _CONTROL_FLOW)
    if not (regions and is_failure and isinstance(log, getattr(symbolic_convert, "SpeculationLog", ()))):
        raise error
    for region in regions:
        region.give_up(error)
    log.clear()  # Dynamo would expect the same instructions as before
    raise exc.RestartAnalysis(restart_reason="torchguard: a block cannot be compiled as a nested region")
