"""Reading flags at the Python boundary."""

import pytest
import torch

from torchguard import ErrorConfig, ErrorFlags, ErrorLocation, UnpackedError, err, flags, has_err
from torchguard.exceptions import CorruptFlagsError, TracingError


@pytest.fixture
def f():
    encoder, head = ErrorLocation.register("encoder"), ErrorLocation.register("head")
    f = err.push(err.new_t(5), err.NAN, encoder, where=torch.tensor([True, False, True, True, False]))
    return err.push(f, err.INF, head, where=torch.tensor([False, False, True, True, False]))


def test_repr(f):
    assert flags.repr(f) == "ErrorFlags(5 samples, 5 errors: 3xNAN @ encoder, 2xINF @ head)"
    assert flags.repr(err.new_t(3)) == "ErrorFlags(3 samples, no errors)"


def test_a_long_repr_is_truncated():
    locations = [ErrorLocation.register(f"step {i}") for i in range(16)]
    f = err.push_many(err.new_t(1), [(err.NAN, location, torch.tensor([True])) for location in locations])
    assert flags.repr(f).endswith("NAN @ step 11, and 4 more)")


def test_summary(f):
    assert flags.summary(f) == {"encoder": {"NAN": 3}, "head": {"INF": 2}}


def test_unpack(f):
    assert flags.unpack(f, 1) == []
    nan, inf = flags.unpack(f, sample_idx=-2)
    assert nan == UnpackedError(3, 1, nan.location, "CRITICAL", "NAN", "encoder")
    assert str(inf) == "CRITICAL: INF @ head"


def test_unpack_all_equals_unpack_of_each_sample(f):
    assert flags.unpack_all(f) == [flags.unpack(f, row) for row in range(5)]


def test_the_class_has_the_same_functions(f):
    assert ErrorFlags.summary(f) == flags.summary(f)
    assert ErrorFlags.repr(f) == flags.repr(f)
    assert ErrorFlags.unpack(f, 2) == flags.unpack(f, 2)
    assert ErrorFlags.unpack_all(f) == flags.unpack_all(f)


def test_high_locations_and_every_carrier(carrier):
    f = err.from_code(err.VALUE_CLAMPED, 1023, 2, config=ErrorConfig(flag_dtype=carrier, num_slots=3))
    assert flags.summary(f) == {"Location_1023": {"VALUE_CLAMPED": 2}}


def test_a_sample_index_out_of_range(f):
    with pytest.raises(IndexError, match="sample_idx is 5 but flags hold 5 samples"):
        flags.unpack(f, 5)


@pytest.mark.parametrize("name", ["unpack", "unpack_all", "summary", "repr"])
@pytest.mark.compiled
def test_a_call_in_a_graph_raises_and_names_the_alternative(f, name):
    with pytest.raises(Exception, match=f"flags.{name} returns Python values.*Inside, use"):
        torch.compile(getattr(flags, name), backend="eager", fullgraph=True)(f)


@pytest.mark.compiled
def test_has_err_in_a_graph(f):
    with pytest.raises(Exception, match=r"has_err returns Python values.*err.any_err"):
        torch.compile(has_err, backend="eager", fullgraph=True)(f)


def test_a_call_while_torch_is_compiling_raises(f, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(TracingError, match="called inside a compiled region"):
        flags.summary(f)


@pytest.mark.parametrize(
    "arithmetic", [lambda f: f + 1.0, lambda f: f * 3 - 2, lambda f: f.fill_(0.5), torch.randn_like], ids=range(4)
)
def test_arithmetic_on_float_flags_is_detected(arithmetic):
    config = ErrorConfig(flag_dtype=torch.float32)
    f = err.push(err.new_t(4, config=config), err.NAN, 1, config=config, where=torch.tensor([True, False] * 2))
    broken = arithmetic(f)
    with pytest.raises(CorruptFlagsError, match=r"flags.summary: the flags of samples \[.*Change flags with err"):
        flags.summary(broken)
    with pytest.raises(CorruptFlagsError, match=r"err.push: the flags"):
        err.push(broken, err.INF, 2, config=config)
