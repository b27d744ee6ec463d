"""Which id stands for which place.

Ten bits hold 1,023 places and 0 for unknown. Every live model has ids of its own, so that errors of two models
in one flags tensor can be told apart. An id is given to another place only when all others are taken and
whatever owned it is gone, so flags keep their names after their model was dropped.
"""

import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torchguard._channel.layout import LOCATION_MASK
from torchguard._renamed import renamed
from torchguard._torch.process import process_state
from torchguard.exceptions import LocationWarning, OutOfRangeError


class _Place:
    """The holder of one id."""

    def __init__(self, path: str, model: str = "", number: int = 1, owner: "weakref.ref[Any] | None" = None) -> None:
        self.path = path
        self.model = model
        self.number = number
        self.owner = owner

    @property
    def is_free(self) -> bool:
        """Whether a model had it that is gone; a name registered by hand stays."""
        return self.owner is not None and self.owner() is None

    @property
    def name(self) -> str:
        return self.path or self.model

    @property
    def full_name(self) -> str:
        """The name, told apart from the same one in another model."""
        model = self.model if self.number == 1 else f"{self.model}#{self.number}"
        return f"{model}:{self.path}" if self.path else model


class _Registry:
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._places: dict[int, _Place] = {}
        self._by_hand: dict[str, int] = {}
        self._next = 1
        self._models: Counter[str] = Counter()

    def register(self, path: str) -> int:
        with self._lock:
            if path not in self._by_hand:
                location = self._take()
                if not location:
                    warn_full(path)
                    return location
                self._places[location] = _Place(path)
                self._by_hand[path] = location
            return self._by_hand[path]

    def claim(self, owner: Any, model: str, number: int, path: str) -> int:
        """An id for a place of a model, 0 if none is left."""
        with self._lock:
            location = self._take()
            if location:
                self._places[location] = _Place(path, model, number, weakref.ref(owner))
            return location

    def number(self, model: str) -> int:
        """The how-manieth model of that name this is."""
        with self._lock:
            self._models[model] += 1
            return self._models[model]

    def _take(self) -> int:
        while self._next in self._places:
            self._next += 1
        if self._next <= LOCATION_MASK:
            return self._next
        location = next((location for location, place in self._places.items() if place.is_free), 0)
        self._places.pop(location, None)  # so that the newest holder stands last
        return location

    def free_ids(self) -> list[int]:
        """Never used ones first, then those of models that are gone, the longest held first."""
        with self._lock:
            unused = [location for location in range(1, LOCATION_MASK + 1) if location not in self._places]
            return unused + [location for location, place in self._places.items() if place.is_free]

    def find(self, path: str) -> int:
        with self._lock:
            if path in self._by_hand:
                return self._by_hand[path]
            owned = (location for location, place in self._places.items() if place.path == path and not place.is_free)
            return max(owned, default=0)

    def place(self, location: int) -> _Place | None:
        return self._places.get(location)

    def places(self) -> dict[int, _Place]:
        """Every id that was given out, and what holds it."""
        with self._lock:
            return dict(self._places)

    def count(self) -> int:
        return len(self._places) + 1

    def reset(self) -> None:
        with self._lock:
            self._by_hand.clear()
            self._models.clear()
            self._next = 1
            self._places = {key: place for key, place in self._places.items() if place.owner and not place.is_free}


# One for the process: ids are in flags and on modules, whichever import of this package put them there.
registry = process_state("locations", _Registry)
registry.__class__ = _Registry  # as it is written here: it was made by the first import, or before a reload


def warn_full(path: str) -> None:
    warnings.warn(
        f"All {LOCATION_MASK} location ids are taken: errors at {path!r} will show as Unknown. "
        "Drop models you no longer need, or call ErrorLocation.reset().",
        LocationWarning,
        stacklevel=4,
    )


class ErrorLocation:
    """The registry of named places.

    >>> place = ErrorLocation.register("preprocess.resize")
    >>> ErrorLocation.name(place)
    'preprocess.resize'
    """

    UNKNOWN = 0
    MAX_LOCATION_ID = LOCATION_MASK

    @staticmethod
    def register(path: str) -> int:
        """The id of a named place; the same name gets the same id."""
        if not isinstance(path, str) or not path:
            raise OutOfRangeError(f"ErrorLocation.register: {path!r} is no name. Give a path such as 'encoder.0'.")
        return registry.register(path)

    @staticmethod
    def get(path: str) -> int:
        """The id of a registered name or of a live model's module, the newest if there are several, else 0."""
        return registry.find(path)

    @staticmethod
    def is_registered(path: str) -> bool:
        return registry.find(path) != ErrorLocation.UNKNOWN

    @staticmethod
    @renamed(loc="location")
    def name(location: int) -> str:
        """What to call a place."""
        if location == ErrorLocation.UNKNOWN:
            return "Unknown"
        place = registry.place(location)
        return place.name if place else f"Location_{location}"

    @staticmethod
    @renamed(loc="location")
    def path(location: int) -> str:
        """The path of a place, empty if there is none."""
        place = registry.place(location)
        return place.path if place else ""

    @staticmethod
    def count() -> int:
        """How many places are known, the unknown one included."""
        return registry.count()

    @staticmethod
    def get_all_ids() -> dict[int, str]:
        """What each known id is called, the unknown one included."""
        return {location: ErrorLocation.name(location) for location in (ErrorLocation.UNKNOWN, *registry.places())}

    @staticmethod
    def get_all_paths() -> dict[str, int]:
        """The id that `get` finds for each path that it knows."""
        paths = {place.path for place in registry.places().values() if place.path and not place.is_free}
        return {path: registry.find(path) for path in sorted(paths)}

    @staticmethod
    def reset() -> None:
        """Forget every name but those of live models.

        Their ids are given out anew: flags and compiled functions that hold one will show another's name.
        """
        registry.reset()


def names_of(locations: Iterable[int]) -> dict[int, str]:
    """Names for the places of one report: if two share a name, each is told apart by the model it is in."""
    names = {location: ErrorLocation.name(location) for location in locations}
    shared = {name for name, count in Counter(names.values()).items() if count > 1}
    for location in names:
        place = registry.place(location)
        if place and place.model and place.name in shared:
            names[location] = place.full_name
    return names
