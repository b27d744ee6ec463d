"""Assignment of location ids to module paths when there are more paths than ids."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from torchguard.exceptions import IdsGivenError, OutOfRangeError
from torchguard.locations._registry import ErrorLocation


class WeightedLocationTree:
    """Module paths and their ids.

    With enough ids, each path has its own. Otherwise shallow paths have, and a deeper one shares the id of its nearest
    ancestor that has one. Paths of a higher weight come before all others, however deep they are.

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
            raise OutOfRangeError(
                f"max_locations: expected 2 or more, got {max_locations}. Id 0 is reserved for unknown locations."
            )
        self.max_locations = max_locations
        self.weights: dict[str, float] = {}
        self._default_weight = 1.0
        self._paths: dict[str, None] = {}
        self._ids: dict[str, int] = {}

    def set_weight(self, path_pattern: str, weight: float) -> None:
        """Set the weight of paths that match a glob pattern; the first pattern that matches a path counts."""
        self.weights[path_pattern] = weight

    def set_default_weight(self, weight: float) -> None:
        self._default_weight = weight

    def add_path(self, path: str) -> None:
        """Add a path; ids follow the order in which paths were added."""
        if self._ids:
            raise IdsGivenError(
                f"add_path: ids are assigned already, so {path!r} cannot be added. Add every path before build_ids."
            )
        self._paths[path] = None

    def count_leaves(self) -> int:
        """The number of paths without a path below them."""
        inner = {nearest(path.rpartition(".")[0], self._paths) for path in self._paths}
        return sum(path not in inner for path in self._paths)

    def build_ids(self, start_id: int = 1) -> None:
        """Assign ids, from `start_id` up."""
        own = self.chosen(self.max_locations - 1)
        self._ids = {path: start_id + position for position, path in enumerate(own)}

    def chosen(self, room: int) -> list[str]:
        """At most `room` paths with an id of their own; the last is the root, "", which all others share."""
        children = [path for path in self._paths if path]
        if len(children) >= room:
            ranked = sorted(children, key=lambda path: (-self._weight(path), path.count(".")))
            highest = set(ranked[: room - 1])
            children = [path for path in children if path in highest]
        return [*children, ""] if room else []

    def get_location(self, path: str) -> int:
        """The id of `path` or of its nearest ancestor; 0 if neither it nor an ancestor was added."""
        if not self._ids:
            self.build_ids()
        owner = nearest(path, self._ids)
        is_known = owner or not path or nearest(path, self._paths)
        return self._ids[owner] if is_known else ErrorLocation.UNKNOWN

    @property
    def path_to_id(self) -> dict[str, int]:
        """The id of each added path, its own or a shared one; empty before ids are assigned."""
        return {path: self.get_location(path) for path in self._paths} if self._ids else {}

    def register_all(self) -> dict[str, int]:
        """Register every path in `ErrorLocation`, and return the ids there."""
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
    """`path`, or its closest ancestor in `known`, or the root ""."""
    while path and path not in known:
        path = path.rpartition(".")[0]
    return path
