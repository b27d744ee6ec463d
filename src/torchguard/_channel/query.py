"""Queries of flags that return tensors: safe inside a graph, without a host sync.

Several take a `config`, as they do in 1.x. A query then reads the first `config.num_slots` slots. Flags contain all
else that it needs, so no other setting is read. A config of another width than that of the flags is an error.
"""

import torch
from jaxtyping import Bool, Int32, Int64
from torch import Tensor

from torchguard._channel.codes import ErrorCode, Severity
from torchguard._channel.config import ErrorConfig
from torchguard._channel.deferred import rows_with
from torchguard._channel.packing import Flags, Slots, bits, readable, unpack
from torchguard._channel.slot_bits import SLOT_MASK, slot_code, slot_location, slot_severity
from torchguard._channel.validate import require_domain, require_flags, require_in_range
from torchguard._renamed import renamed


@renamed(flags="f")
def is_err(f: Flags) -> Bool[Tensor, " batch"]:
    """True where a sample has an error."""
    require_flags("err.is_err", f)
    return rows_with(f)


@renamed(flags="f")
def is_ok(f: Flags) -> Bool[Tensor, " batch"]:
    """True where a sample has no error."""
    require_flags("err.is_ok", f)
    return ~rows_with(f)


@renamed(flags="f")
def any_err(f: Flags) -> Bool[Tensor, ""]:
    """True if any sample has an error."""
    require_flags("err.any_err", f)
    return rows_with(f).any()


@renamed(flags="f")
def all_ok(f: Flags) -> Bool[Tensor, ""]:
    """True if no sample has an error."""
    return ~any_err(f)


@renamed(flags="f")
def has_any(f: Flags) -> Bool[Tensor, ""]:
    """The same as `any_err`."""
    return any_err(f)


@renamed(flags="f")
def has_code(f: Flags, code: int, config: ErrorConfig | None = None) -> Bool[Tensor, " batch"]:
    """True where a sample holds an error of that code.

    >>> err.has_code(err.from_code(err.INF, location=1, n=2), err.NAN)
    tensor([False, False])
    """
    require_flags("err.has_code", f)
    require_in_range("err.has_code", code=code)
    room = readable("err.has_code", f, config)
    if room is None:
        return rows_with(f, code)
    slots = unpack(f)[:, :room]
    return ((slot_code(slots) == code) & (slots != 0)).any(-1)


@renamed(flags="f")
def has_nan(f: Flags, config: ErrorConfig | None = None) -> Bool[Tensor, " batch"]:
    """True where a sample holds a NaN error."""
    return has_code(f, ErrorCode.NAN, config)


@renamed(flags="f")
def has_inf(f: Flags, config: ErrorConfig | None = None) -> Bool[Tensor, " batch"]:
    """True where a sample holds an Inf error."""
    return has_code(f, ErrorCode.INF, config)


@renamed(flags="f")
def has_fallback(f: Flags, config: ErrorConfig | None = None) -> Bool[Tensor, " batch"]:
    """True where a sample runs on a fallback value."""
    return has_code(f, ErrorCode.FALLBACK_VALUE, config)


@renamed(flags="f", dom="domain")
def has_domain(f: Flags, domain: int, config: ErrorConfig | None = None) -> Bool[Tensor, " batch"]:
    """True where a sample holds an error of that `ErrorDomain`."""
    require_flags("err.has_domain", f)
    require_domain("err.has_domain", domain)
    slots = _read("err.has_domain", f, config)
    return (((slot_code(slots) >> 2) == domain) & (slots != 0)).any(-1)


@renamed(flags="f")
def has_critical(f: Flags, config: ErrorConfig | None = None) -> Bool[Tensor, " batch"]:
    """True where a sample holds a critical error."""
    return max_severity(f, config) == Severity.CRITICAL


@renamed(flags="f")
def count_errors(f: Flags, config: ErrorConfig | None = None) -> Int32[Tensor, " batch"]:
    """How many errors each sample holds."""
    require_flags("err.count_errors", f)
    return (_read("err.count_errors", f, config) != 0).sum(-1, dtype=torch.int32)


@renamed(flags="f")
def max_severity(f: Flags, config: ErrorConfig | None = None) -> Int64[Tensor, " batch"]:
    """The worst severity of each sample, 0 if it has no error."""
    require_flags("err.max_severity", f)
    return slot_severity(_read("err.max_severity", f, config)).amax(-1).to(torch.int64)


@renamed(flags="f")
def get_first_code(f: Flags) -> Int32[Tensor, " batch"]:
    """The code in slot 0 of each sample: under the default policy, of its first error."""
    return slot_code(_first_slot("err.get_first_code", f))


@renamed(flags="f")
def get_first_location(f: Flags) -> Int32[Tensor, " batch"]:
    """The location in slot 0 of each sample: under the default policy, where it first went wrong."""
    return slot_location(_first_slot("err.get_first_location", f))


@renamed(flags="f")
def get_first_severity(f: Flags) -> Int32[Tensor, " batch"]:
    """The severity in slot 0 of each sample."""
    return slot_severity(_first_slot("err.get_first_severity", f))


def _read(who: str, f: Flags, config: ErrorConfig | None) -> Slots:
    """The slots that a query with this config reads."""
    room = readable(who, f, config)
    return unpack(f) if room is None else unpack(f)[:, :room]


def _first_slot(who: str, f: Flags) -> Int32[Tensor, " batch"]:
    require_flags(who, f)
    return (bits(f)[:, 0] & SLOT_MASK).to(torch.int32)
