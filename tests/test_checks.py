"""The checks: any rank, any dtype, any layout, every backend."""

import pytest
import torch
from torch import nn

from torchguard import (
    err,
    find,
    fix,
    flag_inf,
    flag_nan,
    flag_nan_and_inf,
    flag_oob_indices,
    flags,
    has_err,
    push,
    tracked,
)
from torchguard.exceptions import LocationWarning

NAN, INF = float("nan"), float("inf")
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SMALL_FLOATS = [getattr(torch, name) for name in dir(torch) if name.startswith("float8_e")]


def codes(f):
    return [[error.code for error in row] for row in flags.unpack_all(f)]


@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 2, 3), (4, 2, 1, 3)])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_rank_and_dtype(shape, dtype):
    x = torch.ones(shape, dtype=dtype)
    x[1], x[2] = NAN, -INF
    assert codes(flag_nan(x, 1, err.new(x))) == [[], [err.NAN], [], []]
    assert codes(flag_inf(x, 1, err.new(x))) == [[], [], [err.INF], []]
    assert codes(flag_nan_and_inf(x, 1, err.new(x))) == [[], [err.NAN], [err.INF], []]


@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 2, 3)])
def test_every_rank_on_every_backend(run, shape):
    x = torch.randn(shape)
    x[1], x[2] = NAN, INF

    def fn(x):
        f = err.new(x)
        return flag_nan(x, 1, f), flag_inf(x, 1, f), flag_nan_and_inf(x, 1, f)

    nan, inf, both = run(fn)(x)
    assert codes(nan) == [[], [err.NAN], [], []]
    assert codes(inf) == [[], [], [err.INF], []]
    assert codes(both) == [[], [err.NAN], [err.INF], []]


@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=str)
def test_float8(dtype):
    x = torch.ones(3, 4).to(dtype)
    if torch.isnan(torch.tensor(NAN).to(dtype).float()):
        x[1] = torch.tensor(NAN).to(dtype)
        assert codes(flag_nan(x, 1, err.new(x))) == [[], [err.NAN], []]
    assert codes(flag_nan_and_inf(x[:1], 1)) == [[]]


@pytest.mark.parametrize("shape", [(4,), (4, 3)])
def test_complex_numbers(shape):
    x = torch.ones(shape, dtype=torch.complex64)
    x[1], x[2] = complex(0, NAN), complex(INF, 0)
    assert codes(flag_nan_and_inf(x, 1)) == [[], [err.NAN], [err.INF], []]


def test_integers_are_always_finite():
    x = torch.ones(3, 2, dtype=torch.int64)
    f = err.new(x)
    assert flag_nan_and_inf(x, 1, f) is f


@pytest.mark.inductor
def test_a_row_with_nan_and_inf(run):
    x = torch.ones(2, 3)
    x[1, 0], x[1, 2] = INF, NAN
    assert codes(run(lambda x: flag_nan_and_inf(x, 1, err.new(x)))(x)) == [[], [err.NAN, err.INF]]


def test_opposite_infinities_are_not_nan(run):
    """Their sum is NaN, and the quick check takes the sum."""
    x = torch.tensor([[INF, -INF], [1.0, 2.0]])
    assert codes(run(lambda x: flag_nan(x, 1, err.new(x)))(x)) == [[], []]
    assert codes(run(lambda x: flag_nan_and_inf(x, 1, err.new(x)))(x)) == [[err.INF], []]


def test_finite_values_whose_sum_overflows_are_not_inf():
    x = torch.full((2, 1000), 3e38)
    f = err.new(x)
    assert flag_nan_and_inf(x, 1, f) is f


def test_views_and_strides(run):
    x = torch.randn(3, 8, 4)
    x[2, 5, 1] = NAN

    def fn(x):
        halves = x.split(2, dim=-1)
        f = flag_nan(halves[0].transpose(1, 2), 1, err.new(x))
        return flag_nan(x[:, ::2], 2, f)

    assert codes(run(fn)(x)) == [[], [], [err.NAN]]


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (3, 0, 2), (3, 2, 0)])
def test_empty_tensors(run, shape):
    x = torch.zeros(shape)
    f = run(lambda x: flag_nan_and_inf(x, 1, flag_nan(x, 2, err.new(x))))(x)
    assert f.shape[0] == shape[0]
    assert flags.summary(f) == {}
    z, f = fix(x, f, 3)
    assert z.shape == x.shape


