"""What a device can do, as a value.

The fields of a device: what each may be, and how it is read from Python, from TOML and from the environment.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchguard._torch import ops
from torchguard.device import _op_patterns
from torchguard.device._taken_codes import TAKEN, first_taken
from torchguard.exceptions import DeviceError

if TYPE_CHECKING:
    from torchguard.device._rules.base import Constraint


LAYOUTS = ("contiguous", "channels_last", "transposed", "broadcast", "strided")
DECOMPOSITIONS = ("none", "core", "inductor")
# What stands for no restriction where there is no None to write: in TOML and in the environment.
ANY = "any"

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"k": 2**10, "m": 2**20, "g": 2**30, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class Field(NamedTuple):
    """How a field is read, and what it may be in words. Reading raises ValueError, with or without a detail."""

    read: Callable[[Any], Any]
    allowed: str


def read(name: str, value: object, where: str) -> Any:
    """The value of a field as a device keeps it. `where` says who gave it."""
    field = FIELDS[name]
    try:
        return field.read(value)
    except ValueError as error:
        detail = f" {error}" if error.args else ""
        raise DeviceError(f"{where}: {value!r} is not allowed.{detail} Use {field.allowed}.") from None


def check_names(names: Iterable[str], known: Iterable[str], where: str) -> None:
    """Refuse the names that are not known, with what they may have been meant to be."""
    known = list(known)
    for name in names:
        if name not in known:
            raise DeviceError(f"{where}: there is no {name!r}.{like(name, known)} Known are {', '.join(known)}.")


def like(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def read_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).strip().lower() not in _WORDS:
        raise ValueError
    return _WORDS[str(value).strip().lower()]


def _read_name(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value


def _optional(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """None, and the word for it, mean no restriction."""
    return lambda value: None if value is None or value == ANY else read(value)


def _items(value: object) -> list[Any]:
    """What a list holds, or a text with commas, or a single thing."""
    if isinstance(value, str):
        return [item.strip() for item in value.split(",") if item.strip()]
    return list(value) if isinstance(value, (list, tuple, set, frozenset)) else [value]


def _read_whole(value: object) -> int:
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError
    return value


def _read_dtypes(value: object) -> tuple[torch.dtype, ...]:
    found = []
    for item in _items(value):
        dtype = getattr(torch, item.removeprefix("torch."), None) if isinstance(item, str) else item
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{item!r} is no dtype.")
        found.append(dtype)
    return tuple(dict.fromkeys(found))


def _read_layouts(value: object) -> tuple[str, ...]:
    for item in _items(value):
        if item not in LAYOUTS:
            raise ValueError(f"{item!r} is no layout.{like(str(item), LAYOUTS)}")
    return tuple(_items(value))


def _read_by_dim(value: object) -> tuple[tuple[int, int], ...]:
    """Pairs of a dim and a number, from a mapping, from pairs, or from text such as `-1:16,-2:8`."""
    if isinstance(value, Mapping):
        value = tuple(value.items())
    pairs = [item.split(":") if isinstance(item, str) else item for item in _items(value)]
    if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
        raise ValueError
    return tuple((_read_dim(dim), _read_whole(number)) for dim, number in pairs)


def _read_dim(value: object) -> int:
    if isinstance(value, str) and value.strip().removeprefix("-").isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{value!r} is no dim.")
    return value


def _read_alignment(value: object) -> tuple[tuple[int, int], ...]:
    """A number alone is for the innermost dim."""
    if isinstance(value, int) or (isinstance(value, str) and ":" not in value):
        return ((-1, _read_whole(value)),)
    return _read_by_dim(value)


def _read_largest(value: object) -> int | tuple[tuple[int, int], ...]:
    """A number alone is for every dim."""
    if isinstance(value, int) or (isinstance(value, str) and ":" not in value):
        return _read_whole(value)
    return _read_by_dim(value)


def _read_bytes(value: object) -> int:
    if not isinstance(value, str):
        return _read_whole(value)
    match = _SIZE.fullmatch(value.strip().lower())
    if match is None or match[2] not in _UNITS or not float(match[1]):
        raise ValueError
    return int(match[1]) * _UNITS[match[2]] if match[1].isdecimal() else int(float(match[1]) * _UNITS[match[2]])


def _read_ops(value: object) -> tuple[str, ...]:
    patterns = tuple(_normal(item) for item in _items(value))
    for pattern in patterns:
        if pattern.startswith("aten.") and not ops.matches_an_op(pattern):
            names = {name.rpartition(".")[0] if pattern.count(".") == 1 else name for name in ops.op_names()}
            raise ValueError(f"No op is called {pattern!r}.{like(pattern, names)}")
    return patterns


def _read_ops_of_graphs(value: object) -> tuple[str, ...]:
    """Ops that can be found: a name that no graph ever holds would be a rule that never fires."""
    patterns = _read_ops(value)
    for pattern in patterns:
        if pattern.startswith("aten.") and not _op_patterns.reaches_graphs(pattern):
            others = _op_patterns.similar_in_graphs(pattern)[:5]
            instead = f", which may hold {', '.join(others)}" if others else ""
            raise ValueError(f"{pattern!r} is taken apart before there is a graph{instead}. Name what it is made of.")
    return patterns


def _read_denied(value: object) -> tuple[str, ...]:
    """No restriction is to deny nothing."""
    return _optional(_read_ops_of_graphs)(value) or ()


def _normal(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise ValueError(f"{name!r} is no name of an op.")
    name = name.removeprefix("torch.ops.").replace("::", ".")
    return name if "." in name else f"aten.{name}"


def _read_decompositions(value: object) -> str | tuple[str, ...]:
    return str(value) if value in DECOMPOSITIONS else _read_ops(value)


def _read_constraints(value: object) -> tuple[Any, ...]:
    items = _items(value)
    if not all(hasattr(item, "check") and hasattr(item, "code") and not isinstance(item, type) for item in items):
        raise ValueError
    if (code := first_taken([item.code for item in items])) is not None:
        raise ValueError(f"The code {code} is taken{f' by {TAKEN[code]}' if code in TAKEN else ''}. Choose another.")
    return tuple(items)


_DTYPES = Field(_optional(_read_dtypes), f"names of dtypes such as ['float32', 'bfloat16'], or {ANY!r}")
_OPS = "names of ops such as 'aten.gelu', 'aten.add.Tensor' or 'aten.*softmax*'"

FIELDS: dict[str, Field] = {
    "name": Field(_read_name, "a name"),
    "parameters": _DTYPES,
    "activations": _DTYPES,
    "indices": _DTYPES,
    "accumulators": _DTYPES,
    "layouts": Field(_optional(_read_layouts), f"some of {', '.join(LAYOUTS)}, or {ANY!r}"),
    "alignment": Field(
        _optional(_read_alignment),
        f"a whole number from 1 on for the innermost dim, one for each dim such as {{-1: 16, -2: 8}}, or {ANY!r}",
    ),
    "max_memory": Field(_optional(_read_bytes), f"a number of bytes, a text such as '16GiB', or {ANY!r}"),
    "deny": Field(_read_denied, f"{_OPS}, or {ANY!r}"),
    "allow": Field(_optional(_read_ops_of_graphs), f"{_OPS}, or {ANY!r}"),
    "max_rank": Field(_optional(_read_whole), f"a whole number from 1 on, or {ANY!r}"),
    "max_dim": Field(
        _optional(_read_largest),
        f"a whole number from 1 on for every dim, one for each dim such as {{0: 64}}, or {ANY!r}",
    ),
    "dynamic_shapes": Field(read_bool, "true or false"),
    "decompositions": Field(
        _read_decompositions, f"one of {', '.join(DECOMPOSITIONS)}, or the {_OPS} to be decomposed"
    ),
    "constraints": Field(_read_constraints, "instances of Constraint"),
}


PREFIX = "MOCK_"
# What is no field of a device, and set by the environment too.
DEVICE, STRICT, RUN = f"{PREFIX}DEVICE", f"{PREFIX}STRICT", f"{PREFIX}RUN"
_VARIABLES = {f"{PREFIX}{name.upper()}": name for name in FIELDS if name != "constraints"}
_EXAMPLES = Path(__file__).parent / "examples"
_NO_DOUBLE = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Device:
    """A target that graphs are checked against. None means that anything goes; the default refuses float64 alone.

    Every field may be given as text too, as in TOML and in the environment: `max_memory="16GiB"`.

    Attributes:
        parameters, activations: dtypes of floating point parameters and buffers, and of everything computed.
        indices: dtypes of integer tensors, counters of one element aside. Masks of bools are not checked.
        accumulators: dtypes in which a reduction over floating point numbers may add up.
        layouts: how a tensor may lie in memory when an op takes it; matrix products take transposed ones anyway.
        alignment: what sizes have to be multiples of: of the innermost dim, or by dim. Dims of size 1 are exempt.
        max_memory: bytes that tensors may take at any time.
        deny, allow: ops by name or glob; what is denied is not allowed.
        max_rank, max_dim: the most dims, and the largest size: of every dim, or by dim.
        dynamic_shapes: whether sizes may be symbols.
        decompositions: what is taken apart before it is checked: nothing, what core ATen or Inductor take apart, or
            these ops. What runs is another matter.
        constraints: rules for this device alone.
    """

    name: str = "mock"
    parameters: tuple[torch.dtype, ...] | Any = _NO_DOUBLE
    activations: tuple[torch.dtype, ...] | Any = _NO_DOUBLE
    indices: tuple[torch.dtype, ...] | Any = None
    accumulators: tuple[torch.dtype, ...] | Any = None
    layouts: tuple[str, ...] | Any = None
    alignment: tuple[tuple[int, int], ...] | Any = None
    max_memory: int | Any = None
    deny: tuple[str, ...] | Any = ()
    allow: tuple[str, ...] | Any = None
    max_rank: int | Any = None
    max_dim: int | tuple[tuple[int, int], ...] | Any = None
    dynamic_shapes: bool | Any = True
    decompositions: str | tuple[str, ...] = "none"
    constraints: "tuple[Constraint, ...]" = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            value = read(field.name, getattr(self, field.name), f"Device.{field.name}")
            object.__setattr__(self, field.name, value)

    @classmethod
    def from_toml(
        cls, path: str | os.PathLike[str], *, environment: Mapping[str, str] | None = None, **overrides: Any
    ) -> "Device":
        """What Python says, else what the file says, else what the environment says.

        Args:
            path: a file, or the name of one of `examples()`.
            environment: what to use instead of `os.environ`.
        """
        given = {**_from_variables(_environment(environment)), **_from_file(_file_at(path))}
        return cls._merged(given, overrides)

    @classmethod
    def from_environment(cls, *, environment: Mapping[str, str] | None = None, **overrides: Any) -> "Device":
        """What Python says, else what the file at `MOCK_DEVICE` says, else what `MOCK_ALIGNMENT` and its like say."""
        variables = _environment(environment)
        path = variables.get(DEVICE)
        given = {**_from_variables(variables), **(_from_file(_file_at(path)) if path else {})}
        return cls._merged(given, overrides)

    @classmethod
    def _merged(cls, given: dict[str, Any], overrides: dict[str, Any]) -> "Device":
        check_names(overrides, FIELDS, "Device")
        return cls(**{**given, **overrides})

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them; rules of its own by their codes."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        for role in ("parameters", "activations", "indices", "accumulators"):
            plain[role] = plain[role] and [str(dtype).removeprefix("torch.") for dtype in plain[role]]
        return {**plain, "constraints": [rule.code for rule in self.constraints]}


def examples() -> dict[str, Device]:
    """Devices that come with torchguard, to try things with: none describes a product."""
    return {path.stem: Device(**_from_file(path)) for path in sorted(_EXAMPLES.glob("*.toml"))}


def _file_at(path: str | os.PathLike[str]) -> Path:
    found = next((p for p in (Path(path), _EXAMPLES / f"{path}.toml") if p.is_file()), None)
    if found is None:
        names = sorted(p.stem for p in _EXAMPLES.glob("*.toml"))
        raise DeviceError(f"Device: no file at {str(path)!r}, nor is it one of the examples: {', '.join(names)}.")
    return found


def _from_file(path: Path) -> dict[str, Any]:
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DeviceError(f"Device: {path} is not TOML: {error}.") from None
    check_names(given, [name for name in FIELDS if name != "constraints"], str(path))
    return {"name": path.stem, **{name: read(name, value, f"{name} in {path}") for name, value in given.items()}}


def _environment(given: Mapping[str, str] | None) -> dict[str, str]:
    """The variables that are ours, those set to nothing aside."""
    ours = {name: value for name, value in (os.environ if given is None else given).items() if name.startswith(PREFIX)}
    known = [*_VARIABLES, DEVICE, STRICT, RUN]
    for name in ours:
        # Others have names that start like this as well, so only what looks like a slip is one.
        if name not in known and (hint := like(name, known)):
            raise DeviceError(f"{name}: there is no such setting.{hint}")
    return {name: value for name, value in ours.items() if value.strip()}


def _from_variables(variables: Mapping[str, str]) -> dict[str, Any]:
    return {
        field: read(field, variables[variable], variable)
        for variable, field in _VARIABLES.items()
        if variable in variables
    }
