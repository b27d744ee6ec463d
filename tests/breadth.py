"""Tables of which `make test` runs some rows, and `make test-long` the rest."""

import pytest


def breadth(rows, *now):
    """The rows for `pytest.mark.parametrize`; all but those named in `now` are marked `long`."""
    return [row if row in now else pytest.param(row, marks=pytest.mark.long) for row in rows]