def test_flags_are_created_if_none_are_given():
    assert codes(flag_nan(torch.tensor([NAN, 1.0]), 1)) == [[err.NAN], []]


def test_a_clean_batch_returns_the_flags_unchanged():
    x = torch.randn(4, 3)
    f = err.new(x)
    assert flag_nan(x, 1, f) is f


def test_flags_do_not_require_grad():
    x = torch.randn(4, 3, requires_grad=True)
    assert not flag_nan_and_inf(x * 2, 1, err.new(x)).requires_grad


@pytest.mark.parametrize("shape", [(4,), (4, 2)])
def test_indices_out_of_bounds(run, shape):
    ids = torch.zeros(shape, dtype=torch.int64)
    ids[1], ids[2] = 10, -1
    f = run(lambda ids: flag_oob_indices(ids, 10, 1, err.new(ids)))(ids)
    assert codes(f) == [[], [err.OOB], [err.OOB], []]


def test_has_err_and_find():
    f = flag_nan(torch.tensor([NAN, 1.0]), 1)
    assert has_err(f)
    assert not has_err(err.new_t(2))
    assert find(err.NAN, f).tolist() == [True, False]


class TestFix:
    @pytest.mark.inductor
    def test_replaces_rows_that_are_not_finite(self, run):
        x = torch.tensor([[1.0, NAN], [2.0, 3.0], [INF, 4.0]])
        z, f = run(lambda x: fix(x, err.new(x), 5))(x)
        assert z.tolist() == [[0.0, 0.0], [2.0, 3.0], [0.0, 0.0]]
        assert codes(f) == [[err.FALLBACK_VALUE], [], [err.FALLBACK_VALUE]]

    def test_replaces_rows_that_were_flagged(self, run):
        bad = torch.tensor([False, True])
        z, f = run(lambda x, bad: fix(x, err.push(err.new(x), err.OVERFLOW, 1, where=bad), 5, fallback=-1.0))(
            torch.ones(2, 2), bad
        )
        assert z.tolist() == [[1.0, 1.0], [-1.0, -1.0]]
        assert codes(f) == [[], [err.OVERFLOW, err.FALLBACK_VALUE]]

    @pytest.mark.parametrize("fallback", [torch.tensor([7.0, 8.0]), lambda: torch.tensor([[7.0, 8.0]] * 2)])
    def test_fallback_can_be_a_tensor_or_a_callable(self, run, fallback):
        x = torch.tensor([[1.0, NAN], [2.0, 3.0]])
        z, _ = run(lambda x: fix(x, err.new(x), 5, fallback=fallback))(x)
        assert z.tolist() == [[7.0, 8.0], [2.0, 3.0]]

    def test_records_a_row_once(self, run):
        def fn(x):
            z, f = fix(x, err.new(x), 1)
            z, f = fix(z + 1, f, 2)
            return fix(z.log() * INF, f, 3)  # 0 * Inf: the row becomes NaN again

        _, f = run(fn)(torch.tensor([[NAN], [2.0]]))
        assert [e.location for e in flags.unpack(f, 0)] == [1, 3]
        assert [e.location for e in flags.unpack(f, 1)] == [3]

    def test_preserves_integer_dtype(self):
        ids = torch.tensor([[1, 99], [2, 3]])
        f = flag_oob_indices(ids, 10, 1, err.new(ids))
        z, f = fix(ids, f, 1)
        assert z.tolist() == [[0, 0], [2, 3]]
        assert z.dtype == torch.int64


