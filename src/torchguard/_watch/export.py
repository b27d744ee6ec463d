"""A watched model in an export, or as a whole under `torch.func`: its plan is found before, by another call.

For an export, that is a call on the example. Under a transform, operations cannot be followed, and `vmap` hides a dim,
but whose a row is depends on shapes alone. So the first call of a form is made twice: with zeros of the same shapes,
outside of all transforms and without gradients, which leaves a plan; then under the transform, with that plan. Buffers
and random numbers stay as they were.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchguard._pytrees import map_tensors, tensors_in
from torchguard._torch.tracing import outside_all_transforms, outside_transforms
from torchguard._watch.arguments import batch_of, form_of
from torchguard._watch.batch import size_free
from torchguard._watch.plan import OwnerPlan, follow
from torchguard._watch.state import unrecorded


@contextmanager
def planned(guarded: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_dynamic: bool) -> Iterator[None]:
    """Within it, an export of the model returns `(out, f)`, and knows which rows belong to which sample.

    Args:
        args: the example that the model will be exported with.
        kwargs: likewise.
        is_dynamic: whether sizes will vary: a row code that holds for those of the example alone counts as mixing.
    """
    watch = guarded._watch
    with unrecorded(guarded):
        try:
            watch.export_plan = _plan_of(guarded, args, dict(kwargs), is_dynamic)
            yield
        finally:
            watch.export_plan = None


def batch_dim(guarded: Any) -> int:
    """The dim along which the samples of a watched model lie."""
    return guarded._watch.batch_dim


def location_ids(guarded: Any) -> tuple[int, ...]:
    """The ids of all locations of a watched model."""
    return guarded._watch.ids


def _plan_of(guarded: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_dynamic: bool) -> OwnerPlan:
    watch = guarded._watch
    batch = batch_of(args, kwargs, watch.batch_dim)
    owners = follow(watch.model, args, kwargs, batch)
    record = watch.new_record(batch, owners)
    plain: Any = super(type(guarded).__mro__[1], guarded)  # without the `forward` that `watch` added
    forward = watch.instance_forward or plain.forward
    with torch.no_grad(), owners.running():
        output = guarded.forward_of_model(forward, args, kwargs, record)
    plan = owners.finish(output)
    if not is_dynamic:
        return plan
    checks = tuple([(location, path, size_free(code)) for location, path, code in plan.checks])
    return plan._replace(checks=checks, outputs=tuple(map(size_free, plan.outputs)))


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
