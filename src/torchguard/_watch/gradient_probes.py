"""Gradient probes, which record where a backward pass produced NaN or Inf.

A gradient probe is a leaf tensor of zeros, one entry per location and sample, that takes no part in any value; its
gradient records what a gradient mask (`gradient_mask.py`) found.

Why probes: a fault that is created in the backward pass, such as the derivative of `sqrt` at 0, comes after the flags
of the call were returned. The only results of a backward pass, in eager mode and in compiled code alike, are gradients
of leaves; a Python list that backward code appends to would be filled once, while the graph is traced. So each replaced
tensor (`replace.py`) takes the probe of its location as a second input, and its backward returns, as the probe's
gradient, 0, `PROBE_INF` or `PROBE_NAN` for each sample. A hook on the leaf saves the gradient it receives.

One call goes through these steps:

1. `WatchState.new_record` makes a view of the leaf for the call, so that calls do not share what is attached to it.
2. `call_probes` splits that view into one probe per location, by one autograd node (`_SplitProbes`). The parts are
   saved on the view as `_torchguard_call`: AOTAutograd runs many operators that each get the view and no other common
   object. What the node is given must not reference what it returns: that cycle would pass through autograd's C++
   nodes, which Python's garbage collector does not see, and would never be freed.
3. When the call is summarized, `set_origins` stores which samples were bad going forward. Backward drops these from the
   probes' gradients: they are known already.
4. In a traced backward pass the masks write into one `ProbeTable` instead of returning a gradient each, so that there
   is nothing to merge. `_SplitProbes.backward` takes the table. A table belongs to one backward pass,
   identified by autograd's number for that pass: a pass that does not reach the probes (`torch.autograd.grad` in a
   graph) leaves its table behind.
5. Blocks that are compiled once (`regions.py`) get the probes of their own locations as one slice (`region_probes`).

All this can be removed when torch lets a backward pass return values that are no gradients.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchguard._operators import define, define_opaque
from torchguard._torch.tracing import backward_number, is_shape_only, is_surely, is_traced

# Attribute of the probes of a call: the `CallProbes` that they were split into.
_CALL = "_torchguard_call"
# The most gradients for which a kernel that stacks them is compiled; for more, compiling it would take long.
_MAX_STACKED = 64


class CallOrigins:
    """A cell for the origins of a call (`CallSummary.origins`): None until the call is summarized, and in regions."""

    origins: Tensor | None = None

    def __init__(self, is_of_region: bool) -> None:
        self.is_of_region = is_of_region

    @property
    def is_running(self) -> bool:
        """Whether the call is not over: a gradient that is taken now is part of what the model computes."""
        return self.origins is None and not self.is_of_region


class ProbeTable:
    """The gradients of the probes while a backward pass is traced, one for each location and sample.

    Args:
        cell: the origins of the call, for masks that need them.
    """

    def __init__(self, locations: int, size: int, device: torch.device, cell: CallOrigins) -> None:
        self.locations, self.size, self.device, self.cell = locations, size, device, cell
        self.opened: tuple[int, Tensor] | None = None  # the number of the backward pass, and its table

    def open(self) -> Tensor:
        """The table of the current backward pass: see `new_table`."""
        now = backward_number()
        if self.opened is None or self.opened[0] != now:
            self.opened = (now, new_table(self.locations, self.size, self.device))
        return self.opened[1]

    def take(self) -> Tensor | None:
        """The gradients `(locations, samples)`, if this backward pass wrote any. No reference to the table is kept."""
        opened, self.opened = self.opened, None
        return opened[1][0] if opened is not None and opened[0] == backward_number() else None


def new_table(locations: int, size: int, device: torch.device) -> Tensor:
    """Zeros `(2, locations, samples)`: the gradients of the probes, and the counters of the kernel."""
    if device.type == "cpu":  # where a kernel takes longer to compile than it ever saves
        return _call_new_probe_table(locations, size, device)
    return torch.zeros(2, locations, size, device=device)


def _call_new_probe_table(locations: int, size: int, device: torch.device) -> Tensor:
    """Call the operator `new_probe_table`."""
    return _NEW_PROBE_TABLE(locations, size, device)


_NEW_PROBE_TABLE = define_opaque(
    "new_probe_table(int locations, SymInt size, Device device) -> Tensor",
    lambda locations, size, device: torch.zeros(2, locations, size, device=device),
    lambda locations, size, device: torch.empty(2, locations, size, device=device),
)


class CallProbes:
    """The probes of one call: `each` has one per location, `(batch,)`."""

    def __init__(self, probes: Tensor, size: int) -> None:
        self.cell = CallOrigins(is_of_region=is_surely(probes.shape[1] == size))
        self.table = ProbeTable(probes.shape[0], size, probes.device, self.cell)
        # Neither argument may reference `each`: see the top of the file.
        self.each: tuple[Tensor, ...] = _SplitProbes.apply(probes, size, self.cell, self.table)  # pyright: ignore[reportAttributeAccessIssue]


def call_probes(probes: Tensor, size: int) -> CallProbes:
    """The probes of a call, `(locations, MAX_PROBED_BATCH)`, split for that many samples. They are split once."""
    split = getattr(probes, _CALL, None)
    if split is None:
        split = CallProbes(probes, size)
        setattr(probes, _CALL, split)
    return split


def probes_at(location: int, probes: Any, region: range | None) -> tuple[Any, int]:
    """The probes that include that of a location, and its index in them.

    A region has probes of its own locations alone. A fault that belongs to another location is recorded at its first.
    """
    if region is None:
        return probes, location
    return probes, location - region.start if region.start <= location < region.stop else 0


def set_origins(probes: Tensor | None, origins: Tensor) -> None:
    """Store the origins of a call where the backward pass of its probes, if it has any, finds them."""
    split = getattr(probes, _CALL, None)
    if split is not None:
        split.cell.origins = origins


class _SplitProbes(torch.autograd.Function):
    """The probe of each location. Their gradients are merged by one call, or were written into the table."""

    generate_vmap_rule = True

    @staticmethod
    def forward(probes: Tensor, size: int, cell: CallOrigins, table: ProbeTable) -> tuple[Tensor, ...]:
        zero = probes.new_zeros(())
        return tuple(zero.expand(size) for _ in range(probes.shape[0]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        probes, _, ctx.cell, ctx.table = inputs
        ctx.shape = probes.shape
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        received = {i: grad for i, grad in enumerate(grads) if grad is not None}
        written = ctx.table.take()
        if written is not None:
            if received:  # gradients on another device, or that no operator takes
                written = written + _call_merge_probes([*received.values()], [*received], None, *written.shape)
            received = {0: written}
        if not received:
            return None, None, None, None
        return _merged(received, ctx), None, None, None


class _SplitRegions(torch.autograd.Function):
    """The probes of consecutive locations, for each of several regions."""

    @staticmethod
    def forward(
        probes: Tensor, size: int, firsts: list[int], counts: list[int], cell: CallOrigins
    ) -> tuple[Tensor, ...]:
        regions = zip(firsts, counts, strict=True)
        return tuple(probes[first : first + count, :size] for first, count in regions)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        probes, _, ctx.firsts, _, ctx.cell = inputs
        ctx.shape = probes.shape
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        received = {first: grad for first, grad in zip(ctx.firsts, grads, strict=True) if grad is not None}
        if not received:
            return None, None, None, None, None
        return _merged(received, ctx), None, None, None, None


def region_probes(probes: Tensor, size: int, regions: Sequence[range]) -> list[Tensor]:
    """The probes of the locations of each region. Calls the operator `region_probes`."""
    return _REGION_PROBES(probes, size, [region.start for region in regions], [len(region) for region in regions])


def _region_probes_op(probes: Tensor, size: int, firsts: list[int], counts: list[int]) -> list[Tensor]:
    if is_shape_only(probes):
        return [probes.new_empty(count, size, requires_grad=True) for count in counts]
    return [*_SplitRegions.apply(probes, size, firsts, counts, call_probes(probes, size).cell)]  # pyright: ignore[reportGeneralTypeIssues]


_REGION_PROBES = define(
    "region_probes(Tensor probes, SymInt size, int[] firsts, int[] counts) -> Tensor[]", _region_probes_op
)


def _merged(received: dict[int, Tensor], ctx: Any) -> Tensor:
    """The gradient of the probes of a call, from gradients by the first location of each, in order."""
    origins, (count, width), grads = ctx.cell.origins, ctx.shape, [*received.values()]
    if not is_traced(grads[0]):
        return _merge_probes(grads, [*received], origins, count, width)
    if origins is None and is_surely(width == grads[0].shape[-1]):
        if grads[0].ndim == 2 and len(grads[0]) == count:  # first, since a row of it is as long as the batch
            return grads[0]
        if count == len(grads) <= _MAX_STACKED and grads[0].ndim == 1:  # one for every location
            return torch.stack(grads)
    return _call_merge_probes(grads, [*received], origins, count, width)  # compiled, it would be a large kernel


def _call_merge_probes(
    grads: list[Tensor], firsts: list[int], origins: Tensor | None, count: int, width: int
) -> Tensor:
    """Call the operator `merge_probes`."""
    return _MERGE_PROBES(grads, firsts, origins, count, width)


def _merge_probes(grads: list[Tensor], firsts: list[int], origins: Tensor | None, count: int, width: int) -> Tensor:
    """Gradients of probes as rows of one tensor `(count, width)`; zeros for all others, and for samples with an origin.

    It creates no index tensor on the device: under CUDA graphs, the result must not use memory that belongs to a graph.

    Args:
        grads: gradients of the probe of one location, `(batch,)`, or of several consecutive ones, `(locations, batch)`.
        firsts: the first location of each, in order.
    """
    tables = [torch.atleast_2d(grad) for grad in grads]
    nothing, rows, end = tables[0].new_zeros(1, tables[0].shape[1]), [], 0
    for first, table in zip([*firsts, count], [*tables, nothing], strict=True):
        if first > end:
            rows.append(nothing.expand(first - end, -1))
        rows.append(table)
        end = first + len(table)
    merged = torch.cat(rows[:-1])
    merged = merged if origins is None else merged[:, : origins.shape[1]] * (origins[0] < 0).to(merged.device)
    return F.pad(merged, (0, width - merged.shape[1]))


_MERGE_PROBES = define_opaque(
    "merge_probes(Tensor[] grads, int[] firsts, Tensor? origins, int count, SymInt width) -> Tensor",
    _merge_probes,
    lambda grads, firsts, origins, count, width: grads[0].new_empty(count, width),
)
