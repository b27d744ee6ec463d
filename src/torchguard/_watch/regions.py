"""Blocks of a model that are compiled once for all that are alike."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchguard._operators import are_kept_whole, define
from torchguard._pytrees import mapped, tensors_in
from torchguard._torch.settings import protect_regions
from torchguard._watch.state import Watch
from torchguard._watch.wrapper import Eye


class Region:
    """What stands in the place of a block's `forward`: in a graph, it is a region of its own.

    Dynamo compares regions, and what is behind it compiles those that are alike once. So nothing in one may tell which
    it is: places count from its first, and its marks are a part of those of the call. The hooks of the block itself are
    called from here, to be in the region.

    Args:
        eye: that of the block, if it is watched.
        part: of the places, those of the block and its modules.
    """

    is_region = True  # by which it is known: after a reload, and in a second import, `Region` is another class

    def __init__(self, watch: Watch, block: nn.Module, eye: Eye | None, part: range) -> None:
        self.watch, self.block, self.eye, self.part = watch, block, eye, part
        self.number = watch.parts.index(part) if part else None
        self.own_forward = block.__dict__.get("forward")  # set on the instance, as tools do

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.own_forward or type(self.block).forward.__get__(self.block))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        journal = self.watch.journal
        # Of a block that is compiled alone, the marks were not taken apart.
        if journal is None or not are_kept_whole() or (journal.marks is not None and not journal.parts):
            return self.run(args, kwargs)
        if not protect_regions():  # gradients of a region could be wrong
            return self.run(args, kwargs)
        marks = journal.parts[self.number] if journal.parts and self.number is not None else None
        whole = journal.enter(self.part, marks)
        output, found, remarks = _once(self, *args, **kwargs)  # pyright: ignore[reportGeneralTypeIssues]
        if found:
            found = _OUT_OF_REGION(found)
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


def places_within(path: str, paths: Sequence[str]) -> range:
    """The places of a module and all within it. They follow each other; the input and the output are not among them."""
    places = [i for i, other in enumerate(paths[1:-1], start=1) if f"{other}.".startswith(f"{path}.")]
    return range(places[0], places[-1] + 1) if places else range(0)


def remove_region(module: nn.Module, watch: Watch) -> None:
    """Take off the region of a watched model, which may be within that of another."""
    outer: Any = None
    region: Any = module.__dict__.get("forward")
    while _is_region(region) and region.watch is not watch:
        outer, region = region, region.own_forward
    if not _is_region(region):
        return
    if outer is not None:
        outer.own_forward = region.own_forward
    elif region.own_forward is not None:
        module.__dict__["forward"] = region.own_forward
    else:
        del module.__dict__["forward"]


def _is_region(forward: Any) -> bool:
    return getattr(type(forward), "is_region", False)


def _out_of_region(found: list[Tensor]) -> list[Tensor]:
    return [one.view_as(one) for one in found]


# What a region returns, Dynamo loses track of inside of a checkpoint; of what is made of it, it does not.
_OUT_OF_REGION = define("out_of_region(Tensor[] found) -> Tensor[]", _out_of_region)


@torch.compiler.nested_compile_region
def _once(region: Region, *args: Any, **kwargs: Any) -> tuple[Any, Sequence[Tensor], Sequence[Tensor]]:
    """What a block puts out, the evidence met there, and whom the remarks are about: a region can but return tensors.

    That places are noted in a list beside it keeps Dynamo from taking one call for another without tracing it. And a
    region may not return what it was given: that is copied.
    """
    journal = region.watch.journal
    assert journal is not None
    if journal.marks is not None:
        journal.marks = journal.marks.view_as(journal.marks)  # what hangs on a leaf that it leads to is never freed
    output = region.run(args, kwargs)
    given: list[Tensor] = []
    for one in (*args, *kwargs.values()):
        given += [one] if isinstance(one, Tensor) else [z for _, z in tensors_in(one)]
    output = mapped(output, lambda z: z.clone() if any(z is one for one in given) else z)
    found, journal.found, journal.marks = journal.found, [], None  # Dynamo would take them for another way out
    return output, tuple(found), tuple([rows for _, _, rows in journal.remarks])
