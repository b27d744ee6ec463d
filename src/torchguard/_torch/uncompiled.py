"""Plain Python in place of what torch would compile, so that hooks and modes see every operation.

Three things of torch compile on their own, and are kept from it here:

- **Compiled functions** run as plain Python under the stance "force_eager" (`without_compiled_code`).
- **Operators that call functions** (`torch.cond`, `while_loop`, `map`, `scan`, `associative_scan`): in eager mode,
  torch compiles each call of them with Dynamo. Dynamo traces the hooks of modules within, and refuses what they write.
  Without Dynamo, the operators trace their functions with fake tensors, and fail on parameters. So they run as the
  loops and branches that they stand for (`python_control_flow`). Patches `setup_compilation_env` of
  `torch._higher_order_ops`, which all of them enter first.
- **Checkpoints** run their function once more in backward. That run has to save the same tensors, so it runs as the
  first one did. Patches `_CheckpointFrame.__init__` of `torch.utils.checkpoint`.

The stance is public, the patched names are those of torch 2.11 to 2.15. Degraded where torch lacks them: models with
such operators, or with checkpoints around compiled functions, fail with an error of torch when called in eager mode.
"""

import contextlib
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torchguard._torch.process import patch_function, process_state


class _EagerStance:
    """The stance "force_eager" of the process, which several threads may want at once: the last one puts it back."""

    def __init__(self) -> None:
        self.lock, self.users, self.stack = threading.Lock(), 0, contextlib.ExitStack()


class _Python(threading.local):
    """Whether operators that call functions run as Python in this thread."""

    is_on = False


_EAGER = process_state("eager stance", _EagerStance)
_PYTHON = process_state("python control flow", _Python)


@contextlib.contextmanager
def without_compiled_code() -> Iterator[None]:
    """Run compiled functions as plain Python, so that a mode sees their operations. Dynamo compiles them afterwards.

    The stance is one for all threads: others run their compiled functions as plain Python meanwhile. If nothing is
    compiled yet, loading Dynamo to set it would take seconds.
    """
    if "torch._dynamo" not in sys.modules:
        yield
        return
    _patch_checkpoints()
    with _EAGER.lock:
        _EAGER.users += 1
        if _EAGER.users == 1:
            _EAGER.stack.enter_context(torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _EAGER.lock:
            _EAGER.users -= 1
            if _EAGER.users == 0:
                _EAGER.stack.close()


@contextlib.contextmanager
def python_control_flow() -> Iterator[None]:
    """Run operators that call functions as plain Python, in this thread."""
    _patch_operators()
    _patch_checkpoints()
    _PYTHON.is_on, before = True, _PYTHON.is_on
    try:
        yield
    finally:
        _PYTHON.is_on = before


@functools.cache
def _patch_operators() -> None:
    for name in ("utils", "cond", "while_loop", "map", "scan", "associative_scan"):  # some import it by name
        with contextlib.suppress(ImportError):
            owner = importlib.import_module(f"torch._higher_order_ops.{name}")
            patch_function(owner, "setup_compilation_env", globals(), "_environment")


@functools.cache
def _patch_checkpoints() -> None:
    frame = getattr(torch.utils.checkpoint, "_CheckpointFrame", None)
    if frame is not None:
        patch_function(frame, "__init__", globals(), "_new_frame")


def _environment(original: Callable[[], Any]) -> Any:
    return _python_environment() if _PYTHON.is_on else original()


@contextlib.contextmanager
def _python_environment() -> Iterator[str]:
    with without_compiled_code(), _PythonMode():
        yield "eager"


class _PythonMode(TorchFunctionMode):
    """Runs operators that call functions as plain Python."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name() if isinstance(function, torch._ops.HigherOrderOperator) else ""
        given, in_python = dict(kwargs or {}), _IN_PYTHON.get(name)
        if in_python is None:
            return function(*args, **given)
        given.pop("mutated_arg_indices", None)  # since torch 2.14: what a graph writes to. Python writes to it itself.
        return in_python(*args, **given)


def _cond(predicate: Any, if_true: Any, if_false: Any, operands: Any = ()) -> Any:
    return (if_true if predicate else if_false)(*operands)


def _while_loop(condition: Any, body: Any, carried: Any, additional: Any = ()) -> Any:
    result = None
    while condition(*carried, *additional):
        result = body(*carried, *additional)
        carried = pytree.tree_leaves(result)
    if result is None:
        return tuple([one.clone() if isinstance(one, Tensor) else one for one in carried])
    return result


def _map(function: Any, given: Any, additional: Any = ()) -> Any:
    return _stacked([function(*[z[i] for z in given], *additional) for i in range(len(given[0]))])


def _scan(combine: Any, carry: Any, given: Any, additional_inputs: Any = ()) -> Any:
    results = []
    for i in range(len(given[0])):
        carry, result = combine(*pytree.tree_leaves(carry), *[z[i] for z in given], *additional_inputs)
        results.append(result)
    return carry, _stacked(results)


def _associative_scan(combine: Any, given: Any, additional_inputs: Any = ()) -> Any:
    operators = importlib.import_module("torch._higher_order_ops.associative_scan")
    return operators.generic_associative_scan(combine, given, additional_inputs=additional_inputs)


def _stacked(results: list[Any]) -> Any:
    return pytree.tree_map(lambda *zs: torch.stack(zs) if isinstance(zs[0], Tensor) else zs[0], *results)


# By the name of the operator.
_IN_PYTHON = {
    "cond": _cond,
    "while_loop": _while_loop,
    "map_impl": _map,
    "scan": _scan,
    "associative_scan": _associative_scan,
}


def _new_frame(original: Callable[..., None], frame: Any, *args: Any, **kwargs: Any) -> None:
    original(frame, *args, **kwargs)
    is_uncompiled, is_python = _EAGER.users > 0, _PYTHON.is_on
    if not (is_uncompiled or is_python):
        return
    recompute = frame.recompute_fn

    def recompute_alike(*inputs: Any) -> Any:
        with (
            without_compiled_code() if is_uncompiled else contextlib.nullcontext(),
            python_control_flow() if is_python else contextlib.nullcontext(),
        ):
            return recompute(*inputs)

    frame.recompute_fn = recompute_alike
