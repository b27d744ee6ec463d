"""Types of graphs: the shape and dtype of each node, derived from the leaves."""

from torchguard.compiled.certify.types._check import COVERED, check_types

__all__ = ["COVERED", "check_types"]
