"""From an annotation to what has to be looked at: tensors, and the tuples, dicts and classes that hold them."""

import collections.abc
import dataclasses
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar, Union, get_args, get_origin

import torch

from torchguard.typing.dtypes import TensorKind
from torchguard.typing.hints import fields_of
from torchguard.typing.jaxtyped import is_jaxtyped, spec_of_jaxtyped
from torchguard.typing.scope import Scope
from torchguard.typing.spec import TensorSpec

_SEQUENCES = (list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_MAPPINGS = (dict, collections.OrderedDict, collections.abc.Mapping, collections.abc.MutableMapping)
_WRAPPERS = (typing.Final, typing.ClassVar, typing.Required, typing.NotRequired)


@dataclasses.dataclass(frozen=True)
class Items:
    """A tuple of so many, each declared by itself."""

    items: tuple["Node | None", ...]

    def parts(self) -> Iterable["Node | None"]:
        return self.items

    def check(self, value: Any, scope: Scope, path: str) -> None:
        if not isinstance(value, (tuple, list)):
            return scope.report_structure(path, f"a tuple of {len(self.items)}", f"a {type(value).__name__}")
        if len(value) != len(self.items):
            return scope.report_structure(path, f"a tuple of {len(self.items)}", f"{len(value)} items")
        for i, (node, item) in enumerate(zip(self.items, value, strict=True)):
            if node is not None:
                node.check(item, scope, f"{path}[{i}]")
        return None


@dataclasses.dataclass(frozen=True)
class Each:
    """Any number of the same, in a list or tuple."""

    item: "Node"

    def parts(self) -> Iterable["Node | None"]:
        return (self.item,)

    def check(self, value: Any, scope: Scope, path: str) -> None:
        if not isinstance(value, Sequence) or isinstance(value, str):
            return scope.report_structure(path, "a list or tuple", f"a {type(value).__name__}")
        for i, item in enumerate(value):
            self.item.check(item, scope, f"{path}[{i}]")
        return None


@dataclasses.dataclass(frozen=True)
class EachValue:
    """Any number of the same, in a dict."""

    item: "Node"

    def parts(self) -> Iterable["Node | None"]:
        return (self.item,)

    def check(self, value: Any, scope: Scope, path: str) -> None:
        if not isinstance(value, Mapping):
            return scope.report_structure(path, "a dict", f"a {type(value).__name__}")
        for key, item in value.items():
            self.item.check(item, scope, f"{path}[{key!r}]")
        return None


@dataclasses.dataclass
class Fields:
    """The attributes of a dataclass or a NamedTuple, or the keys of a TypedDict."""

    kind: type
    are_keys: bool
    optional: frozenset[str]
    fields: dict[str, "Node"] = dataclasses.field(default_factory=dict)

    def parts(self) -> Iterable["Node | None"]:
        return self.fields.values()

    def check(self, value: Any, scope: Scope, path: str) -> None:
        if not isinstance(value, Mapping if self.are_keys else self.kind):
            return scope.report_structure(path, f"a {self.kind.__name__}", f"a {type(value).__name__}")
        for name, node in self.fields.items():
            if not self.are_keys:
                node.check(getattr(value, name), scope, f"{path}.{name}")
            elif name in value:
                node.check(value[name], scope, f"{path}[{name!r}]")
            elif name not in self.optional:
                scope.report_structure(path, f"a {self.kind.__name__}", f"a dict without {name!r}")
        return None


@dataclasses.dataclass(frozen=True)
class OneOf:
    """A union. What is not about tensors is only asked whether the value is of that type."""

    options: tuple[tuple[Any, "Node | None"], ...]

    def parts(self) -> Iterable["Node | None"]:
        return [node for _, node in self.options]

    def check(self, value: Any, scope: Scope, path: str) -> None:
        if value is None and any(option is type(None) for option, _ in self.options):
            return
        tried: list[Scope] = []
        for option, node in self.options:
            if node is None:
                if _is_of(option, value):
                    return
                continue
            trial = scope.fork()
            node.check(value, trial, path)
            if not trial.findings:
                scope.join(trial)
                return
            tried.append(trial)
        # Where none fits, the one that came furthest says most.
        scope.join(max(tried, key=lambda trial: len(trial.seen)))


# A part of an annotation under which tensors are declared. `check` reports what does not fit.
Node: TypeAlias = TensorSpec | Items | Each | EachValue | Fields | OneOf


def specs_in(node: Node | None, above: tuple[Node, ...] = ()) -> Iterator[TensorSpec]:
    """Every declared tensor under a node."""
    if isinstance(node, TensorSpec):
        yield node
    elif node is not None and not any(node is seen for seen in above):
        for part in node.parts():
            yield from specs_in(part, (*above, node))


def node_of(annotation: Any, variables: Mapping[Any, Any] | None = None, above: tuple[Fields, ...] = ()) -> Node | None:
    """What to look at under an annotation, None if no tensor is declared there.

    Args:
        variables: what the type variables of a generic class stand for.
        above: the classes this one is part of, for those that hold themselves.
    """
    variables = variables or {}
    if isinstance(annotation, TypeVar):
        return node_of(variables[annotation], above=above) if annotation in variables else None
    if isinstance(annotation, typing.NewType):
        return node_of(annotation.__supertype__, variables, above)
    if hasattr(annotation, "__value__"):  # type X = ...
        return node_of(annotation.__value__, variables, above)
    if isinstance(annotation, TensorKind):
        return annotation.spec or TensorSpec(annotation.dtype.name, annotation.dtype)
    if is_jaxtyped(annotation):
        return spec_of_jaxtyped(annotation)
    origin, args = get_origin(annotation), get_args(annotation)

    def part(inner: Any) -> Node | None:
        return node_of(inner, variables, above)

    if origin is Annotated:
        return part(args[0])
    if origin in (Union, types.UnionType):
        options = tuple((option, part(option)) for option in args)
        return OneOf(options) if any(node is not None for _, node in options) else None
    if origin in _WRAPPERS:
        return part(args[0])
    if origin is tuple and not (len(args) == 2 and args[1] is ...):
        items = tuple(part(item) for item in args)
        return Items(items) if any(item is not None for item in items) else None
    if origin in (tuple, *_SEQUENCES) and args:
        item = part(args[0])
        return None if item is None else Each(item)
    if origin in _MAPPINGS and len(args) == 2:
        item = part(args[1])
        return None if item is None else EachValue(item)
    return _fields_of(origin or annotation, args, variables, above)


def _fields_of(
    kind: Any, args: tuple[Any, ...], variables: Mapping[Any, Any], above: tuple[Fields, ...]
) -> Node | None:
    are_keys = typing.is_typeddict(kind)
    has_fields = are_keys or dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")
    if not isinstance(kind, type) or not has_fields:
        return None
    for fields in above:
        if fields.kind is kind:
            return fields
    fields = Fields(kind, are_keys, getattr(kind, "__optional_keys__", frozenset()))
    names = dict(zip(getattr(kind, "__parameters__", ()), args, strict=False)) | dict(variables)
    for name, hint in fields_of(kind).items():
        node = None if get_origin(hint) is typing.ClassVar else node_of(hint, names, (*above, fields))
        if node is not None:
            fields.fields[name] = node
    return fields if any(node is not fields for node in fields.fields.values()) else None


def _is_of(option: Any, value: Any) -> bool:
    kind = get_origin(option) or option
    if kind is Any:
        return True
    if isinstance(kind, type):
        return isinstance(value, kind)
    return not isinstance(value, torch.Tensor)
