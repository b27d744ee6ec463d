"""Checks that record where they are: pass the module, and its location is looked up."""

import math
from collections.abc import Callable, Set
from typing import Any

import torch
from jaxtyping import Bool, Integer, Shaped
from torch import Tensor

from torchguard import err
from torchguard._casts import Number
from torchguard._channel import record
from torchguard._channel.combine import push_lost
from torchguard._channel.config import ErrorConfig
from torchguard._channel.fill import fallback_like
from torchguard._channel.gradients import mask_nonfinite_gradients, over_rows
from torchguard._channel.packing import Flags
from torchguard._channel.policy import RowStatus, rows
from torchguard._channel.record import push_findings
from torchguard._channel.validate import require_batch, require_flags, require_location, require_size
from torchguard._renamed import renamed
from torchguard._torch.tracing import can_read, is_exporting
from torchguard.exceptions import NotFlagsError
from torchguard.flags import require_boundary
from torchguard.locations._tracked import LocationLike, location_id

__all__ = ["find", "fix", "flag_inf", "flag_nan", "flag_nan_and_inf", "flag_oob_indices", "has_err", "push"]

Values = Shaped[Tensor, "batch *rest"]


@renamed(flags="f")
def has_err(f: Flags) -> bool:
    """Whether any sample has an error, as a Python bool. Waits for the device."""
    require_boundary("has_err", "err.any_err(f) or HAS(f)")
    return bool(err.any_err(f))


@renamed(flags="f")
def find(code: int, f: Flags, config: ErrorConfig | None = None) -> Bool[Tensor, " batch"]:
    """True where a sample holds that code: `err.has_code`."""
    return err.has_code(f, code, config)


@renamed(flags="f")
def push(
    f: Flags,
    code: int | Tensor,
    module: LocationLike = None,
    severity: int | None = None,
    *,
    where: Bool[Tensor, "batch *rest"] | None = None,
    location: int | Tensor | None = None,
    config: ErrorConfig | None = None,
) -> Flags:
    """`err.push` at the location of a module (or at a name, or at `location=` an id)."""
    return err.push(f, code, module if location is None else location, severity, config, where=where)


@renamed(tensor="z", flags="f")
def flag_nan(z: Values, module: LocationLike, f: Flags | None = None, config: ErrorConfig | None = None) -> Flags:
    """Record NaN for each sample of `z` that has one.

    >>> x = torch.tensor([[1.0, float("nan")], [1.0, 2.0]])
    >>> flags.repr(flag_nan(x, "input", err.new(x)))
    'ErrorFlags(2 samples, 1 errors: 1xNAN @ input)'
    """
    return _flagged("flag_nan", z, module, f, config, {err.NAN})


@renamed(tensor="z", flags="f")
def flag_inf(z: Values, module: LocationLike, f: Flags | None = None, config: ErrorConfig | None = None) -> Flags:
    """Record Inf for each sample of `z` that has one."""
    return _flagged("flag_inf", z, module, f, config, {err.INF})


@renamed(tensor="z", flags="f")
def flag_nan_and_inf(
    z: Values, module: LocationLike, f: Flags | None = None, config: ErrorConfig | None = None
) -> Flags:
    """`flag_nan` and `flag_inf` in one pass over `z`."""
    return _flagged("flag_nan_and_inf", z, module, f, config, {err.NAN, err.INF})


@renamed(indices="ids", flags="f")
def flag_oob_indices(
    ids: Integer[Tensor, "batch *rest"],
    num_embeddings: int,
    module: LocationLike,
    f: Flags | None = None,
    config: ErrorConfig | None = None,
) -> Flags:
    """Record `OUT_OF_BOUNDS` for each sample with an index that is negative, or `num_embeddings` or more.

    >>> ids = torch.tensor([[0, 255], [7, 8]], dtype=torch.uint8)
    >>> err.is_ok(flag_oob_indices(ids, 255, "tokens")), err.is_ok(flag_oob_indices(ids, 256, "tokens"))
    (tensor([False,  True]), tensor([True, True]))
    """
    f, location = _prepared("flag_oob_indices", ids, module, f, config)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise NotFlagsError(f"flag_oob_indices: ids are {ids.dtype}. Give integers.")
    require_size("flag_oob_indices", "num_embeddings", num_embeddings)
    # In the dtype of the ids, `num_embeddings` could wrap around (256 is 0 in uint8). A uint64 id beyond int64 becomes
    # negative, which is out of bounds as well.
    ids = ids.to(torch.int64)
    return record.push(f, err.OOB, location, config=config, where=(ids < 0) | (ids >= num_embeddings))


