"""Parameter tables of which `make test` runs some rows, and `make test-long` the others."""

import pytest


def breadth(rows, *now):
    """Rows for `pytest.mark.parametrize`. All rows except those in `now` are marked `long`."""
    return [row if row in now else pytest.param(row, marks=pytest.mark.long) for row in rows]
