"""AOTAutograd: decompositions, partitions, backends."""

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

from torchguard._torch.nodes import hint
from torchguard._torch.ops import is_op

logger = logging.getLogger("torchguard.device")

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


@contextlib.contextmanager
def without_guards(values: Sequence[object]) -> Iterator[None]:
    """Let code ask for sizes without that being noted: what is traced here is looked at, and never run."""
    modes = (getattr(value, "fake_mode", None) for value in values)
    of_sizes = (value.node for value in values if isinstance(value, torch.SymInt))
    found = (one.shape_env for one in (*modes, *of_sizes) if one is not None)
    shape_env = next((one for one in found if one is not None), None)
    with shape_env.suppress_guards() if shape_env is not None else contextlib.nullcontext():
        yield


class _Again(fx.Interpreter):
    """Runs a graph some of whose ops are taken apart."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Taken apart, an op may lay out its result in another way, of which there is no such view.
        if target is torch.ops.aten.view.default:
            target = torch.ops.aten.reshape.default
        return super().call_function(target, args, kwargs)


def decomposed(module: fx.GraphModule, table: Mapping[Any, Callable[..., Any]]) -> fx.GraphModule:
    """The graph traced again with some ops taken apart; its nodes keep the lines they came from."""
    before = module.graph.find_nodes(op="placeholder")
    values = [node.meta["val"] for node in before]
    modes = (getattr(value, "fake_mode", None) for value in values)
    mode = next((mode for mode in modes if mode is not None), contextlib.nullcontext())  # for constants that are made
    with without_guards(values), mode, traceback.preserve_node_meta():
        # What a graph is given is flat here, whatever way of calling it was compiled to.
        run = functools.partial(_Again(module).run, enable_io_processing=False)
        again = make_fx(run, decomposition_table=dict(table))(*values)
    for old, new in zip(before, again.graph.find_nodes(op="placeholder"), strict=True):
        new.meta = {**old.meta, "val": new.meta.get("val", old.meta["val"])}
    return again


@dataclass(frozen=True)
class _Call:
    """A call of an op, which is another call's equal if shapes, dtypes and all else are the same."""

    target: Any
    text: str
    args: Any = field(compare=False)
    values: tuple[Any, ...] = field(compare=False)


def ops_made_of(node: fx.Node) -> tuple[Any, ...]:
    """The ops that torch takes a call apart into, at the sizes at hand. None if it cannot."""
    nodes = node.all_input_nodes
    if node.target not in decompositions("all") or not all("val" in one.meta for one in nodes):
        return ()
    places: dict[fx.Node, Any] = {one: _Value(i) for i, one in enumerate(nodes)}
    args = fx.map_arg((node.args, dict(node.kwargs)), lambda one: places[one])
    values = tuple(_at_hand(one.meta["val"]) for one in nodes)
    return _ops_made_of(_Call(node.target, f"{args} {values}", args, values))


@dataclass(frozen=True)
class _Value:
    """The place of an input among the values."""

    position: int


def _at_hand(value: Any) -> Any:
    """A value without symbols, of which sizes, strides and dtypes alone count."""
    if isinstance(value, Tensor) and value.layout is torch.strided:
        sizes, strides = ([hint(one) or 0 for one in part] for part in (value.shape, value.stride()))
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
    if isinstance(value, (tuple, list)):
        return [_at_hand(part) for part in value]
    return hint(value) if isinstance(value, torch.SymInt) else value


@functools.lru_cache(maxsize=1024)
def _ops_made_of(call: _Call) -> tuple[Any, ...]:
    def run(*values: Any) -> Any:
        args, kwargs = _filled(call.args, values)
        return call.target(*args, **kwargs)

    try:
        traced = make_fx(run, decomposition_table={call.target: decompositions("all")[call.target]})(*call.values)
    except Exception as error:  # a decomposition may raise anything, and then it is no advice to use it
        logger.debug("%s cannot be taken apart: %s", call.target, error)
        return ()
    return tuple(node.target for node in traced.graph.nodes if node.op == "call_function" and is_op(node.target))


def _filled(args: Any, values: Sequence[Any]) -> Any:
    """Arguments with the values in their places."""
    if isinstance(args, _Value):
        return values[args.position]
    if isinstance(args, (tuple, list)):
        return type(args)(_filled(part, values) for part in args)
    return {name: _filled(part, values) for name, part in args.items()} if isinstance(args, dict) else args


# Taken apart, its second result is another one than its backward takes, which is never taken apart.
NOT_FOR_TRAINING = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@functools.cache
def decompositions(which: str) -> dict[Any, Callable[..., Any]]:
    """The decompositions of core ATen, of Inductor, or all that torch knows."""
    if which == "inductor":
        from torch._inductor.decomposition import select_decomp_table

        return dict(select_decomp_table())
    core = dict(torch.export.default_decompositions().items())
    if which == "core":
        return core
    from torch._decomp import decomposition_table

    return {**decomposition_table, **core}


def run_eagerly(dynamo: fx.GraphModule, inputs: Sequence[Any], partition: Partition, inference: Compile) -> Any:
    """What the backend `aot_eager` does, with the two places in which graphs are seen before anything runs.

    Args:
        partition: splits a joint graph; called once for a graph that is trained.
        inference: called with a graph that is not.
    """
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(
        fw_compiler=run_as_it_is,
        bw_compiler=run_as_it_is,
        inference_compiler=inference,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    return backend(dynamo, inputs)


def run_as_it_is(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A graph as a function that lets go of its inputs once they are used."""
    from torch._dynamo.backends.debugging import boxed_nop

    return boxed_nop(module, list(inputs))


def split(joint: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Into forward and backward, as `aot_eager` and Inductor do it."""
    from functorch.compile import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, inputs, **options)


def only_traced(dynamo: fx.GraphModule, inputs: Sequence[Any], partition: Partition, inference: Compile) -> None:
    """Show the graphs that `run_eagerly` would show, leaving no trace with Dynamo: another compiler is to follow."""
    from torch._guards import TracingContext, tracing

    context = copy.copy(TracingContext.get())  # AOTAutograd writes into it, and reads what Dynamo knows of sizes
    context.guards_context = type(context.guards_context)()
    with tracing(context), without_guards([*inputs, context]):
        run_eagerly(dynamo, inputs, partition, inference)


def take_over_name(name: str, backend: Any) -> None:
    """Have a name stand for this backend, if torch has looked it up before: it remembers what it found then.

    That was the one of an earlier import of this package, whose reports nobody reads. There is no public way to change
    it; where torch keeps it elsewhere, the name stands for the earlier one.
    """
    known = getattr(sys.modules.get("torch._dynamo.backends.registry"), "_COMPILER_FNS", {})
    if known.get(name) is not None:
        backend._tags = getattr(known[name], "_tags", ())  # which torch leaves on all that it knows
        known[name] = backend
