"""Guards in words, as Dynamo shows them to a filter."""

import dataclasses
import reprlib
from collections.abc import Iterable
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

import torch

from torchguard._torch.guards import guard_sources

_LINES_A_TYPE = 10


@runtime_checkable
class Entry(Protocol):
    """One guard, as Dynamo shows it to a filter."""

    @property
    def name(self) -> str: ...
    @property
    def has_value(self) -> bool: ...
    @property
    def value(self) -> object: ...
    @property
    def guard_type(self) -> str: ...
    @property
    def derived_guard_types(self) -> tuple[str, ...]: ...
    @property
    def is_global(self) -> bool: ...
    @property
    def orig_guard(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class GuardInfo:
    """One guard in words. `sources` are the kinds of `from_source`; `value` is empty where there is none."""

    name: str
    type: str
    sources: tuple[str, ...]
    value: str

    def __str__(self) -> str:
        value = f" = {self.value}" if self.value else ""
        return f"{self.name or '(no name)'}{value} [{', '.join(self.sources)}]"


def describe(entry: Entry) -> GuardInfo:
    """A guard in words, as Dynamo shows it to a filter."""
    value = one_line(entry.value) if entry.has_value else ""
    return GuardInfo(entry.name, entry.guard_type, guard_sources(entry.orig_guard), value)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a filter makes of some guards. Its text has the counts first, then the guards, type by type."""

    filter: str
    kept: tuple[GuardInfo, ...]
    dropped: tuple[GuardInfo, ...]

    def __str__(self) -> str:
        total = len(self.kept) + len(self.dropped)
        head = f"{self.filter} keeps {len(self.kept)} of {total} guards and drops {len(self.dropped)}."
        return "\n".join([head, *_section("dropped", self.dropped), *_section("kept", self.kept)])


def _section(title: str, guards: tuple[GuardInfo, ...]) -> Iterable[str]:
    def type_of(guard: GuardInfo) -> str:
        return guard.type

    if guards:
        yield f"{title}:"
    for type, group in groupby(sorted(guards, key=type_of), key=type_of):
        lines = [str(guard) for guard in group]
        yield f"  {type} ({len(lines)})"
        yield from (f"    {line}" for line in lines[:_LINES_A_TYPE])
        if len(lines) > _LINES_A_TYPE:
            yield f"    ... and {len(lines) - _LINES_A_TYPE} more"


class _OneLine(reprlib.Repr):
    """Short texts that never print a tensor's values, which may be on a device, nor a whole module."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxother, self.maxstring = 2, 3, 60, 60

    def repr1(self, x: Any, level: int) -> str:
        if isinstance(x, torch.Tensor):
            return f"{type(x).__name__}({str(x.dtype).removeprefix('torch.')}, {tuple(x.shape)}, {x.device})"
        if isinstance(x, torch.nn.Module):
            return f"{type(x).__name__}(...)"
        return self.repr_dict(x, level) if isinstance(x, dict) else super().repr1(x, level)


def one_line(value: object) -> str:
    """A value in a line."""
    return " ".join(_OneLine().repr(value).split())