@renamed(tensor="z", flags="f")
def fix(
    z: Values,
    f: Flags,
    module: LocationLike,
    fallback: Number | Tensor | Callable[[], Tensor] = 0.0,
    config: ErrorConfig | None = None,
) -> tuple[Values, Flags]:
    """Replace every bad row of `z` by `fallback`, and record `FALLBACK_VALUE` for it.

    A row is bad if `f` holds an error for its sample or if it is not finite. It gets no gradient. Gradients that
    arrive here as NaN or Inf, such as the 0 * Inf of an overflowing step after this one, are zeroed for their row.

    A fallback that the dtype of `z` cannot hold is an error. Where its values cannot be read, in a graph or on a GPU,
    `OVERFLOW` is recorded for the replaced rows instead.

    >>> x = torch.tensor([[1.0, float("nan")], [1.0, 2.0]])
    >>> x, f = fix(x, err.new(x), "input")
    >>> x
    tensor([[0., 0.],
            [1., 2.]])
    """
    f, location = _prepared("fix", z, module, f, config)
    flagged = err.is_err(f)
    broken = rows(~torch.isfinite(floats_of(z))) if _can_be_bad(z) else torch.zeros_like(flagged)
    value, missing = fallback_like("fix", z, fallback() if callable(fallback) else fallback)
    fixed = torch.where(over_rows(flagged | broken, z), value, mask_nonfinite_gradients(z))
    # A row that already holds a fallback is replaced again but not recorded again.
    is_new = broken | (flagged & ~err.has_fallback(f))
    f = record.push(f, err.FALLBACK_VALUE, location, config=config, where=is_new)
    return fixed, push_lost(f, z, missing, flagged | broken, location, config)


def _flagged(
    who: str, z: Values, module: LocationLike, f: Flags | None, config: ErrorConfig | None, codes: Set[int]
) -> Flags:
    f, location = _prepared(who, z, module, f, config)
    findings = findings_in(z, location, codes)
    return push_findings(f, findings, config) if findings else f


def _prepared(who: str, z: Any, module: LocationLike, f: Flags | None, config: ErrorConfig | None) -> tuple[Flags, int]:
    """Flags and location id. All arguments are validated, whether or not any value is bad."""
    if not isinstance(z, Tensor):
        raise NotFlagsError(f"{who}: expected a tensor to check, got {type(z).__name__}.")
    if f is None:
        f = err.new(z, config)
    require_flags(who, f)
    require_batch(who, f, z, "z")
    location = location_id(module)
    require_location(who, location)
    return f, location


# Detection. Rows are reduced over their last dimension only: the kernel that packs reduces the rest for all checks.
# In an export no reduction relies on NaN: onnxruntime's `ReduceMax` drops it.


def findings_in(z: Tensor, location: int, codes: Set[int]) -> list[tuple[int, int, RowStatus]]:
    """`(code, location, status)` for each of `codes` (NAN, INF). Empty if one sum shows that no value of `z` is bad."""
    if not _can_be_bad(z):
        return []
    values, nan, inf = floats_of(z), err.NAN in codes, err.INF in codes
    if _is_finite(values) if inf else _is_free_of_nan(values):
        return []
    if nan and inf:
        nans, infs = _nan_and_inf(values)
        return [(err.NAN, location, nans), (err.INF, location, infs)]
    return [(err.NAN, location, _nan(values))] if nan else [(err.INF, location, _inf(values))]


def can_be_checked(z: Tensor) -> bool:
    """Whether a tensor can hold NaN or Inf and has a batch dimension."""
    return _can_be_bad(z) and z.layout == torch.strided and not z.is_nested


def floats_of(z: Tensor) -> Tensor:
    """`z` detached, as real floats of 16 bits or more."""
    z = z.detach() if z.requires_grad else z
    if z.is_complex():
        parts = torch.view_as_real(z.resolve_conj())
        return parts.flatten(-2) if z.ndim > 1 else parts
    return z.to(torch.float32) if z.element_size() == 1 else z


def _can_be_bad(z: Tensor) -> bool:
    return z.is_floating_point() or z.is_complex()


def _is_free_of_nan(z: Tensor) -> bool:
    # Any NaN makes the sum NaN. So does Inf - Inf; then the exact check decides.
    return can_read(z) and not math.isnan(z.sum().item())


def _is_finite(z: Tensor) -> bool:
    # A finite sum proves every element finite. Any other may be overflow; then the exact check decides.
    return can_read(z) and math.isfinite(z.sum().item())


def _nan(z: Tensor) -> RowStatus:
    """NaN where a row holds one: the maximum propagates NaN, in one pass and without a mask of the size of `z`."""
    if z.ndim > 1 and z.shape[-1] and not is_exporting():
        return z.amax(-1)
    return _rows_where(torch.isnan(z))


def _inf(z: Tensor) -> RowStatus:
    """True, or NaN, where a row holds Inf."""
    found = z.abs() == math.inf  # not isinf, which Inductor does not vectorise
    if z.is_cpu and z.ndim > 1 and z.shape[-1] and not is_exporting():
        # Nor does Inductor vectorise `any` on the CPU. On a GPU `any` is faster.
        return torch.where(found, math.nan, torch.zeros((), dtype=z.dtype)).amax(-1)
    return _rows_where(found)


def _nan_and_inf(z: Tensor) -> tuple[RowStatus, RowStatus]:
    """Both in one pass: Inductor fuses reductions of the same kind over the same values."""
    return _nan(z) if z.is_cpu else _rows_where(z != z), _inf(z)


def _rows_where(found: Tensor) -> Tensor:
    return found.any(-1) if found.ndim > 1 else found
