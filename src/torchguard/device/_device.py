"""A device: what each field may hold, and how it is read from Python, from TOML and from environment variables.

`FIELDS` has one reader for each field. A reader takes a Python value, a TOML value or the text of a variable, and
returns the value that `Device` stores; it raises ValueError for anything else, with or without a detail. Readers are
composed: `_optional(_list_of(_read_dtype))`.
"""

import difflib
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchguard._sizes import parse_size
from torchguard._torch import ops
from torchguard.device import _op_patterns
from torchguard.device._rules.base import Constraint
from torchguard.device._rules.registry import code_conflict
from torchguard.exceptions import DeviceError

LAYOUTS = ("contiguous", "channels_last", "transposed", "broadcast", "strided")
DECOMPOSITIONS = ("none", "core", "inductor")
# The word for "no restriction" in TOML and in the environment, which have no None.
ANY = "any"

_BOOLS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}

Reader = Callable[[Any], Any]


class Field(NamedTuple):
    """The reader of a field, and a description of the values it accepts, for messages."""

    read: Reader
    allowed: str


def read(name: str, value: object, where: str) -> Any:
    """The value that `Device` stores in a field. `where` names the origin of the value in messages."""
    field = FIELDS[name]
    try:
        return field.read(value)
    except ValueError as error:
        detail = f" {error}" if error.args else ""
        raise DeviceError(f"{where}: {value!r} is not allowed.{detail} Use {field.allowed}.") from None


def check_names(names: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise for the first name that is not known, and suggest a similar one."""
    known = list(known)
    for name in names:
        if name not in known:
            raise DeviceError(f"{where}: unknown name {name!r}.{did_you_mean(name, known)} Use {', '.join(known)}.")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence with the known name that is most similar; empty if none is."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _optional(read: Reader) -> Reader:
    """None and "any" mean no restriction."""
    return lambda value: None if value is None or value == ANY else read(value)


def _list_of(read_item: Reader) -> Reader:
    """A list, text with commas, or a single item; each item once."""
    return lambda value: tuple(dict.fromkeys(map(read_item, _items(value))))


def _items(value: object) -> list[Any]:
    if isinstance(value, str):
        return [item.strip() for item in value.split(",") if item.strip()]
    return list(value) if isinstance(value, (list, tuple, set, frozenset)) else [value]


def read_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).strip().lower() not in _BOOLS:
        raise ValueError
    return _BOOLS[str(value).strip().lower()]


def _read_name(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value


def _read_whole(value: object) -> int:
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError
    return value


def _read_dtype(value: object) -> torch.dtype:
    dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{value!r} is not a dtype.")
    return dtype


def _read_layout(value: object) -> str:
    if value not in LAYOUTS:
        raise ValueError(f"{value!r} is not a layout.{did_you_mean(str(value), LAYOUTS)}")
    return str(value)


def _read_size(value: object) -> int | tuple[tuple[int, int], ...]:
    """A number alone, or a number for each dim: a mapping, pairs, or text such as `-1:16,-2:8`."""
    if isinstance(value, int) or (isinstance(value, str) and ":" not in value):
        return _read_whole(value)
    return _list_of(_read_dim_size)(tuple(value.items()) if isinstance(value, Mapping) else value)


def _read_dim_size(value: object) -> tuple[int, int]:
    pair = value.split(":") if isinstance(value, str) else value
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        raise ValueError
    dim, size = pair
    if isinstance(dim, str) and dim.strip().removeprefix("-").isdecimal():
        dim = int(dim)
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise ValueError(f"{dim!r} is not a dim.")
    return dim, _read_whole(size)


def _read_alignment(value: object) -> tuple[tuple[int, int], ...]:
    """A number alone is for the innermost dim."""
    size = _read_size(value)
    return ((-1, size),) if isinstance(size, int) else size


def _read_bytes(value: object) -> int:
    try:
        return _read_whole(parse_size(value) if isinstance(value, str) else value)
    except ValueError:
        raise ValueError from None  # without a detail: `allowed` says the same


def _read_rate(value: object) -> float:
    rate = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else 0.0
    if not 0 < rate < float("inf"):
        raise ValueError
    return rate


def _read_op(value: object) -> str:
    """A name or glob of ops as `aten.gelu`, from `gelu`, `aten::gelu`, `torch.ops.aten.gelu`, `F.gelu` or `nn.GELU`."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is not the name of an op.")
    patterns = _op_patterns.patterns_as_written(value.strip())
    for pattern in patterns:
        if ops.matches_an_op(pattern):
            return pattern
    pattern = patterns[0]
    namespace = pattern.partition(".")[0]
    if not ops.matches_an_op(f"{namespace}.*"):
        return pattern  # of a library that may be imported later; the check says if it was not
    names = {name.rpartition(".")[0] if pattern.count(".") == 1 else name for name in ops.op_names(namespace)}
    raise ValueError(f"There is no op {pattern!r}.{did_you_mean(pattern, names)}")


