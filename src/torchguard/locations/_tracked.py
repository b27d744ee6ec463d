"""Giving the modules of a model their places: `@tracked`."""

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

from torch import nn

from torchguard._torch.modules import child_names
from torchguard._torch.process import process_state
from torchguard._torch.tracing import constant_in_graphs
from torchguard.exceptions import LocationWarning, NotFlagsError
from torchguard.locations._registry import ErrorLocation, registry, warn_full
from torchguard.locations._tree import WeightedLocationTree, nearest

T = TypeVar("T")
Place = nn.Module | int | str | None
_LOCATION = "_fx_location"
_PATH = "_fx_path"
_BUILDING = "_fx_building"

_tables: "weakref.WeakSet[LocationTable]" = process_state("location tables", weakref.WeakSet)


class LocationTable:
    """The ids of one model, each claimed when it is first asked for.

    A copy of the model, by `deepcopy` or `pickle`, gets a table of its own; a copy of one layer, just its place.
    """

    def __init__(self, model: str, paths: tuple[str, ...], weights: tuple[tuple[str, float], ...]) -> None:
        self.model, self.paths, self.weights = model, paths, weights
        self.number = registry.number(model)
        self.ids: dict[str, int] = {}
        free = len(registry.free_ids())
        fits = len(paths) < free
        self.twin = None if fits else next((table for table in _tables if table.paths == paths), None)
        # A model that cannot have all it wants leaves some for others, and for names given by hand.
        self.own = self.twin.own if self.twin else _chosen(paths, weights, free if fits else free - free // 8)
        _tables.add(self)

    def locate(self, path: str) -> "Location":
        place = nearest(path, self.own)
        if place not in self.ids:
            self.ids[place] = self._claim(place)
        return Location(self, path, self.ids[place])

    def _claim(self, place: str) -> int:
        granted = registry.claim(self, self.model, self.number, place)
        if not granted and self.twin:
            granted = self.twin.ids.get(place, 0)
        if not granted:
            warn_full(place or self.model)
        return granted

    def __reduce__(self) -> tuple[Any, ...]:
        return LocationTable, (self.model, self.paths, self.weights)

    def __deepcopy__(self, memo: dict[int, Any]) -> "LocationTable":
        copy = memo[id(self)] = LocationTable(self.model, self.paths, self.weights)
        return copy


def _chosen(paths: tuple[str, ...], weights: tuple[tuple[str, float], ...], room: int) -> frozenset[str]:
    tree = WeightedLocationTree()
    for pattern, weight in weights:
        tree.set_weight(pattern, weight)
    for path in paths:
        tree.add_path(path)
    return frozenset(tree.chosen(room))


class Location:
    """What a module carries: where it stands in which model."""

    def __init__(self, table: LocationTable, path: str, id: int) -> None:
        self.table, self.path, self.id = table, path, id

    def __reduce__(self) -> tuple[Any, ...]:
        return LocationTable.locate, (self.table, self.path)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Location":
        table = memo.get(id(self.table)) or self.table.__deepcopy__(memo)
        return table.locate(self.path)


def assign(model: nn.Module, weights: Mapping[str, float] | None = None) -> None:
    """Give every module of `model` its place.

    Modules with parameters get `_fx_path`, and an id in depth-first order. Those without only pass on what others
    made: in an `nn.Sequential` they share the place of the module before them, elsewhere of the one around them.
    """
    modules = dict(model.named_modules())
    stateful = tuple(path for path, module in modules.items() if path and any(True for _ in module.parameters()))
    table = LocationTable(type(model).__name__, stateful, tuple((weights or {}).items()))
    for path in stateful:
        _attach(modules[path], _PATH, path)
        _attach(modules[path], _LOCATION, table.locate(path))
    known = set(stateful)
    for path, module in modules.items():
        if path not in known:
            _attach(module, _LOCATION, table.locate(_maker(path, modules, known) if path else path))


def _attach(module: nn.Module, name: str, value: Any) -> None:
    try:
        setattr(module, name, value)
    except (AttributeError, TypeError, RuntimeError):
        # It refuses to be changed. A place is no state of its own: it only says where the module stands.
        vars(module)[name] = value


def _maker(path: str, modules: Mapping[str, nn.Module], known: set[str]) -> str:
    """Where the input of a module without parameters comes from, as far as the structure tells."""
    parent = path.rpartition(".")[0]
    if isinstance(modules.get(parent), nn.Sequential):
        siblings = [f"{parent}.{child}" if parent else child for child in child_names(modules[parent])]
        before = siblings[: siblings.index(path)]
        return next((sibling for sibling in reversed(before) if sibling in known), nearest(parent, known))
    return nearest(parent, known)


def location_of(module: nn.Module) -> Location | None:
    return getattr(module, _LOCATION, None)


def place_of(module: Place) -> int:
    """The location id of a module, a name, an id, or nothing in particular (0)."""
    if module is None:
        return ErrorLocation.UNKNOWN
    if isinstance(module, nn.Module):
        place = location_of(module)
        if place is not None:
            return place.id
        path = getattr(module, _PATH, None)  # of a module nobody tracks, set by hand
        return _untracked(type(module).__name__) if path is None else _registered(path)
    return _registered(module) if isinstance(module, str) else module


@constant_in_graphs
def _registered(name: str) -> int:
    return ErrorLocation.register(name)


@constant_in_graphs
def _untracked(kind: str) -> int:
    warnings.warn(
        f"A {kind} was given as a place but has none: its errors will show as Unknown. "
        "Decorate the model's class with @tracked, or call tracked(model).",
        LocationWarning,
        stacklevel=5,
    )
    return ErrorLocation.UNKNOWN


@overload
def tracked(target: T, *, weights: Mapping[str, float] | None = None) -> T: ...
@overload
def tracked(target: None = None, *, weights: Mapping[str, float] | None = None) -> Callable[[T], T]: ...
def tracked(target: Any = None, *, weights: Mapping[str, float] | None = None) -> Any:
    """Name the places of a model, as a class decorator or for a model already made: `tracked(model)`.

    After `__init__`, every submodule that has parameters knows its path (`_fx_path`), so that checks can take
    the module itself as the place: `flag_nan(h, self.encoder, f)`.

    Args:
        weights: for models of more than 1,023 such modules, glob patterns of the paths that must keep a place
            of their own, and how much they matter: `{"head.*": 10.0}`.
    """
    if target is None:
        return lambda later: tracked(later, weights=weights)
    if isinstance(target, nn.Module):
        assign(target, weights)
        return target
    if not (isinstance(target, type) and issubclass(target, nn.Module)):
        raise NotFlagsError(f"tracked: {target!r} is neither an nn.Module nor a class of one.")
    _track_init(target, weights)
    _track_subclasses(target, weights)
    return target


class _Nursery(threading.local):
    """Tracked models under construction: a part waits for the whole it is built into."""

    def __init__(self) -> None:
        self.depth = 0
        self.waiting: list[tuple[nn.Module, Mapping[str, float] | None]] = []


_nursery = _Nursery()


def _track_init(cls: type[nn.Module], weights: Mapping[str, float] | None) -> None:
    original = cls.__init__

    @functools.wraps(original)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if _BUILDING in self.__dict__:  # called by the __init__ of a subclass
            return original(self, *args, **kwargs)
        built: list[tuple[nn.Module, Mapping[str, float] | None]] = []
        self.__dict__[_BUILDING] = True
        _nursery.depth += 1
        try:
            original(self, *args, **kwargs)
            _nursery.waiting.append((self, weights))
        finally:
            self.__dict__.pop(_BUILDING, None)
            _nursery.depth -= 1
            if _nursery.depth == 0:
                built, _nursery.waiting = _nursery.waiting, []
        for model, of_its_class in reversed(built):  # the whole was finished last
            if location_of(model) is None:
                assign(model, of_its_class)
        return None

    cls.__init__ = init


def _track_subclasses(cls: type[nn.Module], weights: Mapping[str, float] | None) -> None:
    own = cls.__dict__.get("__init_subclass__")

    def init_subclass(sub: type[nn.Module], **kwargs: Any) -> None:
        own.__func__(sub, **kwargs) if own else super(cls, sub).__init_subclass__(**kwargs)
        if "__init__" in sub.__dict__:
            _track_init(sub, weights)

    cls.__init_subclass__ = classmethod(init_subclass)  # pyright: ignore[reportAttributeAccessIssue]
