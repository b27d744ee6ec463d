"""Losses, with the reductions they end in, and the formulas torch has for their derivatives."""

from collections.abc import Callable
from typing import Any

import torch

from torchguard.compiled.certify.algebra._field import UnsupportedError
from torchguard.compiled.certify.algebra._values import Value, exact

_NONE, _MEAN, _SUM = 0, 1, 2


def _reduced(loss: Value, reduction: int) -> Value:
    if reduction == _NONE:
        return loss
    total = loss.total(list(range(loss.element.dim())))
    return total if reduction == _SUM else total / loss.element.numel()


def _spread(g: Value, reduction: int, count: int) -> Value:
    return g / count if reduction == _MEAN else g


def _mse(x: Value, y: Value, reduction: int = _MEAN) -> Value:
    return _reduced((x - y).square(), reduction)


def _mse_backward(g: Value, x: Value, y: Value, reduction: int) -> Value:
    difference = x - y
    return _spread(g, reduction, difference.element.numel()) * difference * 2


def _huber(x: Value, y: Value, reduction: int = _MEAN, delta: float = 1.0) -> Value:
    z = (x - y) * (x - y).sgn()
    return _reduced(z.lt(delta).where(z * z * 0.5, (z - 0.5 * delta) * delta), reduction)


def _huber_backward(g: Value, x: Value, y: Value, reduction: int, delta: float) -> Value:
    d = x - y
    slope = (d * d.sgn()).lt(delta).where(d, d.sgn() * delta)
    return _spread(g, reduction, d.element.numel()) * slope


def _smooth_l1(x: Value, y: Value, reduction: int = _MEAN, beta: float = 1.0) -> Value:
    z = (x - y) * (x - y).sgn()
    return _reduced(z.lt(beta).where(z * z * 0.5 / beta, z - 0.5 * beta), reduction)


def _smooth_l1_backward(g: Value, x: Value, y: Value, reduction: int, beta: float) -> Value:
    d = x - y
    slope = (d * d.sgn()).lt(beta).where(d / beta, d.sgn())
    return _spread(g, reduction, d.element.numel()) * slope


def _weights_at(target: Value, weight: Value | None, ignored: int, like: Value) -> tuple[Value, Value]:
    """Which class each place asks for, and how much it counts: nothing where it is to be ignored."""
    is_counted = target.element != ignored
    like.field.journal.compared(is_counted)
    chosen = exact(like.field, torch.where(is_counted, target.element, 0))
    counts = exact(like.field, is_counted.to(torch.int64)).as_elements()
    if weight is not None:
        counts = counts * weight.arranged(lambda t: t[chosen.element])
    return chosen, counts


def _nll(x: Value, target: Value, weight: Value | None, reduction: int, ignored: int) -> tuple[Value, Value]:
    chosen, counts = _weights_at(target, weight, ignored, x)
    dim = 0 if x.element.dim() == 1 else 1
    picked = x.arranged(lambda t: t.gather(dim, chosen.element.unsqueeze(dim)).squeeze(dim))
    losses = -picked * counts
    dims = list(range(losses.element.dim()))
    total = counts.total(dims)
    if reduction == _NONE:
        return losses, Value(x.field, torch.zeros((), dtype=x.field.dtype))
    return (losses.total(dims) / total if reduction == _MEAN else losses.total(dims)), total


def _nll_backward(
    g: Value, x: Value, target: Value, weight: Value | None, reduction: int, ignored: int, total: Value
) -> Value:
    chosen, counts = _weights_at(target, weight, ignored, x)
    dim = 0 if x.element.dim() == 1 else 1
    each = -(g / total if reduction == _MEAN else g) * counts
    empty = torch.zeros(x.shape, dtype=x.field.dtype)
    return each.linear(lambda t: empty.scatter(dim, chosen.element.unsqueeze(dim), t.unsqueeze(dim)))


def _cross_entropy_of_logits(
    x: Value, y: Value, weight: Value | None = None, pos_weight: Value | None = None, reduction: int = _MEAN
) -> Value:
    if pos_weight is not None:
        raise UnsupportedError("binary_cross_entropy_with_logits with pos_weight")
    z = (-(x * x.sgn())).exp()
    loss = (1 - y) * x - (x.lt(0).where(x, 0) - (1 + z).log())
    return _reduced(loss if weight is None else loss * weight, reduction)


RULES: dict[str, Callable[..., Any]] = {
    "mse_loss": _mse,
    "mse_loss_backward": _mse_backward,
    "huber_loss": _huber,
    "huber_loss_backward": _huber_backward,
    "smooth_l1_loss": _smooth_l1,
    "smooth_l1_loss_backward": _smooth_l1_backward,
    "nll_loss_forward": _nll,
    "nll_loss_backward": _nll_backward,
    "nll_loss2d_forward": _nll,
    "nll_loss2d_backward": _nll_backward,
    "binary_cross_entropy_with_logits": _cross_entropy_of_logits,
}
