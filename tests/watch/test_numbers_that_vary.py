"""Graphs with symbols: what keeps samples apart for the sizes and numbers that were traced may mix them for others."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from torchguard import err
from torchguard._torch.symbols import CannotRunError, Symbols
from torchguard._watch import watch
from torchguard._watch.graph_plan import _Finder
from torchguard.exceptions import MixedRowsWarning

NAN, BAD = float("nan"), 1


class Mixing(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.first, self.last, self.mix = nn.Linear(8, 8).double(), nn.Linear(8, 8).double(), mix
        self.register_buffer("shift", torch.zeros((), dtype=torch.long))

    def forward(self, x, k=0):
        return self.last(self.mix(self, self.first(x), k))


def rolled_by(number):
    return lambda model, h, k: h + h.roll(number, 0)


def rolled(model, h, k):
    return h + h.roll(k, 0)


def rolled_by_half(model, h, k):
    return h + h.roll(int(k / 2), 0)


def rolled_by_buffer(model, h, k):
    return h + h.roll(int(model.shift), 0)


def picked(model, h, k):
    return h + h[(torch.arange(h.shape[0]) + k) % h.shape[0]]


def modulo(number):
    return lambda model, h, k: h + h[torch.arange(h.shape[0]) % number]


def at_most(number):
    return lambda model, h, k: h + h[torch.arange(h.shape[0]).clamp(max=number)]


def limited(most, mix):
    def limited_mix(model, h, k):
        torch._check(h.shape[0] <= most)
        return mix(model, h, k)

    return limited_mix


def in_pairs(mix):
    return lambda model, h, k: mix(model, h.unflatten(0, (h.shape[0] // 2, 2)).flatten(0, 1), k)


def rolled_by_part(model, h, k):
    return h + h.roll(k // 16, 0)


def depends_on_bad(model, x, k):
    """The samples whose output another value of the bad one changes."""
    other = x.clone()
    other[BAD] += 1
    return ((model(other, k) - model(x, k)).abs().amax((1, 2)) > 1e-9).nonzero().flatten().tolist()


def flagged_in_last(model, calls, backend, **how):
    """Calls a compiled model with several batch sizes and numbers, the last time with a bad sample.

    Returns which samples it may change, which were flagged, and whether the model was said to mix samples.
    """
    torch._dynamo.reset()
    compiled = torch.compile(watch(model, quarantine=True), backend=backend, fullgraph=True, **how)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", MixedRowsWarning)
        for size, k in calls[:-1]:
            compiled(torch.randn(size, 5, 8, dtype=torch.float64), k)
        size, k = calls[-1]
        x = torch.randn(size, 5, 8, dtype=torch.float64)
        changed = depends_on_bad(model, x, k)
        x[BAD, 0] = NAN
        out, f = compiled(x, k)
    assert out.isfinite().all()
    return changed, err.is_err(f).nonzero().flatten().tolist(), any(one.category is MixedRowsWarning for one in seen)


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("mix", "calls", "how"),
    [
        (rolled_by(4), [(4, 0), (8, 0)], {"dynamic": True}),
        (rolled_by(4), [(2, 0), (4, 0), (5, 0)], {}),
        (rolled, [(4, 4), (4, 8), (4, 5)], {}),
        (rolled, [(4, 4), (4, 5)], {"dynamic": True}),
        (rolled_by_half, [(4, 16.0), (4, 8.0), (4, 2.0)], {}),
        (picked, [(4, 4), (4, 8), (4, 5)], {}),
        (modulo(4), [(4, 0), (8, 0)], {"dynamic": True}),
        (modulo(64), [(4, 0), (66, 0)], {"dynamic": True}),
        (at_most(1), [(2, 0), (4, 0)], {"dynamic": True}),
        (limited(64, modulo(8)), [(4, 0), (16, 0)], {"dynamic": True}),
        (in_pairs(modulo(16)), [(4, 0), (20, 0)], {"dynamic": True}),
        (rolled_by_part, [(4, 8), (4, 9), (4, 18)], {}),
    ],
)
def test_a_graph_that_mixes_samples_for_other_numbers_says_so(mix, calls, how, backend):
    changed, flagged, declared = flagged_in_last(Mixing(mix), calls, backend, **how)
    assert changed != [BAD]
    assert declared
    assert flagged == [*range(calls[-1][0])]


@pytest.mark.long
def test_inductor_says_so():
    changed, flagged, declared = flagged_in_last(Mixing(rolled), [(4, 4), (4, 5)], "inductor", dynamic=True)
    assert set(changed) < set(flagged)
    assert declared


def test_a_number_of_a_buffer():
    model = Mixing(rolled_by_buffer)
    compiled = torch.compile(watch(model, quarantine=True), backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    with pytest.warns(MixedRowsWarning, match="aten.add.Tensor, for other sizes or numbers than those of this call"):
        compiled(x)
    model.shift.fill_(1)
    x[BAD, 0] = NAN
    assert err.is_err(compiled(x)[1]).all()


@pytest.mark.parametrize(
    "mix",
    [
        lambda model, h, k: h + h.roll(k, 1),
        lambda model, h, k: h + h.roll(h.shape[0], 0),
        lambda model, h, k: h + h[torch.arange(h.shape[0])] * k,
        lambda model, h, k: torch.cat([h, h * k])[: h.shape[0]],
        lambda model, h, k: h.transpose(0, 1).flatten(0, 1).tanh().unflatten(0, h.shape[1::-1]).transpose(0, 1),
        lambda model, h, k: h + h.unflatten(2, (2, 4)).flip(2).flatten(2),
        lambda model, h, k: h * k if 0 < k <= 7 else h,
    ],
)
def test_a_graph_that_keeps_samples_apart_for_all_numbers_is_exact(mix):
    for how in ({"dynamic": True}, {}):
        calls = [(4, 2), (6, 3), (5, 7)]
        assert flagged_in_last(Mixing(mix), calls, "eager", **how) == ([BAD], [BAD], False)


class Scaled(nn.Module):
    """Has an epsilon, which is a symbol of its own with `dynamic=True`, as in each of a model's norms."""

    def __init__(self):
        super().__init__()
        self.eps, self.last = 1e-6, nn.Linear(8, 8).double()

    def forward(self, x):
        return self.last(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def flagged(model, *given):
    with warnings.catch_warnings():
        warnings.simplefilter("error", MixedRowsWarning)
        return err.is_err(model(*given)[1]).nonzero().flatten().tolist()


def bad_batch(*shape):
    x = torch.randn(*shape, dtype=torch.float64)
    x[BAD, 0] = NAN
    return x


def test_many_equal_numbers():
    model = watch(nn.Sequential(*[Scaled() for _ in range(8)]), quarantine=True)
    assert flagged(torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True), bad_batch(4, 5, 8)) == [BAD]


