"""Names of places: the registry, the weighted tree, and `@tracked`."""

from torchguard.locations._registry import ErrorLocation
from torchguard.locations._tracked import tracked
from torchguard.locations._tree import IdsGivenError, WeightedLocationTree

__all__ = ["ErrorLocation", "IdsGivenError", "WeightedLocationTree", "tracked"]
