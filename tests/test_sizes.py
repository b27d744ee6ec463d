"""Sizes in bytes as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchguard._sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("2GiB", 2 << 30),
        (" 2 gib ", 2 << 30),
        ("2g", 2 << 30),
        ("1.5 KiB", 1536),
        ("500 MB", 500_000_000),
        ("3B", 3),
        ("1TiB", 1 << 40),
    ],
)
def test_a_number_and_a_unit_of_1000_or_1024(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "2 apples", "-1", "1e3", "GiB", "1 2", True, None, "\u0662GiB"])
def test_anything_else_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"is not a size\. Write one such as 500MB, 2GiB, or a number of bytes"):
        parse_size(text)


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB")])
def test_sizes_are_formatted_in_units_of_1024(size, text):
    assert format_size(size) == text


@given(st.integers(0, 1 << 60))
def test_a_formatted_size_is_read_back_within_its_rounding(size):
    assert abs(parse_size(format_size(size)) - size) <= size / 19