class TestLocations:
    def test_a_name(self, run):
        f = run(lambda x: flag_nan(x, "data.loader", err.new(x)))(torch.tensor([NAN]))
        assert flags.summary(f) == {"data.loader": {"NAN": 1}}

    def test_an_id_by_keyword(self):
        f = push(err.new_t(2), err.NAN, location=42, where=torch.tensor([True, False]))
        assert err.get_first_location(f).tolist() == [42, 0]

    def test_none_is_unknown(self):
        assert flags.summary(flag_nan(torch.tensor([NAN]), None)) == {"Unknown": {"NAN": 1}}

    def test_an_untracked_module_warns(self):
        layer = nn.Linear(2, 2)
        with pytest.warns(LocationWarning, match=r"A Linear was given as a location but has none.*tracked"):
            f = flag_nan(torch.full((1, 2), NAN), layer)
        assert flags.summary(f) == {"Unknown": {"NAN": 1}}

    def test_an_invalid_location_raises_even_on_clean_data(self):
        with pytest.raises(ValueError, match="flag_nan: location is 5000"):
            flag_nan(torch.ones(2, 2), 5000)

    @pytest.mark.compiled
    def test_an_untracked_module_warns_while_tracing(self):
        layer = nn.Linear(2, 2)
        with pytest.warns(LocationWarning, match="A Linear was given as a location"):
            torch.compile(lambda x: flag_nan(x, layer, err.new(x)), backend="eager", fullgraph=True)(torch.ones(1, 2))

    def test_a_tracked_module(self, run):
        @tracked
        class Checked(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(2, 2)

            def forward(self, x):
                out = self.layer(x)
                f = push(err.new(x), err.OVERFLOW, self.layer, where=out > 1e6)
                return out, flag_nan(out, self.layer, f)

        x = torch.tensor([[1.0, 1.0], [NAN, 1.0], [1e9, 1e9]])
        net = Checked()
        nn.init.ones_(net.layer.weight)
        _, f = run(net)(x)
        assert flags.summary(f) == {"layer": {"NAN": 1, "OVERFLOW": 1}}


INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("size", [100, 127, 128, 255, 256, 32_767, 50_257, 2**31, 2**32, 2**40, 2**63 - 1])
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_the_number_of_embeddings_need_not_fit_the_dtype_of_the_ids(dtype, size):
    most = torch.iinfo(dtype).max
    ids = torch.tensor([[0, 1], [99, 3], [0, min(most, 2**63 - 1)]]).to(dtype)
    want = [size > 99, min(most, 2**63 - 1) < size]
    assert err.is_ok(flag_oob_indices(ids, size, 1))[1:].tolist() == want


@pytest.mark.inductor
def test_ids_of_every_integer_dtype(run):
    def fn(ids):
        return [flag_oob_indices(ids, size, 1, err.new(ids)) for size in (3, 256, 50_257)]

    for dtype in (torch.uint8, torch.int8, torch.int16):
        found = run(fn)(torch.tensor([[0, 1], [2, 3]]).to(dtype))
        assert [err.is_ok(f).tolist() for f in found] == [[True, False], [True, True], [True, True]]


def test_negative_ids_of_every_signed_dtype():
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        assert err.is_err(flag_oob_indices(torch.tensor([-1, 0], dtype=dtype), 2**20, 1)).tolist() == [True, False]
    assert err.is_err(flag_oob_indices(torch.tensor([2**64 - 1], dtype=torch.uint64), 2**62, 1)).all()


@pytest.mark.compiled
def test_the_number_of_embeddings_may_be_dynamic():
    def fn(ids, weight):
        return flag_oob_indices(ids, weight.shape[0], 1)

    fn = torch.compile(fn, backend="aot_eager", fullgraph=True, dynamic=True)
    for size in (200, 256, 300):
        f = fn(torch.tensor([0, 199, 255], dtype=torch.uint8), torch.zeros(size, 2))
        assert err.is_ok(f).tolist() == [True, True, size > 255]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32], ids=str)
def test_locations_of_every_integer_dtype(run_light, dtype):
    locations = torch.tensor([3, 120], dtype=dtype)
    f = run_light(lambda locations: err.push(err.new(locations), err.NAN, locations))(locations)
    assert err.get_first_location(f).tolist() == [3, 120]
