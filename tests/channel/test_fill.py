"""Values that replace others must fit the dtype that they go into."""

import math

import pytest
import torch

from torchguard import err, fix
from torchguard.exceptions import NotFlagsError, OutOfRangeError

NAN, INF = math.nan, math.inf
BAD = torch.tensor([False, True])

# What torch would wrap around, truncate, saturate or turn into Inf.
UNFIT = [
    (torch.uint8, 300),
    (torch.uint8, -1),
    (torch.int8, 128),
    (torch.int16, 50_257),
    (torch.int32, 2**31),
    (torch.int64, 2**63),
    (torch.int64, 0.5),
    (torch.int64, NAN),
    (torch.int64, INF),
    (torch.uint16, 65_536),
    (torch.bool, 2),
    (torch.bool, 0.5),
    (torch.float16, 1e6),
    (torch.float16, -65_505),
    (torch.bfloat16, 3.4e38),
    (torch.float32, 1e300),
    (torch.complex64, 1e300),
    (torch.float32, 1j),
    (torch.float8_e4m3fn, 1e4),
    (torch.float8_e4m3fn, INF),
    (torch.float8_e5m2, 1e6),
    (torch.float8_e8m0fnu, 0.0),
]
FIT = [
    (torch.uint8, 255),
    (torch.int8, -128),
    (torch.int64, 3.0),
    (torch.int64, True),
    (torch.bool, 1),
    (torch.float16, 65_504),
    (torch.float16, INF),
    (torch.float32, NAN),
    (torch.bfloat16, 0.1),
    (torch.complex64, 1 + 2j),
    (torch.complex64, 3.0),
    (torch.float8_e4m3fn, 448.0),
    (torch.float8_e5m2, -INF),
]


def flagged():
    return err.push(err.new_t(2), err.NAN, 1, where=BAD)


FILLED = {
    "take_ok_p": lambda z, value: err.take_ok_p(err.push(err.new(z), err.NAN, 1, where=BAD), z, value),
    "take_err_p": lambda z, value: err.take_err_p(err.push(err.new(z), err.NAN, 1, where=~BAD), z, fill=value),
    "replace": lambda z, value: err.replace(z, value, targets=[0.0]),
    "fix": lambda z, value: fix(z, err.push(err.new(z), err.NAN, 1, where=BAD), 2, value)[0],
    "recover_with_fallback": lambda z, value: err.recover_with_fallback(
        err.push(err.new(z), err.NAN, 1, where=BAD), z, value, 2
    )[0],
}


def values(dtype):
    """A row of ones, and a row of zeros that is to be replaced."""
    return torch.tensor([[1.0, 1.0], [0.0, 0.0]]).to(dtype)


@pytest.mark.parametrize(("dtype", "value"), UNFIT, ids=str)
@pytest.mark.parametrize("name", FILLED)
def test_a_number_that_does_not_fit_raises(name, dtype, value):
    with pytest.raises(OutOfRangeError, match=f"(value|fill|fallback|target) is .*, which {dtype} does not hold"):
        FILLED[name](values(dtype), value)


@pytest.mark.compiled
@pytest.mark.parametrize(("dtype", "value"), [UNFIT[0], UNFIT[6], UNFIT[12]], ids=str)
@pytest.mark.parametrize("name", FILLED)
def test_a_number_that_does_not_fit_raises_while_tracing(name, dtype, value):
    with pytest.raises(Exception, match=f"which {dtype} does not hold"):
        torch.compile(FILLED[name], backend="eager", fullgraph=True)(values(dtype), value)


@pytest.mark.parametrize(("dtype", "value"), FIT, ids=str)
@pytest.mark.parametrize("name", FILLED)
def test_a_number_that_fits_is_inserted(name, dtype, value):
    filled = FILLED[name](values(dtype), value)
    assert filled.dtype == dtype
    want = torch.tensor(value, dtype=torch.complex128 if dtype.is_complex else torch.float64).to(dtype)
    wide = torch.complex64 if dtype.is_complex else torch.float32
    torch.testing.assert_close(filled[1].to(wide), want.to(wide).expand(2), rtol=0, atol=0, equal_nan=True)
    assert (filled[0].to(wide) == 1).all()


@pytest.mark.compiled
def test_numbers_may_be_dynamic():
    fn = torch.compile(FILLED["take_ok_p"], backend="aot_eager", fullgraph=True, dynamic=True)
    for value in (1.5, 2.5, 3.5):
        assert fn(values(torch.float32), value)[1].tolist() == [value, value]
    fn = torch.compile(FILLED["take_ok_p"], backend="aot_eager", fullgraph=True, dynamic=True)
    for value in (5, 6, 255):
        assert fn(values(torch.uint8), value)[1].tolist() == [value, value]
    with pytest.raises(Exception, match=r"which torch\.uint8 does not hold"):
        fn(values(torch.uint8), 256)


