"""Flags written under one config, and then under another: as in a plain-Python model, in a graph as in eager mode."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.breadth import breadth
from tests.channel.test_policy import DTYPES, ERRORS, POLICIES, Held, model, rank, same, unpacked

from torchguard import AccumulationConfig, Dedupe, ErrorConfig, Order, Priority, err

ROWS = 48
YES = torch.tensor([True])


def pushed(policy, room, held, errors):
    """The model of `test_policy`, for a sample that already holds errors written under another policy."""
    if not errors:
        return held
    if not (policy.priority == Priority.CHRONO and policy.order == Order.FIRST):
        oldest_first = held[::-1] if policy.priority == Priority.CHRONO else held
        return model(policy, room, oldest_first + errors)
    kept = [Held(*error, arrived) for arrived, error in enumerate(held)][:room]
    for arrived, error in enumerate(errors, start=len(held)):
        new = Held(*error, arrived)
        twin = next((old for old in kept if same(policy.dedupe, old, new)), None)
        if twin is None:
            kept = sorted([*kept, new], key=lambda held: rank(policy, held))[:room]
        elif new.severity > twin.severity:
            twin.code, twin.location, twin.severity = error
    return [(one.code, one.location, one.severity) for one in kept]


def flags_of(errors, config):
    return err.push_many(err.new_t(1, config=config), [(*error[:2], YES, error[2]) for error in errors], config)


# Two configs of one width: 4 slots fill one word of int64, and two of int32.
ROOMS = st.sampled_from([3, 4])
FEW = st.lists(ERRORS, max_size=5)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@settings(max_examples=settings.default.max_examples // 3)
@given(
    st.sampled_from(POLICIES),
    st.sampled_from(DTYPES),
    ROOMS,
    ROOMS,
    st.lists(ERRORS, max_size=6),
    FEW,
)
def test_pushes_onto_flags_of_another_config(policy, before, dtype, room_before, room, first, second):
    f = flags_of(first, ErrorConfig(room_before, before, flag_dtype=dtype))
    held, config = unpacked(f), ErrorConfig(room, policy, flag_dtype=dtype)
    want = pushed(policy, room, held, second)
    together = err.push_many(f, [(*error[:2], YES, error[2]) for error in second], config)
    assert unpacked(together) == want
    for code, location, severity in second:
        f = err.push(f, code, location, severity, config, where=YES)
    assert unpacked(f) == want


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@settings(max_examples=settings.default.max_examples // 3)
@given(
    st.sampled_from(POLICIES),
    st.sampled_from(DTYPES),
    ROOMS,
    st.lists(ERRORS, max_size=5),
    FEW,
)
def test_a_merge_of_flags_of_another_config(policy, before, dtype, room, first, second):
    """It does not depend on what the other samples of the batch hold."""
    made_with, config = ErrorConfig(4, before, flag_dtype=dtype), ErrorConfig(room, policy, flag_dtype=dtype)
    one, two = flags_of(first, made_with), flags_of(second, made_with)
    held, theirs = unpacked(one), unpacked(two)
    newest_first = policy.priority == Priority.CHRONO and policy.order == Order.LAST
    want = pushed(policy, room, held, theirs[::-1] if newest_first else theirs) if held else theirs
    assert unpacked(err.merge(one, two, config=config)) == want
    full = flags_of([(1, 1, 1), (2, 1, 1), (9, 2, 2)], made_with)
    beside_others = err.merge(torch.cat([one, full, full]), torch.cat([two, full, two]), config=config)
    assert unpacked(beside_others[:1]) == want


def random_flags(policy, room, seed, dtype=torch.int64):
    """Flags of many samples, each with some of these errors."""
    config, generator = ErrorConfig(room, policy, flag_dtype=dtype), torch.Generator().manual_seed(seed)
    f = err.new_t(ROWS, config=config)
    for _ in range(6):
        code, location, severity = (torch.randint(low, high, (1,), generator=generator).item() for low, high in RANGES)
        where = torch.rand(ROWS, generator=generator) < 0.4
        f = err.push(f, (1, 2, 9)[code], location, severity, config, where=where)
    return f


RANGES = ((0, 3), (1, 4), (1, 4))
BEFORE = [AccumulationConfig(dedupe=Dedupe.NONE), AccumulationConfig(), POLICIES[4], POLICIES[15]]


@pytest.mark.compiled
@pytest.mark.parametrize("policy", breadth(POLICIES, *POLICIES[::7]), ids=str)
def test_a_graph_merges_and_pushes_as_eager_mode_does(policy):
    config = ErrorConfig(3, policy)

    def fn(one, two, three, mask):
        some = err.push(one, err.OVERFLOW, 2, config=config, where=mask)
        more = err.push_many(one, [(err.NAN, at, mask) for at in (1, 2, 3)], config)
        both = err.merge(one, two, config=config)
        return some, more, both, err.merge(one, two, three, config=config), err.clear(one, err.NAN, config)

    traced = torch.compile(fn, backend="aot_eager", fullgraph=True)
    for before, seed in itertools.product(BEFORE, range(3)):
        args = [random_flags(before, 4, 10 * seed + number) for number in range(3)]
        args.append(torch.rand(ROWS) > 0.6)
        for got, want in zip(traced(*args), fn(*args), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", breadth(DTYPES, torch.float32), ids=str)
def test_merging_under_another_dedupe(run, dtype):
    """One NaN and one Inf at each of two locations; `Dedupe.CODE` joins what arrives, and leaves what is held."""
    config = ErrorConfig(accumulation=AccumulationConfig(dedupe=Dedupe.CODE), flag_dtype=dtype)
    held = [(err.NAN, 1, 3), (err.NAN, 2, 3)]
    one = torch.cat([flags_of(held, ErrorConfig(flag_dtype=dtype)), err.new_t(2, config=config)])
    two = torch.cat([flags_of([(err.NAN, 3, 3), (err.INF, 3, 3)], config)] * 2 + [err.new_t(1, config=config)])
    merged = run(lambda one, two: err.merge(one, two, config=config))(one, two)
    assert unpacked(merged[:1]) == [*held, (err.INF, 3, 3)]
    assert unpacked(merged[1:2]) == [(err.NAN, 3, 3), (err.INF, 3, 3)]
    assert unpacked(merged[2:]) == []


@pytest.mark.wrong_types  # the signature asks for one width
@pytest.mark.parametrize(("slots", "wider"), [(2, 16), (16, 2), (4, 8)])
def test_merging_flags_of_two_widths(run_light, slots, wider):
    errors = [(err.NAN, at, 3) for at in range(1, 4)]
    one, two = flags_of(errors[:1], ErrorConfig(slots)), flags_of(errors, ErrorConfig(wider))
    one, two = torch.cat([one, one * 0]), torch.cat([two, two])
    merged = run_light(err.merge)(one, two)
    assert merged.shape == one.shape
    held = errors[: min(wider, one.shape[1] * 4)]
    assert unpacked(merged[:1]) == unpacked(merged[1:]) == held


@pytest.mark.long
@pytest.mark.compiled
def test_merging_empty_and_dynamic_batches():
    fn = torch.compile(lambda a, b, c: err.merge(a, b, c), backend="aot_eager", fullgraph=True, dynamic=True)
    whole = [random_flags(AccumulationConfig(), 16, seed) for seed in range(3)]
    for size in (ROWS, 7, 2, 0):
        args = [f[:size] for f in whole]
        assert torch.equal(fn(*args), err.merge(*args))