def _read_graph_op(value: object) -> str:
    """An op that a graph can contain: a rule about any other op would never find anything."""
    pattern = _read_op(value)
    if pattern.startswith("aten.") and not _op_patterns.matches_graph_ops(pattern):
        if not any(ops.is_traced(name) for name in ops.op_names() if ops.matches(name, pattern)):
            raise ValueError(f"No graph contains {pattern!r}: it returns no tensor, and Dynamo breaks the graph there.")
        similar = _op_patterns.similar_graph_ops(pattern)[:5]
        candidates = f", possibly {', '.join(similar)}" if similar else ""
        raise ValueError(
            f"No graph contains {pattern!r}: AOTAutograd decomposes it first. Name what it decomposes to{candidates}."
        )
    return pattern


def _read_denied(value: object) -> tuple[str, ...]:
    return _optional(_list_of(_read_graph_op))(value) or ()


def _read_decompositions(value: object) -> str | tuple[str, ...]:
    return str(value) if value in DECOMPOSITIONS else _list_of(_read_op)(value)


def _read_constraints(value: object) -> tuple[Constraint, ...]:
    rules = _items(value)
    if not all(isinstance(rule, Constraint) for rule in rules):
        raise ValueError
    if conflict := code_conflict(rules):
        raise ValueError(conflict)
    return tuple(rules)


_DTYPES = Field(_optional(_list_of(_read_dtype)), f"names of dtypes such as ['float32', 'bfloat16'], or {ANY!r}")
_WHOLE = "a whole number of at least 1"
_OPS = "names of ops such as 'aten.gelu', 'aten.add.Tensor' or 'aten.*softmax*'"

FIELDS: dict[str, Field] = {
    "name": Field(_read_name, "a name"),
    "parameters": _DTYPES,
    "activations": _DTYPES,
    "indices": _DTYPES,
    "accumulators": _DTYPES,
    "layouts": Field(_optional(_list_of(_read_layout)), f"some of {', '.join(LAYOUTS)}, or {ANY!r}"),
    "alignment": Field(
        _optional(_read_alignment),
        f"{_WHOLE} for the innermost dim, one for each dim such as {{-1: 16, -2: 8}}, or {ANY!r}",
    ),
    "max_memory": Field(_optional(_read_bytes), f"a number of bytes, a text such as '16GiB', or {ANY!r}"),
    "deny": Field(_read_denied, f"{_OPS}, or {ANY!r}"),
    "allow": Field(_optional(_list_of(_read_graph_op)), f"{_OPS}, or {ANY!r}"),
    "max_rank": Field(_optional(_read_whole), f"{_WHOLE}, or {ANY!r}"),
    "max_dim": Field(_optional(_read_size), f"{_WHOLE} for every dim, one for each dim such as {{0: 64}}, or {ANY!r}"),
    "peak_flops": Field(_optional(_read_rate), f"floating point operations a second such as 200e12, or {ANY!r}"),
    "bandwidth": Field(_optional(_read_rate), f"bytes a second such as 1.2e12, or {ANY!r}"),
    "dynamic_shapes": Field(read_bool, "true or false"),
    "decompositions": Field(_read_decompositions, f"one of {', '.join(DECOMPOSITIONS)}, or the {_OPS} to decompose"),
    "constraints": Field(_read_constraints, "instances of Constraint with codes of their own"),
}

