"""The tensor annotations of a function, and validation of its calls against them."""

import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any, NamedTuple

from torchguard._channel.config import get_config
from torchguard.exceptions import AnnotationError, ValidationWarning
from torchguard.typing._containers import Node, specs_in
from torchguard.typing._dims import Formula, Named, OfSelf
from torchguard.typing._hints import Unresolved, resolve
from torchguard.typing._message import error_of
from torchguard.typing._reader import Reader
from torchguard.typing._scope import Scope

_NO_ARGUMENTS: dict[str, Any] = {}
_OUT_OF_REACH = sys.maxsize  # the position of a keyword-only parameter
_COLLECTING = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


class Declared(NamedTuple):
    """A parameter whose annotation declares tensors, with the name and position by which it can be passed."""

    name: str
    key: str | None
    position: int
    node: Node
    may_be_none: bool


class Terms(NamedTuple):
    """The annotations of a signature, as nodes."""

    plain: tuple[Declared, ...]
    collecting: tuple[tuple[Parameter, int, Node], ...]
    returned: Node | None
    unresolved: Mapping[str, Unresolved]
    is_deferred: bool
    reads_arguments: bool

    @property
    def say_something(self) -> bool:
        return bool(self.plain or self.collecting or self.returned or self.unresolved)


class Contract:
    """The tensors that a function declares in its parameters and in its return annotation.

    Args:
        local: names of the defining scope, to resolve annotations that are strings.
    """

    def __init__(self, function: Callable[..., Any], local: Mapping[str, Any]) -> None:
        self.function, self.name = function, function.__qualname__
        self.parameters = tuple(inspect.signature(function).parameters.values())
        self._globals, self._local = inspect.unwrap(function).__globals__, local
        self._lock = threading.Lock()
        self.terms = self._read()

    def complete(self, strictly: bool = True) -> Terms:
        """Resolve string annotations that name later definitions: at the first call, when they must exist."""
        with self._lock:
            terms = self._read() if self.terms.unresolved else self.terms
            if strictly:
                for name, hint in terms.unresolved.items():
                    message = f"{self.name}: {name}: {hint}"
                    if hint.declares_a_tensor or get_config().strict_validation:
                        raise AnnotationError(message)
                    warnings.warn(f"{message} It is not validated.", ValidationWarning, stacklevel=4)
                self.terms = terms = terms._replace(unresolved={})
            return terms

    def check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scope:
        """Raise if an argument violates its annotation; return the scope for `check_return`."""
        terms = self.terms
        arguments = self._by_name(args, kwargs) if terms.reads_arguments else _NO_ARGUMENTS
        scope = Scope(self.name, args[0] if args else self._first_of(kwargs), arguments)
        given = len(args)
        for name, key, position, node, may_be_none in terms.plain:
            if position < given:
                value = args[position]
            elif key in kwargs:
                value = kwargs[key]
            else:
                continue
            if value is not None or not may_be_none:
                node.check(value, scope, name)
        for parameter, position, node in terms.collecting:
            for path, value in self._collected(parameter, position, args, kwargs):
                node.check(value, scope, path)
        if terms.is_deferred:
            scope.check_deferred()
        if scope.findings:
            raise error_of(scope)
        return scope

    def check_return(self, value: Any, scope: Scope) -> None:
        """Raise if the returned value violates its annotation, given the arguments."""
        terms = self.terms
        if terms.returned is None:
            return
        scope.returning = True
        checked = len(scope.checked)
        terms.returned.check(value, scope, "return")
        if terms.is_deferred:
            scope.check_deferred(checked)
        if scope.findings:
            raise error_of(scope)

    def _collected(
        self, parameter: Parameter, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[str, Any]]:
        """The values that `*args` or `**kwargs` collects, each with its path."""
        if parameter.kind is Parameter.VAR_POSITIONAL:
            return [(f"{parameter.name}[{i}]", value) for i, value in enumerate(args[position:])]
        named = {p.name for p in self.parameters if p.kind is not Parameter.POSITIONAL_ONLY}
        return [(key, value) for key, value in kwargs.items() if key not in named]

    def _first_of(self, kwargs: dict[str, Any]) -> Any:
        return kwargs.get(self.parameters[0].name) if self.parameters else None

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        defaults = {p.name: p.default for p in self.parameters if p.default is not Parameter.empty}
        return defaults | dict(zip((p.name for p in self.parameters), args, strict=False)) | kwargs

    def _read(self) -> Terms:
        annotations = {p.name: p.annotation for p in self.parameters if p.annotation is not Parameter.empty}
        if "return" in self.function.__annotations__:
            annotations["return"] = self.function.__annotations__["return"]
        nodes: dict[str, Node] = {}
        unresolved: dict[str, Unresolved] = {}
        for name, annotation in annotations.items():
            try:
                hint = resolve(annotation, self._globals, self._local)
                if isinstance(hint, Unresolved):
                    unresolved[name] = hint
                elif (node := Reader(self._local).read(hint)) is not None:
                    nodes[name] = node
            except AnnotationError as error:
                raise AnnotationError(f"{self.name}: {name}: {error}") from None
        self._require_sense(nodes, bool(unresolved))
        plain, collecting = [], []
        for position, parameter in enumerate(self.parameters):
            name, kind, node = parameter.name, parameter.kind, nodes.get(parameter.name)
            if node is None:
                continue
            if kind in _COLLECTING:
                collecting.append((parameter, position, node))
                continue
            key = None if kind is Parameter.POSITIONAL_ONLY else name
            reach = _OUT_OF_REACH if kind is Parameter.KEYWORD_ONLY else position
            # `mask: Tensor[...] = None` is a common way to write an optional argument.
            plain.append(Declared(name, key, reach, node, parameter.default is None))
        dims = [dim for node in nodes.values() for spec in specs_in(node) for dim in spec.plain_dims]
        return Terms(
            tuple(plain),
            tuple(collecting),
            nodes.get("return"),
            unresolved,
            is_deferred=any(dim.deferred for dim in dims),
            reads_arguments=any(isinstance(dim, Formula) for dim in dims),
        )

    def _require_sense(self, nodes: Mapping[str, Node], is_partial: bool) -> None:
        """Raise for dims that can never be computed: they read `self` without one, or names that no dim binds."""
        dims = [(path, spec, dim) for path, node in nodes.items() for spec in specs_in(node) for dim in spec.plain_dims]
        bound = {dim.name for _, _, dim in dims if isinstance(dim, Named)}
        has_owner = bool(self.parameters) and self.parameters[0].name not in nodes
        for path, spec, dim in dims:
            if isinstance(dim, OfSelf) and not has_owner:
                raise AnnotationError(
                    f"{self.name}: {path}: {spec.text}: {dim.text} is read off the first parameter, "
                    "which has to be self or another object that has it. Use a name or a size instead."
                )
            if isinstance(dim, Formula) and (loose := dim.names - bound) and not is_partial:
                raise AnnotationError(
                    f"{self.name}: {path}: {spec.text}: nothing binds {', '.join(sorted(loose))} in {dim.text!r}. "
                    "Declare a dim of that name."
                )
