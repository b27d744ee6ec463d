"""Stopping a gradient that is not finite: zeros in all of a sample of which a part is bad.

Marks: leaves without influence, whose gradient tells where a backward pass went bad.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchguard._operators import define, define_whole
from torchguard._torch.tracing import backward_number, can_read, is_shape_only, is_surely, is_traced
from torchguard._watch.batch import Batch, rows_of
from torchguard._watch.detect import INF_MARK, NAN_MARK, are_finite, evidence, is_fine, is_nan
from torchguard._watch.replace import has_kernel, only
from torchguard.checks import floats_of

# What is remembered on the marks of a call.
_CALL = "_torchguard_call"
# So many marks are put together by a kernel; to compile one for more would take long.
_FEW = 64


class CameTo:
    """What a call came to, once that is known: `told` of its `Verdict`."""

    told: Tensor | None = None


class Table:
    """Where stops leave their marks while a backward pass is traced: one for each place and sample.

    Each pass has its own: one that does not come to the marks (`torch.autograd.grad` in a graph) leaves them untaken.
    """

    def __init__(self, places: int, size: int, device: torch.device) -> None:
        self.places, self.size, self.device = places, size, device
        self.opened: tuple[int, Tensor] | None = None

    def open(self) -> Tensor:
        """`(2, places, samples)`: the marks, and as many zeros to count in."""
        now = backward_number()
        if self.opened is None or self.opened[0] != now:
            self.opened = (now, new_rows(self.places, self.size, self.device))
        return self.opened[1]

    def take(self) -> Tensor | None:
        """The marks, `(places, samples)`, if a stop left any there. Nothing of what was traced is kept."""
        opened, self.opened = self.opened, None
        return opened[1][0] if opened is not None and opened[0] == backward_number() else None


def new_rows(places: int, size: int, device: torch.device) -> Tensor:
    """`(2, places, samples)` zeros."""
    if device.type == "cpu":  # where a kernel takes longer to compile than it ever saves
        return _NO_MARKS(places, size, device)
    return torch.zeros(2, places, size, device=device)


class Marked:
    """The marks of one call, taken apart: `each` has those of a place, `(batch,)`."""

    def __init__(self, marks: Tensor, size: int) -> None:
        self.came_to, self.table = CameTo(), Table(marks.shape[0], size, marks.device)
        # What it is given must not lead back to what it returns: nobody would ever find that cycle.
        self.each: tuple[Tensor, ...] = _Apart.apply(marks, size, self.came_to, self.table)  # pyright: ignore[reportAttributeAccessIssue]


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
    """The marks of each place. Their gradients are put together by one call, or were left in a table."""

    generate_vmap_rule = True

    @staticmethod
    def forward(marks: Tensor, size: int, came_to: CameTo, table: Table) -> tuple[Tensor, ...]:
        zero = marks.new_zeros(())
        return tuple(zero.expand(size) for _ in range(marks.shape[0]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        marks, _, ctx.came_to, ctx.table = inputs
        ctx.shape = marks.shape
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        born = {i: grad for i, grad in enumerate(grads) if grad is not None}
        left = ctx.table.take()
        if left is not None:
            if born:  # of gradients that are on another device, or that no operator takes
                left = left + _TOGETHER([*born.values()], [*born], None, *left.shape)
            born = {0: left}
        if not born:
            return None, None, None, None
        return _put_together(born, ctx), None, None, None


class _Parts(torch.autograd.Function):
    """The marks of some places that follow each other, for each of several parts of a model."""

    @staticmethod
    def forward(marks: Tensor, size: int, firsts: list[int], counts: list[int], came_to: CameTo) -> tuple[Tensor, ...]:
        parts = zip(firsts, counts, strict=True)
        return tuple(marks[first : first + count, :size] for first, count in parts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        marks, _, ctx.firsts, _, ctx.came_to = inputs
        ctx.shape = marks.shape
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        born = {first: grad for first, grad in zip(ctx.firsts, grads, strict=True) if grad is not None}
        if not born:
            return None, None, None, None, None
        return _put_together(born, ctx), None, None, None, None


def _put_together(born: dict[int, Tensor], ctx: Any) -> Tensor:
    """Marks by the first of their places, in order."""
    told, (count, width), each = ctx.came_to.told, ctx.shape, [*born.values()]
    if not is_traced(each[0]):
        return _together(each, [*born], told, count, width)
    if told is None and is_surely(width == each[0].shape[-1]):
        if each[0].ndim == 2 and len(each[0]) == count:  # in this order: the length of one row is that of the batch
            return each[0]
        if count == len(each) <= _FEW and each[0].ndim == 1:  # there are no others
            return torch.stack(each)
    return _TOGETHER(each, [*born], told, count, width)  # it would take long to compile


def _together(born: list[Tensor], firsts: list[int], told: Tensor | None, count: int, width: int) -> Tensor:
    """Marks as the rows of a table, one for each of so many places; zeros for the rest, and for samples that were bad.

    No index is put on the device for it: under CUDA graphs, what is kept must not come from their memory.

    Args:
        born: marks of one place, or of several that follow each other.
        firsts: the first place of each, in order.
    """
    tables = [torch.atleast_2d(one) for one in born]
    nothing, rows, end = tables[0].new_zeros(1, tables[0].shape[1]), [], 0
    for first, table in zip([*firsts, count], [*tables, nothing], strict=True):
        if first > end:
            rows.append(nothing.expand(first - end, -1))
        rows.append(table)
        end = first + len(table)
    found = torch.cat(rows[:-1])
    found = found if told is None else found[:, : told.shape[1]] * (told[0] < 0).to(found.device)
    return F.pad(found, (0, width - found.shape[1]))


def _parts_op(marks: Tensor, size: int, firsts: list[int], counts: list[int]) -> list[Tensor]:
    if is_shape_only(marks):
        return [marks.new_empty(count, size, requires_grad=True) for count in counts]
    return [*_Parts.apply(marks, size, firsts, counts, marked(marks, size).came_to)]  # pyright: ignore[reportGeneralTypeIssues]


def _shape(born: list[Tensor], firsts: list[int], told: Tensor | None, count: int, width: int) -> Tensor:
    return born[0].new_empty(count, width)


def _no_marks(places: int, size: int, device: torch.device) -> Tensor:
    return torch.zeros(2, places, size, device=device)


def _empty(places: int, size: int, device: torch.device) -> Tensor:
    return torch.empty(2, places, size, device=device)


_NO_MARKS = define_whole("no_marks(int places, SymInt size, Device device) -> Tensor", _no_marks, _empty)
PARTS = define("parts(Tensor marks, SymInt size, int[] firsts, int[] counts) -> Tensor[]", _parts_op)
_TOGETHER = define_whole(
    "together(Tensor[] born, int[] firsts, Tensor? told, int count, SymInt width) -> Tensor", _together, _shape
)


# So many numbers of a sample the kernel cannot count.
LONGEST = 2**31 - 2**20


def stopped(
    grad: Tensor, batch: Batch, dim: int | None, table: Table | None, place: int
) -> tuple[Tensor, Tensor | None]:
    """A gradient with zeros in every sample that has something bad.

    And a mark for each sample, 0 for one that is fine; None if they were left in the table.

    Args:
        dim: along which the samples lie, if that is known.
        table: where to leave the marks, if the gradient is where the table is.
    """
    along = batch.dim if dim is None else dim
    if is_traced(grad) and along == 0 and batch.has_rows(grad.shape, 0) and not _is_beyond_operators(grad):
        finite = grad.clone()  # which Inductor leaves out where nobody else reads it
        if table is not None and table.device == grad.device:
            _STOP_(finite, table.open(), place, batch.size)
            return finite, None
        rows = new_rows(1, batch.size, grad.device)
        _STOP_(finite, rows, 0, batch.size)
        return finite, rows[0, 0]
    return _stopped(grad, batch, along)


def _is_beyond_operators(grad: Tensor) -> bool:
    """If there is to be a derivative of this; and what is complex, Inductor refuses."""
    return grad.is_complex() or torch.is_grad_enabled()


def _stopped(grad: Tensor, batch: Batch, along: int) -> tuple[Tensor, Tensor]:
    if can_read(grad) and are_finite(floats_of(grad)):
        return grad, torch.zeros(batch.size, device=batch.device)
    born = evidence(grad)
    rows = rows_of(born, along, batch)
    if rows is None:  # about no sample in particular: about all
        worst = born.amax().expand(batch.size)
        return only(is_fine(born), grad), _mark(worst).to(batch.device)
    worst = rows.amax(tuple(range(1, rows.ndim)))
    over = batch.over(is_fine(worst).to(grad.device), grad, along)
    assert over is not None
    return torch.where(over, grad, 0).to(grad.dtype), _mark(worst)


def _mark(worst: Tensor) -> Tensor:
    return torch.where(is_nan(worst), NAN_MARK, torch.where(is_fine(worst), 0.0, INF_MARK))


def _stop_(grad: Tensor, table: Tensor, place: int, rows: int) -> None:
    """In place, in so many equal parts. Mostly nothing is bad, and to see that takes one pass that writes nothing."""
    if has_kernel(grad) and grad.numel() // rows < LONGEST:
        from torchguard._watch.kernels import stop

        stop(grad, table, place, rows)
        return
    batch = Batch(rows, (grad.shape[0] // rows,) if rows else (), 0, grad.device)
    finite, mark = _stopped(grad, batch, 0)
    if finite is not grad:
        grad.copy_(finite)
        table[0, place] = torch.maximum(table[0, place], mark)


_STOP_ = define_whole("stop_(Tensor(a!) grad, Tensor(b!) table, int place, SymInt rows) -> ()", _stop_, lambda *_: None)
