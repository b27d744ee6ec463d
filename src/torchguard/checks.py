"""Checks that record where they are: pass the module, and its location is looked up."""

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
from torchguard._channel.detect import can_be_bad, floats_of
from torchguard._channel.fill import fallback_like
from torchguard._channel.gradients import mask_nonfinite_gradients, over_rows
from torchguard._channel.packing import Flags
from torchguard._channel.policy import rows
from torchguard._channel.record import push_faults
from torchguard._channel.validate import require_batch, require_flags, require_location, require_size
from torchguard._renamed import renamed
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
    broken = rows(~torch.isfinite(floats_of(z))) if can_be_bad(z) else torch.zeros_like(flagged)
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
    return push_faults(f, z, location, codes, config)


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
