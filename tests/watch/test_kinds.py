"""What a look at a tensor finds, against looking at every number."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchguard._watch.detect import (
    FINE,
    INF,
    NAN,
    are_finite,
    bits_of_largest,
    evidence,
    is_fine,
    is_nan,
    kinds_of,
    raised,
)

NUMBERS = st.sampled_from([0.0, -0.0, 1.0, -2.5, 6e4, -1e-7, math.inf, -math.inf, math.nan])


def kind_of(row):
    if any(math.isnan(number) for number in row):
        return NAN
    return INF if any(math.isinf(number) for number in row) else FINE


@pytest.mark.parametrize("look", [evidence, bits_of_largest])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@given(rows=st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=1, max_size=5))
def test_the_worst_of_each_vector(look, dtype, rows):
    found = look(torch.tensor(rows, dtype=dtype)).squeeze(-1)
    kinds = [kind_of(row) for row in rows]
    assert kinds_of(found).tolist() == kinds
    assert is_fine(found).tolist() == [kind == FINE for kind in kinds]
    assert is_nan(found).tolist() == [kind == NAN for kind in kinds]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_largest_numbers_are_fine(dtype):
    largest = torch.finfo(dtype).max
    z = torch.tensor([[largest, -largest], [-math.inf, 0.0], [-math.nan, 0.0]], dtype=dtype)
    assert kinds_of(bits_of_largest(z)).flatten().tolist() == [FINE, INF, NAN]
    assert kinds_of(evidence(z)).flatten().tolist() == [FINE, INF, NAN]


@pytest.mark.parametrize("look", [evidence, bits_of_largest])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@given(rows=st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=1, max_size=5))
def test_what_reaches_a_limit_counts_as_inf(look, dtype, rows):
    found = raised(look(torch.tensor(rows, dtype=dtype)).squeeze(-1), 2.0, dtype)
    kinds = [max(kind_of(row), INF if any(abs(number) >= 2 for number in row) else FINE) for row in rows]
    assert kinds_of(found).tolist() == kinds


@given(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]), st.data())
def test_all_are_finite_or_not(dtype, data):
    most = torch.finfo(dtype).max
    number = st.sampled_from([0.0, 1.0, most, -most, float("inf"), float("-inf"), float("nan")])
    z = torch.tensor(data.draw(st.lists(number, max_size=4)), dtype=dtype)
    assert are_finite(z) is bool(z.isfinite().all())
