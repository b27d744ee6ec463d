"""The rules over graphs, whoever made them."""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import fx

from torchguard._torch import aot, nodes, ops
from torchguard.device._device import Device
from torchguard.device._graph import Graph, labels_of
from torchguard.device._memory import plan_memory, plan_step, saved_between
from torchguard.device._report import DeviceReport, GraphReport
from torchguard.device._rules.base import Constraint
from torchguard.device._rules.registry import rules_of
from torchguard.device._violations import Violation, merged
from torchguard.exceptions import DeviceError

logger = logging.getLogger("torchguard.device")


def check(
    forward: fx.GraphModule,
    backward: fx.GraphModule | None = None,
    *,
    device: Device,
    dynamo: fx.GraphModule | None = None,
    strict: bool = True,
) -> DeviceReport:
    """What of a region fits a device. The graphs are left as they are, and no guard is added.

    Args:
        forward: a graph of ATen ops as AOTAutograd makes it, whose nodes have fake tensors in `meta["val"]`.
        dynamo: the graph they were made from, for the names of inputs, and to know which are parameters.
        strict: whether a rule that raises is an error. Otherwise it is logged, and the others go on.
    """
    modules = {"forward": forward, "backward": backward} if backward is not None else {"inference": forward}
    for name, module in modules.items():
        _refuse_without_values(name, module)
    inputs = nodes.inputs_of(dynamo) if dynamo is not None else ()
    table = table_of(device, is_trained=backward is not None)
    levels = {name: _at_level_of(module, table) for name, module in modules.items()}
    labels = {name: labels_of(module, inputs, levels[name]) for name, module in modules.items()}
    called = {node: name for names, _ in labels.values() for node, name in names.items()}
    if backward is not None:
        plans = plan_step(levels["forward"], levels["backward"], saved_between(forward, backward), names=called)
    else:
        plans = (plan_memory(levels["inference"], names=called),)
    graphs = [Graph(name, levels[name], plan, *labels[name]) for name, plan in zip(levels, plans, strict=True)]
    return DeviceReport(tuple(_report(one, device, strict) for graph in graphs for one in (graph, *_inner(graph))))


def table_of(device: Device, is_trained: bool) -> Mapping[Any, Callable[..., Any]]:
    """The decompositions that make a device's ops of what runs."""
    which = device.decompositions
    if isinstance(which, str):
        whole = {} if which == "none" else aot.decompositions(which)
        return {op: made for op, made in whole.items() if not (is_trained and op is aot.NOT_DECOMPOSED_IN_TRAINING)}
    known = aot.decompositions("all")
    chosen = {op: made for op, made in known.items() if any(ops.matches(str(op), pattern) for pattern in which)}
    for pattern in which:
        if not any(ops.matches(str(op), pattern) for op in chosen):
            raise DeviceError(f"Device.decompositions: torch cannot take apart {pattern!r}. Leave it out.")
    return chosen


def _at_level_of(module: fx.GraphModule, table: Mapping[Any, Callable[..., Any]]) -> fx.GraphModule:
    if not any(node.target in table for node in module.graph.nodes if node.op == "call_function"):
        return module
    return aot.decomposed(module, table)


def _report(graph: Graph, device: Device, strict: bool) -> GraphReport:
    # A rule may ask for a size: what is looked at is not what runs, so nothing is to hold for the answer.
    with aot.suppress_guards([node.meta.get("val") for node in graph.module.graph.nodes]):
        found = [violation for rule in rules_of(device) for violation in _broken(rule, graph, device, strict)]
    return GraphReport(graph, device, merged(found))


def _broken(rule: Constraint, graph: Graph, device: Device, strict: bool) -> list[Violation]:
    """What breaks a rule, up to where the rule itself fails."""
    found: list[Violation] = []
    try:
        found.extend(rule.check(graph, device))
    except Exception as error:  # it may be anybody's code
        told = f"rule {rule.code} ({type(rule).__name__}) failed on the {graph.name} graph: {error!r}"
        if strict:
            raise DeviceError(f"check: {told}. Correct it, or leave it out.") from error
        logger.warning("%s", told, exc_info=error)
    return found


def _inner(graph: Graph) -> Iterator[Graph]:
    """The graphs that ops such as `cond` call, named after where they are."""
    for node in graph.module.graph.find_nodes(op="get_attr"):
        module = getattr(graph.module, str(node.target), None)
        if isinstance(module, fx.GraphModule):
            inner = Graph(f"{graph.name}.{node.target}", module, plan_memory(module))
            yield inner
            yield from _inner(inner)


def _refuse_without_values(name: str, module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        is_bare = node.op == "call_function" and "val" not in node.meta and ops.returns_something(node.target)
        if is_bare or node.op in ("call_module", "call_method"):
            raise DeviceError(
                f"check: node {node.name!r} of the {name} graph is no op of ATen with a fake tensor in meta['val']. "
                "Trace with make_fx(..., tracing_mode='fake'), or use mock_backend."
            )
