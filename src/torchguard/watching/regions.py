"""Blocks of a model that are compiled once for all that are alike."""

from typing import Any

import torch
from torch import Tensor, nn

from torchguard._torch import compiled_once, keep_what_regions_are_given
from torchguard.nested import mapped
from torchguard.operators import are_kept_whole, define
from torchguard.watching.shell import Eye
from torchguard.watching.state import Watch


class Region:
    """What stands in the place of a block's `forward`: in a graph, it is a region of its own.

    Dynamo compares regions, and what is behind it compiles those that are alike once. So nothing in one may tell which
    it is: places count from its first, and its marks are a part of those of the call. The hooks of the block itself are
    called from here, to be in the region.

    Args:
        eye: that of the block, if it is watched.
        number: of this one among the regions that have places, None if it has none.
        first: of its places, which are those of its modules, too.
    """

    def __init__(self, watch: Watch, block: nn.Module, eye: Eye | None, number: int | None, first: int) -> None:
        self.watch, self.block, self.eye, self.number, self.first = watch, block, eye, number, first
        self.own_forward = block.__dict__.get("forward")  # set on the instance, as tools do

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        journal = self.watch.journal
        if journal is None or not are_kept_whole():
            return self.run(args, kwargs)
        keep_what_regions_are_given()
        marks = journal.parts[self.number] if journal.parts and self.number is not None else None
        whole = journal.enter(self.first, marks)
        output, found, remarks = _once(self, *args, **kwargs)
        if found:
            found = torch.ops.torchguard.out_of_region(found)
        journal.leave(whole, found, remarks)
        return output

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        eye = self.eye
        if eye is None:
            return self._forward(args, kwargs)
        if eye.looks_before:
            args, kwargs = eye.before(self.block, args, kwargs) or (args, kwargs)
        output = self._forward(args, kwargs)
        changed = eye.after(self.block, args, output) if eye.looks_after else None
        return output if changed is None else changed

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.own_forward is not None:
            return self.own_forward(*args, **kwargs)
        return type(self.block).forward(self.block, *args, **kwargs)


def new_region(watch: Watch, block: nn.Module, path: str, eye: Eye | None) -> Region:
    """A region for the block at that path. Its marks are a further part of those that are watched."""
    places = [place for place, other in enumerate(watch.paths) if f"{other}.".startswith(f"{path}.")]
    if not places:
        return Region(watch, block, eye, None, 0)
    watch.parts = (*watch.parts, range(places[0], places[-1] + 1))
    return Region(watch, block, eye, len(watch.parts) - 1, places[0])


def remove_region(module: nn.Module, watch: Watch) -> None:
    region = module.__dict__.get("forward")
    if isinstance(region, Region) and region.watch is watch:
        del module.__dict__["forward"]
        if region.own_forward is not None:
            module.__dict__["forward"] = region.own_forward


def _out_of_region(found: list[Tensor]) -> list[Tensor]:
    return [one.view_as(one) for one in found]


# What a region returns, Dynamo loses track of inside of a checkpoint; of what is made of it, it does not.
define("out_of_region(Tensor[] found) -> Tensor[]", _out_of_region)


@compiled_once
def _once(region: Region, *args: Any, **kwargs: Any) -> tuple[Any, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What a region returns, the evidence that was met there, and whom the remarks are about: it goes out by no list.

    It may not return what it was given: that is copied.
    """
    output = region.run(args, kwargs)
    given = (*args, *kwargs.values())
    if isinstance(output, Tensor):  # as most are: Dynamo takes long over what follows
        output = output.clone() if any(output is one for one in given) else output
    else:
        output = mapped(output, lambda z: z.clone() if any(z is one for one in given) else z)
    journal = region.watch.journal
    assert journal is not None
    found, journal.found = journal.found, []  # Dynamo would take the list for another way out
    return output, tuple(found), tuple([rows for _, _, rows in journal.remarks])
