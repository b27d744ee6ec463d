"""Choice between values inside a graph: `IF(cond, fn).ELIF(cond, fn).ELSE(fn)`.

A condition is a bool tensor: 0-d chooses for the whole batch, `(batch,)` chooses row by row.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Bool
from torch import Tensor

from torchguard import err
from torchguard._channel.config import ErrorConfig
from torchguard._channel.gradients import choose, over_rows
from torchguard._channel.packing import Flags
from torchguard._renamed import renamed
from torchguard.exceptions import BranchError

__all__ = ["AND", "HAS", "IF", "IS", "NOT", "OR", "BranchError", "IfChain"]

T = TypeVar("T")
Condition = Bool[Tensor, ""] | Bool[Tensor, " batch"]


@renamed(flags="f")
def HAS(f: Flags) -> Bool[Tensor, ""]:
    """Does any sample have an error? Row by row: `err.is_err(f)`."""
    return err.any_err(f)


@renamed(flags="f")
def IS(code: int, f: Flags, *, config: ErrorConfig | None = None) -> Bool[Tensor, ""]:
    """Does any sample hold that code? Row by row: `err.has_code(f, code)`."""
    return err.has_code(f, code, config).any()


def OR(*conds: Condition) -> Condition:
    """True where any condition is."""
    return _joined("OR", conds, torch.logical_or)


def AND(*conds: Condition) -> Condition:
    """True where all conditions are."""
    return _joined("AND", conds, torch.logical_and)


def NOT(cond: Condition) -> Condition:
    """True where the condition is False."""
    return ~_condition("NOT", cond)


@renamed(then_fn="then")
def IF(cond: Condition, then: Callable[[], T]) -> "IfChain[T]":
    """Start a choice; nothing is computed before `ELSE`.

    Every branch runs, in eager mode as in a graph, and `torch.where` selects, which never waits for a device. So
    branches return tensors of equal shapes in equal structures, and should have no side effects. What is not chosen
    gets a gradient of zero; if the condition is for the whole batch, also where its computation was not finite.

    >>> z = torch.tensor([[1.0], [2.0]])
    >>> IF(torch.tensor([True, False]), lambda: -z).ELSE(lambda: z)
    tensor([[-1.],
            [ 2.]])
    """
    return IfChain(((_condition("IF", cond), then),))


class IfChain(Generic[T]):
    """An unfinished choice."""

    def __init__(self, branches: tuple[tuple[Condition, Callable[[], T]], ...]) -> None:
        self._branches = branches

    @renamed(fn="then")
    def ELIF(self, cond: Condition, then: Callable[[], T]) -> "IfChain[T]":
        """Another branch, taken where no earlier one was."""
        return IfChain((*self._branches, (_condition("ELIF", cond), then)))

    @renamed(else_fn="otherwise")
    def ELSE(self, otherwise: Callable[[], T]) -> T:
        """The value of the first branch whose condition holds, else of this one."""
        values = [then() for _, then in self._branches]
        chosen: Any = otherwise()
        for (cond, _), value in zip(reversed(self._branches), reversed(values), strict=True):
            chosen = _select(cond, value, chosen)
        return chosen


def _select(cond: Tensor, value: Any, other: Any) -> Any:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        if value.shape != other.shape:
            raise BranchError(
                f"IF: branches return shapes {tuple(value.shape)} and {tuple(other.shape)}. Make them equal."
            )
        if cond.ndim and (value.ndim == 0 or value.shape[0] != cond.shape[0]):
            raise BranchError(
                f"IF: a condition over {cond.shape[0]} rows cannot choose within a value of {tuple(value.shape)}. "
                "Reduce it with .any(), or return values with that many rows."
            )
        return torch.where(over_rows(cond, value), value, other) if cond.ndim else choose(cond, value, other)
    if isinstance(value, (tuple, list)) and isinstance(other, (tuple, list)) and len(value) == len(other):
        parts = [_select(cond, one, two) for one, two in zip(value, other, strict=True)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict) and isinstance(other, dict) and value.keys() == other.keys():
        return {key: _select(cond, value[key], other[key]) for key in value}
    if value is None and other is None:
        return None
    raise BranchError(
        f"IF: branches return {type(value).__name__} and {type(other).__name__}, which do not match. "
        "Return tensors, or tuples, lists or dicts of them, in the same structure."
    )


def _condition(who: str, cond: Any) -> Tensor:
    if not isinstance(cond, Tensor) or cond.dtype != torch.bool or cond.ndim > 1:
        got = f"{cond.dtype} of rank {cond.ndim}" if isinstance(cond, Tensor) else type(cond).__name__
        raise BranchError(f"{who}: a condition is a bool tensor of rank 0 or 1, got {got}. Use IS(...), HAS(...).")
    return cond


def _joined(who: str, conds: tuple[Condition, ...], join: Callable[[Tensor, Tensor], Tensor]) -> Condition:
    if not conds:
        raise BranchError(f"{who}: no condition was given. Pass at least one.")
    joined = _condition(who, conds[0])
    for cond in conds[1:]:
        joined = join(joined, _condition(who, cond))
    return joined
