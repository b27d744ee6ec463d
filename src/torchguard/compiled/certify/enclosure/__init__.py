"""Sound bounds of what a graph computes, for all inputs in a box."""

from torchguard.compiled.certify.enclosure._enclose import COVERED, Box, BoxError, Enclosure, enclose

__all__ = ["COVERED", "Box", "BoxError", "Enclosure", "enclose"]