PREFIX = "MOCK_"
# Variables that are not fields of a device.
DEVICE, STRICT, RUN = f"{PREFIX}DEVICE", f"{PREFIX}STRICT", f"{PREFIX}RUN"
_VARIABLES = {f"{PREFIX}{name.upper()}": name for name in FIELDS if name != "constraints"}
_EXAMPLES = Path(__file__).parent / "examples"
_NO_DOUBLE = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Device:
    """A target that graphs are checked against. None means no restriction; by default only float64 is refused.

    Every field also accepts text, as in TOML and in the environment: `max_memory="16GiB"`.

    Attributes:
        parameters: dtypes of floating point parameters and buffers.
        activations: dtypes of all other floating point tensors.
        indices: dtypes of integer tensors, except counters of one element. Boolean masks are not checked.
        accumulators: dtypes in which a floating point reduction may accumulate.
        layouts: memory layouts that ops accept. Matrix products always accept transposed operands.
        alignment: what sizes have to be multiples of: the innermost dim's, or by dim. Dims of size 1 are exempt.
        max_memory: bytes that tensors may take at any time.
        deny, allow: ops by name or glob. `deny` wins over `allow`.
        max_rank: the largest number of dims.
        max_dim: the largest size, of every dim or by dim.
        peak_flops, bandwidth: floating point operations and bytes of memory a second, for the least time of each op.
        dynamic_shapes: whether sizes may be symbols.
        decompositions: what is decomposed before the check: nothing (`none`), what core ATen (`core`) or Inductor
            (`inductor`) decompose, or these ops. What runs is not decomposed.
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
    peak_flops: float | Any = None
    bandwidth: float | Any = None
    dynamic_shapes: bool | Any = True
    decompositions: str | tuple[str, ...] = "none"
    constraints: tuple[Constraint, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            value = read(field.name, getattr(self, field.name), f"Device.{field.name}")
            object.__setattr__(self, field.name, value)

    @classmethod
    def from_toml(
        cls, path: str | os.PathLike[str], *, environment: Mapping[str, str] | None = None, **overrides: Any
    ) -> "Device":
        """A device from a TOML file. `overrides` win over the file, and the file over the environment.

        Args:
            path: a file, or the name of one of `examples()`.
            environment: what to read instead of `os.environ`.
        """
        settings = {**_from_variables(_environment(environment)), **_from_file(_file_at(path))}
        return cls._merged(settings, overrides)

    @classmethod
    def from_environment(cls, *, environment: Mapping[str, str] | None = None, **overrides: Any) -> "Device":
        """A device from variables such as `MOCK_ALIGNMENT`.

        `overrides` win over the file that `MOCK_DEVICE` names, and the file over the other variables.
        """
        variables = _environment(environment)
        path = variables.get(DEVICE)
        settings = {**_from_variables(variables), **(_from_file(_file_at(path)) if path else {})}
        return cls._merged(settings, overrides)

    @classmethod
    def _merged(cls, settings: dict[str, Any], overrides: dict[str, Any]) -> "Device":
        check_names(overrides, FIELDS, "Device")
        return cls(**{**settings, **overrides})

    def to_dict(self) -> dict[str, Any]:
        """The fields as values for JSON; the device's own rules by their codes."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        for role in ("parameters", "activations", "indices", "accumulators"):
            plain[role] = plain[role] and [str(dtype).removeprefix("torch.") for dtype in plain[role]]
        return {**plain, "constraints": [rule.code for rule in self.constraints]}


def examples() -> dict[str, Device]:
    """Illustrative devices that come with torchguard. None describes a product."""
    return {path.stem: Device(**_from_file(path)) for path in sorted(_EXAMPLES.glob("*.toml"))}


def _file_at(path: str | os.PathLike[str]) -> Path:
    found = next((p for p in (Path(path), _EXAMPLES / f"{path}.toml") if p.is_file()), None)
    if found is None:
        names = sorted(p.stem for p in _EXAMPLES.glob("*.toml"))
        raise DeviceError(
            f"Device: there is no file {str(path)!r}. Use the path of a TOML file, or one of the examples: "
            f"{', '.join(names)}."
        )
    return found


def _from_file(path: Path) -> dict[str, Any]:
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DeviceError(f"Device: {path} is not TOML: {error}.") from None
    check_names(settings, [name for name in FIELDS if name != "constraints"], str(path))
    return {"name": path.stem, **{name: read(name, value, f"{name} in {path}") for name, value in settings.items()}}


def _environment(given: Mapping[str, str] | None) -> dict[str, str]:
    """The variables with the prefix, without those that are empty."""
    environment = os.environ if given is None else given
    prefixed = {name: value for name, value in environment.items() if name.startswith(PREFIX)}
    known = [*_VARIABLES, DEVICE, STRICT, RUN]
    for name in prefixed:
        # Other programs use the prefix too, so a name is an error only if it looks like a misspelt one.
        if name not in known and (suggestion := did_you_mean(name, known)):
            raise DeviceError(f"{name}: unknown setting.{suggestion}")
    return {name: value for name, value in prefixed.items() if value.strip()}


def _from_variables(variables: Mapping[str, str]) -> dict[str, Any]:
    return {
        field: read(field, variables[variable], variable)
        for variable, field in _VARIABLES.items()
        if variable in variables
    }
