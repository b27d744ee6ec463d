"""What code written for the published 1.x relies on, beside the specification."""

import pytest
import torch

from torchguard import (
    AccumulationConfig,
    Dedupe,
    Err,
    ErrorCode,
    ErrorConfig,
    ErrorLocation,
    Ok,
    Order,
    Priority,
    Severity,
    err,
    find,
    fix,
    flag_nan,
    flags,
    has_err,
    unwrap,
)

NAN, INF = float("nan"), float("inf")


def codes_of(f):
    return [[error.code for error in sample] for sample in flags.unpack_all(f)]


def errors_of(f):
    return [[(error.code, error.location_name) for error in sample] for sample in flags.unpack_all(f)]


def rows(n, *bad):
    """True at the given rows."""
    return torch.isin(torch.arange(n), torch.tensor(bad))


def traced(fn):
    return torch.compile(fn, backend="aot_eager", fullgraph=True)


def test_locations_are_registered_by_name():
    ErrorLocation.reset()
    known = ErrorLocation.count()
    place = ErrorLocation.register("legacy.decoder.head")
    assert place > 0
    assert ErrorLocation.register("legacy.decoder.head") == place
    assert ErrorLocation.get("legacy.decoder.head") == place
    assert ErrorLocation.name(place) == "legacy.decoder.head"
    assert ErrorLocation.path(place) == "legacy.decoder.head"
    assert ErrorLocation.is_registered("legacy.decoder.head")
    assert ErrorLocation.count() == known + 1


def test_unknown_locations():
    assert ErrorLocation.UNKNOWN == 0
    assert ErrorLocation.get("legacy.never.registered") == 0
    assert not ErrorLocation.is_registered("legacy.never.registered")
    assert ErrorLocation.name(0) == "Unknown"


def test_locations_are_forgotten():
    ErrorLocation.register("legacy.forgotten")
    known = ErrorLocation.count()
    ErrorLocation.reset()
    assert not ErrorLocation.is_registered("legacy.forgotten")
    assert ErrorLocation.get("legacy.forgotten") == 0
    assert ErrorLocation.count() < known


def test_code_15_is_unknown():
    assert ErrorCode.UNKNOWN == err.UNKNOWN == 15
    assert ErrorCode.name(15) == "UNKNOWN"
    f = err.push(err.new_t(1), ErrorCode.UNKNOWN, 1)
    assert flags.unpack(f)[0].code_name == "UNKNOWN"


def test_codes_have_names_and_severities():
    assert ErrorCode.name(ErrorCode.NAN) == "NAN"
    assert ErrorCode.name(ErrorCode.OUT_OF_BOUNDS) == "OUT_OF_BOUNDS"
    assert ErrorCode.default_severity(ErrorCode.NAN) == Severity.CRITICAL
    assert ErrorCode.default_severity(ErrorCode.OUT_OF_BOUNDS) == Severity.ERROR
    assert ErrorCode.default_severity(ErrorCode.FALLBACK_VALUE) == Severity.WARN
    assert ErrorCode.default_severity(ErrorCode.OK) == Severity.OK


def test_a_code_for_each_sample(compiled):
    config = ErrorConfig(num_slots=8)

    @compiled
    def forward(x):
        f = err.new(x, config)
        codes = torch.where(x.isnan(), ErrorCode.NAN, torch.where(x.isinf(), ErrorCode.INF, ErrorCode.OK))
        return err.push(f, codes, 1, Severity.ERROR, config)

    f = forward(torch.tensor([1.0, NAN, INF]))
    assert f.shape == (3, 2)
    assert codes_of(f) == [[], [err.NAN], [err.INF]]
    assert err.max_severity(f).tolist() == [Severity.OK, Severity.ERROR, Severity.ERROR]
    assert flags.unpack(f, 0, config) == []
    assert [error.code_name for error in flags.unpack(f, 1, config)] == ["NAN"]


def test_old_names_of_filters():
    z = torch.tensor([[1.0], [NAN], [3.0]])
    f = flag_nan(z, "z", err.new(z))
    assert err.Ok(f, z).tolist() == [[1.0], [3.0]]
    assert err.Err(f, z).shape == (1, 1)


def test_has_err_is_a_bool_and_find_a_mask():
    f = err.new_t(3)
    assert has_err(f) is False
    f = err.push(f, ErrorCode.INF, 1, where=rows(3, 1))
    assert has_err(f) is True
    assert find(ErrorCode.INF, f).tolist() == [False, True, False]
    assert find(ErrorCode.NAN, f).tolist() == [False, False, False]


@pytest.mark.parametrize(
    ("fallback", "replaced"),
    [(0.5, [0.5, 0.5]), (torch.tensor([7.0, 8.0]), [7.0, 8.0]), (lambda: torch.tensor([[9.0, 9.0]]), [9.0, 9.0])],
    ids=["float", "tensor", "callable"],
)
def test_fix_replaces_the_whole_row_and_keeps_its_error(fallback, replaced):
    @traced
    def forward(z):
        f = flag_nan(z, "head", err.new(z))
        return fix(z, f, "head", fallback)

    z, f = forward(torch.tensor([[1.0, 2.0], [3.0, NAN]]))
    assert z.tolist() == [[1.0, 2.0], replaced]
    assert errors_of(f) == [[], [(err.NAN, "head"), (err.FALLBACK_VALUE, "head")]]


def test_lifo_puts_the_newest_in_slot_0(run):
    config = ErrorConfig(num_slots=4, accumulation=AccumulationConfig(Priority.CHRONO, Order.LAST, Dedupe.UNIQUE))

    def forward(f):
        for location in range(1, 7):
            f = err.push(f, ErrorCode.NAN, location, Severity.CRITICAL, config)
        return f

    f = run(forward)(err.new_t(1, None, config))
    assert err.get_first_location(f).tolist() == [6]
    assert [error.location for error in flags.unpack(f, 0, config)] == [6, 5, 4, 3]


@pytest.mark.parametrize("first", [ErrorCode.NAN, ErrorCode.SATURATED])
def test_one_record_a_location_keeps_the_worse(run, first):
    config = ErrorConfig(accumulation=AccumulationConfig(dedupe=Dedupe.LOCATION))

    def forward(f):
        f = err.push(f, first, 1, config=config)
        f = err.push(f, ErrorCode.OOB, 1, config=config)
        return err.push(f, ErrorCode.NAN, 1, config=config)

    f = run(forward)(err.new_t(1, None, config))
    assert [(error.code, error.location) for error in flags.unpack(f, 0, config)] == [(ErrorCode.NAN, 1)]


def test_unwrap_takes_a_result():
    assert unwrap(Ok(42)) == 42
    with pytest.raises(ValueError, match="Negative"):
        unwrap(Err(ValueError("Negative")))