@pytest.mark.parametrize(
    ("dtype", "target", "held"),
    [
        (torch.uint8, 999, 231),
        (torch.int8, 300, 44),
        (torch.int64, 0.5, 0),
        (torch.float16, 1e6, INF),
        (torch.bool, 3, 1),
        (torch.float8_e4m3fn, 1e5, 448.0),
    ],
)
def test_a_target_that_does_not_fit_raises(run_light, dtype, target, held):
    """torch would find other values: 999 is 231 in uint8."""
    z = torch.tensor([held, 0]).to(dtype)
    with pytest.raises(Exception, match=f"err.replace: target is .*, which {dtype} does not hold"):
        run_light(lambda z: err.replace(z, 0, targets=[target]))(z)


def test_inf_is_in_no_dtype_without_it():
    z = torch.tensor([448.0, 1.0]).to(torch.float8_e4m3fn)
    for targets in ([err.INF], ["posinf"], [INF], ["nan"]):
        assert err.replace(z, 0.0, targets).float().tolist() == [448.0, 1.0]
    assert err.replace(torch.tensor([1, 2]), 0, [err.NAN, err.INF, INF, NAN]).tolist() == [1, 2]


def test_a_bool_is_a_value_and_no_code():
    assert err.replace(torch.tensor([True, False]), False, targets=[True]).tolist() == [False, False]


@pytest.mark.compiled
@pytest.mark.parametrize("name", ["fix", "recover_with_fallback"])
@pytest.mark.parametrize(
    ("dtype", "fallback"),
    [
        (torch.float16, torch.tensor([1.0, 1e6])),
        (torch.uint8, torch.tensor([1, 300])),
        (torch.int64, torch.tensor([1.0, 0.5])),
        (torch.int64, torch.tensor([1.0, NAN])),
        (torch.bool, torch.tensor([1, 2])),
        (torch.complex64, torch.tensor([1.0, 1e300], dtype=torch.float64)),
        (torch.float8_e4m3fn, torch.tensor([1.0, 1e4])),
    ],
    ids=str,
)
def test_a_tensor_that_does_not_fit_raises_or_is_recorded(name, dtype, fallback):
    with pytest.raises(OutOfRangeError, match=f"fallback has .*, which {dtype} does not hold"):
        FILLED[name](values(dtype), fallback)
    repair = {
        "fix": lambda z, f, v: fix(z, f, 2, v),
        "recover_with_fallback": lambda z, f, v: err.recover_with_fallback(f, z, v, 2),
    }
    traced = torch.compile(repair[name], backend="aot_eager", fullgraph=True)
    _, f = traced(values(dtype), flagged(), fallback)
    assert err.has_code(f, err.OVERFLOW).tolist() == [False, True]
    _, f = traced(values(dtype), err.new_t(2), fallback)  # nothing is replaced
    assert err.all_ok(f)


def test_only_rows_whose_own_fallback_does_not_fit_are_recorded(run):
    def fn(z, f, fallback):
        return fix(z, f, 2, fallback)

    z, f = torch.ones(3, 2, dtype=torch.float16), err.from_code(err.NAN, 1, 3)
    fits = torch.tensor([[1.0], [2.0], [INF]])  # Inf is what was asked for
    assert not err.has_code(run(fn)(z, f, fits)[1], err.OVERFLOW).any()
    if run(fn) is not fn:
        _, f = run(fn)(z, f, torch.tensor([[1.0], [1e6], [2.0]]))
        assert err.has_code(f, err.OVERFLOW).tolist() == [False, True, False]


def test_a_learned_fallback_gets_a_gradient(run_light):
    fallback = torch.tensor([0.5, 0.25], requires_grad=True)
    z = torch.ones(2, 2, dtype=torch.bfloat16)
    run_light(lambda z, f, fallback: fix(z, f, 2, fallback)[0].sum())(z, flagged(), fallback).backward()
    assert fallback.grad.tolist() == [1.0, 1.0]


@pytest.mark.wrong_types
def test_fills_of_other_types():
    z = torch.ones(2, 2)
    assert err.take_ok_p(flagged(), z, torch.tensor(7.0)).tolist() == [[1.0, 1.0], [7.0, 7.0]]
    with pytest.raises(OutOfRangeError, match=r"fill is a torch\.float64 tensor"):
        err.take_ok_p(flagged(), z, torch.tensor(7.0, dtype=torch.float64))
    with pytest.raises(NotFlagsError, match=r"fill is 'zero'\. Give a number or a tensor"):
        err.take_ok_p(flagged(), z, "zero")
    with pytest.raises(OutOfRangeError, match=r"fallback is torch\.complex64"):
        fix(z, flagged(), 1, torch.tensor(1j))


def test_empty_batches_are_checked_as_well(run_light):
    z = torch.zeros(0, 3, dtype=torch.uint8)
    with pytest.raises(Exception, match="does not hold"):
        run_light(lambda z: err.take_ok_p(err.new(z), z, 256))(z)
    assert run_light(lambda z: err.take_ok_p(err.new(z), z, 255))(z).shape == (0, 3)
