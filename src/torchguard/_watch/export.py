"""A watched model in an export: its plan is found before, by a call on the example."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from torchguard._watch.arguments import batch_of
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
