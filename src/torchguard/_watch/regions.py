"""Regions: blocks of a model that are compiled once for all that are alike.

A large model is mostly one block, many times over, and torch compiles each anew. `torch.compiler.nested_compile_region`
changes that: Dynamo traces the marked function into a subgraph of its own, compares it with the subgraphs it has, and
AOTAutograd and the backend compile equal ones once. Where Dynamo comes to the `forward` of a block, it is given
`_call_region` to trace instead (`_torch/region_calls.py`, which also says what happens if torch cannot compile a
region).

A watched block does not qualify as it is. What stands in the way, and what is done about it:

- **Equal subgraphs.** Two blocks differ in their locations, and a location that is a constant in the graph would make
  every subgraph another. So inside a region locations count from its first, and its gradient probes are a slice of
  those of the call (`gradient_probes.region_probes`).
- **Tensors leave a region by being returned.** A list in the call record that the region appends to would leak tensors
  of the subgraph. The record gets lists of its own for the region (`CallRecord.enter_region`), and the region returns
  them. The locations are plain integers and stay in the outer record. That the trace has this side effect also keeps
  Dynamo from reusing an earlier trace of the same function without running it, by which the locations would not be
  recorded.
- **A region may not return its input**, which blocks do (a mask, a cache): it returns a clone, and the caller gets the
  input in its place. `CallRecord.passed_on` says which one.
- **Inside `torch.utils.checkpoint`, Dynamo loses track of what a region returns**, but not of what is computed from it.
  The operator `leave_region` makes a view of each status.
- **Reference cycles.** An object that is attached to a leaf and references that leaf is never freed
  (`gradient_probes.py`). So the probes of the region are a view of the leaf, which is dropped at the end of the region.
- **Wrong gradients in torch up to 2.15** and slow compilation: `_torch/settings.py` changes settings of torch when a
  region is traced, and says why.

All but the first two can be removed when torch allows in a nested region what it allows in a function.

**Where nobody asked for it** (`compile_once` left out), blocks are regions only where a call hardly notices: on a GPU,
without gradients, in large blocks. A region keeps kernels of two blocks from being fused: the residual stream is
written and read once more. A block of width w does about 12 w² products for each vector of that stream, so this is a
share of 1 / w: by the rates of an H200, 2 % of the block at a width of 2,048 and 1 % at 4,096. Calling a region also
takes the host longer than the same kernels in one graph, which is hidden where the GPU takes longer than the host. With
gradients, the settings that keep them right cost memory.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchguard._operators import define
from torchguard._pytrees import map_tensors, tensors_in
from torchguard._torch.hook_calls import HookCall
from torchguard._torch.region_calls import REGION, trace_regions
from torchguard._torch.settings import protect_regions
from torchguard._torch.tracing import casts_to_float16, in_transform, is_exporting
from torchguard._watch.state import WatchState
from torchguard._watch.warn import warn_of_float16, warn_of_no_regions

# The weights of a block of a width of about 3,000, and the products for which an H200 takes 1 ms or more: as long as a
# slow host takes to launch the kernels of a block.
_MANY_WEIGHTS, _MANY_PRODUCTS = 10**8, 4 * 10**11
_DEVICES = ("cuda",)


class Region:
    """How a block becomes a nested region.

    Args:
        locations: those of the block and its modules.
    """

    def __init__(self, watch: WatchState, locations: range) -> None:
        self.watch, self.locations = watch, locations
        self.number = watch.regions.index(locations) if locations else None

    def in_dynamo(self, call: HookCall, values: Sequence[Any]) -> Callable[..., Any] | None:
        """What Dynamo traces in place of the block's `forward`; None if that is traced. Given are its arguments."""
        watch = self.watch
        record = call.written_to(watch, "traced_record")
        if watch.has_no_regions or call.is_none(record) or in_transform() or is_exporting():
            return None
        if call.constant(record, "region") is not None or not call.constant(record, "in_graph"):
            return None
        if not (watch.asks_for_regions or self._is_worthwhile(call, values)):
            return None
        if not call.is_none(call.attribute(record, "probes")):
            if self.number is None:  # no location in it: its faults in backward belong to one outside
                return None
            if self._has_float16(call, values):
                warn_of_float16(watch)
                return None
        return _call_region if protect_regions() else None

    def _is_worthwhile(self, call: HookCall, values: Sequence[Any]) -> bool:
        found = [z for z in map(call.tensor, values) if z is not None and z.is_floating_point() and z.ndim > 1]
        if torch.is_grad_enabled() or not found or found[0].device.type not in _DEVICES:
            return False
        if not all(isinstance(size, int) for size in found[0].shape):
            return False
        vectors, weights = math.prod(found[0].shape[:-1]), sum(p.numel() for p in call.module.parameters())
        return weights >= _MANY_WEIGHTS and vectors * weights >= _MANY_PRODUCTS

    def _has_float16(self, call: HookCall, values: Sequence[Any]) -> bool:
        found = [call.tensor(value) for value in values]
        return casts_to_float16() or any(z is not None and z.dtype == torch.float16 for z in found)

    def give_up(self, error: Exception) -> None:
        """Compile the blocks of the model one by one from now on: torch raised an error for a region."""
        if self.watch.asks_for_regions and not self.watch.has_no_regions:
            warn_of_no_regions(self.watch, error)
        self.watch.has_no_regions = True


