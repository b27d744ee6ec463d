"""The enclosure layer: bounds of what a graph computes, for all inputs in a box, rounding errors included."""

from torchguard.compiled.certify.enclosure._enclose import ENCLOSURE_OPS, Box, Enclosure, enclose
from torchguard.exceptions import BoxError

__all__ = ["ENCLOSURE_OPS", "Box", "BoxError", "Enclosure", "enclose"]
