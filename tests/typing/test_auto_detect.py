"""`@tensorcheck` records NaN and Inf of what a function returns in the flags it returns, compiled or not."""

import dataclasses
import math
import warnings
from typing import NamedTuple

import pytest
import torch
from torch import nn

from torchguard import (
    ErrorConfig,
    InvalidReturnTypeError,
    Ok,
    Result,
    err,
    flags,
    set_config,
    tensorcheck,
    tracked,
)
from torchguard.exceptions import ValidationWarning
from torchguard.experimental import err as exp_err
from torchguard.typing import Tensor, error_t, float32_t, int64_t

Values = Tensor[float32_t, ("batch", ...)]
Flags = Tensor[error_t, ("batch", "words")]
X = torch.tensor([[1.0, 2.0], [-1.0, 1.0], [0.0, 1.0]])  # the log of row 1 is NaN, of row 2 Inf


def codes(f):
    return [[error.code for error in flags.unpack(f, i)] for i in range(f.shape[0])]


def test_nan_and_inf(run):
    @tensorcheck
    def log(x):
        return x.log(), err.new(x)

    out, f = run(log)(X)
    assert codes(f) == [[], [err.NAN], [err.INF]]
    torch.testing.assert_close(out, X.log(), equal_nan=True)


@pytest.mark.parametrize(
    ("auto_detect", "found"),
    [
        (True, [[], [err.NAN], [err.INF]]),
        (False, [[], [], []]),
        (None, [[], [], []]),
        ({err.NAN}, [[], [err.NAN], []]),
        (frozenset({err.INF}), [[], [], [err.INF]]),
        ([err.NAN, err.INF], [[], [err.NAN], [err.INF]]),
        (set(), [[], [], []]),
    ],
)
def test_what_is_detected(auto_detect, found):
    @tensorcheck(auto_detect=auto_detect)
    def log(x):
        return x.log(), err.new(x)

    assert codes(log(X)[1]) == found
    assert codes(torch.compile(log, backend="aot_eager", fullgraph=True)(X)[1]) == found


def test_the_place_is_the_tracked_module(run):
    @tracked
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        @tensorcheck
        def forward(self, x):
            y, f = self.inner(x)
            return y * float("inf"), f

    _, f = run(Model())(X)
    assert [str(error) for error in flags.unpack(f, 1)] == ["CRITICAL: NAN @ inner", "CRITICAL: NAN @ Model"]


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    @tensorcheck
    def forward(self, x):
        return x.log() * self.weight, err.new(x)


def test_a_function_or_an_untracked_module_goes_by_its_name(run):
    _, f = run(Inner())(X)
    assert str(flags.unpack(f, 1)[0]) == "CRITICAL: NAN @ Inner.forward"


def test_every_carrier(run, carrier):
    @tensorcheck
    def log(x):
        return x.log(), err.new(x)

    set_config(ErrorConfig(flag_dtype=carrier))
    assert codes(run(log)(X)[1]) == [[], [err.NAN], [err.INF]]


def test_flags_of_the_experimental_namespace(run):
    @tensorcheck
    def log(x):
        return x.log(), exp_err.new(x)

    _, f = run(log)(X)
    assert f.dtype == torch.float32
    assert codes(f) == [[], [err.NAN], [err.INF]]


def test_flags_that_were_passed_in(run):
    @tensorcheck
    def log(x, f):
        return x.log(), f

    before = err.push(err.new(X), err.OVERFLOW, 3, where=torch.tensor([True, True, False]))
    assert codes(run(log)(X, before)[1]) == [[err.OVERFLOW], [err.OVERFLOW, err.NAN], [err.INF]]


class Out(NamedTuple):
    y: Values
    f: Flags
    note: Tensor[int64_t, ("batch", 4)]


@dataclasses.dataclass
class Record:
    y: Values
    f: Flags


def named_tuple(x) -> Out:
    return Out(x.log(), err.new(x), torch.zeros(3, 4, dtype=torch.int64))


def dataclass(x) -> Record:
    return Record(x.log(), err.new(x))


def flags_first(x) -> tuple[Flags, Values]:
    return err.new(x), x.log()


def deep(x) -> tuple[tuple[Values, Flags], dict[str, Values]]:
    return (x, err.new(x)), {"log": x.log()}


