"""The tree of an annotation: declared tensors, and the tuples, dicts and classes that hold them."""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeAlias, get_args, get_origin

import torch

from torchguard.typing._scope import Scope, described
from torchguard.typing._spec import TensorSpec

_MISSING = object()


@dataclasses.dataclass(frozen=True)
class Items:
    """A tuple of fixed length, each item with its own declaration."""

    items: tuple["Node | None", ...]

    def parts(self) -> Iterable["Node | None"]:
        return self.items

    def check(self, value: Any, scope: Scope, path: str) -> None:
        if not isinstance(value, (tuple, list)):
            return scope.report_structure(path, f"a tuple of {len(self.items)}", described(value))
        if len(value) != len(self.items):
            return scope.report_structure(path, f"a tuple of {len(self.items)}", f"{len(value)} items")
        for i, (node, item) in enumerate(zip(self.items, value, strict=True)):
            if node is not None:
                node.check(item, scope, f"{path}[{i}]")
        return None


@dataclasses.dataclass(frozen=True)
class Each:
    """A list, tuple or set of any length, all items with one declaration."""

    item: "Node"

    def parts(self) -> Iterable["Node | None"]:
        return (self.item,)

    def check(self, value: Any, scope: Scope, path: str) -> None:
        if not isinstance(value, Collection) or isinstance(value, (str, bytes, Mapping, torch.Tensor)):
            return scope.report_structure(path, "a list or tuple", described(value))
        for i, item in enumerate(value):
            self.item.check(item, scope, f"{path}[{i}]")
        return None


@dataclasses.dataclass(frozen=True)
class EachValue:
    """A dict of any size, all values with one declaration."""

    item: "Node"

    def parts(self) -> Iterable["Node | None"]:
        return (self.item,)

    def check(self, value: Any, scope: Scope, path: str) -> None:
        if not isinstance(value, Mapping):
            return scope.report_structure(path, "a dict", described(value))
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
            return scope.report_structure(path, f"a {self.kind.__name__}", described(value))
        for name, node in self.fields.items():
            if not self.are_keys:
                if (field := getattr(value, name, _MISSING)) is not _MISSING:
                    node.check(field, scope, f"{path}.{name}")
            elif name in value:
                node.check(value[name], scope, f"{path}[{name!r}]")
            elif name not in self.optional:
                scope.report_structure(path, f"a {self.kind.__name__}", f"a dict without {name!r}")
        return None


@dataclasses.dataclass(frozen=True)
class OneOf:
    """A union. Options without tensors are checked by `isinstance` only."""

    text: str
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
        # If no option accepts the value, report the one that got furthest.
        furthest = max(tried, key=lambda trial: len(trial.checked))
        furthest.findings = [
            finding._replace(annotation=self.text) if finding.path == path else finding for finding in furthest.findings
        ]
        scope.join(furthest)


# A part of an annotation that declares tensors. `check` reports violations to the scope.
Node: TypeAlias = TensorSpec | Items | Each | EachValue | Fields | OneOf


def specs_in(node: Node | None, above: tuple[Node, ...] = ()) -> Iterator[TensorSpec]:
    """Every declared tensor under a node."""
    if isinstance(node, TensorSpec):
        yield node
    elif node is not None and not any(node is checked for checked in above):
        for part in node.parts():
            yield from specs_in(part, (*above, node))


def _is_of(option: Any, value: Any) -> bool:
    """Whether a value is an instance of a type without tensors, as far as Python can decide."""
    if get_origin(option) is Literal:
        return value in get_args(option)
    kind = get_origin(option) or option
    if kind is Any:
        return True
    # An int is accepted as a float, as static checkers do.
    kinds = {float: (float, int), complex: (complex, float, int)}.get(kind, kind)
    try:
        return isinstance(value, kinds)
    except TypeError:  # a protocol, a TypedDict, a Callable
        return not isinstance(value, torch.Tensor)
