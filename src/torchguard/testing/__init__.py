"""Checks of losses and models, and tests on several ranks."""

from torchguard.testing._processes import run_ranks

__all__ = ["run_ranks"]
