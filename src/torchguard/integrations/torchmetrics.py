"""The rate of bad samples as a metric of torchmetrics, synced over ranks."""

import torch
from torch import Tensor

from torchguard import err
from torchguard._extras import require_extra

require_extra("torchguard.integrations.torchmetrics", "torchmetrics", "torchmetrics")
from torchmetrics import Metric  # noqa: E402

__all__ = ["BadSampleRate"]


class BadSampleRate(Metric):
    """The share of samples that have an error in their flags (`err.is_err`), over all batches and ranks.

    >>> from torchguard.integrations.torchmetrics import BadSampleRate
    >>> metric = BadSampleRate()
    >>> metric.update(err.push(err.new_t(4), err.NAN, 1, where=torch.tensor([True, False, False, False])))
    >>> metric.compute()
    tensor(0.2500)
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    bad: Tensor
    total: Tensor

    def __init__(self, **kwargs: object) -> None:
        super().__init__(**kwargs)  # pyright: ignore[reportArgumentType]
        self.add_state("bad", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("total", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, f: Tensor) -> None:
        """Count the samples of a batch. Waits for nothing."""
        is_bad = err.is_err(f)
        self.bad += is_bad.sum()
        self.total += len(is_bad)

    def compute(self) -> Tensor:
        """The share of bad samples; 0 if there was no sample."""
        return self.bad / self.total.clamp(min=1)
