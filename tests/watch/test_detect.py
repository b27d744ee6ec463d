"""Row statuses, against a check of every number."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchguard._watch.detect import (
    INF,
    NAN,
    OK,
    all_finite,
    faults_of,
    is_finite,
    is_nan,
    row_status,
    scan,
)
from torchguard._watch.magnitudes import from_limit, magnitude_bits
from torchguard._watch.select import norm_widths

NUMBERS = st.sampled_from([0.0, -0.0, 1.0, -2.5, 6e4, -1e-7, math.inf, -math.inf, math.nan])


def largest_bits(z):
    """The status of a tensor as a GPU has it."""
    magnitudes = z.abs() if z.dtype == torch.float16 else magnitude_bits(z)
    return magnitudes.amax(-1, keepdim=True)


def fault_of(row):
    if any(math.isnan(number) for number in row):
        return NAN
    return INF if any(math.isinf(number) for number in row) else OK


@pytest.mark.parametrize("check", [row_status, largest_bits])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@given(rows=st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=1, max_size=5))
def test_the_status_of_a_vector_is_its_worst_fault(check, dtype, rows):
    status = check(torch.tensor(rows, dtype=dtype)).squeeze(-1)
    faults = [fault_of(row) for row in rows]
    assert faults_of(status).tolist() == faults
    assert is_finite(status).tolist() == [fault == OK for fault in faults]
    assert is_nan(status).tolist() == [fault == NAN for fault in faults]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_largest_numbers_are_finite(dtype):
    largest = torch.finfo(dtype).max
    z = torch.tensor([[largest, -largest], [-math.inf, 0.0], [-math.nan, 0.0]], dtype=dtype)
    assert faults_of(largest_bits(z)).flatten().tolist() == [OK, INF, NAN]
    assert faults_of(row_status(z)).flatten().tolist() == [OK, INF, NAN]


@pytest.mark.parametrize("check", [row_status, largest_bits])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@given(rows=st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=1, max_size=5))
def test_magnitudes_from_a_limit_on_count_as_inf(check, dtype, rows):
    status = from_limit(check(torch.tensor(rows, dtype=dtype)).squeeze(-1), 2.0, dtype)
    faults = [max(fault_of(row), INF if any(abs(number) >= 2 for number in row) else OK) for row in rows]
    assert faults_of(status).tolist() == faults


@given(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]), st.data())
def test_all_are_finite_or_not(dtype, data):
    most = torch.finfo(dtype).max
    number = st.sampled_from([0.0, 1.0, most, -most, float("inf"), float("-inf"), float("nan")])
    z = torch.tensor(data.draw(st.lists(number, max_size=4)), dtype=dtype)
    assert all_finite(z) is bool(z.isfinite().all())


@pytest.mark.parametrize(
    ("vectors", "widths", "pieces"), [(2048, (), 4), (2048, (64, 4096), 1), (2048, (1024,), 4), (16, (4096,), 4)]
)
def test_many_long_vectors_of_the_width_of_a_norm_are_scanned_whole_on_a_gpu(vectors, widths, pieces):
    z = torch.empty(vectors, 4096, dtype=torch.bfloat16, device="meta")
    assert scan(z, widths).shape == (vectors, pieces)


def test_the_widths_of_norms():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(48))

    class OwnRMSNorm(Scale):
        pass

    model = nn.Sequential(
        nn.LayerNorm(64), nn.Linear(64, 32), OwnRMSNorm(), Scale(), nn.LazyBatchNorm1d(), nn.LayerNorm((2, 3))
    )
    assert norm_widths(model) == (48, 64)
