"""Names of places: the registry, the weighted tree, and `@tracked`."""

from torchguard.locations.registry import ErrorLocation
from torchguard.locations.tracking import tracked
from torchguard.locations.tree import IdsGivenError, WeightedLocationTree

__all__ = ["ErrorLocation", "IdsGivenError", "WeightedLocationTree", "tracked"]
