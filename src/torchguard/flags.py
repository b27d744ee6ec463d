"""The namespace `flags`: the content of a flags tensor as Python values, outside of compiled regions.

Each call copies the flags from device to host once, and loops over errors, never over slots. Several functions take a
`config`, as they do in 1.x: they read the first `config.num_slots` slots, and raise if the flags have another width.
Flags contain all else that is needed to read them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchguard._channel.codes import ErrorCode, Severity
from torchguard._channel.config import ErrorConfig
from torchguard._channel.packing import Flags, readable
from torchguard._channel.packing import unpack as flags_to_slots
from torchguard._channel.record import merge
from torchguard._channel.slot_bits import (
    CODE_BITS,
    CODE_MASK,
    CODE_SHIFT,
    SLOT_MASK,
    slot_code,
    slot_location,
    slot_severity,
)
from torchguard._channel.validate import require_flags, require_intact
from torchguard._renamed import renamed
from torchguard.exceptions import CorruptFlagsError, SampleIndexError, TracingError
from torchguard.locations._registry import names_of

__all__ = [
    "CorruptFlagsError",
    "ErrorFlags",
    "SampleIndexError",
    "TracingError",
    "UnpackedError",
    "repr",
    "summary",
    "unpack",
    "unpack_all",
]

_MAX_ENTRIES = 12


class UnpackedError(NamedTuple):
    """One error of one sample."""

    severity: int
    code: int
    location: int
    severity_name: str
    code_name: str
    location_name: str

    def __str__(self) -> str:
        return f"{self.severity_name}: {self.code_name} @ {self.location_name}"


@renamed(flags="f", flags_tensor="f")
def unpack(f: Flags, sample_idx: int = 0, config: ErrorConfig | None = None) -> list[UnpackedError]:
    """The errors of one sample, slot 0 first.

    >>> f = err.from_code(err.NAN, ErrorLocation.register("encoder"), n=1)
    >>> [str(error) for error in flags.unpack(f)]
    ['CRITICAL: NAN @ encoder']
    """
    _require_boundary("unpack", f, "err.get_first_code(f) or err.has_code(f, code)")
    count = f.shape[0]
    if not -count <= sample_idx < count:
        raise SampleIndexError(f"flags.unpack: sample_idx is {sample_idx} but flags hold {count} samples.")
    row = sample_idx % count
    return _unpacked("flags.unpack", f[row : row + 1], config)[0]


@renamed(flags="f", flags_tensor="f")
def unpack_all(f: Flags, config: ErrorConfig | None = None) -> list[list[UnpackedError]]:
    """The errors of every sample."""
    _require_boundary("unpack_all", f, "err.is_err(f) or err.has_code(f, code)")
    return _unpacked("flags.unpack_all", f, config)


@renamed(flags="f", flags_tensor="f")
def summary(f: Flags, config: ErrorConfig | None = None) -> dict[str, dict[str, int]]:
    """Count samples by location and code: `{location: {code: count}}`.

    >>> flags.summary(err.from_code(err.INF, ErrorLocation.register("head"), n=3))
    {'head': {'INF': 3}}
    """
    _require_boundary("summary", f, "err.has_code(f, code)")
    found: dict[str, dict[str, int]] = {}
    for location, code, count in _counted("flags.summary", f, config):
        codes = found.setdefault(location, {})
        codes[code] = codes.get(code, 0) + count
    return found


@renamed(flags="f", flags_tensor="f")
def repr(f: Flags, config: ErrorConfig | None = None) -> str:
    """One line: the number of samples, and errors by code and location.

    >>> flags.repr(err.new_t(32))
    'ErrorFlags(32 samples, no errors)'
    """
    _require_boundary("repr", f, "nothing: print at the Python boundary")
    counted = sorted(_counted("flags.repr", f, config), key=lambda entry: -entry[2])
    if not counted:
        return f"ErrorFlags({f.shape[0]} samples, no errors)"
    total = sum(count for _, _, count in counted)
    shown = [f"{count}x{code} @ {location}" for location, code, count in counted[:_MAX_ENTRIES]]
    if len(counted) > len(shown):
        shown.append(f"and {len(counted) - len(shown)} more")
    return f"ErrorFlags({f.shape[0]} samples, {total} errors: {', '.join(shown)})"


class ErrorFlags:
    """The functions of this namespace as static methods, and some of 1.x."""

    unpack = staticmethod(unpack)
    unpack_all = staticmethod(unpack_all)
    summary = staticmethod(summary)
    repr = staticmethod(repr)

    # Only in 1.x.
    unpack_all_vectorized = unpack_all

    @staticmethod
    @renamed(flags="f")
    def pretty_print(f: Flags, sample_idx: int = 0, config: ErrorConfig | None = None) -> str:
        """The errors of one sample as text, a line for each.

        >>> print(ErrorFlags.pretty_print(err.from_code(err.OOB, ErrorLocation.register("embedding"), n=1)))
        Found 1 error(s):
          [0] ERROR | INDEX.OUT_OF_BOUNDS | @ embedding
        """
        errors = unpack(f, sample_idx, config)
        lines = [
            f"  [{slot}] {error.severity_name} | {ErrorCode.domain_name(error.code)}.{error.code_name} | "
            f"@ {error.location_name}"
            for slot, error in enumerate(errors)
        ]
        return "\n".join([f"Found {len(errors)} error(s):", *lines]) if errors else "[OK] No errors"

    @staticmethod
    def reduce_or(flags_list: Sequence[Flags]) -> Flags:
        """`err.merge` for flags on several devices; the result is on the device of the first."""
        return merge(*(f.to(flags_list[0].device) for f in flags_list))


def require_boundary(who: str, instead: str) -> None:
    """Raise if a graph is being traced: a Python value cannot become part of it."""
    if torch.compiler.is_compiling():
        raise TracingError(
            f"{who} returns Python values and was called inside a compiled region. Inside, use {instead}; "
            f"or return the flags and call {who} on them outside."
        )


def _require_boundary(name: str, f: Any, instead: str) -> None:
    require_boundary(f"flags.{name}", instead)
    require_flags(f"flags.{name}", f)


def _host_slots(who: str, f: Flags, config: ErrorConfig | None) -> tuple[Tensor, Tensor]:
    """The slots that a call with this config reads, on the host, and which of them are used."""
    room = readable(who, f, config)
    slots = flags_to_slots(f.detach().cpu())
    used = slots != 0
    require_intact(who, slots, used)
    return slots[:, :room], used[:, :room]


def unpack_named(
    who: str, f: Flags, locations: Mapping[int, str], codes: Mapping[int, str]
) -> list[list[UnpackedError]]:
    """The errors of every sample of flags that another process made, with the names that it had."""
    require_boundary(who, "the flags")
    require_flags(who, f)
    return _unpacked(who, f, None, locations, codes)


def _unpacked(
    who: str,
    f: Flags,
    config: ErrorConfig | None,
    locations: Mapping[int, str] | None = None,
    codes: Mapping[int, str] | None = None,
) -> list[list[UnpackedError]]:
    slots, used = _host_slots(who, f, config)
    rows = used.nonzero()[:, 0].tolist()
    held = (slots[used].to(torch.int32) & SLOT_MASK).tolist()
    if locations is None:
        locations = names_of({slot_location(slot) for slot in held})
    made = {slot: _unpacked_error(slot, locations, codes or {}) for slot in set(held)}
    errors: list[list[UnpackedError]] = [[] for _ in range(f.shape[0])]
    for row, slot in zip(rows, held, strict=True):
        errors[row].append(made[slot])
    return errors


def _unpacked_error(slot: int, locations: Mapping[int, str], codes: Mapping[int, str]) -> UnpackedError:
    severity, code, location = slot_severity(slot), slot_code(slot), slot_location(slot)
    code_name = codes.get(code) or ErrorCode.name(code)
    name = locations.get(location) or (f"Location_{location}" if location else "Unknown")
    return UnpackedError(severity, code, location, Severity.name(severity), code_name, name)


def _counted(who: str, f: Flags, config: ErrorConfig | None) -> list[tuple[str, str, int]]:
    """`(location, code, count)`, ordered by location id."""
    slots, used = _host_slots(who, f, config)
    counts = ((slots[used].to(torch.int64) & SLOT_MASK) >> CODE_SHIFT).bincount()
    keys = counts.nonzero().flatten()
    names = names_of({key >> CODE_BITS for key in keys.tolist()})
    return [
        (names[key >> CODE_BITS], ErrorCode.name(key & CODE_MASK), count)
        for key, count in zip(keys.tolist(), counts[keys].tolist(), strict=True)
    ]
