"""The pytest fixture.

Every run of pytest loads this, before any conftest: it is no part of the package, which would come with it, and imports
that only where the fixture is used.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest


@pytest.fixture
def expect_no_recompile() -> Callable[..., AbstractContextManager[Any]]:
    """`with expect_no_recompile(): ...` fails the test if something is compiled again in the block."""
    from torchguard.guards._inspect import expect_no_recompile

    return expect_no_recompile
