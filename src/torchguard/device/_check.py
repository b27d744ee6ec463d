"""Check graphs against a device: decompose them to the device's ops, plan their memory, run the rules."""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import fx

from torchguard._progress import progress_line
from torchguard._torch import aot, nodes, ops
from torchguard._torch.support import warn_of_missing
from torchguard.device._device import Device
from torchguard.device._graph import Graph, placeholder_names
from torchguard.device._memory import plan_memory, plan_step, saved_between
from torchguard.device._report import DeviceReport, GraphReport
from torchguard.device._rules.base import Constraint
from torchguard.device._rules.registry import rules_of
from torchguard.device._violations import DeviceViolation, merge_violations
from torchguard.exceptions import DeviceError

logger = logging.getLogger("torchguard.device")

_warned: set[str] = set()  # patterns, each of which is named once
_Decompositions = Mapping[Any, Callable[..., Any]]


def check(
    forward: fx.GraphModule,
    backward: fx.GraphModule | None = None,
    *,
    device: Device,
    dynamo: fx.GraphModule | None = None,
    strict: bool = True,
) -> DeviceReport:
    """Check the graphs of a region against a device. The graphs are not changed, and no guard is added.

    Args:
        forward: a graph of ATen ops as AOTAutograd makes it, whose nodes have fake tensors in `meta["val"]`.
        backward: its backward graph; without one, `forward` is an inference graph.
        dynamo: Dynamo's graph, from which the names of inputs are read, and which of them are parameters.
        strict: whether a rule that raises is an error. If not, it is logged, and the other rules run.
    """
    warn_of_missing("device")
    _warn_of_unknown_ops(device)
    modules = {"forward": forward, "backward": backward} if backward is not None else {"inference": forward}
    for name, module in modules.items():
        _require_fake_values(name, module)
    with progress_line() as show:
        show(f"check: decomposing for {device.name}")
        outer = _device_graphs(modules, device, dynamo)
        reports = []
        for graph in (one for top in outer for one in (top, *_inner_graphs(top))):
            show(f"check: the rules of {device.name} on the {graph.name} graph")
            reports.append(_check_graph(graph, device, strict))
    return DeviceReport(tuple(reports))


def _device_graphs(modules: Mapping[str, fx.GraphModule], device: Device, dynamo: fx.GraphModule | None) -> list[Graph]:
    """The graphs in the ops of a device, each with its memory plan and the names of its inputs."""
    backward = modules.get("backward")
    inputs = nodes.inputs_of(dynamo) if dynamo is not None else ()
    table = _decompositions(device, is_training=backward is not None)
    decomposed = {name: _decomposed(module, table) for name, module in modules.items()}
    labels = {name: placeholder_names(module, inputs, decomposed[name]) for name, module in modules.items()}
    all_names = {node: name for names, _ in labels.values() for node, name in names.items()}
    saved: dict[int, int] = {}
    if backward is not None:
        saved = saved_between(modules["forward"], backward)
        plans = plan_step(decomposed["forward"], decomposed["backward"], saved, names=all_names)
    else:
        plans = (plan_memory(decomposed["inference"], names=all_names),)
    only_saved = {"forward": frozenset(saved.values())}
    return [
        Graph(name, decomposed[name], plan, *labels[name], only_saved.get(name, frozenset()))
        for name, plan in zip(modules, plans, strict=True)
    ]


def _warn_of_unknown_ops(device: Device) -> None:
    """Say which patterns cannot find anything, since no library with such ops was imported."""
    for pattern in (*device.deny, *(device.allow or ())):
        if not ops.matches_an_op(pattern) and pattern not in _warned:
            _warned.add(pattern)
            logger.warning(
                "Device %s names %r, but no op of %r is registered: it finds nothing. Import the library that defines "
                "it, or name an op of torch: 'aten.%s'.",
                device.name,
                pattern,
                pattern.partition(".")[0],
                pattern.rpartition(".")[2],
            )


def _decompositions(device: Device, is_training: bool) -> _Decompositions:
    """The decompositions that turn the ops of a graph into those of the device."""
    selected = device.decompositions
    if isinstance(selected, str):
        table = {} if selected == "none" else aot.decompositions(selected)
        return {op: made for op, made in table.items() if not (is_training and op is aot.NOT_DECOMPOSED_IN_TRAINING)}
    known = aot.decompositions("all")
    chosen = {op: made for op, made in known.items() if any(ops.matches(str(op), pattern) for pattern in selected)}
    for pattern in selected:
        if not any(ops.matches(str(op), pattern) for op in chosen):
            raise DeviceError(f"Device.decompositions: torch cannot decompose {pattern!r}. Remove it.")
    return chosen


def _decomposed(module: fx.GraphModule, table: _Decompositions) -> fx.GraphModule:
    if not any(node.target in table for node in module.graph.nodes if node.op == "call_function"):
        return module
    return aot.decomposed(module, table)


def _check_graph(graph: Graph, device: Device, strict: bool) -> GraphReport:
    # A rule may compare symbolic sizes. The compiled code does not depend on the answer, so it must not be guarded.
    with aot.suppress_guards([node.meta.get("val") for node in graph.module.graph.nodes]):
        found = [_run_rule(rule, graph, device, strict) for rule in rules_of(device)]
    failures = tuple(failure for _, failure in found if failure)
    return GraphReport(graph, device, merge_violations(one for some, _ in found for one in some), failures)


def _run_rule(rule: Constraint, graph: Graph, device: Device, strict: bool) -> tuple[list[DeviceViolation], str]:
    """The violations that a rule finds; if it raises, those it found before, and what it raised."""
    violations: list[DeviceViolation] = []
    failure = ""
    try:
        violations.extend(rule.check(graph, device))
    except Exception as error:  # a rule may be a user's code
        failure = f"rule {rule.code} ({type(rule).__name__}) failed on the {graph.name} graph: {error!r}"
        if strict:
            raise DeviceError(f"check: {failure}. Correct the rule, or remove it.") from error
        logger.warning("%s", failure, exc_info=error)
    return violations, failure


def _inner_graphs(graph: Graph) -> Iterator[Graph]:
    """The graphs that ops such as `cond` call, named `<outer graph>.<attribute>`."""
    for node in graph.module.graph.find_nodes(op="get_attr"):
        module = getattr(graph.module, str(node.target), None)
        if isinstance(module, fx.GraphModule):
            inner = Graph(f"{graph.name}.{node.target}", module, plan_memory(module))
            yield inner
            yield from _inner_graphs(inner)


def _require_fake_values(name: str, module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        lacks_value = node.op == "call_function" and "val" not in node.meta and ops.returns_something(node.target)
        if lacks_value or node.op in ("call_module", "call_method"):
            raise DeviceError(
                f"check: expected ATen ops with fake tensors in meta['val'], got node {node.name!r} ({node.op}) in the "
                f"{name} graph. Trace with make_fx(..., tracing_mode='fake'), or use mock_backend."
            )
