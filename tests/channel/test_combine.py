"""Values and flags together."""

import pytest
import torch

from torchguard import err, experimental, flag_nan, flags

NAN, INF = float("nan"), float("inf")
Z = torch.tensor([[1.0, 2.0], [NAN, 3.0], [4.0, 5.0]])


@pytest.fixture
def f():
    return flag_nan(Z, 1, err.new(Z))


def test_taking_rows(f):
    assert err.take_ok(f, Z).tolist() == [[1.0, 2.0], [4.0, 5.0]]
    assert err.take_err(f, Z)[:, 1].tolist() == [3.0]
    ok, bad = err.partition(f, Z)
    assert (ok.shape, bad.shape) == ((2, 2), (1, 2))
    assert torch.equal(err.Ok(f, Z), ok)
    assert err.Err(f, Z).shape == bad.shape
    (ok_z, ok_i), (_, bad_i) = err.partition_many(f, Z, torch.arange(3))
    assert torch.equal(ok_z, ok)
    assert (ok_i.tolist(), bad_i.tolist()) == ([0, 2], [1])
    assert err.get_ok(f).shape == (2, 4)
    assert flags.summary(err.get_err(f)) == flags.summary(f)


@pytest.mark.compiled
def test_taking_rows_in_a_graph_that_allows_it():
    import torch._dynamo.config as dynamo

    with dynamo.patch(capture_dynamic_output_shape_ops=True):

        @torch.compile(backend="inductor", fullgraph=True)
        def fn(z):
            return err.take_ok(flag_nan(z, 1, err.new(z)), z)

        assert fn(Z).tolist() == [[1.0, 2.0], [4.0, 5.0]]


def test_filling_rows(run, f):
    ok, bad = run(lambda f, z: (err.take_ok_p(f, z), err.take_err_p(f, z, fill=-1.0)))(f, Z)
    assert ok.tolist() == [[1.0, 2.0], [0.0, 0.0], [4.0, 5.0]]
    assert bad[[0, 2]].tolist() == [[-1.0, -1.0]] * 2
    assert bad[1, 1] == 3


@pytest.mark.parametrize("z", [torch.arange(3), torch.ones(3, 2, 2), torch.ones(3, dtype=torch.bfloat16)])
def test_filling_keeps_dtype_and_shape(f, z):
    filled = err.take_ok_p(f, z, fill=0.0)
    assert (filled.dtype, filled.shape) == (z.dtype, z.shape)


def test_mapping(run, f):
    ok, bad = run(lambda f, z: (err.map_ok(f, z, lambda z: z * 10), err.map_err(f, z, torch.zeros_like)))(f, Z)
    assert ok[[0, 2]].tolist() == [[10.0, 20.0], [40.0, 50.0]]
    assert torch.isnan(ok[1, 0])
    assert bad.tolist() == [[1.0, 2.0], [0.0, 0.0], [4.0, 5.0]]


@pytest.mark.long
@pytest.mark.compiled
@pytest.mark.parametrize("batch", [1, 3, 33])
@pytest.mark.parametrize("good", ["none", "last", "all"])
def test_mapping_in_a_large_graph(batch, good):
    """Half-precision values, float32 flags and 44 outputs on Inductor; also where no row is good."""
    layer = torch.nn.Linear(8, 8).half()

    def fn(x):
        f, z, outputs = flag_nan(x, 1, experimental.err.new(x)), x, []
        for number in range(11):
            mapped = err.map_ok(f, z, layer)
            scaled = err.map_ok(f, z, lambda z: z / z.norm(dim=-1, keepdim=True))
            z, f = err.and_then(f, mapped, lambda z, at=number: (z * 2, flag_nan(z, 2 + at, experimental.err.new(z))))
            outputs += [mapped, scaled, err.take_ok_p(f, mapped), z]
        return outputs, f

    x = torch.randn(batch, 8).half()
    if good != "all":
        x[: batch if good == "none" else -1] = NAN
    (want, want_f), (got, f) = fn(x), torch.compile(fn, fullgraph=True)(x)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2, equal_nan=True)
    assert torch.equal(err.is_ok(f), err.is_ok(want_f))


@pytest.mark.parametrize("keep", [[False, False], [False, True], [True, True]])
def test_a_stand_in_is_a_good_row_or_zeros(run_light, keep):
    seen = []
    f = err.push(err.new_t(2), err.NAN, 1, where=~torch.tensor(keep))
    z = torch.tensor([[1.0], [2.0]])
    err.map_ok(f, z, lambda z: seen.append(z) or z)
    assert seen[0].flatten().tolist() == {(0, 0): [0.0, 0.0], (0, 1): [2.0, 2.0], (1, 1): [1.0, 2.0]}[tuple(keep)]
    assert torch.equal(run_light(lambda z: err.map_ok(f, z, torch.neg))(z)[:, 0] < 0, torch.tensor(keep))


