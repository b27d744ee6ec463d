"""What the signature of a function says about tensors, and whether a call keeps to it."""

import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any, NamedTuple

from torchguard.errors.config import get_config
from torchguard.exceptions import AnnotationError, ValidationWarning
from torchguard.typing.dims import Formula, Named, OfSelf
from torchguard.typing.hints import Unresolved, resolve
from torchguard.typing.message import error_of
from torchguard.typing.scope import Scope
from torchguard.typing.structure import Node, node_of, specs_in

_NO_ARGUMENTS: dict[str, Any] = {}
_OUT_OF_REACH = sys.maxsize  # the position of what can only be given by name


class Declared(NamedTuple):
    """A parameter under which tensors are declared: by which name and at which position it is given, if it can be."""

    name: str
    key: str | None
    position: int
    node: Node
    may_be_none: bool


class Contract:
    """The tensors a function declares, in its parameters and in what it returns.

    Args:
        local: names at the place of definition, for annotations that are text.
    """

    def __init__(self, function: Callable[..., Any], local: Mapping[str, Any]) -> None:
        self.function, self.name = function, function.__qualname__
        self.parameters = tuple(inspect.signature(function).parameters.values())
        self._globals, self._local = inspect.unwrap(function).__globals__, local
        self._read()
        if not self.unresolved:
            self._local = {}  # they would keep alive what the place of definition held

    @property
    def declares_anything(self) -> bool:
        return bool(self._plain or self._collecting or self.returned or self.unresolved)

    def complete(self) -> None:
        """Text may name what is defined later: it is read again at the first call, and has to make sense then."""
        self._read()
        for name, hint in self.unresolved.items():
            told = f"{self.name}: {name}: {hint}"
            if hint.declares_a_tensor or get_config().strict_validation:
                raise AnnotationError(told)
            warnings.warn(f"{told} It is not validated.", ValidationWarning, stacklevel=4)
        self.unresolved, self._local = {}, {}

    def check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scope:
        """Raise if an argument does not fit; the scope is for `check_return`."""
        arguments = self._by_name(args, kwargs) if self._reads_arguments else _NO_ARGUMENTS
        scope = Scope(self.name, args[0] if args else None, arguments)
        given = len(args)
        for name, key, position, node, may_be_none in self._plain:
            if position < given:
                value = args[position]
            elif key in kwargs:
                value = kwargs[key]
            else:
                continue
            if value is not None or not may_be_none:
                node.check(value, scope, name)
        for name, kind, position, node in self._collecting:
            for path, value in self._collected(name, kind, position, args, kwargs):
                node.check(value, scope, path)
        if self._is_late:
            scope.settle()
        if scope.findings:
            raise error_of(scope)
        return scope

    def check_return(self, value: Any, scope: Scope) -> None:
        """Raise if what is returned does not fit, given what the arguments were."""
        if self.returned is None:
            return
        scope.returning = True
        seen = len(scope.seen)
        self.returned.check(value, scope, "return")
        if self._is_late:
            scope.settle(seen)
        if scope.findings:
            raise error_of(scope)

    def _collected(
        self, name: str, kind: Any, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[str, Any]]:
        """What `*args` or `**kwargs` collects, each with its path."""
        if kind is Parameter.VAR_POSITIONAL:
            return [(f"{name}[{i}]", value) for i, value in enumerate(args[position:])]
        named = {p.name for p in self.parameters if p.kind is not Parameter.POSITIONAL_ONLY}
        return [(key, value) for key, value in kwargs.items() if key not in named]

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        defaults = {p.name: p.default for p in self.parameters if p.default is not Parameter.empty}
        return defaults | dict(zip((p.name for p in self.parameters), args, strict=False)) | kwargs

    def _read(self) -> None:
        annotations = {p.name: p.annotation for p in self.parameters if p.annotation is not Parameter.empty}
        if "return" in self.function.__annotations__:
            annotations["return"] = self.function.__annotations__["return"]
        nodes: dict[str, Node | None] = {}
        self.unresolved: dict[str, Unresolved] = {}
        for name, annotation in annotations.items():
            try:
                hint = resolve(annotation, self._globals, self._local)
                if isinstance(hint, Unresolved):
                    self.unresolved[name] = hint
                else:
                    nodes[name] = node_of(hint)
            except AnnotationError as error:
                raise AnnotationError(f"{self.name}: {name}: {error}") from None
        self.returned = nodes.get("return")
        self._plain: list[Declared] = []
        self._collecting: list[tuple[str, Any, int, Node]] = []
        for position, (name, kind, default) in enumerate((p.name, p.kind, p.default) for p in self.parameters):
            node = nodes.get(name)
            if node is None:
                continue
            if kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
                self._collecting.append((name, kind, position, node))
                continue
            key = None if kind is Parameter.POSITIONAL_ONLY else name
            reach = _OUT_OF_REACH if kind is Parameter.KEYWORD_ONLY else position
            # `mask: Tensor[...] = None` is how many write an optional argument.
            self._plain.append(Declared(name, key, reach, node, default is None))
        self._require_sense(nodes)

    def _require_sense(self, nodes: Mapping[str, Node | None]) -> None:
        """Dims have to be readable: off `self`, and from names that some dim binds."""
        dims = [(path, spec, dim) for path, node in nodes.items() for spec in specs_in(node) for dim in spec.plain_dims]
        bound = {dim.name for _, _, dim in dims if isinstance(dim, Named)}
        has_owner = bool(self.parameters) and nodes.get(self.parameters[0].name) is None
        for path, spec, dim in dims:
            if isinstance(dim, OfSelf) and not has_owner:
                raise AnnotationError(
                    f"{self.name}: {path}: {spec.text}: {dim.text} is read off the first parameter, "
                    "which has to be self or another object that has it. Use a name or a size instead."
                )
            if isinstance(dim, Formula) and (loose := dim.names - bound) and not self.unresolved:
                raise AnnotationError(
                    f"{self.name}: {path}: {spec.text}: nothing binds {', '.join(sorted(loose))} in {dim.text!r}. "
                    "Declare a dim of that name."
                )
        self._is_late = any(dim.late for _, _, dim in dims)
        self._reads_arguments = any(isinstance(dim, Formula) for _, _, dim in dims)
