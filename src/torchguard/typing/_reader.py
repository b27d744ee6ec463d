"""Conversion of annotations to trees of nodes."""

import collections.abc
import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from torchguard.exceptions import AnnotationError
from torchguard.typing._containers import Each, EachValue, Fields, Items, Node, OneOf
from torchguard.typing._dtypes import TensorKind
from torchguard.typing._hints import fields_of
from torchguard.typing._jaxtyping import is_jaxtyped, spec_of_jaxtyped
from torchguard.typing._spec import TensorSpec

_WRAPPERS = (Annotated, typing.Final, typing.Required, typing.NotRequired)
# Their contents come later, or would be consumed by a check.
_OPAQUE = (collections.abc.Iterable, collections.abc.Awaitable, collections.abc.Callable, type, typing.ClassVar)


class Reader:
    """Converts annotations to nodes.

    Args:
        local: names of the defining scope, to resolve fields whose annotations are strings.
    """

    def __init__(self, local: Mapping[str, Any]) -> None:
        self._local = local
        self._variables: dict[Any, Any] = {}
        self._aliases: list[Any] = []
        self._above: list[Fields] = []

    def read(self, annotation: Any) -> Node | None:
        """The node of an annotation, None if it declares no tensor."""
        if isinstance(annotation, TensorKind):
            return annotation.spec or TensorSpec(annotation.dtype.name, annotation.dtype)
        if is_jaxtyped(annotation):
            return spec_of_jaxtyped(annotation)
        if _is_of_another_copy(annotation):
            reason = "stems from an earlier import of torchguard, so this @tensorcheck cannot read it"
            raise AnnotationError(f"{annotation!r} {reason}. Import torchguard.typing again where it is written.")
        if isinstance(annotation, TypeVar):
            return self.read(self._variables.get(annotation, annotation.__bound__))
        if isinstance(annotation, typing.NewType):
            return self.read(annotation.__supertype__)
        if hasattr(annotation, "__value__"):
            return self._alias(annotation)
        origin, args = get_origin(annotation), get_args(annotation)
        node = (self._holder(origin, args) if args else None) or self._fields(origin or annotation, args)
        if node is None and not _is_opaque(origin) and _declares_a_tensor(annotation):
            raise AnnotationError(f"{annotation!r} holds tensors in a way @tensorcheck does not look into.")
        return node

    def _holder(self, origin: Any, args: tuple[Any, ...]) -> Node | None:
        if origin in _WRAPPERS:
            return self.read(args[0])
        if origin in (Union, types.UnionType):
            options = tuple((option, self.read(option)) for option in args)
            text = " | ".join("None" if option is type(None) else _written(option) for option in args)
            return OneOf(text, options) if any(node is not None for _, node in options) else None
        if origin is tuple and not (len(args) == 2 and args[1] is ...):
            if any(getattr(arg, "__unpacked__", False) or get_origin(arg) is typing.Unpack for arg in args):
                return None
            items = tuple(self.read(item) for item in args)
            return Items(items) if any(item is not None for item in items) else None
        if not isinstance(origin, type):
            return None
        if issubclass(origin, collections.abc.Mapping):
            item = self.read(args[-1]) if len(args) == 2 else None
            return None if item is None else EachValue(item)
        if issubclass(origin, collections.abc.Collection):
            item = self.read(args[0])
            return None if item is None else Each(item)
        return None

    def _alias(self, alias: Any) -> Node | None:
        """`type X = ...`, whose value is evaluated on access."""
        if any(alias is other for other in self._aliases):
            raise AnnotationError(f"{alias!r} is defined by itself, which @tensorcheck does not follow.")
        self._aliases.append(alias)
        try:
            return self.read(alias.__value__)
        except NameError as error:
            raise AnnotationError(f"{alias!r} cannot be resolved: {error}.") from error
        finally:
            self._aliases.pop()

    def _fields(self, kind: Any, args: tuple[Any, ...]) -> Node | None:
        are_keys = typing.is_typeddict(kind)
        has_fields = are_keys or dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")
        if not isinstance(kind, type) or not has_fields:
            return None
        for fields in self._above:
            if fields.kind is kind:
                return fields
        fields = Fields(kind, are_keys, getattr(kind, "__optional_keys__", frozenset()))
        variables = self._variables
        self._variables = variables | dict(zip(getattr(kind, "__parameters__", ()), args, strict=False))
        self._above.append(fields)
        for name, hint in fields_of(kind, self._local).items():
            node = self.read(hint)
            if node is not None:
                fields.fields[name] = node
        self._above.pop()
        self._variables = variables
        return fields if any(node is not fields for node in fields.fields.values()) else None


def _is_of_another_copy(annotation: Any) -> bool:
    kind = type(annotation)
    return (kind.__module__, kind.__qualname__) == (TensorKind.__module__, TensorKind.__qualname__)


def _is_opaque(origin: Any) -> bool:
    if origin in _OPAQUE:
        return True
    kinds = (collections.abc.Iterator, collections.abc.Awaitable, collections.abc.AsyncIterable)
    return isinstance(origin, type) and issubclass(origin, kinds)


def _declares_a_tensor(annotation: Any) -> bool:
    """Whether an annotation declares a tensor anywhere, also in unexpected positions."""
    if isinstance(annotation, TensorKind) or is_jaxtyped(annotation):
        return True
    if isinstance(annotation, (tuple, list)):
        return any(_declares_a_tensor(part) for part in annotation)
    if isinstance(annotation, dict):
        return any(_declares_a_tensor(part) for part in annotation.values())
    metadata = getattr(annotation, "__metadata__", ())
    return any(_declares_a_tensor(part) for part in (*get_args(annotation), *metadata))


def _written(option: Any) -> str:
    if is_jaxtyped(option):
        return spec_of_jaxtyped(option).text
    return getattr(option, "__name__", repr(option)) if not isinstance(option, TensorKind) else repr(option)