def test_mapping_flags(run, f):
    mapped = run(lambda f: err.map_err_flags(f, lambda f: err.push(f, err.SATURATED, 99, err.WARN)))(f)
    assert err.count_errors(mapped).tolist() == [0, 2, 0]


def test_and_then_skips_bad_rows(run, f):
    def step(z):
        return z - 4, err.push(err.new(z), err.OVERFLOW, 7, where=z[:, 0] < 3)

    z, after = run(lambda f, z: err.and_then(f, z, step))(f, Z)
    assert z[[0, 2]].tolist() == [[-3.0, -2.0], [0.0, 1.0]]
    assert torch.isnan(z[1, 0])
    assert [[e.code for e in row] for row in flags.unpack_all(after)] == [[err.OVERFLOW], [err.NAN], []]


def test_and_then_may_change_the_shape(run, f):
    z, _ = run(lambda f, z: err.and_then(f, z, lambda z: (z.sum(-1), err.new(z))))(f, Z)
    assert z.tolist() == [3.0, 0.0, 9.0]


def test_bind_runs_everything(run, f):
    def step(z):
        return z * 2, err.push(err.new(z), err.OVERFLOW, 7)

    z, after = run(lambda f, z: err.bind(f, z, step))(f, Z)
    assert z[0].tolist() == [2.0, 4.0]
    assert err.count_errors(after).tolist() == [1, 2, 1]


def test_guards(run):
    z = torch.tensor([[1.0, -1.0], [2.0, 3.0]])

    def fn(z):
        f = err.ensure_mask(err.new(z), z[:, 0] > 1, err.SATURATED, 3)
        return err.guard(f, z, lambda z: z > 0, err.OVERFLOW, 4)

    assert [[e.code for e in row] for row in flags.unpack_all(run(fn)(z))] == [[err.SATURATED, err.OVERFLOW], []]


def test_recover_with_fallback(run, f):
    for fallback in (7.0, torch.full((2,), 7.0)):
        z, after = run(lambda f, z, fallback=fallback: err.recover_with_fallback(f, z, fallback, 9))(f, Z)
        assert z.tolist() == [[1.0, 2.0], [7.0, 7.0], [4.0, 5.0]]
        assert err.has_fallback(after).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("targets", "want"),
    [
        ([err.NAN], [1.0, 0.0, INF, -INF, 999.0]),
        ([err.NAN, err.INF], [1.0, 0.0, 0.0, 0.0, 999.0]),
        (["nan", "posinf"], [1.0, 0.0, 0.0, -INF, 999.0]),
        (["neginf", "nan", 999], [1.0, 0.0, INF, 0.0, 0.0]),
        ([1.0, "nan"], [0.0, 0.0, INF, -INF, 999.0]),
        ([float("inf"), "nan"], [1.0, 0.0, 0.0, -INF, 999.0]),
    ],
)
def test_replace(run, targets, want):
    z = torch.tensor([1.0, NAN, INF, -INF, 999.0])
    assert run(lambda z: err.replace(z, value=0.0, targets=targets))(z).tolist() == want


def test_replacing_nan_by_its_value():
    assert err.replace(torch.tensor([NAN, 1.0]), targets=[NAN]).tolist() == [0.0, 1.0]


def test_mean_ok_sums_half_precision_like_torch():
    loss = torch.full((100,), 1000.0, dtype=torch.float16)
    assert err.mean_ok(err.new(loss), loss) == loss.mean()


def test_fallbacks_keep_shape_and_dtype(f):
    z, _ = err.recover_with_fallback(f, Z.to(torch.bfloat16), torch.zeros(2), 1)
    assert z.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"expected a fallback of shape \(3, 2\), got \(3,\)"):
        err.recover_with_fallback(f, Z, torch.zeros(3), 1)


def test_mapping_keeps_the_shape(f):
    with pytest.raises(
        ValueError, match=r"expected shape \(3, 2\) from the function, got \(3,\)\. Return that, or use err.and_then"
    ):
        err.map_ok(f, Z, lambda z: z.sum(-1))


def test_mean_ok(run, f):
    assert run(err.mean_ok)(f, torch.tensor([1.0, NAN, 3.0])).item() == 2.0
    assert run(err.mean_ok)(f, Z).item() == 3.0
    assert run(err.mean_ok)(err.from_code(err.NAN, 1, 3), Z).item() == 0.0
