"""The pytest plugin: the fixtures `expect_no_recompile` and `two_ranks`.

Pytest imports this module in every run, before any conftest. It stands outside the package, and imports torchguard only
when a fixture is used, so that a run without it does not import torch.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest


@pytest.fixture
def expect_no_recompile() -> Callable[..., AbstractContextManager[Any]]:
    """`with expect_no_recompile(): ...` fails the test if Dynamo recompiles in the block."""
    from torchguard.guards import expect_no_recompile

    return expect_no_recompile


@pytest.fixture
def two_ranks() -> Callable[..., list[Any]]:
    """`two_ranks(function, *args)` calls a function in two gloo processes, and returns what each of them returned."""
    from torchguard.testing import run_ranks

    return functools.partial(run_ranks, size=2)
