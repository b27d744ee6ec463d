"""ATen operators: names, schemas, kernels.

The class of operators (`torch._ops.OpOverload`), its `_schema` and the dispatcher's tables have no public names. They
are the same in torch 2.11 to 2.15, and required but for one that `op_names` names: without a schema nothing can be said
of an operator.
"""

import functools
import importlib
from fnmatch import fnmatchcase
from typing import Any

import torch


def op_named(name: str) -> Any:
    """The op of a name such as `aten.mm.default`; None if there is none."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, torch._ops.OpOverload) else None


def schema_of(operation: Any) -> Any:
    """The schema of an op: its name, arguments, returns and mutations; None for anything else."""
    return getattr(operation, "_schema", None)


def decomposition_of(operation: Any) -> Any:
    """Torch's own decomposition of an op, from its table in `torch._decomp`."""
    from torch._decomp import get_decompositions

    return get_decompositions([operation])[operation]


def sets_grad_mode(function: Any) -> bool:
    """Whether this is the function that `no_grad` and `enable_grad` call, as a torch function mode receives it."""
    return function is torch._C._set_grad_enabled


def runs_autograd_function(function: Any) -> bool:
    """Whether this is the function that `autograd.Function.apply` calls inside a `torch.func` transform."""
    from torch._functorch.autograd_function import custom_function_call

    return function is custom_function_call


def has_autograd(operation: Any) -> bool:
    """Whether an op has an autograd kernel; one without silently has gradients of zero."""
    name = schema_of(operation).name
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has_kernel(name, key) for key in ("Autograd", "AutogradCPU", "AutogradCUDA"))


@functools.cache
def op_names(namespace: str = "aten") -> tuple[str, ...]:
    """The names of all ops and overloads of a namespace, such as `aten.add.Tensor`.

    Degraded where torch has no `_higher_order_ops`: there are no names in the namespace "higher_order".
    """
    return _op_names(namespace)


def _op_names(namespace: str) -> tuple[str, ...]:
    if namespace == "higher_order":  # how this package names operators such as `cond`
        return tuple(f"higher_order.{name}" for name in getattr(torch._ops, "_higher_order_ops", ()))
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{namespace}::"))
    return tuple(name.replace("::", ".") + ("" if "." in name else ".default") for name in names)


@functools.cache
def op_name_set() -> frozenset[str]:
    return frozenset(op_names())


# The mutations of inputs that stay in an inference graph.
_WRITES = frozenset({"aten.copy_", "aten.set_", "aten.resize_"})


@functools.cache
def is_decomposed(name: str) -> bool:
    """Whether an op, by its full name, never reaches a graph: it is composed of others, or mutates its inputs."""
    namespace, op, overload = name.split(".")
    if f"{namespace}.{op}" in _WRITES:
        return False
    kernels = f"{namespace}::{op}" + ("" if overload == "default" else f".{overload}")

    def has(key: str) -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key(kernels, key)

    # A kernel for a device takes precedence over the composition.
    if has("CompositeImplicitAutograd") and not (has("CPU") or has("CUDA")):
        return True
    found = getattr(getattr(getattr(torch.ops, namespace), op, None), overload, None)
    if not isinstance(found, torch._ops.OpOverload):
        return False
    importlib.import_module("torch._decomp")  # registers ops' Python kernels
    in_python = {torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd}
    return found._schema.is_mutable or not in_python.isdisjoint(found.py_kernels)


@functools.cache
def is_composed(name: str) -> bool:
    """Whether an op, by its full name, is composed of others, and mutates none of its inputs."""
    schema = schema_of(op_named(name))
    return schema is not None and not schema.is_mutable and is_decomposed(name)


@functools.cache
def is_traced(name: str) -> bool:
    """Whether Dynamo puts an op, by its full name, into a graph: one that returns numbers alone breaks it.

    `aten.equal` and `aten.q_scale` return numbers. The exceptions are `item` and assertions, which return nothing.
    """
    schema = schema_of(op_named(name))
    if schema is None or not schema.returns or name.startswith("aten._local_scalar_dense."):
        return True
    return any("Tensor" in str(value.type) for value in schema.returns)


def matches_an_op(pattern: str) -> bool:
    """Whether any op matches a name or glob. Ops of other libraries may be registered at any time."""
    namespace = pattern.partition(".")[0]
    if any(letter in namespace for letter in "*?["):
        return True
    names = op_names() if namespace == "aten" else _op_names(namespace)
    return any(matches(name, pattern) for name in names)


def matches(name: str, pattern: str) -> bool:
    """Whether an overload's name, or the name without the overload, matches a name or glob."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[0], pattern)


def is_view(target: object) -> bool:
    """Whether an op returns a view of an input. torch 2.11 has no `OpOverload.is_view`."""
    if target is torch.ops.aten._unsafe_view.default:  # its schema says that it returns a new tensor
        return True
    returns = target._schema.returns if isinstance(target, torch._ops.OpOverload) else ()
    return any(value.alias_info is not None and not value.alias_info.is_write for value in returns)


def shares_input(target: object) -> bool:
    """Whether an op always returns the storage of its first input; `reshape` is declared to, and may copy."""
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.returns:
        return False
    is_alias = target._schema.returns[0].alias_info is not None or is_view(target)
    return is_alias and (target._schema.is_mutable or not is_decomposed(str(target)))


def is_op(target: object) -> bool:
    """Whether this is an op of torch's dispatcher, not arithmetic on sizes or `operator.getitem`."""
    return isinstance(target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator))


def returns_something(target: object) -> bool:
    """Whether a call returns a value: an assertion does not."""
    return not isinstance(target, torch._ops.OpOverload) or bool(target._schema.returns)
