"""Marks: leaves without influence, whose gradient tells where a backward pass went bad."""

from typing import Any

import torch
from torch import Tensor

from torchguard._torch import is_traced
from torchguard.operators import define_whole
from torchguard.watching.constants import constant

# What is remembered on the marks: those of each place, and their memory.
_EACH, _ROOM = "_torchguard_each", "_torchguard_room"


def mark_at(place: int, marks: Tensor, size: int) -> Tensor:
    """The marks of one place, for so many samples, of `(places, many)`.

    They are taken apart once, and put together by one call.
    """
    each = getattr(marks, _EACH, None)
    if each is None:
        each = _Apart.apply(marks, size)
        setattr(marks, _EACH, each)
    return each[place]


def room_of(marks: Tensor) -> Tensor:
    """The memory of the marks, which are zeros, without their history."""
    room = getattr(marks, _ROOM, None)
    if room is None:
        room = marks.detach()
        setattr(marks, _ROOM, room)
    return room


class _Apart(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(marks: Tensor, size: int) -> tuple[Tensor, ...]:
        zero = marks.new_zeros(())
        return tuple(zero.expand(size) for _ in range(marks.shape[0]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.shape = inputs[0].shape
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        told = {i: grad for i, grad in enumerate(grads) if grad is not None}
        if not told:
            return None, None
        is_in_graph = is_traced(next(iter(told.values())))
        put = torch.ops.torchguard.together if is_in_graph else _together  # it would take long to compile
        return put([*told.values()], [*told], *ctx.shape), None


def _together(told: list[Tensor], places: list[int], count: int, width: int) -> Tensor:
    """Marks of these places, of so many, as the rows of a table; zeros for the rest."""
    marks = told[0].new_zeros(count, width)
    marks[constant(places, marks), : told[0].shape[0]] = torch.stack(told)
    return marks


def _shape(told: list[Tensor], places: list[int], count: int, width: int) -> Tensor:
    return told[0].new_empty(count, width)


define_whole("together(Tensor[] told, int[] places, int count, int width) -> Tensor", _together, _shape)
