"""Pushes packed by a call that is not compiled: what it returns, and which graphs hold it."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.channel.test_policy import DTYPES, ERRORS, POLICIES
from torch import nn
from torch._inductor.utils import run_and_get_code

from torchguard import AccumulationConfig, ErrorConfig, err, flag_inf, flag_nan, flag_nan_and_inf, flags
from torchguard._channel import pushes
from torchguard._channel.packing import capacity, is_transposed
from torchguard._channel.policy import write
from torchguard._channel.slot_bits import pack_slot

NAN, INF = float("nan"), float("inf")
# A status of two samples: a mask, one for each token, or what a maximum returned.
STATUSES = st.one_of(
    st.lists(st.booleans(), min_size=2, max_size=2),
    st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=2, max_size=2),
    st.lists(st.sampled_from([0.0, INF, -INF, NAN]), min_size=2, max_size=2),
)


class Layers(nn.Module):
    """Equal layers, each with a check: also on the output."""

    def __init__(self, check, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))
        self.check = check

    def forward(self, x):
        f = err.new(x)
        for place, layer in enumerate(self.layers):
            x = nn.functional.gelu(layer(x))
            f = self.check(x, place + 1, f)
        return x, f


def bad_batch(dtype=torch.float32):
    """Samples with NaN, Inf, -Inf and NaN, and none."""
    return torch.tensor([[NAN, 1, 2], [1, INF, 2], [-INF, 1, NAN], [1, 2, 3]]).to(dtype)


@settings(max_examples=100)
@given(
    found=st.lists(st.tuples(STATUSES, ERRORS), min_size=1, max_size=8),
    policy=st.sampled_from([*POLICIES, *[AccumulationConfig()] * len(POLICIES)]),
    dtype=st.sampled_from(DTYPES),
    slots=st.sampled_from([1, 2, 3, 4, 5, 8]),
    transposed=st.booleans(),
    begun=st.booleans(),
    few=st.sampled_from([0, 16]),
)
def test_the_call_writes_what_single_pushes_write(found, policy, dtype, slots, transposed, begun, few):
    config = ErrorConfig(num_slots=slots, accumulation=policy, flag_dtype=dtype, use_transposed_layout=transposed)
    config.transpose_threshold = 1
    like = want = err.new_t(2, config=config)
    if begun := begun and not dtype.is_floating_point:
        want = err.push(like, err.OOB, 5, config=config, where=torch.tensor([True, False]))
    base = want if begun else None
    masks = [torch.tensor(status) for status, _ in found]
    codes = [pack_slot(*error) for _, error in found]
    with mock.patch.object(pushes, "_FEW_ROWS", few):
        got = pushes.call_pack_pushes(base, masks, codes, capacity(like, config), policy, like)
    for mask, slot in zip(masks, codes, strict=True):
        want = write(want, [mask], [slot], capacity(like, config), policy)
    assert flags.unpack_all(got) == flags.unpack_all(want)
    assert (got.dtype, is_transposed(got)) == (dtype, is_transposed(like))
    assert base is None or got.data_ptr() != base.data_ptr()


@pytest.mark.parametrize("values", [[0.0, 1.0], [INF, -INF]])
def test_nothing_is_packed_for_a_clean_batch(monkeypatch, values):
    """Also where the sum of clean maxima is NaN."""
    monkeypatch.setattr(pushes, "packed", None)
    like = err.new_t(2)
    f = pushes.call_pack_pushes(None, [torch.tensor(values)], [1], 16, ErrorConfig().accumulation, like)
    assert torch.equal(f, like)


@pytest.mark.compiled
@pytest.mark.parametrize("check", [flag_nan, pytest.param(flag_nan_and_inf, marks=pytest.mark.long)])
def test_inductor_compiles_one_kernel_for_all_layers(check):
    """The last one included, and packs by one call."""
    with torch.no_grad():
        _, (code,) = run_and_get_code(torch.compile(Layers(check), fullgraph=True), torch.randn(4, 16))
    assert code.count("async_compile.cpp_pybinding(") == 1
    assert code.count("torchguard.pack_pushes.default(") == 1
    assert "torchguard.row_maxima" not in code


@pytest.mark.compiled
def test_other_backends_get_standard_operators():
    from torch._dynamo.backends.common import aot_autograd

    targets = set()

    def keep(graph, _):
        targets.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    backend = aot_autograd(fw_compiler=keep, inference_compiler=keep)
    with torch.no_grad():
        torch.compile(Layers(flag_nan_and_inf), backend=backend, fullgraph=True)(torch.randn(4, 16))
    assert targets
    assert all(target.startswith(("aten.", "<built-in function getitem>")) for target in targets), targets


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex operators")
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        *(
            pytest.param(one, marks=pytest.mark.long)
            for one in (torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.float8_e5m2)
        ),
    ],
)
def test_inductor_finds_what_eager_finds(dtype):
    def fn(x):
        z = x.to(torch.float32) + 1 if dtype == torch.float8_e5m2 else x + 1
        f = flag_nan_and_inf(x, 2, flag_nan_and_inf(z, 1, err.new(x)))
        return z, flag_inf(z.unsqueeze(1), 3, f), flag_nan(z.t().t(), 4, f)

    x = bad_batch(dtype)
    for got, want in zip(torch.compile(fn, fullgraph=True)(x)[1:], fn(x)[1:], strict=True):
        assert torch.equal(got, want)


@pytest.mark.compiled
@pytest.mark.inductor
def test_a_tensor_that_changes_later_was_checked_as_it_was(compiled):
    def fn(x):
        z = x.erf() + x
        f = flag_nan_and_inf(z, 1, err.new(z))
        z[3, 0] = NAN
        f = flag_nan_and_inf(z, 2, f)
        z.zero_()
        return z, f

    x = bad_batch()
    for got, want in zip(compiled(fn)(x), fn(x), strict=True):
        assert torch.equal(got, want)


def test_checks_in_branches(compiled):
    def yes(x):
        return flag_nan_and_inf(x.abs(), 1, err.new(x))

    def no(x):
        return flag_nan(x + 1, 2, flag_inf(x, 3, err.new(x)))

    def fn(x):
        return torch.cond(x[3, 0] > 0, yes, no, (x,))

    branching = compiled(fn)
    for x in (bad_batch(), -bad_batch()):
        assert torch.equal(branching(x), (yes if x[3, 0] > 0 else no)(x))


@pytest.mark.long
def test_all_policies_on_flags_that_came_in(compiled):
    """More pushes than a graph sorts at once."""
    configs = [ErrorConfig(num_slots=5, accumulation=policy) for policy in POLICIES[::5]]

    def fn(f, x):
        return [push_each(f, x, config) for config in configs]

    def push_each(f, x, config):
        for place in range(20):
            f = err.push(f, (err.NAN, err.INF, err.OOB)[place % 3], place % 7, config=config, where=x[:, place] > 1)
        return f

    begun, x = err.from_code(err.NAN, 1000, 6, config=configs[0]), torch.randn(6, 20)
    for got, want in zip(compiled(fn)(begun, x), fn(begun, x), strict=True):
        assert torch.equal(got, want)
