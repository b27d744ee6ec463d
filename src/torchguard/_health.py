"""Whether parameters and gradients are finite, and their norms: `check_params`, `check_grads`."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchguard._torch.training import norms, norms_of_one_device


class TensorHealth:
    """NaN, Inf and the norm of each of some named tensors. Nothing waits for the device until it is read.

    Attributes:
        names: of the tensors.
        norms: `(len(names),)`, float64 and on the device: the norm of each tensor, NaN if it holds a NaN, Inf if it
            holds an Inf. Sums in float64 do not overflow for any narrower dtype.
    """

    def __init__(self, names: Sequence[str], norms: Tensor) -> None:
        self.names, self.norms = tuple(names), norms

    @property
    def ok(self) -> bool:
        """Whether all are finite."""
        return bool(self.norms.isfinite().all())

    @property
    def bad(self) -> dict[str, str]:
        """The names of the tensors that are not finite, with "NaN" or "Inf"."""
        values = self.norms.tolist()
        kinds = ["NaN" if value != value else "Inf" if value == float("inf") else "" for value in values]
        return {name: kind for name, kind in zip(self.names, kinds, strict=True) if kind}

    def __str__(self) -> str:
        bad = self.bad
        if not bad:
            return f"{len(self.names)} tensors, all finite"
        shown = ", ".join(f"{name} ({kind})" for name, kind in [*bad.items()][:5])
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        return f"{len(bad)} of {len(self.names)} tensors are not finite: {shown}{more}"

    __repr__ = __str__


def check_params(model: nn.Module) -> TensorHealth:
    """NaN, Inf and norm of each parameter, in one pass and without waiting for the device.

    >>> model = torch.nn.Linear(2, 1)
    >>> _ = torch.nn.init.constant_(model.bias, float("nan"))
    >>> print(check_params(model))
    1 of 2 tensors are not finite: bias (NaN)
    """
    return health_of(dict(model.named_parameters()))


def check_grads(model: nn.Module) -> TensorHealth:
    """NaN, Inf and norm of the gradient of each parameter that has one, in one pass and without waiting."""
    return health_of({name: one.grad for name, one in model.named_parameters() if one.grad is not None})


def health_of(tensors: dict[str, Tensor]) -> TensorHealth:
    """NaN, Inf and norm of each of these tensors. Integers are always finite, and left out."""
    tensors = {name: one for name, one in tensors.items() if one.is_floating_point() or one.is_complex()}
    if not tensors:
        return TensorHealth([], torch.zeros(0, dtype=torch.float64))
    values = [local(values_of(tensor.detach())) for tensor in tensors.values()]
    found = norms(values, 2, torch.float64)
    # Squares of float64 overflow. The largest magnitude does not, and is enough to tell finite from Inf.
    wide = [i for i, one in enumerate(values) if one.dtype in (torch.float64, torch.complex128) and one.numel()]
    for i, largest in zip(wide, norms([values[i] for i in wide], torch.inf), strict=True):
        found[i] = torch.where(found[i].isinf() & largest.isfinite(), largest, found[i])
    device = found[0].device
    return TensorHealth([*tensors], torch.stack([one.to(device, torch.float64) for one in found]))


_is_sparse = operator.attrgetter("is_sparse")


def values_of(tensor: Tensor) -> Tensor:
    """The values of a sparse tensor, those of one index added; a dense tensor as it is."""
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def local(tensor: Any) -> Tensor:
    """The shard of a DTensor that is in this process; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def total_norm(gradients: Sequence[Tensor], is_plain: bool = False) -> Tensor:
    """The norm of all gradients together, as `clip_grad_norm_` computes it. It may overflow.

    Args:
        gradients: at least one.
        is_plain: whether none is a DTensor and all are on one device, which saves to ask each of them.
    """
    if is_plain and not any(map(_is_sparse, gradients)):
        return torch.linalg.vector_norm(torch.stack(norms_of_one_device(gradients)))
    of_meshes: dict[Any, list[Tensor]] = {}  # DTensors of different meshes cannot be added
    for one in gradients:
        of_meshes.setdefault(getattr(one, "device_mesh", None), []).append(values_of(one))
    found = [_whole(torch.nn.utils.get_total_norm(some)) for some in of_meshes.values()]
    return found[0] if len(found) == 1 else torch.stack([one.to(found[0].device) for one in found]).norm()


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def wide_norm(gradients: Sequence[Tensor]) -> float:
    """The norm of all gradients of this process together, in float64. Waits for the device."""
    found = norms([local(values_of(one)) for one in gradients], 2, torch.float64)
    return torch.stack([one.cpu() for one in found]).norm().item()


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether every element is finite, whatever the norm. Waits for the device."""
    return all(bool(local(values_of(tensor.detach())).isfinite().all()) for tensor in tensors)
