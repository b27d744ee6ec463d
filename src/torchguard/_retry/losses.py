"""What a closure returns, and what a run over the batch makes of it."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchguard.exceptions import RetryError


@dataclass
class Losses:
    """What a closure returned for the samples of one batch.

    Args:
        sums: the loss of each sample, or one loss for all of them.
        weights: what the sum of the losses is divided by, for each sample; None for 1.
    """

    sums: Tensor
    weights: Tensor | None

    @property
    def is_scalar(self) -> bool:
        return self.sums.ndim == 0

    def non_finite(self) -> list[int]:
        """The samples whose loss or weight is not finite. Waits for the device."""
        is_bad = ~self.sums.isfinite()
        if self.weights is not None:
            is_bad |= ~self.weights.isfinite()
        return is_bad.nonzero().flatten().tolist()


def losses_of(returned: Any, size: int) -> Losses:
    """Read what a closure returned for a batch of `size` samples.

    Raises:
        RetryError: it is neither a loss per sample, nor sums and weights, nor a scalar.
    """
    weights = None
    if isinstance(returned, (tuple, list)) and len(returned) == 2:
        returned, weights = returned
    if not isinstance(returned, Tensor) or not (weights is None or isinstance(weights, Tensor)):
        raise RetryError(
            f"Retry: the closure returned {type(returned).__name__}. Return a loss for each sample, (sums, weights) of "
            "each sample, or one loss: of a model's output its loss, such as `output.loss`."
        )
    if not returned.is_floating_point():
        raise RetryError(f"Retry: the closure returned losses of {returned.dtype}, expected floating-point numbers.")
    if returned.ndim == 0 and weights is None:
        return Losses(returned, None)
    if returned.numel() != size or (weights is not None and weights.numel() != size):
        given = tuple(returned.shape) if weights is None else (tuple(returned.shape), tuple(weights.shape))
        raise RetryError(
            f"Retry: the closure returned losses of shape {given} for {size} samples. Return one for each sample; of "
            "losses per token the sums and the numbers of tokens, (sums, weights). If the batch has another number of "
            "samples, name what belongs to no sample in shared=, or give select= and size=."
        )
    if weights is not None and weights.requires_grad:
        raise RetryError(
            "Retry: the closure returned weights that require gradients. Weights are constants, such as numbers of "
            "tokens. Detach them, or return one loss."
        )
    if returned.ndim != 1:  # a view is one more operation in the backward pass
        returned = returned.reshape(-1)
    return Losses(returned, None if weights is None else weights.reshape(-1))


@dataclass
class RunResult:
    """A run that went through: its loss, not read yet, and what the closure returned for each micro-batch.

    Args:
        loss: of this rank's samples; the sum over ranks is that of the step.
        losses: for each micro-batch, None where it has no samples in this run.
        correction: what the gradients have yet to be multiplied by.
        weight: the sum of all weights, if there are some.
    """

    loss: Tensor
    losses: list[Losses | None]
    correction: Tensor | None = None
    weight: Tensor | None = None

    def is_finite(self) -> bool:
        """Whether all losses and weights of this rank are finite. Waits for the device."""
        found = [losses for losses in self.losses if losses is not None]
        return all(bool(one.sums.isfinite()) if one.is_scalar else not one.non_finite() for one in found)
