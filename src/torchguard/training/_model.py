"""A model frozen, or in evaluation mode for a while."""

import contextlib
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


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