def test_a_size_that_follows_from_another():
    class Strided(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(8, 8, 3, stride=2, padding=1).double()

        def forward(self, x, y):
            return self.conv(x.transpose(1, 2)).transpose(1, 2) + y

    compiled = torch.compile(watch(Strided(), quarantine=True), backend="aot_eager", fullgraph=True)
    for size, length in [(4, 12), (5, 16), (6, 20)]:
        other = torch.randn(size, length // 2, 8, dtype=torch.float64)
        assert flagged(compiled, bad_batch(size, length, 8), other) == [BAD]


def test_large_constants_are_not_computed(monkeypatch):
    class Blocks(nn.Module):
        def forward(self, x):
            number = torch.arange(x.shape[0] * x.shape[1]) // x.shape[1]
            return (number[:, None] == number).double() @ x.flatten(0, 1) + torch.zeros(x.shape[0], 512, 512).sum()

    sizes, ran = [], _Finder.ran

    def note(self, node, args, kwargs, result):
        sizes.append(result.numel() if type(result) is torch.Tensor else 0)
        return ran(self, node, args, kwargs, result)

    monkeypatch.setattr(_Finder, "ran", note)
    x = torch.randn(2, 256, 8, dtype=torch.float64)
    torch._dynamo.mark_dynamic(x, 0)
    with pytest.warns(MixedRowsWarning):
        torch.compile(watch(Blocks(), quarantine=True), backend="eager", fullgraph=True)(x)
    assert 512 * 512 < max(sizes) <= 1 << 20


def test_numbers_that_depend_on_each_other_are_not_exact():
    def tied(model, h, k):
        torch._check(h.shape[0] * k == 16)
        return h + h.roll(4, 0)

    changed, flagged, declared = flagged_in_last(Mixing(tied), [(4, 4), (8, 2)], "eager", dynamic=True)
    assert set(changed) < set(flagged)
    assert declared


MIXES = {"roll": rolled_by, "modulo": modulo, "at most": at_most}


@given(
    st.sampled_from(sorted(MIXES)), st.integers(1, 9), st.lists(st.integers(2, 12), min_size=2, max_size=3, unique=True)
)
@settings(max_examples=8, deadline=None)
def test_what_changes_is_flagged(mix, number, sizes):
    model = Mixing(MIXES[mix](number))
    changed, flagged, _ = flagged_in_last(model, [(size, 0) for size in sizes], "eager", dynamic=True)
    assert set(changed) <= set(flagged)


class TestSymbols:
    @pytest.fixture
    def environment(self):
        return ShapeEnv()

    def sizes(self, environment, *hints):
        from torch._dynamo.source import ConstantSource

        return [
            environment.create_symintnode(
                environment.create_symbol(
                    hint, ConstantSource(f"size{i}"), DimDynamic.DYNAMIC, do_not_specialize_zero_one=True
                ),
                hint=hint,
                source=ConstantSource(f"size{i}"),
            )
            for i, hint in enumerate(hints)
        ]

    def symbols(self, *sizes):
        graph = torch.fx.Graph()
        for i, size in enumerate(sizes):
            graph.placeholder(f"size{i}").meta["example_value"] = size
        return Symbols([graph])

    def test_no_symbols(self):
        assert not self.symbols(4, torch.ones(2))

    def test_other_numbers_are_primes_that_differ(self, environment):
        sizes = self.sizes(environment, 4, 35, 5)
        found = [[number(size) for size in sizes] for number in self.symbols(*sizes).others(sizes[:1])]
        assert found == [[7, 23, 29], [67, 61, 59]]

    def test_guards_are_kept(self, environment):
        a, b = self.sizes(environment, 8, 6)
        assert a % 8 == 0
        assert a > b
        assert b < 10
        symbols = self.symbols(a, b)
        for number in symbols.others([a]):
            assert number(a) % 8 == 0
            assert number(a) != 8
            assert number(b) < min(10, number(a))
            assert number(b) != 6
            assert number(a * b + 1) == number(a) * number(b) + 1

    def test_a_number_that_cannot_change(self, environment):
        a, b = self.sizes(environment, 4, 9)
        assert a * b == 36
        with pytest.raises(CannotRunError, match="no other sizes or numbers than 4, 9 were found"):
            [*self.symbols(a, b).others([])]

    def test_concrete_numbers_stay(self, environment):
        (a,) = self.sizes(environment, 4)
        assert [number(3) for number in self.symbols(a).others([])] == [3, 3]
