"""What is being traced: graphs, transforms, exports, and sizes that are symbols."""

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable)


def constant_in_graphs(fn: F) -> F:
    """Have Dynamo call `fn` while it traces and take the result for a constant.

    `torch.compiler.assume_constant_result` does the same, but loads all of Dynamo at import. Where the mark is no
    longer known, Dynamo traces into `fn` instead and says what it cannot trace.
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
    """Whether nobody will ever see a value of `tensor`: it is fake, and nothing that is done to it is recorded.

    So it is when Dynamo and AOTAutograd try out what shapes come out, before they trace. Where these names are
    missing nothing counts as such, and trying out costs as much as tracing.
    """
    is_fake = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "is_fake", None)
    proxy_mode = getattr(sys.modules.get("torch.fx.experimental.proxy_tensor"), "get_proxy_mode", None)
    return is_fake is not None and proxy_mode is not None and is_fake(tensor) and proxy_mode() is None


def is_plain(tensor: Tensor) -> bool:
    """Whether `tensor` is just its values: no graph is being traced, and no `torch.func` transform is at work.

    The level of such a transform has no public name; without it, `vmap` over a check in eager mode would fail on
    reading a batched value. Nor have the batched gradients of `torch.autograd.grad(..., is_grads_batched=True)`, which
    are made by an older `vmap`. Nor has the state of `torch.jit.trace`, nor the stack of dispatch modes, one of which
    `make_fx` uses: without them, what a traced check saw in its example would count for every later input.
    """
    return (
        not torch.compiler.is_compiling()
        and not is_traced(tensor)
        and torch._C._functorch.maybe_current_level() is None  # pyright: ignore[reportAttributeAccessIssue]
        and not torch._C._functorch.is_legacy_batchedtensor(tensor)  # pyright: ignore[reportAttributeAccessIssue]
        and torch._C._get_tracing_state() is None
        and torch._C._len_torch_dispatch_stack() == 0
    )


def is_jit_tracing() -> bool:
    """Whether `torch.jit.trace` is at work: documented under `torch.jit`, but not among its exported names."""
    return torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


@constant_in_graphs
def in_transform() -> bool:
    """Whether a `torch.func` transform is at work, asked while Dynamo traces through it."""
    return torch._C._functorch.maybe_current_level() is not None  # pyright: ignore[reportAttributeAccessIssue]


def can_read(tensor: Tensor) -> bool:
    """Whether looking at a value of `tensor` right now is possible and costs no device sync."""
    return tensor.is_cpu and is_plain(tensor)


@constant_in_graphs
def is_exporting() -> bool:
    """Whether `torch.export` is at work.

    In torch 2.11 and 2.12, Dynamo answers `torch.compiler.is_exporting()` with True whenever it traces, so the flag
    behind it is read. Where that is missing nothing counts as an export, and an exported program may hold
    operators of ours.
    """
    return getattr(torch.compiler, "_is_exporting_flag", False)


def holds(condition: bool) -> bool:
    """Whether a comparison of sizes holds; for sizes that depend on values, of which a graph knows nothing, never.

    Comparing such a size ends the trace. Its guard has to be asked for by a name of `torch.fx.experimental`.
    """
    if not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # loads sympy: only where a graph is traced

    return guard_or_false(condition)


def is_surely(condition: bool) -> bool:
    """Whether a comparison of sizes holds, in a graph for every size there may be: asking adds no guard.

    The way to ask without one stands in `torch.fx.experimental`.
    """
    if not torch.compiler.is_compiling() and isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # loads sympy: only where a graph is traced

    return statically_known_true(condition)


def surely_equal(one: Sequence[int], two: Sequence[int]) -> bool:
    """Whether two shapes are known to be equal without adding a guard, which would cost a recompile one day."""
    return len(one) == len(two) and all(is_surely(a == b) for a, b in zip(one, two, strict=True))


def is_in_backward() -> bool:
    """Whether a backward pass of eager mode is under way: what runs then is a checkpoint running its part again.

    There is no public way to ask. Where this one is missing, quarantine and checkpoints do not go together.
    """
    return not torch.compiler.is_compiling() and backward_number() != -1


def backward_number() -> int:
    """Which backward pass is under way, traced or not: -1 for none. There is no public way to ask."""
    return torch._C._current_graph_task_id()
