"""Names of locations: the registry, the weighted tree, and `@tracked`."""

from torchguard.exceptions import IdsGivenError, LocationWarning
from torchguard.locations._registry import ErrorLocation
from torchguard.locations._tracked import tracked
from torchguard.locations._weighted_tree import WeightedLocationTree

__all__ = ["ErrorLocation", "IdsGivenError", "LocationWarning", "WeightedLocationTree", "tracked"]
