"""The loss of each sample of a batch: what a trainer's own loss averages over."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchguard.exceptions import RetryError

IGNORED = -100


def sample_losses(
    logits: Tensor, labels: Tensor, *, shift: bool = False, smoothing: float = 0.0, multi_label: bool = False
) -> tuple[Tensor, Tensor]:
    """The sum of the losses of each sample, and how many losses that are.

    Args:
        logits: `(batch, ..., classes)`, or what a regression predicts.
        labels: `(batch, ...)` classes, of which -100 does not count; or floats, of the shape of `logits` but for
            dims of size 1.
        shift: whether each token is predicted from the ones before it.
        smoothing: of labels.
        multi_label: whether float labels are probabilities of classes.
    """
    if labels.is_floating_point():
        if labels.numel() != logits.numel():
            raise RetryError(
                f"sample_losses: labels {tuple(labels.shape)} and logits {tuple(logits.shape)} do not have the same "
                "size. Give losses of your own."
            )
        labels = labels.reshape(logits.shape).to(logits.dtype)
        fn = F.binary_cross_entropy_with_logits if multi_label else F.mse_loss
        each = fn(logits, labels, reduction="none").flatten(1)
        return each.sum(1), torch.full_like(each[:, 0], each.shape[1])
    if logits.ndim != labels.ndim + 1 or logits.shape[0] != labels.shape[0]:
        raise RetryError(
            f"sample_losses: logits {tuple(logits.shape)} do not fit labels {tuple(labels.shape)}. Give losses of your "
            "own."
        )
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    each = F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none", label_smoothing=smoothing
    )
    each = each.reshape(labels.shape[0], -1)
    return each.sum(1), labels.ne(IGNORED).reshape(labels.shape[0], -1).sum(1).to(each.dtype)


def logits_of(outputs: Any) -> Tensor:
    """The logits among what a model of transformers returned."""
    if isinstance(outputs, Mapping):
        return outputs["logits"]
    return getattr(outputs, "logits", outputs[0] if isinstance(outputs, tuple) else outputs)
