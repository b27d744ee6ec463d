import pytest

from torchguard.guards import _compile


@pytest.fixture(autouse=True)
def no_filters_before():
    """Before torch 2.13, a function that a test compiled with another filter is warned of."""
    _compile._last_filters.clear()
