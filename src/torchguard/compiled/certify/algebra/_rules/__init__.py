"""The meaning of each operator in exact arithmetic, tangents included."""

from collections.abc import Callable
from typing import Any

from torchguard.compiled.certify._definitions import DEFINITIONS
from torchguard.compiled.certify.algebra._rules import (
    activations,
    choices,
    factorisations,
    layers,
    matrices,
    pointwise,
    reductions,
    resampling,
    shapes,
    windows,
)
from torchguard.compiled.certify.algebra._rules.matrices import NEEDS_LAYOUT
from torchguard.compiled.certify.algebra._rules.shapes import CREATION_RULES

RULES: dict[str, Callable[..., Any]] = {
    **pointwise.RULES,
    **choices.RULES,
    **activations.RULES,
    **shapes.RULES,
    **reductions.RULES,
    **matrices.RULES,
    **factorisations.RULES,
    **windows.RULES,
    **resampling.RULES,
    **layers.RULES,
}
# The definitions of operators without a rule.
DEFINED = {name: definition for name, definition in DEFINITIONS.items() if name not in RULES}
# The operators that have a rule or a definition.
ALGEBRAIC_OPS = frozenset(RULES) | frozenset(CREATION_RULES) | frozenset(DEFINED)

__all__ = ["ALGEBRAIC_OPS", "CREATION_RULES", "DEFINED", "NEEDS_LAYOUT", "RULES"]
