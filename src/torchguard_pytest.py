"""The pytest plugin: the fixture `expect_no_recompile`.

Pytest imports this module in every run, before any conftest. It stands outside the package, and imports torchguard only
when the fixture is used, so that a run without it does not import torch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest


@pytest.fixture
def expect_no_recompile() -> Callable[..., AbstractContextManager[Any]]:
    """`with expect_no_recompile(): ...` fails the test if Dynamo recompiles in the block."""
    from torchguard.guards import expect_no_recompile

    return expect_no_recompile
