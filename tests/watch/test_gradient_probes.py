"""Gradients of gradient probes, merged, against a table filled row by row."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from torchguard._watch.gradient_probes import _merge_probes


@st.composite
def pieces(draw):
    """Gradients of the probes of some locations, in pieces of one or several: `(first location, rows)`."""
    found, location = [], draw(st.integers(0, 2))
    width = draw(st.integers(0, 3))
    numbers = st.lists(st.sampled_from([0.0, 1.0, 2.0**20]), min_size=width, max_size=width)
    for rows in draw(st.lists(st.lists(numbers, min_size=1, max_size=3), min_size=1, max_size=4)):
        found.append((location, rows))
        location += len(rows) + draw(st.integers(0, 2))
    return found, location + draw(st.integers(0, 2)), width


@given(pieces(), st.integers(0, 2), st.booleans(), st.data())
def test_every_gradient_is_in_the_row_of_its_location(given_pieces, more, flat, data):
    found, count, width = given_pieces
    bad = data.draw(st.none() | st.lists(st.booleans(), min_size=width, max_size=width))
    want = torch.zeros(count, width + more)
    for first, rows in found:
        for i, row in enumerate(rows):
            for j, number in enumerate(row):
                want[first + i, j] = 0.0 if bad is not None and bad[j] else number
    tables = [torch.tensor(rows).reshape(len(rows), width) for _, rows in found]
    grads = [table[0] if flat and len(table) == 1 else table for table in tables]
    origins = None if bad is None else torch.tensor([0 if b else -1 for b in bad], dtype=torch.int64).expand(3, width)
    assert torch.equal(_merge_probes(grads, [first for first, _ in found], origins, count, width + more), want)
