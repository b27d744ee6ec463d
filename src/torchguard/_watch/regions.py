"""Regions: blocks of a model that are compiled once for all that are alike.

A large model is mostly one block, many times over, and torch compiles each anew. `torch.compiler.nested_compile_region`
changes that: Dynamo traces the marked function into a subgraph of its own, compares it with the subgraphs it has, and
AOTAutograd and the backend compile equal ones once. A `Region` takes the place of a block's `forward` to use it.

A watched block does not qualify as it is. What stands in the way, and what is done about it:

- **Equal subgraphs.** Two blocks differ in their locations, and a location that is a constant in the graph would make
  every subgraph another. So inside a region locations count from its first, and its gradient probes are a slice of
  those of the call (`gradient_probes.region_probes`). The region calls the hooks on the block itself, to make them
  part of the subgraph.
- **Tensors leave a region by being returned.** A list in the call record that the region appends to would leak tensors
  of the subgraph. The record gets lists of its own for the region (`CallRecord.enter_region`), and the region returns
  them. The locations are plain integers and stay in the outer record. That the trace has this side effect also keeps
  Dynamo from reusing an earlier trace of the same function without running it, by which the locations would not be
  recorded.
- **A region may not return its input**, which blocks do (a mask, a cache): it is cloned.
- **Inside `torch.utils.checkpoint`, Dynamo loses track of what a region returns**, but not of what is computed from it.
  The operator `leave_region` makes a view of each status.
- **Reference cycles.** An object that is attached to a leaf and references that leaf is never freed
  (`gradient_probes.py`). So the probes of the region are a view of the leaf, which is dropped at the end of the region.
- **Wrong gradients in torch up to 2.15** and slow compilation: `_torch/settings.py` changes settings of torch when a
  region is traced, and says why.

All but the first two can be removed when torch allows in a nested region what it allows in a function.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchguard._operators import define, use_operators
from torchguard._pytrees import map_tensors, tensors_in
from torchguard._torch.settings import protect_regions
from torchguard._torch.tracing import casts_to_float16
from torchguard._watch.hooks import ModuleHooks
from torchguard._watch.state import WatchState
from torchguard._watch.warn import warn_of_float16


class Region:
    """Takes the place of a block's `forward`. In a graph, it makes the block a nested region.

    Args:
        hooks: those of the block, if it is watched.
        locations: those of the block and its modules.
    """

    is_region = True  # not by `isinstance`: a reload or a second import makes another `Region`

    def __init__(self, watch: WatchState, block: nn.Module, hooks: ModuleHooks | None, locations: range) -> None:
        self.watch, self.block, self.hooks, self.locations = watch, block, hooks, locations
        self.number = watch.regions.index(locations) if locations else None
        self.instance_forward = block.__dict__.get("forward")  # some tools set it on the instance

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.instance_forward or type(self.block).forward.__get__(self.block))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call_record = self.watch.call_record
        if (
            call_record is None
            or not call_record.in_graph
            or not use_operators()
            or (call_record.probes is not None and not call_record.region_probes)  # the block is compiled alone
        ):
            return self.run(args, kwargs)
        if not protect_regions():  # gradients of a region could be wrong
            return self.run(args, kwargs)
        if call_record.probes is not None and (_has_float16((args, kwargs)) or casts_to_float16()):
            if not call_record.has_half_regions:
                call_record.has_half_regions = True
                warn_of_float16(type(self.watch.model).__name__)
            return self.run(args, kwargs)
        of_regions = call_record.region_probes
        probes = of_regions[self.number] if of_regions and self.number is not None else None
        outer = call_record.enter_region(self.locations, probes)
        output, statuses, warnings = _run_nested(self, *args, **kwargs)  # pyright: ignore[reportGeneralTypeIssues]
        if statuses:
            statuses = _call_leave_region(statuses)
        call_record.leave_region(outer, statuses, warnings)
        return output

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the block, with its hooks."""
        hooks = self.hooks
        if hooks is None:
            return self._forward(args, kwargs)
        if hooks.checks_input:
            args, kwargs = hooks.before(self.block, args, kwargs) or (args, kwargs)
        output = self._forward(args, kwargs)
        changed = hooks.after(self.block, args, output) if hooks.checks_output else None
        return output if changed is None else changed

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.instance_forward is not None:
            return self.instance_forward(*args, **kwargs)
        return type(self.block).forward(self.block, *args, **kwargs)


def _has_float16(values: Any) -> bool:
    found = [z for _, z in tensors_in(values) if z.dtype == torch.float16]
    return len(found) > 0


@torch.compiler.nested_compile_region
def _run_nested(region: Region, *args: Any, **kwargs: Any) -> tuple[Any, Sequence[Tensor], Sequence[Tensor]]:
    """The output of a block, the statuses recorded in it, and the masks of its warnings."""
    call_record = region.watch.call_record
    assert call_record is not None
    if call_record.probes is not None:
        call_record.probes = call_record.probes.view_as(call_record.probes)
    output = region.run(args, kwargs)
    given: list[Tensor] = []
    for one in (*args, *kwargs.values()):
        given += [one] if isinstance(one, Tensor) else [z for _, z in tensors_in(one)]
    output = map_tensors(output, lambda z: z.clone() if any(z is one for one in given) else z)
    # Emptied, since Dynamo would take what is in the record for further outputs of the region.
    statuses, call_record.statuses, call_record.probes = call_record.statuses, [], None
    return output, tuple(statuses), tuple([mask for _, _, mask in call_record.warnings])


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


def remove_region(module: nn.Module, watch: WatchState) -> None:
    """Remove the region of a watched model from a module; it may be inside that of another watched model."""
    outer: Any = None
    region: Any = module.__dict__.get("forward")
    while _is_region(region) and region.watch is not watch:
        outer, region = region, region.instance_forward
    if not _is_region(region):
        return
    if outer is not None:
        outer.instance_forward = region.instance_forward
    elif region.instance_forward is not None:
        module.__dict__["forward"] = region.instance_forward
    else:
        del module.__dict__["forward"]


def _is_region(forward: Any) -> bool:
    return getattr(type(forward), "is_region", False)
