"""What is being traced: graphs, transforms, exports, and sizes that are symbols.

This module is loaded with `import torchguard` and runs in every eager check: it imports neither Dynamo nor sympy. The
names are the same in torch 2.11 to 2.15. Without those that are required, importing it raises ImportError; the others
have a degraded mode, which the docstrings name.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from torchguard._torch.support import require_names, warn_if_untested, warn_of_missing

warn_if_untested()  # here, because every part that uses torch imports this module
require_names("torch._C", torch._C, "_current_graph_task_id", "_get_tracing_state", "_len_torch_dispatch_stack")
_functorch = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
require_names(
    "torch._C._functorch",
    _functorch,
    *("is_legacy_batchedtensor", "maybe_current_level", "is_batchedtensor", "is_functorch_wrapped_tensor"),
    *("get_unwrapped", "maybe_get_bdim", "maybe_get_level", "_add_batch_dim"),
)
warn_of_missing("err")

F = TypeVar("F", bound=Callable)
_DEVICES = ("cpu", "cuda")


def constant_in_graphs(fn: F) -> F:
    """Have Dynamo call `fn` while it traces, and treat the result as a constant.

    `torch.compiler.assume_constant_result` sets the same mark, but loads all of Dynamo at import. Degraded where Dynamo
    does not know the mark: it traces into `fn` instead, and reports what it cannot trace.
    """
    fn._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return fn


def is_traced(tensor: Tensor) -> bool:
    """Whether `tensor` stands for a value in a graph under construction.

    Fake and functional tensors are private subclasses; anything that is not a plain tensor is taken for one.
    A user's own subclass is then treated as traced as well, which costs speed, never correctness.
    """
    return type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter


def is_shape_only(tensor: Tensor) -> bool:
    """Whether `tensor` is fake and no operation on it is recorded, so that its values are never read.

    That is so when Dynamo and AOTAutograd compute output shapes, before they trace. Degraded where torch lacks
    `is_fake` or `get_proxy_mode`: False, and computing shapes takes as long as tracing.
    """
    is_fake = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "is_fake", None)
    proxy_mode = getattr(sys.modules.get("torch.fx.experimental.proxy_tensor"), "get_proxy_mode", None)
    return is_fake is not None and proxy_mode is not None and is_fake(tensor) and proxy_mode() is None


def is_plain(tensor: Tensor) -> bool:
    """Whether `tensor` is just its values: no graph is being traced, and no `torch.func` transform is active.

    None of these has a public name, and all are required: the level of `torch.func` transforms (else `vmap` over an
    eager check fails on reading a batched value); the older batched tensors of `autograd.grad(is_grads_batched=True)`;
    the state of `torch.jit.trace` and the stack of dispatch modes, one of which `make_fx` uses (else what a traced
    check found in its example would count for every later input).
    """
    return (
        not torch.compiler.is_compiling()
        and not is_traced(tensor)
        and _functorch.maybe_current_level() is None
        and not _functorch.is_legacy_batchedtensor(tensor)
        and torch._C._get_tracing_state() is None
        and torch._C._len_torch_dispatch_stack() == 0
    )


def is_jit_tracing() -> bool:
    """Whether `torch.jit.trace` is active: documented under `torch.jit`, but not among its exported names. Required."""
    return torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


@constant_in_graphs
def in_transform() -> bool:
    """Whether a `torch.func` transform is active; may be called while Dynamo traces through it. Required."""
    return _functorch.maybe_current_level() is not None


# Operators that call functions which may write to nothing. Torch has two names for the operator of `map`.
_BRANCHES = {"cond", "while_loop", "while_loop_stack_output", "map", "map_impl", "scan", "associative_scan"}


@constant_in_graphs
def is_in_branch() -> bool:
    """Whether Dynamo traces a function that `torch.cond`, `while_loop`, `map` or `scan` calls.

    Degraded where Dynamo names its tracers otherwise: False, and Dynamo refuses the function for what hooks write.
    """
    at_work = getattr(sys.modules.get("torch._dynamo.symbolic_convert"), "tls", None)
    output = getattr(getattr(at_work, "current_tx", None), "output", None)
    tracer = getattr(output, "current_tracer", None)
    while tracer is not None:
        if str(getattr(tracer, "source_target", None)) in _BRANCHES:
            return True
        tracer = getattr(tracer, "parent", None)
    return False


def transform_depth() -> int:
    """How many transforms of `torch.func` are active, one within the other. Required."""
    return len(_functorch.get_interpreter_stack() or [])


def leave_transforms(depth: int) -> None:
    """Leave transforms of `torch.func` that were entered beyond a depth. Required."""
    while transform_depth() > depth:
        _functorch.pop_dynamic_layer_stack()


def forward_depth() -> int:
    """How many forward-mode transforms of `torch.func` (`jvp`, `jacfwd`) are active, one within the other. Required."""
    return sum(one.key().name == "Jvp" for one in _functorch.get_interpreter_stack() or [])


def can_read(tensor: Tensor) -> bool:
    """Whether reading a value of `tensor` is possible and waits for no device."""
    return tensor.is_cpu and is_plain(tensor)


@constant_in_graphs
def is_exporting() -> bool:
    """Whether `torch.export` is active.

    In torch 2.11 and 2.12, Dynamo answers `torch.compiler.is_exporting()` with True whenever it traces, so the flag
    behind it is read. Degraded where that is missing: False, and an exported program may hold torchguard operators.
    """
    return getattr(torch.compiler, "_is_exporting_flag", False)


def is_compiled_by_inductor() -> bool:
    """Whether AOTAutograd traces a graph for Inductor.

    Inductor sets its fake mode around AOTAutograd. Degraded where `V`, its fake mode or `NullHandler` is missing:
    False, and graphs for Inductor are those of other backends, which take longer to compile.
    """
    virtualized = sys.modules.get("torch._inductor.virtualized")
    unset, mode = getattr(virtualized, "NullHandler", None), getattr(getattr(virtualized, "V", None), "fake_mode", None)
    return unset is not None and mode is not None and not isinstance(mode, unset)


def holds(condition: bool) -> bool:
    """Whether a comparison of sizes is true; False for sizes that depend on values.

    Comparing such a size ends the trace; `guard_or_false` of `torch.fx.experimental` does not. Required in a graph.
    """
    if not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # loads sympy: only where a graph is traced

    return guard_or_false(condition)


def is_surely(condition: bool | torch.SymBool) -> bool:
    """Whether a comparison of sizes is true for every size that a graph allows. Adds no guard.

    `statically_known_true` of `torch.fx.experimental` is the only way to ask without a guard. Required in a graph.
    """
    if not torch.compiler.is_compiling() and isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # loads sympy: only where a graph is traced

    return statically_known_true(condition)


def surely_equal(one: Sequence[int], two: Sequence[int]) -> bool:
    """Whether two shapes are known to be equal without a guard, which would cause a recompile later."""
    return len(one) == len(two) and all(is_surely(a == b) for a, b in zip(one, two, strict=True))


def backward_number() -> int:
    """The id of the backward pass under way, traced or not: -1 for none. There is no public way to ask. Required."""
    return torch._C._current_graph_task_id()


def is_in_backward() -> bool:
    """Whether an eager backward pass is under way: a forward that runs then is a checkpoint's second one."""
    return not torch.compiler.is_compiling() and backward_number() != -1


