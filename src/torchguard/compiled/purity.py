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

from torchguard.compiled import _torch
from torchguard.exceptions import ImpureFunctionError

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
_AUTOGRAD_FUNCTION = str(Path("torch", "autograd", "function.py"))
_STANDARD = sysconfig.get_paths()["stdlib"]
_LITERALS = {"aten::lift_fresh", "aten::lift_fresh_copy", "aten::lift"}
# These change running statistics, and their schema does not say so.
_RUNNING_STATISTICS = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}


# What an error is given that was raised at a node whose line is known.
LINE = "torchguard_line"


class Watch(_torch.DispatchMode):
    """Sees every operation of a function: notes the line it comes from, and refuses what is not pure.

    A function has rules of its own where an `autograd.Function` was met, of which operations do not tell.

    Args:
        lifted: what random operations are replaced with, in order; None to refuse them.
        own: the storages of the leaves, which may not be changed.
        detaches: whether what is computed under `no_grad` is detached, which forward mode would not do otherwise.
        finds_lines: whether the line is looked for on the stack; otherwise it is that of a node being run.
    """

    supports_higher_order_operators = True  # so that they are met, and refused in words

    def __init__(
        self,
        name: str,
        lifted: Sequence[Tensor] | None = None,
        own: Set[int] = frozenset(),
        *,
        finds_lines: bool = True,
        detaches: bool = False,
    ) -> None:
        super().__init__()
        self._detaches = detaches
        self._name, self._lifted, self._own, self._finds_lines = name, lifted, own, finds_lines
        self.drawn: list[tuple[str, Tensor]] = []
        self.has_own_rules = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        where = user_line() if self._finds_lines else _torch.current_line()
        set_stack_trace([where])
        self.has_own_rules = self.has_own_rules or _in_autograd_function()
        schema = _torch.schema_of(func)
        if schema is None:
            raise self._error(where, f"{func} takes functions, and a graph has none", "Use torch.where")
        self._refuse(func, args, kwargs, where)
        if is_random(func, args, kwargs):
            return self._draw(func, args, kwargs, where)
        try:
            result = func(*args, **kwargs)
        except _torch.dynamic_shape_errors() as error:
            raise self._of_values(func, where) from error
        if any(isinstance(size, torch.SymInt) for out in _tensors(result) for size in out.shape):
            raise self._of_values(func, where)
        if self._detaches and not torch.is_grad_enabled() and isinstance(result, Tensor) and not schema.is_mutable:
            return torch.ops.aten.detach.default(result)
        return result

    def _of_values(self, func: Any, where: str) -> ImpureFunctionError:
        return self._error(where, f"the shape of what {name_of(func)} returns depends on values", "Use a mask instead")

    def _refuse(self, func: Any, args: Any, kwargs: Any, where: str) -> None:
        schema, tensors = _torch.schema_of(func), _tensors((args, kwargs))
        if schema.name not in _LITERALS and not all(map(_torch.is_fake, tensors)):
            advice = "Make it an argument, or pass the nn.Module itself to the compiler"
            raise self._error(where, f"{name_of(func)} reads a tensor that is no argument (a hidden constant)", advice)
        if torch.Tag.data_dependent_output in func.tags:
            raise branches_on_values(self._name, where)
        trains = schema.name in _RUNNING_STATISTICS and _argument(func, args, kwargs, "training")
        if trains and _argument(func, args, kwargs, "running_mean") is not None:
            advice = "Call .eval() on it, or pass track_running_stats=False"
            raise self._error(where, "batch norm changes its running statistics", advice)
        if schema.is_mutable:
            for given, declared in zip(args, schema.arguments, strict=False):
                written = declared.alias_info is not None and declared.alias_info.is_write
                if written and any(_torch.storage_of(tensor) in self._own for tensor in _tensors(given)):
                    raise self._error(
                        where, f"{name_of(func)} changes an argument in place", "Use the out-of-place form"
                    )

    def _draw(self, func: Any, args: Any, kwargs: Any, where: str) -> Any:
        schema = _torch.schema_of(func)
        if self._lifted is None:
            advice = "Draw outside and pass the numbers as a leaf, which lift_rng=True does for you"
            raise self._error(where, f"{name_of(func)} draws random numbers", advice)
        if schema.name == "aten::native_dropout":
            values, probability = args[0], args[1]
            mask = self._take("dropout", lambda: torch.empty_like(values, dtype=torch.bool))
            return values * mask * (1 / (1 - probability) if probability < 1 else 0.0), mask
        kind = name_of(func).split(".")[1].split("_like")[0].rstrip("_")
        if schema.is_mutable and "out" not in kwargs:
            return args[0].copy_(self._take(kind, lambda: torch.empty_like(args[0])))
        if len(schema.returns) != 1 or schema.is_mutable:
            raise self._error(where, f"{name_of(func)} draws random numbers that cannot be lifted", "Draw them outside")
        return self._take(kind, lambda: func(*args, **kwargs))

    def _take(self, kind: str, make: Any) -> Tensor:
        index = len(self.drawn)
        lifted = self._lifted or ()
        taken = lifted[index] if index < len(lifted) else make()
        self.drawn.append((f"{kind}_{index}", taken))
        return taken.clone()  # the function may go on to change it

    def _error(self, where: str, what: str, advice: str) -> ImpureFunctionError:
        return ImpureFunctionError(f"{self._name}: at {where}: {what}. {advice}.")


def branches_on_values(name: str, where: str) -> ImpureFunctionError:
    return ImpureFunctionError(f"{name}: at {where}: the value of a tensor decides what is run. Use torch.where.")


def is_random(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws random numbers: some only do so while training, or with a dropout above zero."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    switches = ("dropout_p", "train", "training")
    declared = {argument.name for argument in _torch.schema_of(func).arguments}
    return all(_argument(func, args, kwargs, name) not in (0, 0.0, False) for name in switches if name in declared)


def name_of(func: Any) -> str:
    """An operation as it is written: `aten.relu`."""
    return _torch.schema_of(func).name.replace("::", ".")


def user_line() -> str:
    """The innermost line on the stack that is neither torch's nor ours: `model.py:12 in forward`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not _is_the_users(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def _in_autograd_function() -> bool:
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
    for index, declared in enumerate(_torch.schema_of(func).arguments):
        if declared.name == name:
            return args[index] if index < len(args) else kwargs.get(name, declared.default_value)
    return None


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in _torch.flatten(value)[0] if isinstance(leaf, Tensor)]
