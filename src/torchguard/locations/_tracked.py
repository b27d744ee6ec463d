"""`@tracked`: every module of a model gets a location."""

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import torch
from torch import nn

from torchguard._torch.modules import child_names
from torchguard._torch.process import process_state
from torchguard._torch.tracing import constant_in_graphs
from torchguard.exceptions import LocationWarning, NotFlagsError
from torchguard.locations._registry import ErrorLocation, registry, warn_full, warn_of_number
from torchguard.locations._weighted_tree import WeightedLocationTree, nearest

T = TypeVar("T")
LocationLike = nn.Module | int | str | None
_LOCATION = "_fx_location"
_PATH = "_fx_path"
_BUILDING = "_fx_building"

_tables: "weakref.WeakSet[LocationTable]" = process_state("location tables", weakref.WeakSet)


class LocationTable:
    """The location ids of one model, each claimed on first use.

    A copy of the model, by `deepcopy` or `pickle`, gets a table of its own; a copy of one layer shares its id.
    """

    def __init__(self, model: str, paths: tuple[str, ...], weights: tuple[tuple[str, float], ...]) -> None:
        self.model, self.paths, self.weights = model, paths, weights
        self.number = registry.number(model)
        self.ids: dict[str, int] = {}
        free = len(registry.free_ids())
        is_enough = len(paths) < free
        self.same_structure = None if is_enough else next((table for table in _tables if table.paths == paths), None)
        # A model that cannot have an id for every module leaves some for other models and for registered names.
        self.own = (
            self.same_structure.own
            if self.same_structure
            else _chosen(paths, weights, free if is_enough else free - free // 8)
        )
        self.lowest = registry.lowest_for(len(self.own))
        _tables.add(self)

    def locate(self, path: str) -> "Location":
        owner_path = nearest(path, self.own)
        if owner_path not in self.ids:
            self.ids[owner_path] = self._claim(owner_path)
        return Location(self, path, self.ids[owner_path])

    def _claim(self, owner_path: str) -> int:
        granted = registry.claim(self, self.model, self.number, owner_path, self.lowest)
        if not granted and self.same_structure:
            granted = self.same_structure.ids.get(owner_path, 0)
        if not granted:
            warn_full(owner_path or self.model)
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
    """The location of a module, stored on it: table, path and id."""

    def __init__(self, table: LocationTable, path: str, id: int) -> None:
        self.table, self.path, self.id = table, path, id

    def __reduce__(self) -> tuple[Any, ...]:
        return LocationTable.locate, (self.table, self.path)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Location":
        table = memo.get(id(self.table)) or self.table.__deepcopy__(memo)
        return table.locate(self.path)


def assign(model: nn.Module, weights: Mapping[str, float] | None = None) -> None:
    """Give every module of `model` a location.

    Modules with parameters get `_fx_path`, and an id in depth-first order. A module without parameters shares the
    location of the module before it in an `nn.Sequential`, and of its parent elsewhere.
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
            _attach(module, _LOCATION, table.locate(_producer(path, modules, known) if path else path))


def _attach(module: nn.Module, name: str, value: Any) -> None:
    try:
        setattr(module, name, value)
    except (AttributeError, TypeError, RuntimeError):
        # The module rejects attributes. A location is not part of its state, so writing past `setattr` is safe.
        vars(module)[name] = value


def _producer(path: str, modules: Mapping[str, nn.Module], known: set[str]) -> str:
    """The path of the module that produces the input of a module without parameters, judged by structure."""
    parent = path.rpartition(".")[0]
    if isinstance(modules.get(parent), nn.Sequential):
        siblings = [f"{parent}.{child}" if parent else child for child in child_names(modules[parent])]
        before = siblings[: siblings.index(path)]
        return next((sibling for sibling in reversed(before) if sibling in known), nearest(parent, known))
    return nearest(parent, known)


def location_of(module: nn.Module) -> Location | None:
    return getattr(module, _LOCATION, None)


def location_id(module: LocationLike) -> int:
    """The location id of a module, a name or an id; 0 for None."""
    if module is None:
        return ErrorLocation.UNKNOWN
    if isinstance(module, nn.Module):
        location = location_of(module)
        if location is not None:
            return location.id
        path = getattr(module, _PATH, None)  # set by hand on an untracked module
        return _untracked(type(module).__name__) if path is None else _registered(path)
    if isinstance(module, str):
        return _registered(module)
    # Not while Dynamo traces: the number may be a symbol.
    if isinstance(module, int) and not torch.compiler.is_dynamo_compiling():
        name = registry.use_number(module)
        if name:
            warn_of_number(module, name)
    return module


@constant_in_graphs
def _registered(name: str) -> int:
    return ErrorLocation.register(name)


@constant_in_graphs
def _untracked(kind: str) -> int:
    warnings.warn(
        f"A {kind} was given as a location but has none: its errors will be reported as Unknown. "
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
    """Name the locations of a model: a class decorator, or a function of an existing model, `tracked(model)`.

    After `__init__`, every submodule that has parameters has its path (`_fx_path`), so that checks can take the module
    itself as the location: `flag_nan(h, self.encoder, f)`.

    Args:
        weights: for models with more than 1,023 such modules, glob patterns of the paths that must have an id of their
            own, with a weight: `{"head.*": 10.0}`.
    """
    if target is None:
        return lambda later: tracked(later, weights=weights)
    if isinstance(target, nn.Module):
        assign(target, weights)
        return target
    if not (isinstance(target, type) and issubclass(target, nn.Module)):
        raise NotFlagsError(f"tracked: expected an nn.Module or a subclass of it, got {target!r}.")
    _track_init(target, weights)
    _track_subclasses(target, weights)
    return target


class _Construction(threading.local):
    """Tracked models under construction: a submodule waits for the model that contains it."""

    def __init__(self) -> None:
        self.depth = 0
        self.waiting: list[tuple[nn.Module, Mapping[str, float] | None]] = []


_construction = _Construction()


def _track_init(cls: type[nn.Module], weights: Mapping[str, float] | None) -> None:
    original = cls.__init__

    @functools.wraps(original)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if _BUILDING in self.__dict__:  # called by the __init__ of a subclass
            return original(self, *args, **kwargs)
        built: list[tuple[nn.Module, Mapping[str, float] | None]] = []
        self.__dict__[_BUILDING] = True
        _construction.depth += 1
        try:
            original(self, *args, **kwargs)
            _construction.waiting.append((self, weights))
        finally:
            self.__dict__.pop(_BUILDING, None)
            _construction.depth -= 1
            if _construction.depth == 0:
                built, _construction.waiting = _construction.waiting, []
        for model, of_its_class in reversed(built):  # the outermost model was finished last
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
