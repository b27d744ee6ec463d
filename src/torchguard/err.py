"""The namespace `err`: functions that return tensors and can be traced.

Flags are values: `f = err.push(f, ...)`. Codes and severities are attributes: `err.NAN`, `err.CRITICAL`.
"""

from torch import Tensor

from torchguard._channel import record
from torchguard._channel.codes import ErrorCode, ErrorDomain, Severity
from torchguard._channel.combine import (
    and_then,
    bind,
    ensure_mask,
    get_err,
    get_ok,
    guard,
    map_err,
    map_err_flags,
    map_ok,
    mean_ok,
    partition,
    partition_many,
    recover_with_fallback,
    replace,
    take_err,
    take_err_p,
    take_ok,
    take_ok_p,
)
from torchguard._channel.config import ErrorConfig
from torchguard._channel.packing import Flags
from torchguard._channel.query import (
    all_ok,
    any_err,
    count_errors,
    get_first_code,
    get_first_location,
    get_first_severity,
    has_any,
    has_code,
    has_critical,
    has_domain,
    has_fallback,
    has_inf,
    has_nan,
    is_err,
    is_ok,
    max_severity,
)
from torchguard._channel.record import Mask, clear, from_code, merge, new, new_t, push_many, push_scalar
from torchguard._renamed import renamed
from torchguard.exceptions import GivenTwiceError
from torchguard.locations._tracked import LocationLike, location_id

OK = ErrorCode.OK
NAN = ErrorCode.NAN
INF = ErrorCode.INF
OVERFLOW = ErrorCode.OVERFLOW
OUT_OF_BOUNDS = OOB = ErrorCode.OUT_OF_BOUNDS
NEGATIVE_IDX = ErrorCode.NEGATIVE_IDX
EMPTY_INPUT = ErrorCode.EMPTY_INPUT
ZERO_OUTPUT = ErrorCode.ZERO_OUTPUT
CONSTANT_OUTPUT = ErrorCode.CONSTANT_OUTPUT
SATURATED = ErrorCode.SATURATED
FALLBACK_VALUE = ErrorCode.FALLBACK_VALUE
VALUE_CLAMPED = ErrorCode.VALUE_CLAMPED
UNKNOWN = ErrorCode.UNKNOWN

WARN = Severity.WARN
ERROR = Severity.ERROR
CRITICAL = Severity.CRITICAL


@renamed(flags="f")
def push(
    f: Flags,
    code: int | Tensor,
    location: LocationLike | Tensor,
    severity: int | None = None,
    config: ErrorConfig | Mask | None = None,
    *,
    where: Mask | None = None,
) -> Flags:
    """Record an error for each sample where `where` is True.

    The fifth argument is the mask as well, as in `err.push(f, code, location, severity, mask)`: a tensor is taken for
    `where`, an `ErrorConfig` for `config`.

    Args:
        code: one code, or a `(batch,)` tensor of them in which 0 records nothing.
        location: an id, or a tensor of ids, 0-d or `(batch,)`; or a module or a name, as for the checks.
        severity: defaults to that of the code.
        where: `(batch, ...)` bool; a sample is recorded if any of its entries is True. Defaults to all samples.

    >>> f = err.push(err.new_t(3), err.NAN, location=7, where=torch.tensor([False, True, False]))
    >>> err.is_ok(f)
    tensor([ True, False,  True])
    """
    if isinstance(config, Tensor):
        if where is not None:
            raise GivenTwiceError("err.push: the fifth argument is a mask, and where is given. Give one mask.")
        config, where = None, config
    where_in_model = location if isinstance(location, Tensor) else location_id(location)
    return record.push(f, code, where_in_model, severity, config, where=where)


# Names of 1.x.
Ok = take_ok
Err = take_err

__all__ = [
    "CONSTANT_OUTPUT",
    "CRITICAL",
    "EMPTY_INPUT",
    "ERROR",
    "FALLBACK_VALUE",
    "INF",
    "NAN",
    "NEGATIVE_IDX",
    "OK",
    "OOB",
    "OUT_OF_BOUNDS",
    "OVERFLOW",
    "SATURATED",
    "UNKNOWN",
    "VALUE_CLAMPED",
    "WARN",
    "ZERO_OUTPUT",
    "Err",
    "ErrorCode",
    "ErrorDomain",
    "Ok",
    "Severity",
    "all_ok",
    "and_then",
    "any_err",
    "bind",
    "clear",
    "count_errors",
    "ensure_mask",
    "from_code",
    "get_err",
    "get_first_code",
    "get_first_location",
    "get_first_severity",
    "get_ok",
    "guard",
    "has_any",
    "has_code",
    "has_critical",
    "has_domain",
    "has_fallback",
    "has_inf",
    "has_nan",
    "is_err",
    "is_ok",
    "map_err",
    "map_err_flags",
    "map_ok",
    "max_severity",
    "mean_ok",
    "merge",
    "new",
    "new_t",
    "partition",
    "partition_many",
    "push",
    "push_many",
    "push_scalar",
    "recover_with_fallback",
    "replace",
    "take_err",
    "take_err_p",
    "take_ok",
    "take_ok_p",
]
