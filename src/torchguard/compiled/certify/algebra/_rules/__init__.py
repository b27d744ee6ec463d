"""What each operator means in exact arithmetic, tangents included. An operator that stands here is covered."""

from collections.abc import Callable
from typing import Any

from torchguard.compiled.certify.algebra._rules import (
    activations,
    convolutions,
    indexing,
    losses,
    matrices,
    norms,
    pointwise,
    reductions,
    shapes,
    windows,
)

# Rules that need the field itself come apart: they have no argument that would bring it.
MAKING: dict[str, Callable[..., Any]] = shapes.MAKING
RULES: dict[str, Callable[..., Any]] = {
    name: rule
    for module in (
        activations,
        convolutions,
        indexing,
        losses,
        matrices,
        norms,
        pointwise,
        reductions,
        shapes,
        windows,
    )
    for name, rule in module.RULES.items()
}
NEEDS_LAYOUT = matrices.NEEDS_LAYOUT
COVERED = frozenset(RULES) | frozenset(MAKING)
