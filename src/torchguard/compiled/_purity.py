"""What a function may not do if it is to be compiled: noticed while it is traced, operation by operation."""

import sys
import sysconfig
import traceback
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx.traceback import set_stack_trace

from torchguard._torch import fakes, nodes, ops
from torchguard._torch.tensors import detached, flatten, storage_of
from torchguard.exceptions import ImpureFunctionError

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
_AUTOGRAD_FUNCTION = str(Path("torch", "autograd", "function.py"))
_STANDARD = sysconfig.get_paths()["stdlib"]
_LITERALS = {"aten::lift_fresh", "aten::lift_fresh_copy", "aten::lift"}
# These change running statistics, and their schema does not say so.
_RUNNING_STATISTICS = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}


# These read values without an operation.
_READERS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
# What an error is given that was raised at a node whose line is known.
LINE = "torchguard_line"


class Watch(fakes.DispatchMode):
    """Sees every operation of a function: notes the line it comes from, and refuses what is not pure.

    A function has rules of its own where an `autograd.Function` was met, of which operations do not tell. What is
    neither ATen's nor in such a function is `foreign`.

    Args:
        lifted: what random operations are replaced with, in order; None to refuse them.
        own: the storages of the leaves, which may not be changed.
        detaches: whether what is computed under `no_grad` is detached, which forward mode would not do otherwise.
            Torch runs an `autograd.Function` without grad as well, which makes no constants.
        pushes: whether tangents are pushed through the function itself, and have to be cut off there as well. No
            operation tells of them, so this is done to what functions of torch return.
        finds_lines: whether the line is looked for on the stack; otherwise it is that of a node being run.
    """

    supports_higher_order_operators = True  # so that they are met, and refused in words

    def __init__(
        self,
        name: str,
        lifted: Sequence[Tensor] | None = None,
        own: Set[int | None] = frozenset(),
        *,
        finds_lines: bool = True,
        detaches: bool = False,
        pushes: bool = False,
    ) -> None:
        super().__init__()
        self._detaches, self.pushes = detaches, pushes
        self._name, self._lifted, self._own, self._finds_lines = name, lifted, own, finds_lines
        self.drawn: list[tuple[str, Tensor]] = []
        self.has_own_rules = False
        self.foreign: list[tuple[Any, str]] = []
        self._calls = _Calls(self)
        self.grad_is_off = False

    def __enter__(self) -> "Watch":
        self._calls.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._calls.__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        where = user_line() if self._finds_lines else nodes.current_line()
        set_stack_trace([where])
        has_own_rule = in_autograd_function()
        self.has_own_rules = self.has_own_rules or has_own_rule
        schema = ops.schema_of(func)
        if schema is None:
            raise self.error(where, f"{func} takes functions, and a graph has none", "Use torch.where")
        self._refuse(func, args, kwargs, where)
        if is_random(func, args, kwargs):
            return self._draw(func, args, kwargs, where)
        args, kwargs = _with_log_sums(schema, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except fakes.dynamic_shape_errors() as error:
            raise self._of_values(func, where) from error
        if any(map(fakes.has_unbacked_size, _tensors(result))):
            raise self._of_values(func, where)
        if not has_own_rule and func.namespace not in ("aten", "prims") and _tensors(result):
            self.foreign.append((func, where))
        is_constant = self.grad_is_off or torch.is_inference_mode_enabled()
        if self._detaches and is_constant and isinstance(result, Tensor) and not schema.is_mutable:
            return torch.ops.aten.detach.default(result)
        return result

    def _of_values(self, func: Any, where: str) -> ImpureFunctionError:
        return self.error(where, f"the shape of what {name_of(func)} returns depends on values", "Use a mask instead")

    def _refuse(self, func: Any, args: Any, kwargs: Any, where: str) -> None:
        schema, tensors = ops.schema_of(func), _tensors((args, kwargs))
        is_literal = schema.name in _LITERALS and all(tensor.untyped_storage().resizable() for tensor in tensors)
        if not is_literal and not all(map(fakes.is_fake, tensors)):
            raise self.hidden(where, name_of(func))
        if torch.Tag.data_dependent_output in func.tags:
            raise branches_on_values(self._name, where)
        trains = schema.name in _RUNNING_STATISTICS and _argument(func, args, kwargs, "training")
        if trains and _argument(func, args, kwargs, "running_mean") is not None:
            advice = "Call .eval() on it, or pass track_running_stats=False"
            raise self.error(where, "batch norm changes its running statistics", advice)
        if schema.is_mutable and self.pushes and self.grad_is_off and not in_autograd_function():
            raise self.error(where, f"{name_of(func)} changes a tensor without grad", "Use the out-of-place form")
        if schema.is_mutable:
            for declared in schema.arguments:
                written = declared.alias_info is not None and declared.alias_info.is_write
                given = _argument(func, args, kwargs, declared.name)
                if written and any(storage_of(tensor) in self._own for tensor in _tensors(given)):
                    raise self.error(
                        where, f"{name_of(func)} changes an argument in place", "Use the out-of-place form"
                    )

    def _draw(self, func: Any, args: Any, kwargs: Any, where: str) -> Any:
        schema = ops.schema_of(func)
        if self._lifted is None:
            advice = "Draw outside and pass the numbers as a leaf, which lift_rng=True does for you"
            raise self.error(where, f"{name_of(func)} draws random numbers", advice)
        if schema.name == "aten::native_dropout":
            values, probability = args[0], args[1]
            mask = self._take("dropout", lambda: torch.empty_like(values, dtype=torch.bool))
            return values * mask * (1 / (1 - probability) if probability < 1 else 0.0), mask
        kind = name_of(func).split(".")[1].split("_like")[0].rstrip("_")
        if schema.is_mutable and "out" not in kwargs:
            return args[0].copy_(self._take(kind, lambda: torch.empty_like(args[0])))
        if len(schema.returns) != 1 or schema.is_mutable:
            raise self.error(where, f"{name_of(func)} draws random numbers that cannot be lifted", "Draw them outside")
        return self._take(kind, lambda: func(*args, **kwargs))

    def _take(self, kind: str, make: Any) -> Tensor:
        index = len(self.drawn)
        lifted = self._lifted or ()
        taken = lifted[index] if index < len(lifted) else make()
        self.drawn.append((f"{kind}_{index}", taken))
        return taken.clone()  # the function may go on to change it

    def hidden(self, where: str, name: str) -> ImpureFunctionError:
        advice = "Make it an argument, or pass the nn.Module itself to the compiler"
        return self.error(where, f"{name} reads a tensor that is no argument (a hidden constant)", advice)

    def error(self, where: str, what: str, advice: str) -> ImpureFunctionError:
        return ImpureFunctionError(f"{self._name}: at {where}: {what}. {advice}.")


class _Calls(fakes.TorchFunctionMode):
    """Sees what never becomes an operation: switches of grad, and values that are read or replaced behind its back."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if ops.sets_grad_mode(func) and not in_autograd_function():
            self._watch.grad_is_off = not args[0]
        elif func in _READERS and not fakes.is_fake(args[0]):
            raise self._watch.hidden(user_line(), f"Tensor.{func.__name__}")
        elif func == Tensor.data.__set__:  # pyright: ignore[reportAttributeAccessIssue]
            raise self._watch.error(user_line(), "the data of a tensor are replaced", "Use the new tensor itself")
        result = func(*args, **(kwargs or {}))
        if not (self._watch.pushes and self._watch.grad_is_off and _tensors(result)):
            return result
        is_inside = in_autograd_function() and not ops.runs_autograd_function(func)
        return result if is_inside else detached(result)


def branches_on_values(name: str, where: str) -> ImpureFunctionError:
    return ImpureFunctionError(f"{name}: at {where}: the value of a tensor decides what is run. Use torch.where.")


def is_random(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws random numbers: some only do so while training, or with a dropout above zero."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    switches = ("dropout_p", "train", "training")
    declared = {argument.name for argument in ops.schema_of(func).arguments}
    return all(_argument(func, args, kwargs, name) not in (0, 0.0, False) for name in switches if name in declared)


def _with_log_sums(schema: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Have fused attention return what its gradients need: torch asks for it only where a leaf requires grad."""
    for index, declared in enumerate(schema.arguments):
        if declared.name == "compute_log_sumexp" and index < len(args):
            args = (*args[:index], True, *args[index + 1 :])
        elif declared.name == "compute_log_sumexp":
            kwargs = {**kwargs, declared.name: True}
    return args, kwargs


def name_of(func: Any) -> str:
    """An operation as it is written: `aten.relu`."""
    return ops.schema_of(func).name.replace("::", ".")


def user_line() -> str:
    """The innermost line on the stack that is neither torch's nor ours: `model.py:12 in forward`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not _is_the_users(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def in_autograd_function() -> bool:
    """Whether an `autograd.Function` is being run."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "apply" and frame.f_code.co_filename.endswith(_AUTOGRAD_FUNCTION):
            return True
        frame = frame.f_back
    return False


def _is_the_users(file: str) -> bool:
    is_standard = file.startswith(_STANDARD) and "site-packages" not in file
    return not is_standard and not file.startswith(_NOT_THE_USERS)


def line_of(error: BaseException) -> str:
    """The innermost line of the user's an error went through, or that of the node it was raised at."""
    if isinstance(noted := getattr(error, LINE, None), str):
        return noted
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_the_users(frame.filename)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name}" if frames else "an unknown line"


def _argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    for index, declared in enumerate(ops.schema_of(func).arguments):
        if declared.name == name:
            return args[index] if index < len(args) else kwargs.get(name, declared.default_value)
    return None


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]
