"""What code written for the published 1.x relies on, beyond the specification."""

import inspect

import pytest
import torch
from torch import nn

import torchguard
from torchguard import (
    HAS,
    IF,
    IS,
    AccumulationConfig,
    Dedupe,
    Err,
    ErrorCode,
    ErrorConfig,
    ErrorDomain,
    ErrorFlags,
    ErrorLocation,
    Ok,
    Order,
    Priority,
    Severity,
    err,
    error_t,
    experimental,
    find,
    fix,
    flag_inf,
    flag_nan,
    flag_nan_and_inf,
    flag_oob_indices,
    flags,
    has_err,
    push,
    tensorcheck,
    typing,
    unwrap,
)
from torchguard.exceptions import GivenTwiceError, TorchGuardError
from torchguard.typing import Tensor, float32_t

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
    location = ErrorLocation.register("legacy.decoder.head")
    assert location > 0
    assert ErrorLocation.register("legacy.decoder.head") == location
    assert ErrorLocation.get("legacy.decoder.head") == location
    assert ErrorLocation.name(location) == "legacy.decoder.head"
    assert ErrorLocation.path(location) == "legacy.decoder.head"
    assert ErrorLocation.is_registered("legacy.decoder.head")
    assert ErrorLocation.count() == known + 1


def test_unknown_locations():
    assert ErrorLocation.UNKNOWN == 0
    assert ErrorLocation.get("legacy.never.registered") == 0
    assert not ErrorLocation.is_registered("legacy.never.registered")
    assert ErrorLocation.name(0) == "Unknown"


def test_reset_removes_registered_locations():
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


def test_ok_and_err_are_filters():
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
def test_dedupe_by_location_records_the_worse_error(run, first):
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


# Parameters that had another name in 1.x or in the tables of the specification.

Z = torch.tensor([[1.0, 2.0], [NAN, 3.0], [INF, 4.0]])
OK_MASK = torch.tensor([True, False, True])
DEFAULTS = ErrorConfig()


def flagged(z=Z):
    return flag_nan_and_inf(z, 7, err.new(z))


def step(z):
    return z + 1, err.push(err.new(z), err.OVERFLOW, 4)


