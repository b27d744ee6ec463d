"""AOTAutograd: decompositions, partitions, backends.

A backend needs `aot_autograd`, `boxed_nop` and `TracingContext`, none of which is public, and a trace needs `make_fx`
of `torch.fx.experimental`. They are the same in torch 2.11 to 2.15 and required by `device`: the call raises
ImportError where one is missing. Only `replace_registered_backend` has a degraded mode.
"""

import contextlib
import copy
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx

from torchguard._torch import inductor
from torchguard._torch.nodes import hint
from torchguard._torch.ops import is_op

logger = logging.getLogger("torchguard.device")

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


@contextlib.contextmanager
def suppress_guards(values: Sequence[object]) -> Iterator[None]:
    """Add no guards for sizes that are read in the block: what is traced there is inspected, and never run.

    Args:
        values: fake tensors, symbolic sizes, or anything with a `fake_mode`; the first one has the shape environment.
    """
    modes = (getattr(value, "fake_mode", None) for value in values)
    size_nodes = (value.node for value in values if isinstance(value, torch.SymInt))
    found = (one.shape_env for one in (*modes, *size_nodes) if one is not None)
    shape_env = next((one for one in found if one is not None), None)
    with shape_env.suppress_guards() if shape_env is not None else contextlib.nullcontext():
        yield


class _Retrace(fx.Interpreter):
    """Runs a graph of which some ops are decomposed."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A decomposed op may return other strides, for which this view is impossible.
        if target is torch.ops.aten.view.default:
            target = torch.ops.aten.reshape.default
        return super().call_function(target, args, kwargs)


def decomposed(module: fx.GraphModule, table: Mapping[Any, Callable[..., Any]]) -> fx.GraphModule:
    """The graph traced again with some ops decomposed; its nodes keep their source lines."""
    before = module.graph.find_nodes(op="placeholder")
    values = [node.meta["val"] for node in before]
    modes = (getattr(value, "fake_mode", None) for value in values)
    mode = next(
        (mode for mode in modes if mode is not None), contextlib.nullcontext()
    )  # for constants that the graph makes
    with suppress_guards(values), mode, traceback.preserve_node_meta():
        # The inputs are flat here, however the graph was compiled to be called.
        run = functools.partial(_Retrace(module).run, enable_io_processing=False)
        again = make_fx(run, decomposition_table=dict(table))(*values)
    for old, new in zip(before, again.graph.find_nodes(op="placeholder"), strict=True):
        new.meta = {**old.meta, "val": new.meta.get("val", old.meta["val"])}
    return again


@dataclass(frozen=True)
class _Call:
    """A call of an op. Two calls are equal if `text`, with all shapes, strides and dtypes, is."""

    target: Any
    text: str
    args: Any = field(compare=False)
    values: tuple[Any, ...] = field(compare=False)


def ops_in_decomposition(node: fx.Node) -> tuple[Any, ...]:
    """The ops that torch decomposes a call into, at its concrete sizes; empty if it has no decomposition."""
    nodes = node.all_input_nodes
    if node.target not in decompositions("all") or not all("val" in one.meta for one in nodes):
        return ()
    slots: dict[fx.Node, Any] = {one: _Slot(i) for i, one in enumerate(nodes)}
    args = fx.map_arg((node.args, dict(node.kwargs)), lambda one: slots[one])
    values = tuple(_concrete(one.meta["val"]) for one in nodes)
    return _ops_in_decomposition(_Call(node.target, f"{args} {values}", args, values))


@dataclass(frozen=True)
class _Slot:
    """Stands for one of the values in the arguments of a call."""

    position: int


def _concrete(value: Any) -> Any:
    """A value with concrete sizes; a tensor becomes one on the meta device."""
    if isinstance(value, Tensor) and value.layout is torch.strided:
        sizes, strides = ([hint(one) or 0 for one in part] for part in (value.shape, value.stride()))
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
    if isinstance(value, (tuple, list)):
        return [_concrete(part) for part in value]
    return hint(value) if isinstance(value, torch.SymInt) else value


@functools.lru_cache(maxsize=1024)
def _ops_in_decomposition(call: _Call) -> tuple[Any, ...]:
    def run(*values: Any) -> Any:
        args, kwargs = _filled(call.args, values)
        return call.target(*args, **kwargs)

    try:
        traced = make_fx(run, decomposition_table={call.target: decompositions("all")[call.target]})(*call.values)
    except Exception as error:  # a decomposition may raise anything; it is not recommended then
        logger.debug("%s cannot be decomposed: %s", call.target, error)
        return ()
    return tuple(node.target for node in traced.graph.nodes if node.op == "call_function" and is_op(node.target))


def _filled(args: Any, values: Sequence[Any]) -> Any:
    """Arguments with values in their slots."""
    if isinstance(args, _Slot):
        return values[args.position]
    if isinstance(args, (tuple, list)):
        return type(args)(_filled(part, values) for part in args)
    return {name: _filled(part, values) for name, part in args.items()} if isinstance(args, dict) else args


# Decomposed, its second output is not the one that its backward expects, and that is never decomposed.
NOT_DECOMPOSED_IN_TRAINING = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@functools.cache
def decompositions(which: str) -> dict[Any, Callable[..., Any]]:
    """The decompositions of core ATen ("core"), of Inductor ("inductor"), or all that torch has ("all")."""
    if which == "inductor":
        return dict(inductor.decompositions())
    core = dict(torch.export.default_decompositions().items())
    if which == "core":
        return core
    from torch._decomp import decomposition_table

    return {**decomposition_table, **core}


def compile_aot_eager(dynamo: fx.GraphModule, inputs: Sequence[Any], partition: Partition, inference: Compile) -> Any:
    """What the backend `aot_eager` does, with two functions that receive the graphs before anything runs.

    Args:
        partition: splits a joint graph; called once for a graph that requires gradients.
        inference: called with a graph that does not.
    """
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(
        fw_compiler=compile_boxed,
        bw_compiler=compile_boxed,
        inference_compiler=inference,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    return backend(dynamo, inputs)


def compile_boxed(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A graph as a function of one list of inputs, which it empties so that inputs are freed early."""
    from torch._dynamo.backends.debugging import boxed_nop

    return boxed_nop(module, list(inputs))


def split_joint(joint: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward graph of a joint graph, partitioned as `aot_eager` and Inductor do."""
    from functorch.compile import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, inputs, **options)


def trace_only(dynamo: fx.GraphModule, inputs: Sequence[Any], partition: Partition, inference: Compile) -> None:
    """Pass on the graphs that `compile_aot_eager` would, without side effects on Dynamo: another compiler follows."""
    from torch._guards import TracingContext, tracing

    context = copy.copy(TracingContext.get())  # AOTAutograd writes to it, and reads the sizes that Dynamo knows
    context.guards_context = type(context.guards_context)()
    with tracing(context), suppress_guards([*inputs, context]):
        compile_aot_eager(dynamo, inputs, partition, inference)


def replace_registered_backend(name: str, backend: Any) -> None:
    """Make `torch.compile(backend=name)` find this backend if torch has resolved the name before.

    torch caches the backend of an entry point. After a second import of this package that is the backend of the first
    copy, and `report()` of the second would stay empty. Degraded where torch does not cache it in `_COMPILER_FNS`: the
    name keeps resolving to the backend of the first copy.
    """
    known = getattr(sys.modules.get("torch._dynamo.backends.registry"), "_COMPILER_FNS", {})
    if known.get(name) is not None:
        backend._tags = getattr(known[name], "_tags", ())  # torch sets them on every registered backend
        known[name] = backend
