"""Purity: what a function may not do if it is to be compiled.

Tracing records operations alone, so an impure function would be compiled to a graph that silently drops its effects or
freezes a value it read. `PurityMode` runs while the function is traced. As a dispatch mode it sees every operation, and
raises with the user's source line at the first one that is not pure. A second mode, of `__torch_function__`, sees calls
that never become operations: switching grad mode, `tolist`, assigning `.data`.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx.traceback import set_stack_trace

from torchguard._graphs.source_lines import caller_line, error_line
from torchguard._torch import fakes, nodes, ops
from torchguard._torch import tensors as tensors_of_torch
from torchguard._torch.tensors import detached, flatten
from torchguard.exceptions import ImpureFunctionError

_AUTOGRAD_FUNCTION = str(Path("torch", "autograd", "function.py"))
_APPLY = ("apply", "_call_custom_function_call")
_LITERALS = {"aten::lift_fresh", "aten::lift_fresh_copy", "aten::lift"}
# These change running statistics in training mode, but their schema does not say so.
_RUNNING_STATISTICS = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}
_STATISTICS = ("num_batches_tracked", "running_mean", "running_var")
_STATISTICS_ADVICE = "Call .eval() on it, or pass track_running_stats=False"
# These read values without running an operation.
_READERS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
# The attribute of an exception that holds the source line of the node that raised it.
LINE_ATTRIBUTE = "torchguard_line"


class PurityMode(fakes.DispatchMode):
    """Records the source line of every operation of a function, and raises for those that are not pure.

    After the run, `has_autograd_function` says whether the function called an `autograd.Function`, and `custom_ops` are
    the operations outside of those that are not ATen's, with their source lines.

    Args:
        random_leaves: the tensors to return in place of random numbers, in order; None to refuse random operations.
        leaf_storages: the storages of the leaves, which may not be changed, and their names.
        detach_constants: whether to detach what is computed under `no_grad`, as forward mode does not do by itself.
            Torch runs an `autograd.Function` without grad as well, but that makes no constants.
        in_forward_mode: whether the function itself is differentiated in forward mode, where `no_grad` has to drop
            tangents as well. No operation does that, so the results of torch functions are detached.
        search_stack: whether to find the source line on the stack; otherwise it is that of the node being interpreted.
    """

    supports_higher_order_operators = True  # so that they reach this mode, and raise a plain message

    def __init__(
        self,
        name: str,
        random_leaves: Sequence[Tensor] | None = None,
        leaf_storages: Mapping[int | None, str] = MappingProxyType({}),
        *,
        search_stack: bool = True,
        detach_constants: bool = False,
        in_forward_mode: bool = False,
    ) -> None:
        super().__init__()
        self._name, self._random_leaves, self._leaf_storages = name, random_leaves, leaf_storages
        self._search_stack, self._detach_constants = search_stack, detach_constants
        self.in_forward_mode = in_forward_mode
        self.random_tensors: list[tuple[str, Tensor]] = []
        self.has_autograd_function = False
        self.custom_ops: list[tuple[Any, str]] = []
        self._function_mode = _FunctionMode(self)
        self.grad_is_off, self._grad_was_on = False, True

    def __enter__(self) -> "PurityMode":
        self._grad_was_on = torch.is_grad_enabled()
        self._function_mode.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._function_mode.__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        where = caller_line().short if self._search_stack else nodes.current_line()
        set_stack_trace([where])
        is_inside = self.in_autograd_function()
        schema = ops.schema_of(func)
        if schema is None:
            raise self.error(where, f"{func} is a higher-order operation, which a graph cannot hold", "Use torch.where")
        self._check(func, args, kwargs, where)
        if is_random(func, args, kwargs):
            return self._replace_random(func, args, kwargs, where)
        args, kwargs = _with_logsumexp(schema, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except fakes.dynamic_shape_errors() as error:
            raise self._dynamic_shape_error(func, where) from error
        for tensor in _tensors(result):
            if tensor.layout is not torch.strided:
                what = f"{name_of(func)} returns a tensor of layout {tensor.layout}"
                raise self.error(where, what, "Compiled functions hold dense tensors alone: do this outside")
        if any(map(fakes.has_unbacked_size, _tensors(result))):
            raise self._dynamic_shape_error(func, where)
        if not is_inside and func.namespace not in ("aten", "prims") and _tensors(result):
            self.custom_ops.append((func, where))
        is_constant = self.grad_is_off or torch.is_inference_mode_enabled()
        if self._detach_constants and is_constant and isinstance(result, Tensor) and not schema.is_mutable:
            return torch.ops.aten.detach.default(result)
        return result

    def _dynamic_shape_error(self, func: Any, where: str) -> ImpureFunctionError:
        return self.error(where, f"the shape of the result of {name_of(func)} depends on values", "Use a mask instead")

    def _check(self, func: Any, args: Any, kwargs: Any, where: str) -> None:
        schema, tensors = ops.schema_of(func), _tensors((args, kwargs))
        is_literal = schema.name in _LITERALS and all(tensor.untyped_storage().resizable() for tensor in tensors)
        if not is_literal and not all(map(fakes.is_fake, tensors)):
            raise self.hidden_constant(where, name_of(func))
        if torch.Tag.data_dependent_output in func.tags:
            raise branch_error(self._name, where)
        is_training = schema.name in _RUNNING_STATISTICS and _argument(func, args, kwargs, "training")
        if is_training and _argument(func, args, kwargs, "running_mean") is not None:
            raise self.error(where, "batch norm changes its running statistics", _STATISTICS_ADVICE)
        if schema.is_mutable and self.in_forward_mode and self.grad_is_off and not self.in_autograd_function():
            raise self.error(
                where, f"{name_of(func)} changes a tensor in place under no_grad", "Use the out-of-place form"
            )
        if schema.is_mutable:
            for declared in schema.arguments:
                is_written = declared.alias_info is not None and declared.alias_info.is_write
                given = _argument(func, args, kwargs, declared.name)
                storages = [tensors_of_torch.storage_of(tensor) for tensor in _tensors(given)] if is_written else []
                changed = [self._leaf_storages[storage] for storage in storages if storage in self._leaf_storages]
                if changed and changed[0].endswith(_STATISTICS):
                    raise self.error(where, f"{name_of(func)} changes {changed[0]} in place", _STATISTICS_ADVICE)
                if changed:
                    raise self.error(
                        where, f"{name_of(func)} changes an argument in place", "Use the out-of-place form"
                    )

    def _replace_random(self, func: Any, args: Any, kwargs: Any, where: str) -> Any:
        schema = ops.schema_of(func)
        if self._random_leaves is None:
            advice = "Draw them outside and pass them as an argument, or compile with lift_rng=True"
            raise self.error(where, f"{name_of(func)} draws random numbers", advice)
        if schema.name == "aten::native_dropout":
            values, probability = args[0], args[1]
            mask = self._next_random("dropout", lambda: torch.empty_like(values, dtype=torch.bool))
            return values * mask * (1 / (1 - probability) if probability < 1 else 0.0), mask
        kind = name_of(func).split(".")[1].split("_like")[0].rstrip("_")
        if schema.is_mutable and "out" not in kwargs:
            return args[0].copy_(self._next_random(kind, lambda: torch.empty_like(args[0])))
        if len(schema.returns) != 1 or schema.is_mutable:
            raise self.error(
                where, f"{name_of(func)} draws random numbers that lift_rng cannot replace", "Draw them outside"
            )
        return self._next_random(kind, lambda: func(*args, **kwargs))

    def _next_random(self, kind: str, make: Any) -> Tensor:
        index, leaves = len(self.random_tensors), self._random_leaves or ()
        tensor = leaves[index] if index < len(leaves) else make()
        self.random_tensors.append((f"{kind}_{index}", tensor))
        return tensor.clone()  # the function may change it in place

    def hidden_constant(self, where: str, name: str) -> ImpureFunctionError:
        advice = "Make it an argument, or pass the nn.Module itself to the compiler"
        return self.error(where, f"{name} reads a tensor that is not an argument (a hidden constant)", advice)

    def in_autograd_function(self) -> bool:
        """Whether an `autograd.Function` is being run.

        Since torch 2.15, `apply` has no frame of its own. It switches gradients off, which the function mode does not
        see, as it does all that Python switches. A kernel that does the same counts as well: the function is then
        differentiated by torch instead of as a graph.
        """
        is_off = not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        is_inside = (is_off and self._grad_was_on and not self.grad_is_off) or _is_in_frame_of_apply()
        self.has_autograd_function = self.has_autograd_function or is_inside
        return is_inside

    def error(self, where: str, what: str, advice: str) -> ImpureFunctionError:
        return ImpureFunctionError(f"{self._name}: at {where}: {what}. {advice}.")


class _FunctionMode(fakes.TorchFunctionMode):
    """Sees the calls that never become operations: switching grad mode, reading values, and assigning `.data`."""

    def __init__(self, mode: PurityMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if ops.sets_grad_mode(func) and not self._mode.in_autograd_function():
            self._mode.grad_is_off = not args[0]
        elif func in _READERS and not fakes.is_fake(args[0]):
            raise self._mode.hidden_constant(caller_line().short, f"Tensor.{func.__name__}")
        elif func == Tensor.data.__set__:  # pyright: ignore[reportAttributeAccessIssue]
            raise self._mode.error(caller_line().short, "Tensor.data is assigned", "Use the new tensor itself")
        result = func(*args, **(kwargs or {}))
        if not (self._mode.in_forward_mode and self._mode.grad_is_off and _tensors(result)):
            return result
        is_inside = self._mode.in_autograd_function() and not ops.runs_autograd_function(func)
        return result if is_inside else detached(result)


def branch_error(name: str, where: str) -> ImpureFunctionError:
    return ImpureFunctionError(f"{name}: at {where}: control flow depends on the value of a tensor. Use torch.where.")


def is_random(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws random numbers. Some do so only in training, or with a dropout above zero."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    switches = ("dropout_p", "train", "training")
    declared = {argument.name for argument in ops.schema_of(func).arguments}
    return all(_argument(func, args, kwargs, name) not in (0, 0.0, False) for name in switches if name in declared)


def _with_logsumexp(schema: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Make fused attention return the log-sum-exp for its gradients. Torch does so only if a leaf requires grad."""
    for index, declared in enumerate(schema.arguments):
        if declared.name == "compute_log_sumexp" and index < len(args):
            args = (*args[:index], True, *args[index + 1 :])
        elif declared.name == "compute_log_sumexp":
            kwargs = {**kwargs, declared.name: True}
    return args, kwargs


def name_of(func: Any) -> str:
    """The name of an operation, without its overload: `aten.relu`."""
    return ops.schema_of(func).name.replace("::", ".")


def _is_in_frame_of_apply() -> bool:
    """Whether a frame of `autograd.Function.apply` is on the stack; since torch 2.15 only inside of transforms."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _APPLY and frame.f_code.co_filename.endswith(_AUTOGRAD_FUNCTION):
            return True
        frame = frame.f_back
    return False


def line_of(error: BaseException) -> str:
    """The source line of the node that raised an error, or the innermost line of user code in its traceback."""
    if isinstance(noted := getattr(error, LINE_ATTRIBUTE, None), str):
        return noted
    line = error_line(error)
    return line.short if line else "an unknown line"


def _argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    for index, declared in enumerate(ops.schema_of(func).arguments):
        if declared.name == name:
            return args[index] if index < len(args) else kwargs.get(name, declared.default_value)
    return None


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]
