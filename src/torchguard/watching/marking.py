"""Marks: leaves without influence, whose gradient tells where a backward pass went bad."""

from typing import Any

import torch
from torch import Tensor

from torchguard._torch import is_traced
from torchguard.operators import define_whole
from torchguard.watching.constants import constant

# What is remembered on the marks of a call.
_CALL = "_torchguard_call"


class CameTo:
    """What a call came to, once that is known: `told` of its `Verdict`."""

    told: Tensor | None = None


class Marked:
    """The marks of one call, taken apart: `each` has those of a place, `(batch,)`.

    `room` is their memory, which is zeros, without their history.
    """

    def __init__(self, marks: Tensor, size: int) -> None:
        self.came_to = CameTo()
        self.room = marks.detach()
        # What it is given must not lead back to what it returns: nobody would ever find that cycle.
        self.each: tuple[Tensor, ...] = _Apart.apply(marks, size, self.came_to)  # pyright: ignore[reportAttributeAccessIssue]


def marked(marks: Tensor, size: int) -> Marked:
    """The marks of a call, `(places, many)`, for so many samples. They are taken apart once."""
    call = getattr(marks, _CALL, None)
    if call is None:
        call = Marked(marks, size)
        setattr(marks, _CALL, call)
    return call


def tell(marks: Tensor | None, told: Tensor) -> None:
    """What the call came to whose marks these are, if it has any."""
    call = getattr(marks, _CALL, None)
    if call is not None:
        call.came_to.told = told


class _Apart(torch.autograd.Function):
    """The marks of each place. Their gradients are put together by one call."""

    generate_vmap_rule = True

    @staticmethod
    def forward(marks: Tensor, size: int, came_to: CameTo) -> tuple[Tensor, ...]:
        zero = marks.new_zeros(())
        return tuple(zero.expand(size) for _ in range(marks.shape[0]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        marks, _, ctx.came_to = inputs
        ctx.shape = marks.shape
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        born = {i: grad for i, grad in enumerate(grads) if grad is not None}
        if not born:
            return None, None, None
        is_in_graph = is_traced(next(iter(born.values())))
        put = torch.ops.torchguard.together if is_in_graph else _together  # it would take long to compile
        return put([*born.values()], [*born], ctx.came_to.told, *ctx.shape), None, None


def _together(born: list[Tensor], places: list[int], told: Tensor | None, count: int, width: int) -> Tensor:
    """Marks of these places, of so many, as the rows of a table; zeros for the rest, and for samples that were bad."""
    marks = born[0].new_zeros(count, width)
    found = torch.stack(born)
    marks[constant(places, marks), : found.shape[1]] = found if told is None else found * (told[0] < 0).to(found.device)
    return marks


def _shape(born: list[Tensor], places: list[int], told: Tensor | None, count: int, width: int) -> Tensor:
    return born[0].new_empty(count, width)


define_whole("together(Tensor[] born, int[] places, Tensor? told, int count, int width) -> Tensor", _together, _shape)
