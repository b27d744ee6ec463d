"""Which places of a model get an id of their own when there are more places than ids."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from torchguard.exceptions import OutOfRangeError, TorchGuardError
from torchguard.locations._registry import ErrorLocation


class IdsGivenError(TorchGuardError, RuntimeError):
    """A path was added to a tree that has given out its ids: these would no longer hold."""


class WeightedLocationTree:
    """Module paths and the ids they get.

    All fit: each path has its own id. Otherwise the shallow ones do, and a deeper one shares the id of its
    nearest ancestor that has one. Paths of a higher weight are served before all others, however deep.

    Attributes:
        weights: the weight of each pattern.

    >>> tree = WeightedLocationTree(max_locations=4)
    >>> tree.set_weight("head.*", 10.0)
    >>> for path in ["body", "body.0", "body.1", "head", "head.out"]:
    ...     tree.add_path(path)
    >>> tree.build_ids()
    >>> tree.get_location("head.out"), tree.name(tree.get_location("body.1"))
    (2, 'body')
    """

    def __init__(self, max_locations: int = 1024) -> None:
        if max_locations < 2:
            raise OutOfRangeError(f"max_locations is {max_locations}. Give 2 or more: 0 is kept for unknown places.")
        self.max_locations = max_locations
        self.weights: dict[str, float] = {}
        self._default_weight = 1.0
        self._paths: dict[str, None] = {}
        self._ids: dict[str, int] = {}

    def set_weight(self, path_pattern: str, weight: float) -> None:
        """Give paths that match a glob pattern a weight; of several patterns the first that matches counts."""
        self.weights[path_pattern] = weight

    def set_default_weight(self, weight: float) -> None:
        self._default_weight = weight

    def add_path(self, path: str) -> None:
        """Add a place; ids follow the order in which paths were added."""
        if self._ids:
            raise IdsGivenError(f"add_path: the ids were given out before {path!r} came. Add every path first.")
        self._paths[path] = None

    def count_leaves(self) -> int:
        """How many of the places have none below them."""
        inner = {nearest(path.rpartition(".")[0], self._paths) for path in self._paths}
        return sum(path not in inner for path in self._paths)

    def build_ids(self, start_id: int = 1) -> None:
        """Number the places that get an id of their own, from `start_id` up."""
        own = self.chosen(self.max_locations - 1)
        self._ids = {path: start_id + place for place, path in enumerate(own)}

    def chosen(self, room: int) -> list[str]:
        """The at most `room` paths with an id of their own; the last is the root, "", for all that have none."""
        children = [path for path in self._paths if path]
        if len(children) >= room:
            ranked = sorted(children, key=lambda path: (-self._weight(path), path.count(".")))
            kept = set(ranked[: room - 1])
            children = [path for path in children if path in kept]
        return [*children, ""] if room else []

    def get_location(self, path: str) -> int:
        """The id of the nearest place to `path`, itself or above it; 0 if neither it nor one above it was added."""
        if not self._ids:
            self.build_ids()
        owner = nearest(path, self._ids)
        is_known = owner or not path or nearest(path, self._paths)
        return self._ids[owner] if is_known else ErrorLocation.UNKNOWN

    @property
    def path_to_id(self) -> dict[str, int]:
        """The id of each place that was added, its own or a shared one; empty before ids are given out."""
        return {path: self.get_location(path) for path in self._paths} if self._ids else {}

    def register_all(self) -> dict[str, int]:
        """Register every place by name in `ErrorLocation`; the ids that they have there."""
        return {path: ErrorLocation.register(path) for path in self._paths}

    def name(self, location: int) -> str:
        """The path that owns an id."""
        return next((path for path, owned in self._ids.items() if owned == location), f"Location_{location}")

    def _weight(self, path: str) -> float:
        for pattern, weight in self.weights.items():
            if fnmatchcase(path, pattern):
                return weight
        return self._default_weight


def nearest(path: str, known: Mapping[str, object] | Iterable[str]) -> str:
    """`path`, or its closest ancestor in `known`; the root "" always is."""
    while path and path not in known:
        path = path.rpartition(".")[0]
    return path