def _call_region(block: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a block as a region."""
    region: Region = getattr(block, REGION)
    call_record = region.watch.call_record
    assert call_record is not None
    of_regions = call_record.region_probes
    probes = of_regions[region.number] if of_regions and region.number is not None else None
    outer = call_record.enter_region(region.locations, probes)
    output, statuses, warnings = _run_nested(block, *args, **kwargs)  # pyright: ignore[reportGeneralTypeIssues]
    if statuses:
        statuses = _call_leave_region(statuses)
    call_record.leave_region(outer, statuses, warnings)
    if not any(number is not None for number in call_record.passed_on):
        return output
    given, numbers = _tensors_given(args, kwargs), iter(call_record.passed_on)
    return map_tensors(output, lambda z: z if (number := next(numbers)) is None else given[number])


@torch.compiler.nested_compile_region
def _run_nested(block: Any, *args: Any, **kwargs: Any) -> tuple[Any, Sequence[Tensor], Sequence[Tensor]]:
    """The output of a block, the statuses recorded in it, and the masks of its warnings."""
    call_record = getattr(block, REGION).watch.call_record
    if call_record.probes is not None:
        call_record.probes = call_record.probes.view_as(call_record.probes)
    # Not `block.forward`: Dynamo has come to this function, perhaps from one that wraps it.
    output = type(block).forward(block, *args, **kwargs)
    given = _tensors_given(args, kwargs)
    passed_on: list[int | None] = []

    def separate(z: Tensor) -> Tensor:
        numbers = [i for i, one in enumerate(given) if z is one]
        passed_on.append(numbers[0] if numbers else None)
        return z.clone() if numbers else z

    output = map_tensors(output, separate)
    call_record.passed_on = passed_on
    # Emptied, since Dynamo would take what is in the record for further outputs of the region.
    statuses, call_record.statuses, call_record.probes = call_record.statuses, [], None
    return output, tuple(statuses), tuple([mask for _, _, mask in call_record.warnings])


def _tensors_given(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    given: list[Tensor] = []
    for one in (*args, *kwargs.values()):
        given += [one] if isinstance(one, Tensor) else [z for _, z in tensors_in(one)]
    return given


def _call_leave_region(statuses: Sequence[Tensor]) -> list[Tensor]:
    """Call the operator `leave_region`."""
    return _LEAVE_REGION(statuses)


def _leave_region_op(statuses: list[Tensor]) -> list[Tensor]:
    return [status.view_as(status) for status in statuses]


_LEAVE_REGION = define("leave_region(Tensor[] statuses) -> Tensor[]", _leave_region_op)


def locations_within(path: str, paths: Sequence[str]) -> range:
    """The locations of a module and all within it: they are consecutive, and exclude the model's input and output."""
    locations = [i for i, other in enumerate(paths[1:-1], start=1) if f"{other}.".startswith(f"{path}.")]
    return range(locations[0], locations[-1] + 1) if locations else range(0)


def add_regions(watch: WatchState, blocks: dict[nn.Module, range]) -> None:
    """Have blocks be regions. One that is a region of another watched model stays that."""
    if blocks and trace_regions():
        for block, locations in blocks.items():
            block.__dict__.setdefault(REGION, Region(watch, locations))


def remove_region(module: nn.Module, watch: WatchState) -> None:
    """Remove the region of a watched model from a module."""
    region = module.__dict__.get(REGION)
    if region is not None and region.watch is watch:
        del module.__dict__[REGION]
