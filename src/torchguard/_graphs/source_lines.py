"""Lines of the user's code."""

import os
import traceback
from collections.abc import Iterable
from dataclasses import dataclass

import torch

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")


@dataclass(frozen=True)
class Place:
    """A line of code."""

    file: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}" + (f": {self.text}" if self.text else "")


def places_of(stack: Iterable[traceback.FrameSummary]) -> tuple[Place, ...]:
    return tuple(Place(frame.filename, frame.lineno or 0, frame.name, frame.line or "") for frame in stack)


def own_place(stack: tuple[Place, ...]) -> Place:
    """The line of the user's that led to where a stack ends: the innermost that is not torch's own."""
    return next((place for place in reversed(stack) if not place.file.startswith(_TORCH)), stack[-1])
