"""Operators of ATen: names, schemas, kernels."""

import functools
import importlib
from fnmatch import fnmatchcase
from typing import Any

import torch


def op_named(name: str) -> Any:
    """The op that a graph calls `aten.mm.default`, None if there is none. The type of ops has no public name."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, torch._ops.OpOverload) else None


def schema_of(operation: Any) -> Any:
    """What an ATen operation is called, takes, returns and changes; None for anything else. There is no public way."""
    return getattr(operation, "_schema", None)


def sets_grad_mode(function: Any) -> bool:
    """Whether a function is what `no_grad` and `enable_grad` call, which a torch function mode sees."""
    return function is torch._C._set_grad_enabled


def runs_autograd_function(function: Any) -> bool:
    """Whether a function is what `autograd.Function.apply` calls inside a transform."""
    from torch._functorch.autograd_function import custom_function_call

    return function is custom_function_call


def has_autograd(operation: Any) -> bool:
    """Whether an operation says anything to autograd; one that does not has gradients of zero, without a word."""
    name = schema_of(operation).name
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has_kernel(name, key) for key in ("Autograd", "AutogradCPU", "AutogradCUDA"))


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
