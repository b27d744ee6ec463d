"""`type_cast` against exact arithmetic: a cast is `Ok` if no value changes, and says else what became of it."""

import itertools
import math
from fractions import Fraction
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchguard.typing
from torchguard.exceptions import AnnotationError, CastError, CastOverflowError, LossyCastError, TracingError
from torchguard.typing import (
    bool_t,
    complex32_t,
    complex64_t,
    error_t,
    float8_e4m3fn_t,
    float8_e5m2_t,
    float16_t,
    float32_t,
    float64_t,
    int8_t,
    int32_t,
    int64_t,
    type_cast,
    uint8_t,
    uint64_t,
)

# torch, of itself: while it makes a tensor of that dtype.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

INTEGERS = {
    torch.bool: (0, 1),
    **{getattr(torch, f"int{bits}"): (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{getattr(torch, f"uint{bits}"): (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
}
# Bits of precision, the least exponent of a normal number, the largest number, and whether there is an infinity.
FLOATS = {
    torch.float64: (53, -1022, (2**53 - 1) * 2**971, True),
    torch.float32: (24, -126, (2**24 - 1) * 2**104, True),
    torch.bfloat16: (8, -126, (2**8 - 1) * 2**120, True),
    torch.float16: (11, -14, 65504, True),
    torch.float8_e5m2: (3, -14, 57344, True),
    torch.float8_e5m2fnuz: (3, -15, 57344, False),
    torch.float8_e4m3fn: (4, -6, 448, False),
    torch.float8_e4m3fnuz: (4, -7, 240, False),
}
COMPLEX = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
DTYPES = [*INTEGERS, *FLOATS, *COMPLEX]
QUANTIZED = ["qint8_t", "qint32_t", "quint8_t", "quint4x2_t", "quint2x4_t"]


# The model: numbers are `int` or `Fraction`, and infinities and NaN the floats they are.


def verdict(numbers, source, target, rounding=False):
    """None if the cast is `Ok`, else the error. Complex numbers are pairs."""
    if source in COMPLEX and target not in COMPLEX:
        if any(imaginary != 0 for _, imaginary in numbers):
            return LossyCastError
        numbers = [real for real, _ in numbers]
    elif source in COMPLEX:
        numbers = [part for number in numbers for part in number]
    target = COMPLEX.get(target, target)
    if any(is_outside(number, target) for number in numbers):
        return CastOverflowError
    if target in FLOATS and rounding:
        return None
    return None if all(holds(target, number) for number in numbers) else LossyCastError


def is_outside(number, dtype):
    if dtype in INTEGERS:
        low, high = INTEGERS[dtype]
        return not (math.isfinite(number) and low <= number <= high)
    _, _, largest, has_infinity = FLOATS[dtype]
    return not has_infinity if math.isinf(number) else abs(number) > largest


def holds(dtype, number):
    """Whether a dtype has this very number."""
    if dtype in INTEGERS:
        return not is_outside(number, dtype) and number == int(number)
    if not math.isfinite(number):
        return math.isnan(number) or not is_outside(number, dtype)
    return not is_outside(number, dtype) and (number / step_at(number, dtype)).denominator == 1


def step_at(number, dtype):
    """From one float to the next, where this number lies."""
    precision, least, _, _ = FLOATS[dtype]
    exponent = number.numerator.bit_length() - number.denominator.bit_length()
    if abs(number) < Fraction(2) ** exponent:
        exponent -= 1
    return Fraction(2) ** (max(exponent, least) - precision + 1)


def is_next_to(old, new, dtype):
    """Whether one may round to the other. It need not be the nearest: torch rounds to float32 on the way."""
    return same(old, new) or (math.isfinite(old) and holds(dtype, new) and abs(new - old) < step_at(old, dtype))


# From tensors to numbers, and back


def numbers_of(tensor):
    if tensor.dtype in COMPLEX:
        return [tuple(numbers_of(pair)) for pair in torch.view_as_real(tensor).reshape(-1, 2)]
    if tensor.dtype in FLOATS:
        return [Fraction(x) if math.isfinite(x) else x for x in tensor.to(torch.float64).reshape(-1).tolist()]
    return [int(x) for x in tensor.reshape(-1).tolist()]


def tensor_of(numbers, dtype):
    if dtype in COMPLEX:
        pairs = [part for pair in numbers for part in pair]
        return torch.view_as_complex(tensor_of(pairs, COMPLEX[dtype]).reshape(-1, 2))
    if dtype in FLOATS:
        return torch.tensor([float(number) for number in numbers], dtype=torch.float64).to(dtype)
    return torch.tensor([int(number) for number in numbers], dtype=dtype)


def tensor_of_bits(octets, dtype):
    """Any bits are a number, but for bool."""
    if dtype == torch.bool:
        return torch.tensor([octet % 2 == 1 for octet in octets], dtype=torch.bool)
    whole = octets[: len(octets) // dtype.itemsize * dtype.itemsize]
    return torch.tensor(list(whole), dtype=torch.uint8).view(dtype)


def same(one, two):
    return one == two or (one != one and two != two)


def parts_of(numbers, is_complex):
    """Real and imaginary parts in a row."""
    return [part for number in numbers for part in (number if is_complex else (number, 0))]


def alias_of(dtype):
    return getattr(torchguard.typing, f"{str(dtype).removeprefix('torch.')}_t")


def require_verdict(tensor, target, rounding=False):
    """The cast does what the model says, and an `Ok` has the right values."""
    numbers = numbers_of(tensor)
    result = type_cast[alias_of(target)](tensor, rounding=rounding)
    want = None if tensor.dtype == target else verdict(numbers, tensor.dtype, target, rounding)
    told = f"{tensor} to {target}: {result}"
    assert (None if result.is_ok() else type(result.unwrap_err())) == want, told
    if want is None:
        cast = result.unwrap()
        assert (cast.dtype, cast.shape) == (target, tensor.shape)
        before, after = parts_of(numbers, tensor.is_complex()), parts_of(numbers_of(cast), cast.is_complex())
        rounds = rounding and target not in INTEGERS
        agree = partial(is_next_to, dtype=COMPLEX.get(target, target)) if rounds else same
        assert all(agree(old, new) for old, new in zip(before, after, strict=True)), told


POWERS = [2**power for power in (0, 1, 3, 7, 8, 11, 15, 16, 24, 31, 32, 53, 63, 64)]
SMALL = [Fraction(2) ** -power for power in (9, 10, 11, 16, 17, 18, 24, 25, 133, 149, 1074)]
EDGES = [
    *(sign * (power + near) for power in POWERS for near in (-1, 0, 1) for sign in (1, -1)),
    *(sign * Fraction(number) for number in (0.5, 1.5, 127.5, 255.5, 128.5, 32767.5, *SMALL) for sign in (1, -1)),
    *(240, 248, 448, 449, 464, 500, 57344, 61440, 65504, 65505, 65519, 65520, 70000),
    *(sign * largest for _, _, largest, _ in FLOATS.values() for sign in (1, -1)),
    *(math.inf, -math.inf, math.nan),
]


@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.long
def test_every_pair_of_dtypes_at_its_edges(source):
    if source in COMPLEX:
        held = [(number, 0) for number in EDGES if holds(COMPLEX[source], number)]
        held += [(1, number) for number in EDGES if holds(COMPLEX[source], number)]
    else:
        held = [number for number in EDGES if holds(source, number)]
    for number, target in itertools.product(held, DTYPES):
        require_verdict(tensor_of([number], source), target)
        if target in FLOATS:
            require_verdict(tensor_of([number], source), target, rounding=True)


@given(st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.binary(max_size=32), st.booleans())
def test_any_bits(source, target, octets, rounding):
    require_verdict(tensor_of_bits(octets, source), target, rounding)


@given(st.data(), st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.booleans())
def test_several_values_at_once(data, source, target, rounding):
    """Small numbers, so that many casts are `Ok`, and now and then one from the edges."""
    part = COMPLEX.get(source, source)
    numbers = st.one_of(st.integers(-4, 4), st.integers(-130, 260), st.sampled_from(EDGES)).filter(
        lambda number: holds(part, number)
    )
    if source in COMPLEX:
        numbers = st.tuples(numbers, st.one_of(st.just(0), st.just(0), numbers))
    require_verdict(tensor_of(data.draw(st.lists(numbers, max_size=5)), source), target, rounding)


# By example


@pytest.mark.parametrize(
    ("alias", "tensor", "error", "told"),
    [
        (float64_t, torch.tensor([1, 2**53 + 1]), LossyCastError, "1 of 2 values.*first 9007199254740993 at \\(1,\\)"),
        (float32_t, torch.tensor(2**63 - 1), LossyCastError, "first 9223372036854775807 at \\(\\)"),
        (int64_t, torch.tensor([2**63], dtype=torch.uint64), CastOverflowError, "first 9223372036854775808"),
        (uint8_t, torch.tensor([[0, -1]]), CastOverflowError, "are outside of 0 to 255, the first -1 at \\(0, 1\\)"),
        (int32_t, torch.tensor([1.5]), LossyCastError, "the first 1.5"),
        (int8_t, torch.tensor([127.5]), CastOverflowError, "are outside of -128 to 127, the first 127.5"),
        (int8_t, torch.tensor([-128.5]), CastOverflowError, "are outside of -128 to 127, the first -128.5"),
        (float16_t, torch.tensor([70000]), CastOverflowError, "the first 70000"),
        (float16_t, torch.tensor([70000.0]), CastOverflowError, "the first 70000.0"),
        (float8_e4m3fn_t, torch.tensor([500.0]), CastOverflowError, "are outside of -448.0 to 448.0, the first 500.0"),
        (float8_e4m3fn_t, torch.tensor([math.inf]), CastOverflowError, "the first inf"),
        (int64_t, torch.tensor([math.nan]), CastOverflowError, "the first nan"),
        (int64_t, torch.tensor([-math.inf]), CastOverflowError, "the first -inf"),
        (uint64_t, torch.tensor([2.0**64]), CastOverflowError, "are outside of 0 to 18446744073709551615"),
        (bool_t, torch.tensor([0, 1, 2]), CastOverflowError, "are outside of 0 to 1, the first 2"),
        (bool_t, torch.tensor([0.5]), LossyCastError, "the first 0.5"),
        (float32_t, torch.tensor([1 + 2j]), LossyCastError, "have an imaginary part, the first \\(1\\+2j\\)"),
        (complex64_t, torch.tensor([2**24 + 1]), LossyCastError, "the first 16777217"),
        (complex32_t, torch.tensor([1e9 + 0j]), CastOverflowError, "the first 1000000000.0"),
    ],
)
def test_what_an_error_tells(alias, tensor, error, told):
    result = type_cast[alias](tensor)
    with pytest.raises(error, match=told):
        raise result.unwrap_err()


@pytest.mark.parametrize(
    ("alias", "tensor", "want"),
    [
        (float32_t, torch.tensor([1, 2**24]), torch.tensor([1.0, 2.0**24])),
        (float64_t, torch.tensor(2**53), torch.tensor(2.0**53, dtype=torch.float64)),
        (float32_t, torch.tensor(-(2**63)), torch.tensor(-(2.0**63))),
        (uint64_t, torch.tensor([2.0**63]), torch.tensor([2**63], dtype=torch.uint64)),
        (float64_t, torch.tensor([2**63], dtype=torch.uint64), torch.tensor([2.0**63], dtype=torch.float64)),
        (uint8_t, torch.tensor([-0.0, 255.0]), torch.tensor([0, 255], dtype=torch.uint8)),
        (float16_t, torch.tensor([math.inf, -math.inf]), torch.tensor([math.inf, -math.inf], dtype=torch.float16)),
        (float8_e5m2_t, torch.tensor([math.inf]), torch.tensor([math.inf]).to(torch.float8_e5m2)),
        (float32_t, torch.tensor([1 + 0j]), torch.tensor([1.0])),
        (complex64_t, torch.tensor([True, False]), torch.tensor([1 + 0j, 0j])),
        (bool_t, torch.tensor([0.0, 1.0]), torch.tensor([False, True])),
        (error_t, torch.tensor([3], dtype=torch.int32), torch.tensor([3])),
        (torch.int8, torch.tensor([3]), torch.tensor([3], dtype=torch.int8)),
    ],
)
def test_casts_that_change_nothing(alias, tensor, want):
    cast = type_cast[alias](tensor).unwrap()
    assert cast.dtype == want.dtype
    assert numbers_of(cast) == numbers_of(want)


@pytest.mark.parametrize("alias", [alias_of(dtype) for dtype in FLOATS])
def test_nan_stays_nan(alias):
    assert type_cast[alias](torch.tensor([math.nan])).unwrap().to(torch.float32).isnan().all()


def test_rounding_is_for_floats_only():
    tenth = torch.tensor([0.1], dtype=torch.float64)
    assert type_cast[float32_t](tenth).is_err()
    assert type_cast[float32_t](tenth, rounding=True).unwrap().item() == pytest.approx(0.1)
    assert type_cast[float32_t](torch.tensor([2**53 + 1]), rounding=True).unwrap().tolist() == [2.0**53]
    assert type(type_cast[float16_t](torch.tensor([7e4]), rounding=True).unwrap_err()) is CastOverflowError
    assert type(type_cast[int64_t](torch.tensor([1.5]), rounding=True).unwrap_err()) is LossyCastError


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 1, 2)], ids=str)
def test_shapes_are_kept(shape):
    for source, target in itertools.product(DTYPES, DTYPES):
        cast = type_cast[alias_of(target)](torch.ones(shape, dtype=torch.bool).to(source)).unwrap()
        assert (cast.shape, cast.dtype) == (shape, target)
        assert torch.equal(cast.to(torch.complex128), torch.ones(shape, dtype=torch.complex128))


def test_the_same_dtype_is_the_tensor_itself():
    x = torch.tensor([1.5, math.nan], requires_grad=True)
    assert type_cast[float32_t](x).unwrap() is x


@pytest.mark.parametrize("alias", [float64_t, complex64_t, float16_t])
def test_gradients_flow_through(alias):
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    cast = type_cast[alias](x).unwrap()
    (cast * cast).sum().abs().backward()
    assert x.grad.tolist() == [2.0, 4.0]


def test_gradients_flow_through_the_real_part():
    z = torch.tensor([1 + 0j, 2 + 0j], requires_grad=True)
    (type_cast[float32_t](z).unwrap() ** 2).sum().backward()
    assert z.grad.tolist() == [2 + 0j, 4 + 0j]


@pytest.mark.parametrize("value", [1.5, [1, 2], None, "text"])
def test_what_is_no_tensor_is_an_error(value):
    error = type_cast[float32_t](value).unwrap_err()
    assert type(error) is CastError
    assert str(error) == f"type_cast[float32_t]: got a {type(value).__name__}. Give a tensor."


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")  # torch, of itself
def test_a_quantized_tensor_is_an_error():
    quantized = torch.quantize_per_tensor(torch.tensor([1.0]), 0.1, 0, torch.qint8)
    with pytest.raises(CastError, match=r"got a torch.qint8 tensor. Dequantize it first"):
        raise type_cast[float32_t](quantized).unwrap_err()


@pytest.mark.parametrize("name", QUANTIZED)
def test_there_is_no_cast_to_a_quantized_dtype(name):
    for dtype in (getattr(torchguard.typing, name), getattr(torch, name.removesuffix("_t"))):
        with pytest.raises(AnnotationError, match=r"type_cast\[.*q.*\]: a quantized tensor has a scale"):
            type_cast[dtype]


@pytest.mark.parametrize("unknown", ["float33", "float32", int, torch.Tensor, None, 8])
def test_what_is_no_dtype_is_named(unknown):
    with pytest.raises(AnnotationError) as caught:
        type_cast[unknown]
    assert repr(unknown) in str(caught.value)


@pytest.mark.compiled
def test_a_graph_cannot_cast():
    cast = torch.compile(lambda x: type_cast[float32_t](x).unwrap(), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="type_cast returns Python values"):
        cast(torch.tensor([1, 2]))


def test_tracing_by_hand_is_noticed_too(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(TracingError, match="type_cast"):
        type_cast[float32_t](torch.tensor([1]))
