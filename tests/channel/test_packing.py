"""The slot, bit for bit, and flags against a plain-Python reading of their words."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchguard as tg
from torchguard import ErrorConfig, err, flags
from torchguard._channel.packing import pack, unpack
from torchguard._channel.slot_bits import pack_slot, slot_code, slot_location, slot_severity

CODES = st.integers(1, 15)
LOCATIONS = st.integers(0, 1023)
SEVERITIES = st.integers(0, 3)
CARRIERS = st.sampled_from([torch.int64, torch.int32, torch.float32, torch.float64])


def test_constants():
    assert (tg.SLOT_BITS, tg.SLOTS_PER_WORD, tg.SLOT_MASK) == (16, 4, 0xFFFF)
    assert (tg.SEVERITY_SHIFT, tg.SEVERITY_BITS, tg.SEVERITY_MASK) == (0, 2, 0x3)
    assert (tg.CODE_SHIFT, tg.CODE_BITS, tg.CODE_MASK) == (2, 4, 0xF)
    assert (tg.LOCATION_SHIFT, tg.LOCATION_BITS, tg.LOCATION_MASK) == (6, 10, 0x3FF)


@given(CODES, LOCATIONS, SEVERITIES)
def test_a_slot_is_location_then_code_then_severity(code, location, severity):
    slot = pack_slot(code, location, severity)
    assert f"{slot:016b}" == f"{location:010b}{code:04b}{severity:02b}"
    assert (slot_code(slot), slot_location(slot), slot_severity(slot)) == (code, location, severity)


def words_to_slots(f: torch.Tensor) -> list[list[int]]:
    """The documented layout, read with Python integers."""
    whole = f if not f.is_floating_point() else f.view({4: torch.int32, 8: torch.int64}[f.element_size()])
    lanes = f.element_size() // 2
    return [[(word >> (16 * lane)) & 0xFFFF for word in row for lane in range(lanes)] for row in whole.tolist()]


@given(CARRIERS, st.lists(st.tuples(CODES, LOCATIONS, SEVERITIES), max_size=7, unique_by=lambda e: e[:2]))
def test_pushed_errors_fill_slots_from_the_lowest_bits_up(dtype, errors):
    config = ErrorConfig(flag_dtype=dtype, num_slots=8)
    f = err.new_t(2, config=config)
    for code, location, severity in errors:
        f = err.push(f, code, location, severity, config, where=torch.tensor([True, False]))
    want = [pack_slot(*error) for error in errors]
    assert words_to_slots(f) == [want + [0] * (8 - len(want)), [0] * 8]
    assert [(e.code, e.location, e.severity) for e in flags.unpack(f, 0)] == errors


@given(CARRIERS, st.lists(st.lists(st.integers(0, 0xFFFF), min_size=8, max_size=8), min_size=1, max_size=4))
def test_unpack_and_pack_are_inverse(dtype, rows):
    like = err.new_t(len(rows), config=ErrorConfig(flag_dtype=dtype, num_slots=8))
    f = pack(torch.tensor(rows), like)
    assert words_to_slots(f) == rows
    assert words_to_slots(pack(torch.tensor(rows).t().contiguous().t(), like)) == rows  # of one row, with strides of 1
    assert torch.equal(unpack(f).to(torch.int64) & 0xFFFF, torch.tensor(rows))


@pytest.mark.compiled
def test_reading_by_shifts_in_a_graph_agrees_with_reading_in_place(carrier):
    like = err.new_t(5, config=ErrorConfig(flag_dtype=carrier, num_slots=6))
    slots = torch.randint(0, 0x10000, (5, 6))
    compiled = torch.compile(lambda f, slots: (unpack(f), pack(slots, f)), backend="aot_eager", fullgraph=True)
    f = pack(slots, like)
    read, packed = compiled(f, slots)
    assert torch.equal(read.to(torch.int64), unpack(f).to(torch.int64) & 0xFFFF)
    assert words_to_slots(packed) == words_to_slots(f)


@pytest.mark.parametrize(
    ("dtype", "slots", "words"),
    [(torch.int64, 16, 4), (torch.int32, 16, 8), (torch.float32, 16, 8), (torch.float64, 16, 4), (torch.int64, 5, 2)],
)
def test_width_of_flags(dtype, slots, words):
    config = ErrorConfig(flag_dtype=dtype, num_slots=slots)
    f = err.new_t(3, config=config)
    assert f.shape == (3, words)
    assert f.dtype == dtype
    assert config.num_words == words
