"""The registry of location ids and their names.

Ten bits hold 1,023 locations, and 0 for unknown. Each live model has ids of its own, so errors of two models in one
flags tensor can be distinguished. An id is reused only when all ids are taken and the model that owned it is gone, so
flags retain their names after their model was deleted.

Ids can also be numbers that the user made up: `location=42`. So models and names get ids from 128 up, and smaller ones
only when these run out. A number that was used outside of a graph is given to nobody else.
"""

import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torchguard._channel.slot_bits import LOCATION_MASK
from torchguard._renamed import renamed
from torchguard._torch.process import process_state
from torchguard.exceptions import LocationWarning, OutOfRangeError

FIRST_ASSIGNED = 128  # smaller ids are left to numbers given by hand


class _Entry:
    """The location behind one id."""

    def __init__(self, path: str, model: str = "", number: int = 1, owner: "weakref.ref[Any] | None" = None) -> None:
        self.path = path
        self.model = model
        self.number = number
        self.owner = owner

    @property
    def is_free(self) -> bool:
        """Whether the model that owned it is gone. Names registered by hand are never free."""
        return self.owner is not None and self.owner() is None

    @property
    def name(self) -> str:
        return self.path or self.model

    @property
    def full_name(self) -> str:
        """The name, qualified by the model."""
        model = self.model if self.number == 1 else f"{self.model}#{self.number}"
        return f"{model}:{self.path}" if self.path else model


class _Registry:
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._entries: dict[int, _Entry] = {}
        self._by_hand: dict[str, int] = {}
        self._numbers: set[int] = set()  # ids that were made up
        self._shown: set[int] = set()  # ids of modules that were given to the user
        self._next = {1: 1, FIRST_ASSIGNED: FIRST_ASSIGNED}
        self._models: Counter[str] = Counter()

    def register(self, path: str) -> int:
        with self._lock:
            if path not in self._by_hand:
                location = self._take()
                if not location:
                    warn_full(path)
                    return location
                self._entries[location] = _Entry(path)
                self._by_hand[path] = location
            return self._by_hand[path]

    def claim(self, owner: Any, model: str, number: int, path: str, lowest: int) -> int:
        """A new id for a location of a model, `lowest` or more if there is one; 0 if none is left."""
        with self._lock:
            location = self._take(lowest)
            if location:
                self._entries[location] = _Entry(path, model, number, weakref.ref(owner))
            return location

    def number(self, model: str) -> int:
        """1-based count of models registered under this class name."""
        with self._lock:
            self._models[model] += 1
            return self._models[model]

    def _take(self, lowest: int = FIRST_ASSIGNED) -> int:
        while not self._is_unused(self._next[lowest]):
            self._next[lowest] += 1
        if self._next[lowest] <= LOCATION_MASK:
            return self._next[lowest]
        left = next(filter(self._is_unused, range(FIRST_ASSIGNED - 1, 0, -1)), 0)
        if left:
            return left
        location = next((location for location, entry in self._entries.items() if entry.is_free), 0)
        self._entries.pop(location, None)  # so that the newest entry is last
        return location

    def _is_unused(self, location: int) -> bool:
        return location not in self._entries and location not in self._numbers

    def free_ids(self) -> list[int]:
        """Unused ids first, then those of models that are gone, the oldest first."""
        with self._lock:
            unused = list(filter(self._is_unused, range(1, LOCATION_MASK + 1)))
            return unused + [location for location, entry in self._entries.items() if entry.is_free]

    def lowest_for(self, count: int) -> int:
        """The lowest id for a model of `count` locations, which get ascending ids: 1 if it needs the smallest, too."""
        with self._lock:
            unused = sum(map(self._is_unused, range(FIRST_ASSIGNED, LOCATION_MASK + 1)))
        return FIRST_ASSIGNED if count <= unused else 1

    def use_number(self, location: int) -> str:
        """Reserve an id that a user gave as a number. Returns the name of the module that it belongs to, if any."""
        with self._lock:
            if location in self._numbers or location in self._shown:
                return ""
            self._numbers.add(location)
            entry = self._entries.get(location)
            return entry.full_name if entry and entry.owner and not entry.is_free else ""

    def show(self, locations: Iterable[int]) -> None:
        """Note ids that the user gets to see, and may use as numbers."""
        with self._lock:
            self._shown.update(locations)

    def find(self, path: str) -> int:
        with self._lock:
            if path in self._by_hand:
                return self._by_hand[path]
            owned = (location for location, entry in self._entries.items() if entry.path == path and not entry.is_free)
            found = max(owned, default=0)
            self._shown.add(found)
            return found

    def named(self) -> list[int]:
        """The ids of names that were registered by hand, and belong to no model."""
        with self._lock:
            return [*self._by_hand.values()]

    def entry(self, location: int) -> _Entry | None:
        return self._entries.get(location)

    def entries(self) -> dict[int, _Entry]:
        """All ids in use, and their entries."""
        with self._lock:
            return dict(self._entries)

    def count(self) -> int:
        return len(self._entries) + 1

    def clear(self) -> None:
        """Forget everything, also the locations of live models: for tests, which share a process."""
        with self._lock:
            self._entries = {}
            self.reset()

    def reset(self) -> None:
        with self._lock:
            self._by_hand.clear()
            self._models.clear()
            self._numbers.clear()
            self._shown.clear()
            self._next = {1: 1, FIRST_ASSIGNED: FIRST_ASSIGNED}
            self._entries = {key: entry for key, entry in self._entries.items() if entry.owner and not entry.is_free}


