"""A watched model as a whole under `torch.func`: which rows belong to which sample is found by a call outside.

Under a transform, operations cannot be followed, and `vmap` hides a dim. But whose a row is depends on shapes alone. So
the first call of a form is made twice: with zeros of the same shapes, outside of all transforms and without gradients,
which leaves a plan; then under the transform, with that plan. Buffers and random numbers stay as they were.
"""

from typing import Any

import torch
from torch import Tensor

from torchguard._pytrees import map_tensors, tensors_in
from torchguard._torch.tracing import outside_all_transforms, outside_transforms
from torchguard._watch.plan import OwnerPlan, form_of
from torchguard._watch.state import unrecorded


def plan_of_transform(guarded: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OwnerPlan | None:
    """The plan of a call under a transform; None if its operations cannot be followed."""
    plans = guarded._watch.plans
    form = form_of(guarded._watch.model, args, kwargs)
    if form not in plans.of_transforms:
        plans.of_transforms[form] = _found(guarded, args, kwargs)
    return plans.of_transforms[form]


def _found(guarded: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OwnerPlan | None:
    watch = guarded._watch
    sizes = iter([tuple(z.shape) for _, z in tensors_in((args, kwargs))])
    named = {**dict(guarded.named_parameters()), **dict(guarded.named_buffers())}
    shapes = {name: tuple(z.shape) for name, z in named.items()}
    devices = {z.device for z in named.values() if z.is_cuda}
    with outside_all_transforms(), torch.no_grad(), unrecorded(guarded), torch.random.fork_rng([*devices]):
        given = map_tensors((args, kwargs), lambda z: torch.zeros(next(sizes), dtype=z.dtype, device=z.device))
        weights = {name: _copy(outside_transforms(z), shapes[name]) for name, z in named.items()}
        torch.func.functional_call(guarded, weights, *given)
        return watch.plans.known(form_of(watch.model, *given))


def _copy(z: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A copy of a weight; zeros where `vmap` takes another one for each of its calls."""
    return z.detach().clone() if tuple(z.shape) == shape else z.new_zeros(shape)
