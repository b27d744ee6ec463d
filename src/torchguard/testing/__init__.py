"""Checks of losses and models, and tests on several ranks."""

from torchguard.exceptions import ExportCheckError, LossCheckError, RankFailedError
from torchguard.testing._export import ExportReport, check_exportable
from torchguard.testing._loss import LossReport, check_loss
from torchguard.testing._processes import run_ranks

__all__ = [
    "ExportCheckError",
    "ExportReport",
    "LossCheckError",
    "LossReport",
    "RankFailedError",
    "check_exportable",
    "check_loss",
    "run_ranks",
]
