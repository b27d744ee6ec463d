"""The typed layer: the shape and dtype of each node of a graph, derived from its leaves without asking torch."""

from torchguard.compiled.certify.types._check import TYPED_OPS, check_types

__all__ = ["TYPED_OPS", "check_types"]
