"""Reports as JSON: dataclasses to plain data and back, checked against their annotations, which are the schema."""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from torchguard.exceptions import ReportError

# Raised when a key changes its meaning or is removed; new keys and kinds of blocks do not raise it.
SCHEMA = 1
MARKER = "torchguard report"
_DEEPEST = 200  # frames of a flame graph in frames


def to_data(value: Any) -> Any:
    """A dataclass as JSON data. Numbers that are not finite become text, which JSON has no numbers for."""
    if dataclasses.is_dataclass(value):
        kind = getattr(value, "kind", None)
        own = {} if kind is None else {"kind": kind}
        return {**own, **{one.name: to_data(getattr(value, one.name)) for one in dataclasses.fields(value)}}
    if isinstance(value, (tuple, list)):
        return [to_data(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"
    return value


class Reader:
    """Reads JSON data as dataclasses. `kinds` are the blocks by the name of their kind."""

    def __init__(self, kinds: Mapping[str, type]) -> None:
        self._kinds = kinds

    def read(self, data: Any, hint: Any, at: str, depth: int = 0) -> Any:
        """The value of a type. Raises ReportError with its path if the data does not fit."""
        if depth > _DEEPEST:
            raise ReportError(f"{at[:80]}... is nested deeper than {_DEEPEST} levels.")
        if dataclasses.is_dataclass(hint):
            return self._record(data, hint, at, depth)
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin is tuple:
            return self._tuple(data, args, at, depth)
        if origin is typing.Literal:
            return data if data in args else self._fail(data, at, f"one of {', '.join(args)}")
        if origin in (types.UnionType, typing.Union):
            if all(dataclasses.is_dataclass(one) for one in args):
                return self._block(data, at, depth)
            return data if _is_any(data, args) else self._fail(data, at, _names(args))
        return data if _is_any(data, (hint,)) else self._fail(data, at, _names((hint,)))

    def _block(self, data: Any, at: str, depth: int) -> Any:
        kind = data.get("kind") if isinstance(data, dict) else None
        if kind not in self._kinds:
            self._fail(kind, f"{at}.kind", f"one of {', '.join(self._kinds)}")
        return self._record(data, self._kinds[str(kind)], at, depth)

    def _record(self, data: Any, cls: Any, at: str, depth: int) -> Any:
        if not isinstance(data, dict):
            self._fail(data, at, "an object")
        hints = _hints(cls)
        values = {}
        for field in dataclasses.fields(cls):
            if field.name in data:
                values[field.name] = self.read(data[field.name], hints[field.name], f"{at}.{field.name}", depth + 1)
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise ReportError(f"{at}.{field.name} is missing.")
        return cls(**values)

    def _tuple(self, data: Any, args: tuple[Any, ...], at: str, depth: int) -> Any:
        if not isinstance(data, list):
            self._fail(data, at, "an array")
        if args[-1] is not Ellipsis and len(args) != len(data):
            self._fail(data, at, f"an array of {len(args)}")
        hints = args[:1] * len(data) if args[-1] is Ellipsis else args
        pairs = enumerate(zip(data, hints, strict=True))
        return tuple(self.read(one, hint, f"{at}[{i}]", depth + 1) for i, (one, hint) in pairs)

    def _fail(self, data: Any, at: str, expected: str) -> Any:
        raise ReportError(f"{at}: expected {expected}, got {data!r:.60}.")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _is_any(data: Any, hints: tuple[Any, ...]) -> bool:
    allowed = {type(None) if one is None else one for one in hints}
    return type(data) in allowed or (type(data) is int and float in allowed)


def _names(hints: tuple[Any, ...]) -> str:
    return " or ".join("null" if one in (None, type(None)) else one.__name__ for one in hints)