# One per process: flags and modules hold ids, whichever import of this package assigned them.
registry = process_state("locations", _Registry)
registry.__class__ = _Registry  # the current class: the object may stem from an earlier import or from before a reload


def warn_full(path: str) -> None:
    warnings.warn(
        f"All {LOCATION_MASK} location ids are taken: errors at {path!r} will be reported as Unknown. "
        "Drop models you no longer need, or call ErrorLocation.reset().",
        LocationWarning,
        stacklevel=4,
    )


def warn_of_number(location: int, name: str) -> None:
    warnings.warn(
        f"location={location} is the id of {name}: its errors will be reported there. "
        f"Give a name, such as location='my check', or a number below {FIRST_ASSIGNED}.",
        LocationWarning,
        stacklevel=5,
    )


class ErrorLocation:
    """The registry of named locations.

    >>> location = ErrorLocation.register("preprocess.resize")
    >>> ErrorLocation.name(location)
    'preprocess.resize'
    """

    UNKNOWN = 0
    MAX_LOCATION_ID = LOCATION_MASK

    @staticmethod
    def register(path: str) -> int:
        """The id of a named location; the same name gets the same id."""
        if not isinstance(path, str) or not path:
            raise OutOfRangeError(
                f"ErrorLocation.register: expected a name, got {path!r}. Give a path such as 'encoder.0'."
            )
        return registry.register(path)

    @staticmethod
    def get(path: str) -> int:
        """The id of a registered name or of a module of a live model (the newest of several); 0 if there is none."""
        return registry.find(path)

    @staticmethod
    def is_registered(path: str) -> bool:
        return registry.find(path) != ErrorLocation.UNKNOWN

    @staticmethod
    @renamed(loc="location")
    def name(location: int) -> str:
        """The name of a location."""
        if location == ErrorLocation.UNKNOWN:
            return "Unknown"
        entry = registry.entry(location)
        return entry.name if entry else f"Location_{location}"

    @staticmethod
    @renamed(loc="location")
    def path(location: int) -> str:
        """The path of a location, empty if it has none."""
        entry = registry.entry(location)
        return entry.path if entry else ""

    @staticmethod
    def count() -> int:
        """The number of known locations, including the unknown one."""
        return registry.count()

    @staticmethod
    def get_all_ids() -> dict[int, str]:
        """The name of each known id, including the unknown one."""
        ids = ErrorLocation.UNKNOWN, *registry.entries()
        registry.show(ids)
        return {location: ErrorLocation.name(location) for location in ids}

    @staticmethod
    def get_all_paths() -> dict[str, int]:
        """The id that `get` returns for each known path."""
        paths = {entry.path for entry in registry.entries().values() if entry.path and not entry.is_free}
        return {path: registry.find(path) for path in sorted(paths)}

    @staticmethod
    def reset() -> None:
        """Forget every name but those of live models.

        Their ids can be assigned again: flags and compiled functions that hold one will then show another name.
        """
        registry.reset()


def names_of(locations: Iterable[int]) -> dict[int, str]:
    """Names for the locations of one report; names that occur twice are qualified by their model."""
    names = {location: ErrorLocation.name(location) for location in locations}
    registry.show(names)
    shared = {name for name, count in Counter(names.values()).items() if count > 1}
    for location in names:
        entry = registry.entry(location)
        if entry and entry.model and entry.name in shared:
            names[location] = entry.full_name
    return names
