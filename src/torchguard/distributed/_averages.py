"""Losses over the samples of all ranks; gradients and parameters averaged over ranks, for models without DDP."""

import itertools
import zlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from jaxtyping import Float, Inexact, Shaped
from torch import Tensor, nn

from torchguard._channel.combine import sum_ok
from torchguard._channel.packing import Flags
from torchguard.distributed._gather import all_gather
from torchguard.distributed._group import Group, device_of, gathered_numbers, group_of, largest, require_same, total
from torchguard.exceptions import BatchMismatchError, DistributedError


def mean_ok(f: Flags, per_sample_loss: Float[Tensor, "batch *rest"], group: Group = None) -> Float[Tensor, ""]:
    """The mean loss of the good samples of all ranks; 0 if there is none. Bad samples get no gradient.

    Every rank gets the same value: that of one process with the samples of all ranks. Its gradient, once it is averaged
    over the ranks as DDP, FSDP and `average_gradients` do, is that of one process, too, also if ranks have different
    numbers of good samples, or none.

    Args:
        group: the ranks that have different samples, over which gradients are averaged; all by default.
    """
    ranks = group_of("mean_ok", group)
    own, count = sum_ok("mean_ok", f, per_sample_loss)
    if ranks is None:
        return (own / count.clamp(min=1)).to(per_sample_loss.dtype)
    # float64 in every case: exact counts, and one shape and dtype on all ranks.
    loss, good = total(torch.stack([own.to(torch.float64), count.to(torch.float64)]), ranks).unbind()
    good = good.clamp(min=1)
    of_rank = own * (dist.get_world_size(ranks) / good).to(own.dtype)
    mean = (loss / good).to(own.dtype)
    # The value is the mean over all ranks, the gradient that of this rank's part.
    return (mean + (of_rank - of_rank.detach())).to(per_sample_loss.dtype)


def calculate_loss_distributed(
    predictions: Shaped[Tensor, "batch *rest"],
    targets: Shaped[Tensor, "batch *_"],
    loss_fn: Callable[[Tensor, Tensor], Tensor] = torch.nn.functional.l1_loss,
    group: Group = None,
) -> Float[Tensor, "..."]:
    """A loss over the samples of all ranks, gathered with their gradients: for losses that compare samples.

    Every rank gets the same value. Its gradient, averaged over the ranks, is that of one process. A mean over samples
    needs no gathering: `mean_ok`.
    """
    if predictions.ndim == 0 or targets.ndim == 0 or predictions.shape[0] != targets.shape[0]:
        raise BatchMismatchError(
            f"calculate_loss_distributed: predictions have shape {tuple(predictions.shape)} and targets "
            f"{tuple(targets.shape)}. Give one row a sample in both."
        )
    return loss_fn(all_gather(predictions, group), all_gather(targets, group))


@torch.no_grad()
def average_gradients(model: nn.Module, group: Group = None) -> None:
    """Replace each gradient by its mean over the ranks, as DDP does; for models without it.

    A parameter without a gradient on some ranks counts as one of zeros there. One without a gradient on all ranks is
    left alone. One collective for each dtype and device, not one for each parameter.
    """
    ranks = group_of("average_gradients", group)
    if ranks is None:
        return
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    for name, one in trained:
        _require_dense("average_gradients", name, one if one.grad is None else one.grad)
    kinds = zlib.crc32(repr([(name, *one.shape, one.dtype) for name, one in trained]).encode())
    found = gathered_numbers([len(trained), kinds], device_of(ranks), ranks)
    advice = "Build the same model, with the same parameters frozen, on all ranks."
    require_same("average_gradients", "the number of trained parameters", [count for count, _ in found], advice)
    require_same(
        "average_gradients", "names, shapes or dtypes of parameters (checksums)", [kinds for _, kinds in found], advice
    )
    if not trained:
        return
    has_grad = torch.tensor([one.grad is not None for _, one in trained], dtype=torch.int64, device=device_of(ranks))
    used = [one for (_, one), is_used in zip(trained, largest(has_grad, ranks).tolist(), strict=True) if is_used]
    for _, some in itertools.groupby(sorted(used, key=_kind), key=_kind):
        _average([*some], ranks)


def _kind(parameter: Tensor) -> str:
    return f"{parameter.device.type} {parameter.dtype}"


def _average(parameters: list[Tensor], group: dist.ProcessGroup) -> None:
    grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
    flat = torch.cat([torch.view_as_real(one).flatten() if one.is_complex() else one.flatten() for one in grads])
    flat = _mean(flat, group)
    for parameter, grad in zip(parameters, grads, strict=True):
        count = grad.numel() * (2 if grad.is_complex() else 1)
        part, flat = flat[:count], flat[count:]
        part = torch.view_as_complex(part.reshape(*grad.shape, 2)) if grad.is_complex() else part.reshape(grad.shape)
        parameter.grad = grad
        grad.copy_(part)  # noqa: TG120 (a gradient may be a view of a buffer of the optimizer)


def _mean(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The mean over ranks. Half precision is summed in float32: a sum of many ranks would overflow."""
    wide = x.to(torch.float32) if x.element_size() < 4 else x.clone()
    dist.all_reduce(wide, op=dist.ReduceOp.SUM, group=group)
    return (wide / dist.get_world_size(group)).to(x.dtype)


@torch.no_grad()
def all_reduce_parameter(param: Inexact[Tensor, "..."], group: Group = None) -> Inexact[Tensor, "..."]:
    """Replace a parameter or buffer by its mean over the ranks, in place, and return it."""
    ranks = group_of("all_reduce_parameter", group)
    if ranks is None:
        return param
    _require_dense("all_reduce_parameter", "param", param)
    if not (param.is_floating_point() or param.is_complex()):
        raise DistributedError(f"all_reduce_parameter: param is of {param.dtype}, which has no mean. Give floats.")
    own = [param.ndim, *param.shape][:9]
    found = gathered_numbers([*own, *[-1] * (9 - len(own))], device_of(ranks), ranks)
    shapes = [tuple(one[1 : one[0] + 1]) for one in found]
    require_same("all_reduce_parameter", "the shape of the parameter", shapes, "Build the same model on all ranks.")
    real = torch.view_as_real(param) if param.is_complex() else param
    real.copy_(_mean(real, ranks))  # noqa: TG120 (a parameter is changed where it is)
    return param


def _require_dense(who: str, name: str, tensor: Tensor) -> None:
    if hasattr(tensor, "device_mesh"):
        raise DistributedError(f"{who}: {name} is a DTensor. FSDP and tensor parallelism reduce it themselves.")
    if tensor.layout is not torch.strided:
        raise DistributedError(f"{who}: the gradient of {name} is sparse. Use sparse=False, or DDP.")
