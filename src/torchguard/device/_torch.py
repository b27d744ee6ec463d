"""The seam to AOTAutograd and to symbolic sizes, most of which is private torch."""

import contextlib
import copy
import functools
import importlib
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx

logger = logging.getLogger("torchguard.device")

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]

# What advice names: how a program tells Dynamo something of its sizes.
SAY = "torch._check"

_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")
_SIZE = re.compile(r"\.size\(\)\[(\d+)\]")
_SYMBOL = re.compile(r"\b[a-z]+\d+\b")
_LOCAL = re.compile(r"^L\['([^']*)'\]")
# What Dynamo calls the module that is compiled, whose parameters go by the names they have in its state dict.
_ROOT = re.compile(r"^(?:self|fn)\.")


class Input(NamedTuple):
    """What a graph is given: what it is called in the program, and whether it is a parameter or a buffer."""

    name: str
    is_state: bool


@functools.cache
def op_names() -> tuple[str, ...]:
    """Every ATen op there is, overloads with their names. Nothing public lists them."""
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return tuple(name.replace("::", ".") + ("" if "." in name else ".default") for name in names)


@functools.cache
def op_name_set() -> frozenset[str]:
    return frozenset(op_names())


# What is left of writing into an input where a graph is not trained.
_WRITES = frozenset({"aten.copy_", "aten.set_", "aten.resize_"})


@functools.cache
def is_taken_apart(name: str) -> bool:
    """Whether an op, by its full name, is gone before there is a graph: it is made of others, or writes in place.

    Nothing public says which kernels an op has.
    """
    namespace, op, overload = name.split(".")
    if f"{namespace}.{op}" in _WRITES:
        return False
    kernels = f"{namespace}::{op}" + ("" if overload == "default" else f".{overload}")

    def has(key: str) -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key(kernels, key)

    # Where there is a kernel of its own for a device, that is what runs there.
    if has("CompositeImplicitAutograd") and not (has("CPU") or has("CUDA")):
        return True
    found = getattr(getattr(getattr(torch.ops, namespace), op, None), overload, None)
    if not isinstance(found, torch._ops.OpOverload):
        return False
    importlib.import_module("torch._decomp")  # where ops get kernels that are written in Python
    in_python = {torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd}
    return found._schema.is_mutable or not in_python.isdisjoint(found.py_kernels)


@functools.cache
def names_an_op(pattern: str) -> bool:
    return any(fits(name, pattern) for name in op_names())


def fits(name: str, pattern: str) -> bool:
    """Whether an op, or all overloads of one, go by this name or glob."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[0], pattern)


def is_view(target: object) -> bool:
    """Whether an op returns what it is given, seen in another way. `OpOverload.is_view` is not there on torch 2.11."""
    if target is torch.ops.aten._unsafe_view.default:  # says it makes a tensor of its own, and does not
        return True
    returns = target._schema.returns if isinstance(target, torch._ops.OpOverload) else ()
    return any(value.alias_info is not None and not value.alias_info.is_write for value in returns)


def shares_input(target: object) -> bool:
    """Whether what an op returns has the storage of its first input, always: `reshape` says so, and may copy."""
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.returns:
        return False
    is_alias = target._schema.returns[0].alias_info is not None or is_view(target)
    return is_alias and (target._schema.is_mutable or not is_taken_apart(str(target)))


def is_op(target: object) -> bool:
    """Whether this is an op of torch's dispatcher, and no arithmetic on sizes or taking apart of tuples."""
    return isinstance(target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator))


def returns_something(target: object) -> bool:
    """Whether a call has a value: an assertion has none."""
    return not isinstance(target, torch._ops.OpOverload) or bool(target._schema.returns)


def storage_of(tensor: Tensor) -> int | None:
    """What tells one storage from another: fake tensors have no address. None for sparse tensors, which have none."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def storage_bytes(tensor: Tensor) -> int | torch.SymInt:
    return tensor.untyped_storage().nbytes()


def hint(size: int | torch.SymInt) -> int | None:
    """The size at hand behind a symbol, without the guard that asking the symbol itself adds. None if unknown."""
    if isinstance(size, int):
        return size
    return size.node.hint if size.node.has_hint() else None


def in_program(size: torch.SymInt) -> str | None:
    """A size as the program can say it, such as `x.shape[1]`. None where it is of nothing that it was given."""
    expression, sources = size.node.expr, size.node.shape_env.var_to_sources
    names = {}
    for symbol in expression.free_symbols:
        name = getattr(next(iter(sources.get(symbol, ())), None), "name", None)
        if name is None:
            return None
        source = str(name() if callable(name) else name)  # a method on torch 2.11
        names[str(symbol)] = _SIZE.sub(r".shape[\1]", _LOCAL.sub(r"\1", _MEMBER.sub(r".\1", source)))
    text = _SYMBOL.sub(lambda found: names.get(found[0], found[0]), str(expression))
    return text if expression.is_symbol else f"({text})"


def inputs_of(dynamo: fx.GraphModule) -> tuple[Input, ...]:
    """What Dynamo's graph is given, by the names of the program: Dynamo notes the source of each with the node."""
    found = []
    for node in dynamo.graph.find_nodes(op="placeholder"):
        source = str(getattr(getattr(node, "_dynamo_source", None), "name", node.name))
        name = _ROOT.sub("", _LOCAL.sub(r"\1", _MEMBER.sub(r".\1", source)))
        found.append(Input(name, "._parameters[" in source or "._buffers[" in source))
    return tuple(found)


def position_of(placeholder: fx.Node) -> int | None:
    """Which input of Dynamo's graph a placeholder of AOTAutograd's is. None for tangents, and what is saved."""
    return getattr(placeholder.meta.get("desc"), "idx", None)


def is_state_by_itself(placeholder: fx.Node) -> bool:
    """Whether AOTAutograd says that this is a parameter or a buffer, as it does when it lifted it itself."""
    return type(placeholder.meta.get("desc")).__name__ in ("ParamAOTInput", "BufferAOTInput")


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


def run_by_inductor(dynamo: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(dynamo, list(inputs))


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