def result(x) -> Result[tuple[Values, Flags], str]:
    return Ok((x.log(), err.new(x)))


@pytest.mark.parametrize(
    ("function", "flags_of"),
    [
        (named_tuple, lambda out: out.f),
        (dataclass, lambda out: out.f),
        (flags_first, lambda out: out[0]),
        (deep, lambda out: out[0][1]),
        (result, lambda out: out.unwrap()[1]),
    ],
)
def test_declared_flags_are_found_wherever_they_are(run, function, flags_of):
    out = run(tensorcheck(function))(X)
    assert type(out) is type(function(X))
    assert codes(flags_of(out)) == [[], [err.NAN], [err.INF]]


def test_all_that_is_returned_is_looked_at(run):
    @tensorcheck
    def many(x):
        f = err.new(x)
        return {"log": x.log(), "all": [x, (x * math.inf,)]}, x.sum(), torch.arange(3), f

    assert codes(run(many)(X)[-1]) == [[err.INF], [err.NAN, err.INF], [err.INF, err.NAN]]


def test_what_has_no_row_for_each_sample_tells_nothing(run):
    @tensorcheck
    def losses(x):
        return x, x.log().sum(), torch.full((2,), math.nan), err.new(x)

    assert codes(run(losses)(X)[-1]) == [[], [], []]


def test_sizes_that_depend_on_values(compiled):
    @tensorcheck
    def good(x):
        f = err.push(err.new(x), err.OVERFLOW, 1, where=x[:, 0] > 0.5)
        return err.take_ok(f, x), f

    kept, f = compiled(good)(X)
    assert kept.shape == (2, 2)
    assert codes(f) == [[err.OVERFLOW], [], []]


IDS = torch.tensor([[5, 3, 2, 9], [0, 1, 2, 3], [0, 0, 0, 0]])


@pytest.mark.parametrize(
    "other",
    [
        IDS,
        IDS.to(torch.int32).repeat(1, 2),
        torch.tensor([[1.5] * 8, [-2.0] * 8, [0.0] * 8]),
        torch.rand(3, 4).double(),
    ],
    ids=lambda t: str(t.dtype),
)
def test_what_only_looks_like_flags_stays_as_it_is(run, other):
    @tensorcheck
    def two(x, y):
        return x.log(), y + torch.zeros_like(y)

    assert torch.equal(run(two)(X, other)[1], other)


def test_what_is_declared_to_be_something_else_is_no_flags(run):
    @tensorcheck
    def top(x) -> tuple[Values, Tensor[int64_t, ("batch", 4)]]:
        return x.log(), torch.zeros(3, 4, dtype=torch.int64)

    assert not run(top)(X)[1].any()


def test_a_second_output_that_learns_is_no_flags(run):
    weight = torch.zeros(8, requires_grad=True)

    @tensorcheck
    def encode(x, weight):
        return x.log(), weight.expand(3, 8) * 1

    assert not run(encode)(X, weight)[1].any()


def test_gradients_do_not_change(run):
    net = nn.Linear(2, 4)

    def plain(x):
        return net(x), err.new(x)

    def gradient(fn):
        net.zero_grad()
        out, _ = fn(X)
        out.square().sum().backward()
        return net.weight.grad.clone()

    assert torch.equal(gradient(run(tensorcheck(plain))), gradient(run(plain)))


def test_detection_that_was_asked_for_misses_flags():
    @tensorcheck(auto_detect={err.NAN})
    def log(x):
        return x.log()

    with pytest.warns(ValidationWarning, match=r"log: auto_detect names codes, but there are no flags"):
        log(X)
    set_config(ErrorConfig(strict_validation=True))
    with pytest.raises(InvalidReturnTypeError):
        log(X)


def test_detection_by_default_misses_nothing():
    @tensorcheck
    def log(x):
        return x.log()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log(X)


def test_super_records_once(run):
    @tracked
    class Base(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        @tensorcheck
        def forward(self, x):
            return x.log(), err.new(x)

    @tracked
    class Derived(Base):
        @tensorcheck
        def forward(self, x):
            return super().forward(x)

    assert codes(run(Derived())(X)[1]) == [[], [err.NAN], [err.INF]]
