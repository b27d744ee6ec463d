"""What a device can do, as a value."""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchguard.device.fields import FIELDS, check_names, like, read
from torchguard.exceptions import DeviceError

if TYPE_CHECKING:
    from torchguard.device.constraints.base import Constraint

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