CALLS = {
    "new": (lambda f: err.new(reference=Z), lambda f: err.new(x=Z)),
    "new_t": (lambda f: err.new_t(batch_size=3), lambda f: err.new_t(n=3)),
    "from_code": (
        lambda f: err.from_code(code=err.NAN, loc=4, batch_size=3),
        lambda f: err.from_code(code=err.NAN, location=4, n=3),
    ),
    "from_code, experimental": (
        lambda f: experimental.err.from_code(err.NAN, loc=4, batch_size=3),
        lambda f: experimental.err.from_code(err.NAN, location=4, n=3),
    ),
    "new, experimental": (lambda f: experimental.err.new(reference=Z), lambda f: experimental.err.new(x=Z)),
    "new_t, experimental": (lambda f: experimental.err.new_t(batch_size=3), lambda f: experimental.err.new_t(n=3)),
    "err.push": (
        lambda f: err.push(flags=f, code=err.OOB, location=4, where=OK_MASK),
        lambda f: err.push(f=f, code=err.OOB, location=4, where=OK_MASK),
    ),
    "push_scalar": (
        lambda f: err.push_scalar(flags=f, code=err.OOB, location=4),
        lambda f: err.push_scalar(f=f, code=err.OOB, location=4),
    ),
    "clear": (lambda f: err.clear(flags=f, code=err.NAN), lambda f: err.clear(f=f, code=err.NAN)),
    "has_code": (lambda f: err.has_code(flags=f, code=err.NAN), lambda f: err.has_code(f=f, code=err.NAN)),
    "has_domain": (
        lambda f: err.has_domain(flags=f, dom=ErrorDomain.NUMERIC),
        lambda f: err.has_domain(f=f, domain=ErrorDomain.NUMERIC),
    ),
    "map_err_flags": (
        lambda f: err.map_err_flags(flags=f, fn=lambda f: f * 0),
        lambda f: err.map_err_flags(f=f, fn=lambda f: f * 0),
    ),
    "take_ok_p": (
        lambda f: err.take_ok_p(flags=f, tensor=Z, fill=5.0),
        lambda f: err.take_ok_p(f=f, z=Z, fill=5.0),
    ),
    "take_err_p": (
        lambda f: err.take_err_p(flags=f, tensor=Z, fill=5.0),
        lambda f: err.take_err_p(f=f, z=Z, fill=5.0),
    ),
    "map_ok": (
        lambda f: err.map_ok(flags=f, tensor=Z, fn=torch.neg),
        lambda f: err.map_ok(f=f, z=Z, fn=torch.neg),
    ),
    "map_err": (
        lambda f: err.map_err(flags=f, tensor=Z, fn=torch.neg),
        lambda f: err.map_err(f=f, z=Z, fn=torch.neg),
    ),
    "and_then": (
        lambda f: err.and_then(flags=f, tensor=Z, fn=step),
        lambda f: err.and_then(f=f, z=Z, fn=step),
    ),
    "bind": (lambda f: err.bind(flags=f, tensor=Z, fn=step), lambda f: err.bind(f=f, z=Z, fn=step)),
    "ensure_mask": (
        lambda f: err.ensure_mask(flags=f, predicate=OK_MASK, code=err.OOB, loc=4),
        lambda f: err.ensure_mask(f=f, ok_mask=OK_MASK, code=err.OOB, location=4),
    ),
    "guard": (
        lambda f: err.guard(flags=f, tensor=Z, predicate=lambda z: z > 1, code=err.OOB, loc=4),
        lambda f: err.guard(f=f, z=Z, pred=lambda z: z > 1, code=err.OOB, location=4),
    ),
    "recover_with_fallback": (
        lambda f: err.recover_with_fallback(flags=f, tensor=Z, fallback=0.5, loc=4),
        lambda f: err.recover_with_fallback(f=f, z=Z, fallback=0.5, location=4),
    ),
    "find": (lambda f: find(code=err.NAN, flags=f), lambda f: find(code=err.NAN, f=f)),
    "push": (
        lambda f: push(flags=f, code=err.OOB, module=4, where=OK_MASK),
        lambda f: push(f=f, code=err.OOB, module=4, where=OK_MASK),
    ),
    "fix": (
        lambda f: fix(tensor=Z, flags=f, module=4, fallback=0.5),
        lambda f: fix(z=Z, f=f, module=4, fallback=0.5),
    ),
    "flag_nan": (lambda f: flag_nan(tensor=Z, module=4, flags=f), lambda f: flag_nan(z=Z, module=4, f=f)),
    "flag_inf": (lambda f: flag_inf(tensor=Z, module=4, flags=f), lambda f: flag_inf(z=Z, module=4, f=f)),
    "flag_nan_and_inf": (
        lambda f: flag_nan_and_inf(tensor=Z, module=4, flags=f),
        lambda f: flag_nan_and_inf(z=Z, module=4, f=f),
    ),
    "flag_oob_indices": (
        lambda f: flag_oob_indices(indices=torch.tensor([0, 9, 1]), num_embeddings=5, module=4, flags=f),
        lambda f: flag_oob_indices(ids=torch.tensor([0, 9, 1]), num_embeddings=5, module=4, f=f),
    ),
    "HAS": (lambda f: HAS(flags=f), lambda f: HAS(f=f)),
    "IS": (lambda f: IS(code=err.INF, flags=f, config=DEFAULTS), lambda f: IS(code=err.INF, f=f)),
    "IF": (
        lambda f: IF(cond=HAS(f), then_fn=lambda: Z).ELIF(cond=HAS(f), fn=lambda: -Z).ELSE(else_fn=lambda: Z + 1),
        lambda f: IF(cond=HAS(f), then=lambda: Z).ELIF(cond=HAS(f), then=lambda: -Z).ELSE(otherwise=lambda: Z + 1),
    ),
}
QUERIES = """
    is_ok is_err any_err all_ok has_any has_nan has_inf has_critical has_fallback count_errors max_severity
    get_first_code get_first_location get_first_severity
"""


@pytest.mark.parametrize("compile", [lambda fn: fn, traced], ids=["plain", "aot_eager"])
@pytest.mark.parametrize("name", CALLS)
def test_renamed_parameters_are_accepted_under_both_names(name, compile):
    old, new = CALLS[name]
    torch.testing.assert_close(compile(old)(flagged()), new(flagged()), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("compile", [lambda fn: fn, traced], ids=["plain", "aot_eager"])
def test_queries_accept_both_names(compile):
    old = compile(lambda f: [getattr(err, name)(flags=f) for name in QUERIES.split()])
    new = [getattr(err, name)(f=flagged()) for name in QUERIES.split()]
    torch.testing.assert_close(old(flagged()), new, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["take_ok", "take_err", "partition"])
def test_filters_of_rows_accept_both_names(name):
    taken = getattr(err, name)
    torch.testing.assert_close(taken(flags=flagged(), tensor=Z), taken(f=flagged(), z=Z), equal_nan=True)


@pytest.mark.parametrize("name", ["get_ok", "get_err"])
def test_filters_of_flags_accept_both_names(name):
    taken = getattr(err, name)
    assert taken(flags=flagged()).tolist() == taken(f=flagged()).tolist()


@pytest.mark.parametrize("name", ["unpack", "unpack_all", "summary", "repr"])
def test_reports_accept_every_name(name):
    report = getattr(flags, name)(f=flagged())
    assert getattr(flags, name)(flags_tensor=flagged()) == getattr(ErrorFlags, name)(flags=flagged()) == report


def test_other_renamed_parameters():
    assert has_err(flags=flagged())
    assert Severity.name(sev=3) == "CRITICAL"
    assert Severity.is_critical(sev=3)
    assert Severity.is_error_or_worse(sev=2)
    assert Severity.is_warn_or_worse(sev=1)
    assert ErrorDomain.name(domain_bits=1) == "INDEX"
    location = ErrorLocation.register("legacy.head")
    assert ErrorLocation.name(loc=location) == ErrorLocation.path(loc=location) == "legacy.head"


@pytest.mark.parametrize(
    "call",
    [
        lambda f: flag_nan(Z, 4, f, flags=f),
        lambda f: flag_nan(Z, 4, f=f, flags=f),
        lambda f: flag_nan(Z, 4, f, flags=None),
    ],
    ids=["by position", "by name", "as None"],
)
def test_an_argument_given_by_both_names_raises(call):
    with pytest.raises(GivenTwiceError, match=r"^flag_nan: f and flags are the same parameter\. Give f alone\.$"):
        call(flagged())


def test_an_argument_given_twice_is_a_type_error():
    with pytest.raises(TypeError) as caught:
        IF(HAS(flagged()), lambda: 1, then_fn=lambda: 2)
    assert isinstance(caught.value, TorchGuardError)
    assert str(caught.value) == "IF: then and then_fn are the same parameter. Give then alone."


def test_an_argument_given_twice_raises_while_tracing():
    with pytest.raises(Exception, match="z and tensor are the same parameter"):
        traced(lambda z: flag_nan(z, 4, tensor=z))(Z)


def test_an_unknown_keyword_raises():
    with pytest.raises(TypeError, match="unexpected keyword argument 'flag'"):
        err.is_ok(flag=flagged())


def test_signatures_have_the_new_names():
    assert list(inspect.signature(flag_nan).parameters) == ["z", "module", "f", "config"]


# Names.


def test_typing_and_error_t_are_imported_from_the_package():
    assert torchguard.typing.error_t is error_t
    assert typing.ValidationError is torchguard.ValidationError

    @tensorcheck
    def forward(x: Tensor[float32_t, ("batch", 2)]) -> tuple[Tensor, Tensor[error_t, ("batch", "num_words")]]:
        return x, err.new(x)

    _, f = forward(Z)
    assert codes_of(f) == [[], [err.NAN], [err.INF]]


def test_aliases_of_codes():
    assert (ErrorCode.UNDERFLOW, ErrorCode.INVALID_VALUE, ErrorCode.UNSTABLE) == (3, 6, 11)
    assert (ErrorCode.CLAMPED, ErrorCode.SPARSE) == (14, 9)
    assert [ErrorCode.name(code) for code in (3, 6, 9, 11, 14)] == [
        "OVERFLOW",
        "NEGATIVE_IDX",
        "ZERO_OUTPUT",
        "SATURATED",
        "VALUE_CLAMPED",
    ]


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, torch.int32), (torch.int64, torch.int64)], ids=str)
def test_the_dtypes_of_a_config(dtype, bits):
    config = ErrorConfig(flag_dtype=dtype)
    assert (config.torch_dtype, config.torch_int_dtype) == (dtype, bits)
    assert config.word_bits == dtype.itemsize * 8


def test_the_dtype_of_an_alias_is_a_flag_dtype():
    assert ErrorConfig(flag_dtype=float32_t._dtype).flag_dtype == torch.float32
    assert error_t._dtype == torch.int64


def test_the_largest_location():
    assert ErrorLocation.MAX_LOCATION_ID == 1023


def test_the_ok_and_err_values_of_a_result():
    assert (Ok(1).ok_value, Ok(1).err_value) == (1, None)
    assert (Err("why").ok_value, Err("why").err_value) == (None, "why")


def test_the_errors_of_a_sample_as_text():
    f = flag_nan(Z, ErrorLocation.register("legacy.head"), err.new(Z))
    assert ErrorFlags.pretty_print(flags=f, sample_idx=1) == (
        "Found 1 error(s):\n  [0] CRITICAL | NUMERIC.NAN | @ legacy.head"
    )
    assert ErrorFlags.pretty_print(f, 0) == "[OK] No errors"


def test_reduce_or_merges_flags():
    f = ErrorFlags.reduce_or([flag_nan(Z, 1), flag_inf(Z, 2)])
    assert codes_of(f) == [[], [err.NAN], [err.INF]]


def test_the_alias_of_unpack_all():
    assert ErrorFlags.unpack_all_vectorized(flagged()) == flags.unpack_all(flagged())


# Locations.


@pytest.mark.parametrize("compile", [lambda fn: fn, traced], ids=["plain", "aot_eager"])
def test_err_push_takes_a_name_or_a_module(compile):
    layer = torchguard.tracked(nn.Sequential(nn.Linear(2, 2)))[0]

    def forward(z):
        f = err.push(err.new(z), err.OVERFLOW, "legacy.input", where=z > 3)
        return err.push(f, err.SATURATED, layer, where=z > 3)

    f = compile(forward)(Z)
    assert errors_of(f) == [[], [], [(err.OVERFLOW, "legacy.input"), (err.SATURATED, "0")]]


def test_err_push_without_a_location_is_unknown():
    assert errors_of(err.push(err.new_t(1), err.NAN, None)) == [[(err.NAN, "Unknown")]]


@pytest.mark.parametrize("compile", [lambda fn: fn, traced], ids=["plain", "aot_eager"])
def test_a_path_set_by_hand_is_a_location(compile):
    layer = nn.Linear(2, 2)
    layer._fx_path = "legacy.encoder.0"
    f = compile(lambda z: flag_nan(z, layer, err.new(z)))(Z)
    assert errors_of(f) == [[], [(err.NAN, "legacy.encoder.0")], []]


@pytest.mark.parametrize("compile", [lambda fn: fn, traced], ids=["plain", "aot_eager"])
@pytest.mark.parametrize(
    "push_masked",
    [
        lambda f, mask: err.push(f, err.NAN, 1, err.WARN, mask),  # the order of the specification's table
        lambda f, mask: err.push(f, err.NAN, 1, None, mask),
        lambda f, mask: err.push(f, code=err.NAN, location=1, severity=err.WARN, where=mask),
        lambda f, mask: err.push(f, err.NAN, 1, err.WARN, DEFAULTS, where=mask),
        lambda f, mask: err.push(f, err.NAN, 1, where=mask, config=DEFAULTS),
        lambda f, mask: err.push(f, torch.tensor([1, 1, 1]), torch.tensor(4), err.WARN, mask),
        lambda f, mask: experimental.err.push(f, err.NAN, 1, err.WARN, mask),
        lambda f, mask: push(f, err.NAN, 1, err.WARN, where=mask),
        lambda f, mask: err.push_many(f, [(err.NAN, 1, mask, err.WARN)], DEFAULTS),
    ],
)
def test_push_records_what_the_mask_includes_in_every_form(push_masked, compile):
    mask = torch.tensor([True, False, True])
    assert codes_of(compile(push_masked)(err.new_t(3), mask)) == [[err.NAN], [], [err.NAN]]


def test_a_mask_given_twice_raises():
    mask = torch.tensor([False])
    with pytest.raises(GivenTwiceError, match="the fifth argument is a mask, and where is given"):
        err.push(err.new_t(1), err.NAN, 1, err.WARN, mask, where=mask)


@pytest.mark.parametrize("compile", [lambda fn: fn, traced], ids=["plain", "aot_eager"])
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f, mask: err.push_scalar(f, err.NAN, 1, err.WARN, mask), "config is of type .*Tensor.*where=mask"),
        (lambda f, mask: err.push_many(f, [(err.NAN, 1, mask)], mask), "config is of type .*Tensor"),
        (lambda f, mask: err.from_code(err.NAN, 1, 1, None, None, mask), "config is of type .*Tensor"),
        (lambda f, mask: err.merge(f, f, config=mask), "config is of type .*Tensor"),
        (lambda f, mask: err.new(f, mask), "config is of type .*Tensor"),
        (lambda f, mask: experimental.err.new(f, mask), "config is of type .*Tensor"),
        (lambda f, mask: err.ensure_mask(f, mask, err.NAN, 1, None, mask), "config is of type .*Tensor"),
        (lambda f, mask: err.push(f, err.NAN, 1, mask), "severity is a torch.bool tensor.*where=mask"),
        (lambda f, mask: err.push(f, err.NAN, 1, mask.to(torch.int64)), "severity is a torch.int64 tensor"),
        (lambda f, mask: err.push_scalar(f, err.NAN, 1, mask), "severity is a torch.bool tensor"),
        (lambda f, mask: err.push_many(f, [(err.NAN, 1, mask, mask)]), "severity is a torch.bool tensor"),
        (lambda f, mask: err.push(f, err.NAN, 1, err.WARN, [False]), "config is of type list"),
        (lambda f, mask: err.push(f, err.NAN, 1, err.WARN, False), "config is of type bool"),
        (lambda f, mask: err.push(f, err.NAN, 1, err.WARN, mask.float()), "where must be a bool tensor"),
    ],
)
def test_a_mask_in_another_position_raises(call, message, compile):
    with pytest.raises(Exception, match=message):
        compile(call)(err.new_t(1), torch.tensor([False]))


def test_queries_of_the_first_slot_return_int32():
    f = flagged()
    assert err.get_first_code(f).dtype == torch.int32
    assert err.get_first_location(f).dtype == torch.int32
    assert err.get_first_severity(f).dtype == torch.int32
