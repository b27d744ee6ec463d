"""Losses over the samples of all ranks."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor

from torchguard._channel.combine import sum_ok
from torchguard._channel.packing import Flags
from torchguard.distributed._gather import all_gather
from torchguard.distributed._group import Group, group_of, total
from torchguard.exceptions import BatchMismatchError


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
    return (mean + (of_rank - of_rank.detach())).to(
        per_sample_loss.dtype
    )  # the value of one, the gradient of the other


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
