"""The one seam to private torch.

Each access is a small function that says why it is needed and what happens where it is missing.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable)


def is_traced(tensor: Tensor) -> bool:
    """Whether `tensor` stands for a value in a graph under construction.

    Fake and functional tensors are private subclasses; anything that is not a plain tensor is taken for one.
    A user's own subclass is then treated as traced as well, which costs speed, never correctness.
    """
    return type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter


def mutation_count(tensor: Tensor) -> int:
    """How often `tensor` was changed in place: tells whether a note made about it still holds.

    `_version` has no public name. Inference tensors have none at all: they count as never changed, and the
    one caller never keeps notes about them because they are not traced.
    """
    return 0 if tensor.is_inference() else tensor._version


def can_read(tensor: Tensor) -> bool:
    """Whether looking at a value of `tensor` right now is possible and costs no device sync.

    False while tracing, off the CPU, and inside `torch.func` transforms, whose level has no public name; without
    it, an eager `vmap` over a check would fail on reading a batched value.
    """
    return (
        tensor.is_cpu
        and not torch.compiler.is_compiling()
        and not is_traced(tensor)
        and torch._C._functorch.maybe_current_level() is None  # pyright: ignore[reportAttributeAccessIssue]
    )


def constant_in_graphs(fn: F) -> F:
    """Have Dynamo call `fn` while it traces and take the result for a constant.

    `torch.compiler.assume_constant_result` does the same, but loads all of Dynamo at import. Where the mark is no
    longer known, Dynamo traces into `fn` instead and says what it cannot trace.
    """
    fn._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return fn
