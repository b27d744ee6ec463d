"""Combinators over values and flags: filter, transform, chain, recover.

A bad row never changes the gradient of another. `torch.where` alone does not ensure that: it sends a zero gradient into
the row that it did not choose, the zero is multiplied by the NaN that the row left in saved activations, and 0 * NaN is
NaN, which a matmul spreads to every weight. So functions over all rows get good values in place of bad rows
(`substituted`), and non-finite gradients are zeroed row by row on their way back (`mask_nonfinite_gradients`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from torchguard._casts import Number
from torchguard._channel.codes import ErrorCode
from torchguard._channel.config import ErrorConfig
from torchguard._channel.fill import Lost, fallback_like, fill_like, matches
from torchguard._channel.gradients import over_rows
from torchguard._channel.packing import Flags
from torchguard._channel.policy import rows
from torchguard._channel.query import is_err, is_ok
from torchguard._channel.record import merge, push
from torchguard._channel.validate import require_batch, require_mask
from torchguard._renamed import renamed
from torchguard.exceptions import BatchMismatchError, OutOfRangeError


def substituted(keep: Bool[Tensor, " batch"], z: Shaped[Tensor, "batch *rest"]) -> Shaped[Tensor, "batch *rest"]:
    """`z` with every row outside of `keep` replaced by a copy of a row inside it; by zeros if there is none.

    A constant would not do: normalising a row of zeros produces NaN.
    """
    if z.shape[0] == 0:
        return z
    # The first row to keep, or the last row: in range whatever `keep` holds. Not by argmax: the code that Inductor
    # generated for it crashed once, in a large graph, where no row was to be kept.
    last = z.shape[0] - 1
    index = torch.where(keep, torch.arange(z.shape[0], device=z.device), last).amin(0, keepdim=True)
    chosen = z.detach().index_select(0, index)
    chosen = torch.where(over_rows(keep.any().reshape(1), z), chosen, torch.zeros_like(chosen))
    return torch.where(over_rows(keep, z), z, chosen)


Values = Shaped[Tensor, "batch *rest"]


# Filters whose output shapes depend on the data: for the Python boundary.


@renamed(flags="f", tensor="z")
def take_ok(f: Flags, z: Values) -> Shaped[Tensor, "ok *rest"]:
    """The rows of `z` whose samples have no error."""
    require_batch("err.take_ok", f, z, "z")
    return z[is_ok(f)]


@renamed(flags="f", tensor="z")
def take_err(f: Flags, z: Values) -> Shaped[Tensor, "bad *rest"]:
    """The rows of `z` whose samples have an error."""
    require_batch("err.take_err", f, z, "z")
    return z[is_err(f)]


@renamed(flags="f", tensor="z")
def partition(f: Flags, z: Values) -> tuple[Shaped[Tensor, "ok *rest"], Shaped[Tensor, "bad *rest"]]:
    """`take_ok` and `take_err`."""
    return take_ok(f, z), take_err(f, z)


def partition_many(f: Flags, *zs: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """All tensors without the bad rows, and all tensors with the bad rows only."""
    return tuple(take_ok(f, z) for z in zs), tuple(take_err(f, z) for z in zs)


@renamed(flags="f")
def get_ok(f: Flags) -> Shaped[Tensor, "ok words"]:
    """The flags of the samples without an error."""
    return take_ok(f, f)


@renamed(flags="f")
def get_err(f: Flags) -> Shaped[Tensor, "bad words"]:
    """The flags of the samples with an error."""
    return take_err(f, f)


# Filters that keep the shape: for the inside of a graph.


@renamed(flags="f", tensor="z")
def take_ok_p(f: Flags, z: Values, fill: Number | Tensor = 0.0) -> Values:
    """`z` with the rows of bad samples filled with a number that its dtype holds.

    >>> f = err.push(err.new_t(2), err.NAN, location=1, where=torch.tensor([False, True]))
    >>> err.take_ok_p(f, torch.tensor([[1.0], [float("nan")]]))
    tensor([[1.],
            [0.]])
    """
    require_batch("err.take_ok_p", f, z, "z")
    return torch.where(over_rows(is_ok(f), z), z, fill_like("err.take_ok_p", z, fill))


@renamed(flags="f", tensor="z")
def take_err_p(f: Flags, z: Values, fill: Number | Tensor = 0.0) -> Values:
    """`z` with the rows of good samples filled."""
    require_batch("err.take_err_p", f, z, "z")
    return torch.where(over_rows(is_err(f), z), z, fill_like("err.take_err_p", z, fill))


# Transforms.


def _chosen(who: str, chosen: Bool[Tensor, " batch"], value: Tensor, otherwise: Values) -> Values:
    if value.shape != otherwise.shape:
        made, of = tuple(value.shape), tuple(otherwise.shape)
        raise BatchMismatchError(
            f"{who}: expected shape {of} from the function, got {made}. Return that, or use err.and_then."
        )
    return torch.where(over_rows(chosen, value), value, otherwise)


@renamed(flags="f", tensor="z")
def map_ok(f: Flags, z: Values, fn: Callable[[Tensor], Tensor]) -> Values:
    """Apply `fn` to the good rows; bad rows stay unchanged. `fn` gets a copy of a good row in place of each bad one."""
    require_batch("err.map_ok", f, z, "z")
    ok = is_ok(f)
    return _chosen("err.map_ok", ok, fn(substituted(ok, z)), z)


@renamed(flags="f", tensor="z")
def map_err(f: Flags, z: Values, fn: Callable[[Tensor], Tensor]) -> Values:
    """Apply `fn` to the bad rows; good rows stay unchanged. `fn` gets a copy of a bad row in place of each good one."""
    require_batch("err.map_err", f, z, "z")
    bad = is_err(f)
    return _chosen("err.map_err", bad, fn(substituted(bad, z)), z)


@renamed(flags="f")
def map_err_flags(f: Flags, fn: Callable[[Flags], Flags]) -> Flags:
    """Apply `fn` to the flags of bad samples."""
    return torch.where(over_rows(is_err(f), f), fn(f), f)


def replace(
    t: Tensor, value: Number | Tensor = 0.0, targets: Sequence[Number | str] = (ErrorCode.NAN, ErrorCode.INF)
) -> Tensor:
    """`t` with some values replaced; a replaced element gets no gradient.

    Args:
        value: a number that the dtype of `t` holds.
        targets: `err.NAN` (or "nan"), `err.INF` (or "inf"), "posinf", "neginf", or a number to look for that the dtype
            of `t` holds. As 1 and 2 are the codes of NaN and Inf, write the numbers 1.0 and 2.0 as floats.

    >>> err.replace(torch.tensor([1.0, float("inf"), 999.0]), value=-1.0, targets=[err.INF, 999])
    tensor([ 1., -1., -1.])
    """
    if not isinstance(targets, Sequence) or isinstance(targets, str) or not targets:
        raise OutOfRangeError(f"err.replace: targets is {targets!r}. Give a list such as [err.NAN, err.INF].")
    found = torch.zeros_like(t, dtype=torch.bool)
    for target in targets:
        found = found | _matches(t, target)
    return torch.where(found, fill_like("err.replace", t, value, "value"), t)


def _matches(t: Tensor, target: Number | str) -> Bool[Tensor, "..."]:
    if target == "nan" or target != target or _is_code(target, ErrorCode.NAN):
        return torch.isnan(_readable(t))
    if target == "inf" or _is_code(target, ErrorCode.INF):
        return torch.isinf(_readable(t))
    if isinstance(target, str):
        if target not in ("posinf", "neginf"):
            raise OutOfRangeError(f'err.replace: unknown target {target!r}. Use "nan", "inf", "posinf" or "neginf".')
        target = float("inf") if target == "posinf" else float("-inf")
    return matches("err.replace", t, target)


def _readable(t: Tensor) -> Tensor:
    """`t` in a dtype that torch can test for NaN and Inf: not one of 8 bits."""
    return t.to(torch.float32) if t.is_floating_point() and t.element_size() == 1 else t


def _is_code(target: Any, code: int) -> bool:
    return isinstance(target, int) and not isinstance(target, bool) and target == code


# Chains.

Step = Callable[[Tensor], tuple[Tensor, Flags]]


@renamed(flags="f", tensor="z")
def and_then(f: Flags, z: Values, fn: Step, config: ErrorConfig | None = None) -> tuple[Tensor, Flags]:
    """Apply `fn(z) -> (z, f)` to the good rows; bad rows retain their values and gain no errors.

    If `fn` changes the shape, bad rows become zeros. `fn` gets a copy of a good row in place of each bad one.
    """
    require_batch("err.and_then", f, z, "z")
    ok = is_ok(f)
    out, found = fn(substituted(ok, z))
    otherwise = z if z.shape == out.shape else torch.zeros_like(out)
    new_errors = torch.where(over_rows(ok, found), found, torch.zeros_like(found))
    return torch.where(over_rows(ok, out), out, otherwise), merge(f, new_errors, config=config)


@renamed(flags="f", tensor="z")
def bind(f: Flags, z: Values, fn: Step, config: ErrorConfig | None = None) -> tuple[Tensor, Flags]:
    """Apply `fn(z) -> (z, f)` to every row, and merge the errors of both.

    `fn` gets bad rows as they are, and saves them for the backward pass: a weight that it multiplies a NaN with gets a
    NaN gradient. To train, `fix` the rows before, or use `and_then`.
    """
    require_batch("err.bind", f, z, "z")
    out, found = fn(z)
    return out, merge(f, found, config=config)


@renamed(flags="f", predicate="ok_mask", loc="location")
def ensure_mask(
    f: Flags,
    ok_mask: Bool[Tensor, "batch *rest"],
    code: int,
    location: int,
    severity: int | None = None,
    config: ErrorConfig | None = None,
) -> Flags:
    """Record an error where `ok_mask` is False."""
    require_mask("err.ensure_mask", f, ok_mask, "ok_mask")
    return push(f, code, location, severity, config, where=~ok_mask)


@renamed(flags="f", tensor="z", predicate="pred", loc="location")
def guard(
    f: Flags,
    z: Values,
    pred: Callable[[Tensor], Bool[Tensor, "batch *rest"]],
    code: int,
    location: int,
    severity: int | None = None,
    config: ErrorConfig | None = None,
) -> Flags:
    """Record an error where `pred(z)` is False."""
    require_batch("err.guard", f, z, "z")
    return ensure_mask(f, pred(z), code, location, severity, config)


@renamed(flags="f", tensor="z", loc="location")
def recover_with_fallback(
    f: Flags,
    z: Values,
    fallback: Number | Tensor,
    location: int,
    severity: int | None = None,
    config: ErrorConfig | None = None,
) -> tuple[Values, Flags]:
    """`z` with the rows of bad samples replaced, and `FALLBACK_VALUE` recorded for them.

    A fallback that the dtype of `z` cannot hold is an error. Where its values cannot be read, in a graph or on a GPU,
    `OVERFLOW` is recorded for the replaced rows instead.
    """
    require_batch("err.recover_with_fallback", f, z, "z")
    bad = is_err(f)
    value, missing = fallback_like("err.recover_with_fallback", z, fallback)
    recovered = torch.where(over_rows(bad, z), value, z)
    f = push(f, ErrorCode.FALLBACK_VALUE, location, severity, config, where=bad)
    return recovered, push_lost(f, z, missing, bad, location, config)


def push_lost(
    f: Flags, z: Tensor, missing: Lost, replaced: Bool[Tensor, " batch"], location: int, config: ErrorConfig | None
) -> Flags:
    """Record `OVERFLOW` for the replaced rows whose fallback has values that the dtype of `z` cannot hold."""
    if missing is None:
        return f
    where = rows(missing.expand(z.shape)) & replaced
    return push(f, ErrorCode.OVERFLOW, location, config=config, where=where)


def mean_ok(f: Flags, per_sample_loss: Float[Tensor, "batch *rest"]) -> Float[Tensor, ""]:
    """The mean loss of the good samples; 0 if there is none. Bad samples get no gradient.

    >>> f = err.push(err.new_t(3), err.NAN, location=1, where=torch.tensor([False, True, False]))
    >>> err.mean_ok(f, torch.tensor([1.0, float("nan"), 3.0]))
    tensor(2.)
    """
    total, count = sum_ok("err.mean_ok", f, per_sample_loss)
    return (total / count.clamp(min=1)).to(per_sample_loss.dtype)


def sum_ok(
    who: str, f: Flags, per_sample_loss: Float[Tensor, "batch *rest"]
) -> tuple[Float[Tensor, ""], Int64[Tensor, ""]]:
    """The sum of the losses of the good samples, and how many losses that are. Bad samples get no gradient."""
    require_batch(who, f, per_sample_loss, "per_sample_loss")
    ok = over_rows(is_ok(f), per_sample_loss).expand_as(per_sample_loss)
    # Half precision is summed in float32, as torch's own mean does.
    wide = torch.float32 if per_sample_loss.element_size() < 4 else per_sample_loss.dtype
    return torch.where(ok, per_sample_loss, 0).sum(dtype=wide), ok.sum()
