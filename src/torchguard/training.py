"""Functions for training loops: freezing, inference, inputs on a device, checks of a tensor."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from torchguard._pytrees import children, replace_children
from torchguard.exceptions import NonFiniteError, NotFlagsError, TracingError

__all__ = [
    "NonFiniteError",
    "TensorProperties",
    "check_tensor_properties",
    "freeze_model",
    "inference",
    "safe_to_device",
]

Model = TypeVar("Model", bound=nn.Module)
Value = TypeVar("Value")


def freeze_model(model: Model) -> Model:
    """Have no training step change a model any more, and return it.

    Its parameters need no gradients, and lose those that they have: an optimizer would still step on them. Modules with
    running statistics, such as BatchNorm, go into evaluation mode, or they would update these in every forward pass.
    `model.train()` undoes that, so freeze after it.

    >>> model = freeze_model(torch.nn.BatchNorm1d(3))
    >>> model.weight.requires_grad, model.training
    (False, False)
    """
    for parameter in model.parameters():
        parameter.grad = None
    model.requires_grad_(False)
    for module in model.modules():
        if getattr(module, "running_mean", None) is not None:
            module.eval()
    return model


@contextlib.contextmanager
def inference(model: Model) -> Iterator[Model]:
    """`with inference(model): ...` runs a block in evaluation mode and in `torch.inference_mode`.

    After the block, each module is in the mode it was in: a frozen BatchNorm stays in evaluation mode while the rest is
    trained on. Tensors of the block cannot be trained on.

    >>> model = torch.nn.Dropout()
    >>> with inference(model):
    ...     model(torch.ones(2))
    tensor([1., 1.])
    >>> model.training
    True
    """
    was_training = model.training
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.inference_mode():
            yield model
    finally:
        model.train(was_training)  # some models do more than to set the mode: adapters are split off again
        for module, mode in modes:
            module.training = mode


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