@constant_in_graphs
def casts_to_float16() -> bool:
    """Whether autocast is on, to float16; while Dynamo traces, as where it traces."""
    return torch.float16 in autocast_dtypes()


def autocast_dtypes() -> tuple[torch.dtype | None, ...]:
    """To which dtype autocast casts on each kind of device; None where it is off."""
    return tuple([torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in _DEVICES])


def is_in_checkpoint() -> bool:
    """Whether `torch.utils.checkpoint` will run what runs now once more in backward, to save memory.

    It sets hooks for saved tensors meanwhile. Degraded where torch names them otherwise: False, and the second run has
    to save as many tensors as the first, or torch raises an error.
    """
    top = getattr(getattr(torch._C, "_autograd", None), "_top_saved_tensors_default_hooks", None)
    hooks = None if top is None else top(True)
    return hooks is not None and getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook")


def is_in_reentrant_checkpoint() -> bool:
    """Whether a `torch.utils.checkpoint` with `use_reentrant=True` runs its function for the first time: without
    gradients. Looks at the frames that called this one."""
    checkpoint = sys.modules.get("torch.utils.checkpoint")
    code = None if checkpoint is None else checkpoint.CheckpointFunction.forward.__code__
    frame = None if code is None else sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a transform of `torch.func`, or batched gradients, wrap a tensor. Required."""
    return _functorch.is_functorch_wrapped_tensor(tensor) or _functorch.is_legacy_batchedtensor(tensor)


def is_in_vmap(tensor: Tensor) -> bool:
    """Whether `vmap` hides a dim of a tensor. Required, as are the two functions below."""
    return _functorch.is_batchedtensor(tensor)


def outside_vmap(tensor: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function, which keeps the shape, to a tensor with the dim that `vmap` hides, as if outside of `vmap`."""
    from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack

    dim, level = _functorch.maybe_get_bdim(tensor), _functorch.maybe_get_level(tensor)
    with ExitStack() as left:
        while (_functorch.maybe_current_level() or 0) >= level:
            left.enter_context(temporarily_pop_interpreter_stack())
        result = function(_functorch.get_unwrapped(tensor))
    return _functorch._add_batch_dim(result, dim, level)


@contextmanager
def outside_all_transforms() -> Iterator[None]:
    """Leave all transforms of `torch.func`. Required."""
    from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack

    with ExitStack() as left:
        while _functorch.maybe_current_level() is not None:
            left.enter_context(temporarily_pop_interpreter_stack())
        yield


def outside_transforms(tensor: Tensor) -> Tensor:
    """The tensor that `torch.func` transforms wrap."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor
