"""Writing flags and asking about them, eager and on every backend."""

import pytest
import torch

from torchguard import IS, ErrorCode, ErrorConfig, ErrorDomain, ErrorFlags, Severity, err, find, flags
from torchguard._channel.config import AccumulationConfig, Dedupe
from torchguard.exceptions import ConfigError

BAD = torch.tensor([False, True, False, True])


@pytest.fixture
def f():
    """Sample 1: NaN at 3, then a fallback at 4. Sample 3: NaN at 3. Sample 2: an index error at 900."""
    f = err.push(err.new_t(4), err.NAN, 3, where=BAD)
    f = err.push(f, err.FALLBACK_VALUE, 4, where=torch.tensor([False, True, False, False]))
    return err.push(f, err.OOB, 900, where=torch.tensor([False, False, True, False]))


def test_new_flags_are_clean(run, carrier):
    config = ErrorConfig(flag_dtype=carrier)
    f = run(lambda x: err.new(x, config))(torch.randn(3, 2))
    assert f.dtype == carrier
    assert err.is_ok(f).tolist() == [True] * 3


def test_from_code():
    f = err.from_code(err.INF, 1007, 3, severity=err.WARN)
    assert [str(error) for error in flags.unpack(f, 2)] == ["WARN: INF @ Location_1007"]


def test_push_marks_only_its_rows(run, carrier):
    config = ErrorConfig(flag_dtype=carrier)

    def fn(x, bad):
        return err.push(err.new(x, config), err.NAN, location=1023, config=config, where=bad)

    f = run(fn)(torch.randn(4, 2), BAD)
    assert err.is_err(f).tolist() == BAD.tolist()
    assert [str(error) for error in flags.unpack(f, 1)] == ["CRITICAL: NAN @ Location_1023"]


def test_push_counts_a_sample_if_any_of_its_entries_is_bad(run):
    where = torch.zeros(3, 2, 5, dtype=torch.bool)
    where[2, 1, 4] = True
    f = run(lambda where: err.push(err.new(where), err.SATURATED, 1, where=where))(where)
    assert err.is_err(f).tolist() == [False, False, True]


def test_push_takes_a_location_for_each_sample(run, carrier):
    config = ErrorConfig(flag_dtype=carrier)

    def fn(location, bad):
        return err.push(err.new(location, config), err.NAN, location, config=config, where=bad)

    f = run(fn)(torch.tensor([5, 6, 7, 800]), BAD)
    assert err.get_first_location(f).tolist() == [0, 6, 0, 800]
    f = run(fn)(torch.tensor(9).expand(4), BAD)
    assert err.get_first_location(f).tolist() == [0, 9, 0, 9]


def test_push_takes_a_code_for_each_sample(run):
    codes = torch.tensor([ErrorCode.NAN, ErrorCode.OK, ErrorCode.ZERO_OUTPUT])
    f = run(lambda codes: err.push(err.new(codes), codes, 2))(codes)
    assert err.get_first_code(f).tolist() == [1, 0, 9]
    assert err.get_first_severity(f).tolist() == [Severity.CRITICAL, 0, Severity.WARN]


def test_pushing_ok_records_nothing():
    f = err.new_t(2)
    assert err.push(f, err.OK, 3) is f


def test_push_many_is_push_after_push(run):
    records = [(err.NAN, 1, BAD), (err.INF, 2, ~BAD), (err.NAN, 1, ~BAD), (err.OOB, 9, BAD, err.WARN)]

    def one_by_one(x):
        f = err.new(x)
        for code, location, mask, *severity in records:
            f = err.push(f, code, location, *severity, where=mask)
        return f

    f = run(lambda x: err.push_many(err.new(x), records))(torch.randn(4, 1))
    assert torch.equal(f, one_by_one(torch.randn(4, 1)))


def test_push_scalar_marks_everybody():
    assert err.is_err(err.push_scalar(err.new_t(3), err.INF, 2)).all()


def test_flags_are_values():
    f = err.new_t(4)
    before = f.clone()
    err.push(f, err.NAN, 1, where=BAD)
    err.merge(f, err.from_code(err.INF, 1, 4))
    assert torch.equal(f, before)


def test_severity_defaults_by_code():
    found = {code: err.max_severity(err.from_code(code, 1, 1)).item() for code in range(1, 16)}
    assert {code for code, level in found.items() if level == Severity.CRITICAL} == {err.NAN, err.INF}
    assert {code for code, level in found.items() if level == Severity.WARN} == {9, 10, 11, 13, 14}
    assert all(found[code] == ErrorCode.default_severity(code) for code in found)


@pytest.mark.inductor
def test_queries(run, f):
    def ask(f):
        return {
            "is_ok": err.is_ok(f),
            "is_err": err.is_err(f),
            "all_ok": err.all_ok(f),
            "any_err": err.any_err(f),
            "has_any": err.has_any(f),
            "has_nan": err.has_nan(f),
            "has_inf": err.has_inf(f),
            "has_code": err.has_code(f, err.OOB),
            "has_critical": err.has_critical(f),
            "numeric": err.has_domain(f, ErrorDomain.NUMERIC),
            "index": err.has_domain(f, 1),
            "quality": err.has_domain(f, 2),
            "runtime": err.has_domain(f, 3),
            "has_fallback": err.has_fallback(f),
            "count": err.count_errors(f),
            "worst": err.max_severity(f),
            "code": err.get_first_code(f),
            "location": err.get_first_location(f),
            "severity": err.get_first_severity(f),
        }

    answers = run(ask)(f)
    assert {name: answer.tolist() for name, answer in answers.items()} == {
        "is_ok": [True, False, False, False],
        "is_err": [False, True, True, True],
        "all_ok": False,
        "any_err": True,
        "has_any": True,
        "has_nan": [False, True, False, True],
        "has_inf": [False] * 4,
        "has_code": [False, False, True, False],
        "has_critical": [False, True, False, True],
        "numeric": [False, True, False, True],
        "index": [False, False, True, False],
        "quality": [False] * 4,
        "runtime": [False, True, False, False],
        "has_fallback": [False, True, False, False],
        "count": [0, 2, 1, 1],
        "worst": [0, 3, 2, 3],
        "code": [0, 1, 5, 1],
        "location": [0, 3, 900, 3],
        "severity": [0, 3, 2, 3],
    }
    assert answers["count"].dtype == torch.int32
    assert answers["worst"].dtype == torch.int64


# Each query that takes a config, and its answer for two errors of which the config excludes the second.
LIMITED = {
    "has_code": (lambda f, config: err.has_code(f, err.INF, config), False, True),
    "has_nan": (lambda f, config: err.has_nan(f, config), True, True),
    "has_inf": (lambda f, config: err.has_inf(f, config), False, True),
    "has_fallback": (lambda f, config: err.has_fallback(f, config), False, False),
    "has_domain": (lambda f, config: err.has_domain(f, ErrorDomain.NUMERIC, config), True, True),
    "has_critical": (lambda f, config: err.has_critical(f, config), False, True),
    "count_errors": (lambda f, config: err.count_errors(f, config), 1, 2),
    "max_severity": (lambda f, config: err.max_severity(f, config), 1, 3),
    "find": (lambda f, config: find(err.INF, f, config), False, True),
    "IS": (lambda f, config: IS(err.INF, f, config=config), False, True),
}
BOUNDARY = {
    "unpack": lambda f, config: len(flags.unpack(f, 0, config)),
    "unpack_all": lambda f, config: len(flags.unpack_all(f, config)[0]),
    "summary": lambda f, config: len(flags.summary(f, config)),
    "repr": lambda f, config: flags.repr(f, config).count("x"),
    "pretty_print": lambda f, config: ErrorFlags.pretty_print(f, 0, config).count("@"),
}


@pytest.mark.parametrize("name", LIMITED)
def test_a_query_reads_the_slots_of_its_config(run_light, carrier, name):
    query, limited, whole = LIMITED[name]
    f = err.push(err.new_t(1, config=ErrorConfig(num_slots=2, flag_dtype=carrier)), err.NAN, 1, err.WARN)
    f = err.push(f, err.INF, 2)
    one, two = ErrorConfig(num_slots=1), ErrorConfig(num_slots=2)
    answers = run_light(lambda f: [query(f, config) for config in (one, two, None)])(f)
    assert [answer.flatten().tolist() for answer in answers] == [[limited], [whole], [whole]]


@pytest.mark.parametrize("name", BOUNDARY)
def test_reports_read_the_slots_of_their_config(carrier, name):
    f = err.push(err.new_t(1, config=ErrorConfig(num_slots=2, flag_dtype=carrier)), err.NAN, 1)
    f = err.push(f, err.INF, 2)
    configs = ErrorConfig(num_slots=1), ErrorConfig(num_slots=2), None
    assert [BOUNDARY[name](f, config) for config in configs] == [1, 2, 2]


@pytest.mark.parametrize("name", [*LIMITED, *BOUNDARY])
def test_a_config_of_another_width_is_an_error(name):
    """Its slots would be others than those of the flags: nothing that is passed is ignored."""
    query = BOUNDARY[name] if name in BOUNDARY else LIMITED[name][0]
    with pytest.raises(
        ConfigError, match=r"config has 40 slots but the flags have room for 16\. Give the config they were"
    ):
        query(err.new_t(1), ErrorConfig(num_slots=40))


@pytest.mark.wrong_types
@pytest.mark.parametrize("name", [*LIMITED, *BOUNDARY])
def test_a_config_of_another_type_is_an_error(name):
    query = BOUNDARY[name] if name in BOUNDARY else LIMITED[name][0]
    with pytest.raises(ConfigError, match="config is of type int"):
        query(err.new_t(1), 3)


def test_clear_removes_a_code_and_closes_the_gap(run, f):
    cleared = run(lambda f: err.clear(f, err.NAN))(f)
    assert err.count_errors(cleared).tolist() == [0, 1, 1, 0]
    assert err.get_first_code(cleared).tolist() == [0, err.FALLBACK_VALUE, err.OOB, 0]


def test_merge_takes_the_first_as_the_oldest(run, f):
    other = err.push(err.new_t(4), err.INF, 8, where=torch.tensor([True, True, False, False]))
    merged = run(err.merge)(f, other)
    assert [[(e.code, e.location) for e in row] for row in flags.unpack_all(merged)] == [
        [(err.INF, 8)],
        [(err.NAN, 3), (err.FALLBACK_VALUE, 4), (err.INF, 8)],
        [(err.OOB, 900)],
        [(err.NAN, 3)],
    ]
    assert torch.equal(err.merge(f), f)
    assert torch.equal(err.merge(f, err.new_t(4), f), f)


def test_merging_flags_in_different_rows():
    one = err.push(err.new_t(3), err.NAN, 1, where=torch.tensor([True, False, False]))
    two = err.push(err.new_t(3), err.INF, 2, where=torch.tensor([False, False, True]))
    assert err.get_first_code(err.merge(one, two)).tolist() == [err.NAN, 0, err.INF]


def test_empty_batches(run, carrier):
    config = ErrorConfig(flag_dtype=carrier)

    def fn(x):
        f = err.push(err.new(x, config), err.NAN, 1, config=config, where=torch.isnan(x).any(-1))
        return err.merge(f, f, config=config), err.is_ok(f), err.mean_ok(f, x.sum(-1)), err.clear(f, err.NAN)

    merged, ok, mean, _ = run(fn)(torch.zeros(0, 3))
    assert merged.shape[0] == ok.shape[0] == 0
    assert mean.item() == 0
    assert flags.summary(merged) == {}


def test_flags_made_with_another_width_keep_theirs():
    small = ErrorConfig(num_slots=4)
    f = err.new_t(1, config=small)
    for location in range(1, 7):
        f = err.push(f, err.NAN, location)
    assert f.shape == (1, 1)
    assert err.count_errors(f).tolist() == [4]


def test_push_takes_its_arguments_in_the_order_of_the_spec(run_light):
    """`err.push(f, code, location, severity, where)`: what the mask excludes is not recorded."""
    where = torch.tensor([True, False, True])
    f = run_light(lambda x: err.push(err.new(x), err.NAN, 5, 2, where))(torch.zeros(3, 2))
    assert err.is_err(f).tolist() == where.tolist()
    assert [[one.location for one in errors] for errors in flags.unpack_all(f)] == [[5], [], [5]]


@pytest.mark.parametrize("dedupe", list(Dedupe))
def test_a_merge_of_few_rows_is_that_of_many(dedupe):
    """Few shared rows are merged as numbers, many by operations."""
    config = ErrorConfig(accumulation=AccumulationConfig(dedupe=dedupe), num_slots=4)
    torch.manual_seed(0)

    def new():
        f = err.new_t(40, config=config)
        for _ in range(5):
            code, location, severity = (int(torch.randint(1, 4, ())) for _ in range(3))
            f = err.push(f, code, location, severity=severity, where=torch.rand(40) < 0.5, config=config)
        return f

    one, two = new(), new()
    merged = [err.merge(one[i : i + 2], two[i : i + 2], config=config) for i in range(0, 40, 2)]
    assert torch.equal(torch.cat(merged), err.merge(one, two, config=config))
