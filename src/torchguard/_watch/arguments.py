"""The samples of the arguments of a call: how many there are, and which tensors, or rows of them, belong to which. And
the form of a call: what it looks like, but for values."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from torchguard._pytrees import OBJECTS, tensors_in
from torchguard._torch.tracing import autocast_dtypes, is_in_checkpoint, is_surely
from torchguard._torch.training import sharding_of
from torchguard._watch.batch import Batch
from torchguard._watch.owners import OwnerMode
from torchguard.exceptions import WatchError

# The argument that a watched model takes beside those of the model: an id for each sample.
IDS = "sample_ids"

# The most channels by which a list of tensors of three dims is taken for one of images.
_MOST_CHANNELS = 4


def list_of_samples(args: tuple[Any, ...], kwargs: Mapping[str, Any], dim: int) -> list[Tensor] | None:
    """The first argument that is a list with a tensor for each sample, if there is one.

    That is a list of tensors that differ in size along `dim`, or of images: three dims, the first of them channels. If
    such a list holds something else, a fault in one of its tensors is recorded for all of that tensor.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, list) and len(value) > 0 and _are_samples(value, dim):
            return value
    return None


def _are_samples(values: list[Any], dim: int) -> bool:
    first = values[0]
    for one in values:
        if not isinstance(one, Tensor) or one.is_nested or one.ndim != first.ndim or one.ndim <= dim:
            return False
    for one in values:
        if not is_surely(one.shape[dim] == first.shape[dim]):
            return True
    is_image = first.ndim == 3 and dim == 0 and first.is_floating_point()
    return is_image and is_surely(first.shape[0] <= _MOST_CHANNELS)


def tensors_by_sample(args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: Batch) -> list[list[Tensor]]:
    """The tensors that belong to each sample as a whole: those of lists as long as the batch. Empty without such."""
    if list_of_samples(args, kwargs, batch.dim) is None:
        return []
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, list) and len(value) == batch.size]
    return [[z for value in lists for _, z in tensors_in(value[i])] for i in range(batch.size)]


def batch_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], dim: int) -> Batch:
    """The batch of a call: as many samples as most of the tensor arguments have along that dim.

    A dim of size 1 (a timestep for all samples) counts only if there is no other. Among sizes that are equally
    frequent, the tensor with the most dims decides: rather `(4, 20, 8)` than the adjacency matrix `(20, 20)`. If an
    argument is a list with a tensor for each sample, it decides.
    """
    samples = list_of_samples(args, kwargs, dim)
    if samples is not None:
        return Batch(len(samples), (), dim, samples[0].device)
    given = []
    for _, z in tensors_in((args, kwargs)):
        if z.is_nested or z.layout != torch.strided:
            raise WatchError(
                f"watch: got a {'nested' if z.is_nested else z.layout} tensor, whose rows belong to no known sample. "
                "Pass a dense tensor."
            )
        if z.ndim > dim:
            given.append(z)
    if not given:
        raise WatchError(
            f"watch: no argument is a tensor with a dim {dim}, so the call has no samples. Pass the batch "
            "as a tensor, or give its dim as batch_dim."
        )
    first = _typical(given, dim)
    lengths, length = [], 1
    for i, size in enumerate(first.shape):
        if i != dim:
            length = length * size
            lengths.append(length)
    return Batch(first.shape[dim], tuple(lengths), dim, first.device)


def _typical(given: list[Tensor], dim: int) -> Tensor:
    """The tensor whose size along the dim is that of the batch."""
    first = given[0]
    if len(given) == 1 or all(is_surely(z.shape[dim] == first.shape[dim]) for z in given):
        return first
    best, best_rank = first, (-1, -1)
    for z in given:
        size = z.shape[dim]
        count = len([other for other in given if is_surely(other.shape[dim] == size)])
        rank = (0, 0) if is_surely(size == 1) else (count, z.ndim)
        if rank > best_rank:
            best, best_rank = z, rank
    return best


def set_arguments(mode: OwnerMode, tensors: Sequence[Tensor], size: int, dim: int) -> None:
    """Set the owners of the arguments. One without the batch along its dim is for all samples, but for states of
    recurrent layers, `(layers, batch, width)`."""
    for z in tensors:
        if z.ndim > dim and z.shape[dim] == size:
            mode.set_samples(z, dim)
        elif z.ndim == 3 and z.is_floating_point() and [side == size for side in z.shape] == [False, True, False]:
            mode.set_samples(z, 1)


def checked_ids(ids: Any, batch: Batch) -> Tensor:
    """The ids of the samples, one for each."""
    ids = ids if isinstance(ids, Tensor) else torch.tensor(ids)
    if ids.ndim != 1 or ids.is_floating_point() or ids.is_complex():
        raise WatchError(
            f"watch: {IDS} is a tensor of shape {tuple(ids.shape)} and {ids.dtype}. Give one integer for each sample."
        )
    if ids.shape[0] != batch.size:
        raise WatchError(f"watch: {IDS} has {ids.shape[0]} entries, but the batch has {batch.size} samples.")
    return ids.to(batch.device, torch.int64)


def form_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a call looks like, but for values: a key for its plan."""
    modules = [*model.modules()]
    state = tuple([(id(module), module.training) for module in modules])  # modules may be replaced after `watch`
    # Where gradients are on, autograd adds operations of its own (`detach` of what `exp` saves), and parameters that
    # need none have no uses.
    trained = tuple([p.requires_grad for p in model.parameters()]) if torch.is_grad_enabled() else None
    modes = (trained, torch.is_inference_mode_enabled(), is_in_checkpoint(), autocast_dtypes())
    plain = tuple([value for value in (*args, *kwargs.items()) if _is_plain(value)])
    plain += tuple([_cache_form(value) for value in (*args, *kwargs.values())])
    tensors = tensors_in((args, kwargs), objects=OBJECTS)
    shapes = tuple([(keys, z.dtype, tuple(z.shape), z.requires_grad) for keys, z in tensors])
    return modes, state, sharding_of(modules), plain, shapes


def _cache_form(value: Any) -> tuple[Any, ...] | None:
    """The kind of a key-value cache of transformers, the tokens it holds and has room for. Empty, it has no shapes."""
    sizes = []
    for name in ("get_seq_length", "get_max_length") if hasattr(value, "get_seq_length") else ():
        with suppress(AttributeError, ValueError):  # the states of recurrent layers (Mamba) have no length
            sizes.append(getattr(value, name)())
    return (type(value), *[one for one in sizes if isinstance(one, int)]) if sizes else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
