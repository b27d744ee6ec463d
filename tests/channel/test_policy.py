"""Every accumulation policy against a plain-Python model of it."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.breadth import breadth

from torchguard import AccumulationConfig, Dedupe, ErrorConfig, Order, Priority, err, flags

POLICIES = [AccumulationConfig(*axes) for axes in itertools.product(Priority, Order, Dedupe)]
DTYPES = [torch.int64, torch.int32, torch.float32, torch.float64]
# Few values, so that errors collide; the location with the top bit set makes slots negative as int16.
ERRORS = st.tuples(st.sampled_from([1, 2, 9, 15]), st.sampled_from([0, 1, 7, 1023]), st.integers(1, 3))


@dataclass
class Held:
    code: int
    location: int
    severity: int
    arrived: int


def model(policy: AccumulationConfig, room: int, errors: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """One error after the other, as the docs tell it."""
    kept: list[Held] = []
    for arrived, error in enumerate(errors):
        new = Held(*error, arrived)
        twin = next((old for old in kept if same(policy.dedupe, old, new)), None)
        if twin is None:
            kept.append(new)
        elif policy.priority == Priority.CHRONO and policy.order == Order.FIRST:
            if new.severity > twin.severity:
                twin.code, twin.location, twin.severity = error
        elif rank(policy, new) < rank(policy, twin):
            kept[kept.index(twin)] = new
        kept = sorted(kept, key=lambda held: rank(policy, held))[:room]
    return [(held.code, held.location, held.severity) for held in kept]


def same(dedupe: Dedupe, one: Held, two: Held) -> bool:
    if dedupe == Dedupe.NONE:
        return False
    return (dedupe == Dedupe.LOCATION or one.code == two.code) and (
        dedupe == Dedupe.CODE or one.location == two.location
    )


def rank(policy: AccumulationConfig, held: Held) -> tuple[int, ...]:
    sign = 1 if policy.order == Order.FIRST else -1
    return {
        Priority.CHRONO: (sign * held.arrived,),
        Priority.SEVERITY: (sign * held.severity, held.arrived),
        Priority.LOCATION: (sign * held.location, -held.severity, held.arrived),
    }[policy.priority]


def unpacked(f: torch.Tensor) -> list[tuple[int, int, int]]:
    return [(error.code, error.location, error.severity) for error in flags.unpack(f)]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@settings(max_examples=settings.default.max_examples // 5)
@given(st.sampled_from(DTYPES), st.sampled_from([1, 2, 3, 4, 6]), st.lists(ERRORS, max_size=12), st.integers(0, 12))
def test_pushes_one_by_one_together_or_merged_follow_the_model(policy, dtype, room, errors, cut):
    config = ErrorConfig(num_slots=room, accumulation=policy, flag_dtype=dtype)
    yes = torch.tensor([True])
    want = model(policy, room, errors)

    one_by_one = err.new_t(1, config=config)
    for error in errors:
        one_by_one = err.push(one_by_one, *error, config, where=yes)
    assert unpacked(one_by_one) == want

    def together(f, errors):
        return err.push_many(f, [(code, location, yes, severity) for code, location, severity in errors], config)

    empty = err.new_t(1, config=config)
    assert unpacked(together(empty, errors)) == want
    assert unpacked(together(together(empty, errors[:cut]), errors[cut:])) == want
    halves = [model(policy, room, errors[:cut]), model(policy, room, errors[cut:])]
    newest_first = policy.priority == Priority.CHRONO and policy.order == Order.LAST
    arrived = [error for half in halves for error in (reversed(half) if newest_first else half)]
    merged = err.merge(together(empty, errors[:cut]), together(empty, errors[cut:]), config=config)
    assert unpacked(merged) == model(policy, room, arrived)
    if len(halves[1]) < room:
        assert unpacked(merged) == want


@pytest.mark.compiled
@pytest.mark.parametrize("policy", breadth(POLICIES, *POLICIES[::5]), ids=str)
def test_a_graph_keeps_what_eager_keeps(policy):
    config = ErrorConfig(num_slots=3, accumulation=policy)
    errors = [(1, 5, 3), (2, 5, 1), (9, 2, 1), (1, 5, 2), (1, 7, 1), (3, 1, 2), (9, 2, 3)]

    def chain(f, masks):
        for (code, location, severity), mask in zip(errors, masks, strict=True):
            f = err.push(f, code, location, severity, config, where=mask)
        return f

    def from_nothing(masks):
        return chain(err.new_t(64, config=config), masks)

    masks = list(torch.rand(len(errors), 64) > 0.5)
    begun = chain(err.new_t(64, config=config), list(torch.rand(len(errors), 64) > 0.7))
    for fn, args in ((from_nothing, (masks,)), (chain, (begun, masks))):
        want = fn(*args)
        for row in range(3):
            pushed = [error for error, mask in zip(errors, masks, strict=True) if mask[row]]
            if fn is from_nothing:
                assert [(e.code, e.location, e.severity) for e in flags.unpack(want, row)] == model(policy, 3, pushed)
        assert torch.equal(torch.compile(fn, backend="aot_eager", fullgraph=True)(*args), want)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_thousands_of_slots(policy):
    config = ErrorConfig(num_slots=32_768, accumulation=policy)
    f = err.from_code(err.NAN, 3, 1, config=config)
    f = err.push(f, err.INF, 4, config=config)
    merged = err.merge(f, err.from_code(err.OVERFLOW, 5, 1, config=config), config=config)
    assert merged.shape == (1, 8192)
    assert err.count_errors(merged).tolist() == [3]


def test_the_default_keeps_the_root_cause():
    config = ErrorConfig(num_slots=4)
    f = err.new_t(1, config=config)
    for layer in range(1, 21):
        f = err.push(f, err.NAN, layer, config=config)
    assert [error.location for error in flags.unpack(f)] == [1, 2, 3, 4]


def test_last_in_keeps_the_latest_first():
    config = ErrorConfig(num_slots=4, accumulation=AccumulationConfig(order=Order.LAST))
    f = err.new_t(1, config=config)
    for layer in range(1, 21):
        f = err.push(f, err.NAN, layer, config=config)
    assert [error.location for error in flags.unpack(f)] == [20, 19, 18, 17]
