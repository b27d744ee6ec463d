"""Inputs moved to a device, and what a tensor is like."""

from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from torchguard._pytrees import children, replace_children
from torchguard.exceptions import NonFiniteError, NotFlagsError, TracingError

Value = TypeVar("Value")


def safe_to_device(value: Value, device: torch.device | str, dtype: torch.dtype | None = None) -> Value:
    """Tensors on a device, in a dtype: a tensor, or tensors in tuples, NamedTuples, lists, dicts and dataclasses.

    The dtype is applied on the same device as well. Memory that is pinned is copied without waiting. What is there
    already is returned as it is.

    Args:
        dtype: of tensors of its kind. A floating-point dtype leaves indices and masks as they are.

    >>> safe_to_device({"x": torch.ones(2), "ids": torch.arange(2)}, "cpu", torch.float64)
    {'x': tensor([1., 1.], dtype=torch.float64), 'ids': tensor([0, 1])}
    """
    where = torch.device(device)

    def move(one: Any) -> Any:
        if isinstance(one, Tensor):
            is_of_kind = dtype is not None and _kind(one.dtype) == _kind(dtype)
            return one.to(where, dtype if is_of_kind else None, non_blocking=one.is_pinned())
        if isinstance(one, PackedSequence):  # whose batch sizes stay on the CPU
            return one._replace(**{name: move(getattr(one, name)) for name in one._fields if name != "batch_sizes"})
        return replace_children(one, {key: new for key, child in children(one) if (new := move(child)) is not child})

    return move(value)


def _kind(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point else "complex" if dtype.is_complex else "int"


class TensorProperties(NamedTuple):
    """What a tensor is like. `smallest` and `largest` are None for complex, bool and empty tensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    smallest: float | None
    largest: float | None


def check_tensor_properties(tensor: Shaped[Tensor, "..."], name: str = "tensor") -> TensorProperties:
    """Raise `NonFiniteError` if a tensor holds NaN or Inf; otherwise say what it is like.

    Reads the values, so it waits for the device, and cannot be traced: in a graph, use `flag_nan_and_inf`.

    >>> check_tensor_properties(torch.tensor([1.0, 2.0])).largest
    2.0
    """
    if torch.compiler.is_compiling():
        raise TracingError("check_tensor_properties reads values, which a graph cannot. Use flag_nan_and_inf(z, name).")
    if not isinstance(tensor, Tensor):
        raise NotFlagsError(f"check_tensor_properties: {name} is no tensor, but {type(tensor).__name__}.")
    x = tensor.detach()
    bad = ~x.isfinite()
    if bad.any():
        first = tuple(bad.nonzero()[0].tolist())
        raise NonFiniteError(
            f"{name}: {int(x.isnan().sum())} NaN and {int(x.isinf().sum())} Inf in {x.numel()} elements of shape "
            f"{tuple(x.shape)}, {x.dtype}, the first at {first}. To find where they come from: torchguard.watch(model)."
        )
    smallest = largest = None
    if x.numel() and not x.is_complex() and x.dtype != torch.bool:
        smallest, largest = float(x.min()), float(x.max())
    return TensorProperties(tuple(x.shape), x.dtype, x.device, tensor.requires_grad, smallest, largest)
