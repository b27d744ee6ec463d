"""Control flow of torch inside a function, rewritten to plain operations while the function is traced.

A compiled graph holds plain operations alone, so that each derivative, certificate and file can use it. So both
branches of a `torch.cond` are computed and the results of one are chosen, and the steps of `scan` are unrolled: their
number is a size, which is known. A `while_loop` is unrolled if its condition depends on literals alone, and refused
otherwise.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchguard._graphs.source_lines import caller_line
from torchguard._torch import fakes, tensors
from torchguard.exceptions import CompileError, ImpureFunctionError


def _cond(pred: Any, yes: Callable[..., Any], no: Callable[..., Any], operands: Any) -> Any:
    """The results of both branches, chosen by the predicate."""
    if not isinstance(pred, Tensor):
        return (yes if pred else no)(*operands)
    given = [leaf for leaf in tensors.flatten(operands)[0] if isinstance(leaf, Tensor)]
    versions = tensors.versions_of(given)
    (first, structure), (second, other) = tensors.flatten(yes(*operands)), tensors.flatten(no(*operands))
    if not tensors.is_unchanged(versions):
        raise ImpureFunctionError(
            f"at {caller_line().short}: torch.cond: a branch changes its operand in place. Use the out-of-place form."
        )
    if structure != other:
        raise CompileError(
            f"at {caller_line().short}: torch.cond: the branches return different structures, {structure} and {other}."
        )
    chosen = [_choose(pred.reshape(()), a, b) for a, b in zip(first, second, strict=True)]
    return tensors.unflatten(chosen, structure)


def _choose(pred: Tensor, a: Any, b: Any) -> Any:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        if a != b:
            raise CompileError(
                f"at {caller_line().short}: torch.cond: the branches return {a!r:.40} and {b!r:.40}. Return tensors."
            )
        return a
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        types = [f"{t.dtype}{list(t.shape)} on {t.device}" for t in (a, b)]
        raise CompileError(
            f"at {caller_line().short}: torch.cond: the branches return different types, {types[0]} and {types[1]}."
        )
    return torch.where(pred, a, b)


def _scan(step: Callable[..., Any], carry: Sequence[Tensor], xs: Sequence[Tensor]) -> tuple[Any, Any]:
    """The last carry, and the results of all steps along a new dim 0."""
    before: Any = list(carry)
    rows = []
    for i in range(xs[0].shape[0]):
        before, row = step(*tensors.flatten(before)[0], *(x.select(0, i) for x in xs))
        rows.append(row)
    leaves = zip(*(tensors.flatten(row)[0] for row in rows), strict=True)
    stacked = [torch.stack(many) for many in leaves]
    return before, tensors.unflatten(stacked, tensors.flatten(rows[0])[1])


def _while_loop(is_due: Callable[..., Any], body: Callable[..., Any], carried: Any, further: Any = ()) -> Any:
    """The steps of a loop whose condition depends on literals alone, such as a counter."""
    values: Any = carried
    while _constant(is_due(*values, *further)):
        values = tuple(body(*values, *further))
    return tuple(value.clone() if isinstance(value, Tensor) else value for value in values)


def _constant(condition: Any) -> bool:
    known = fakes.constant_of(condition) if isinstance(condition, Tensor) else condition
    if known is None:
        raise ImpureFunctionError(
            f"at {caller_line().short}: while_loop: its number of steps is not known while the function is traced. Let "
            "the condition depend on literals alone, such as a counter from torch.tensor(0), or use scan over "
            "a fixed number of steps, with torch.where for those that are too many."
        )
    return bool(known)


# By the names of the functions that torch would run with Dynamo.
EXPANSIONS: dict[str, Callable[..., Any]] = {
    "_cond_op_wrapper": _cond,
    "run_flattened_scan": _scan,
    "_while_loop_op_wrapper": _while_loop,
}
