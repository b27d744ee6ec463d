"""`@tensorcheck` records NaN and Inf of what a function returns in the flags it returns, compiled or not."""

import dataclasses
import math
import warnings
from collections import OrderedDict, defaultdict
from typing import NamedTuple, TypedDict

import pytest
import torch
from torch import nn

from torchguard import (
    DimensionMismatchError,
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


@pytest.mark.inductor
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

    with pytest.warns(ValidationWarning, match="the returned value contains no flags"):
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


def test_a_second_flags_tensor_is_no_value(run, carrier):
    set_config(ErrorConfig(flag_dtype=carrier))

    @tensorcheck
    def two(x) -> tuple[Values, Flags, Flags]:
        every = torch.ones(3, dtype=torch.bool, device=x.device)
        second = err.push_many(err.new(x), [(code, 1023, every) for code in (err.NAN, err.OVERFLOW, err.INF)])
        return x, err.new(x), second

    _, first, second = run(two)(X)
    assert codes(first) == [[], [], []]
    assert codes(second) == [[err.NAN, err.OVERFLOW, err.INF]] * 3


def test_samples_lie_where_the_annotation_says(run):
    @tensorcheck
    def states(x) -> tuple[Values, Tensor[float32_t, ("layers", "batch", 2)], Tensor[float32_t, ("tokens", 2)], Flags]:
        hidden = torch.stack([x, x.log(), x])
        return x, hidden, torch.full((3, 2), math.nan), err.new(x)

    assert codes(run(states)(X)[-1]) == [[], [err.NAN], [err.INF]]


def test_a_second_output_of_unknown_size(compiled):
    @tensorcheck
    def edges(x):
        return x.sum(-1), (x > 0).nonzero().t()

    assert torch.equal(compiled(edges)(X)[1], (X > 0).nonzero().t())


def test_shapes_of_other_outputs_cause_no_recompile():
    def plain(x, ids):
        return x + 1, ids + 1

    for function in (plain, tensorcheck(plain)):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounter()
        compiled = torch.compile(function, backend=counter, fullgraph=True)
        for length in (2, 3, 5, 6, 7):
            compiled(torch.ones(9, 2), torch.ones(9, length, dtype=torch.int64))
        assert counter.frame_count == 2


class Doubled(NamedTuple):
    y: Values
    f: Flags


class Made(Doubled):
    def __new__(cls, y, f=None):
        return super().__new__(cls, y, err.new(y) if f is None else f)


@dataclasses.dataclass
class Counted:
    y: Values
    f: Flags = dataclasses.field(init=False)
    made: int = 0

    def __post_init__(self):
        self.f, self.made = err.new(self.y), self.made + 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    y: Values
    start: dataclasses.InitVar[int]
    f: Flags


class Named(TypedDict):
    y: Values
    f: Flags


class Listed(list):
    def __init__(self, y, f):
        super().__init__([y, f])


def returning(make, annotation):
    def function(x):
        return make(x.log(), err.new(x))

    function.__annotations__["return"] = annotation
    return tensorcheck(function)


@pytest.mark.parametrize(
    ("make", "annotation"),
    [
        (lambda y, f: Made(y), Doubled),
        (lambda y, f: Counted(y), Counted),
        (lambda y, f: Frozen(y, 3, f), Frozen),
        (lambda y, f: OrderedDict(y=y, f=f), Named),
        (lambda y, f: defaultdict(list, y=y, f=f), Named),
        (lambda y, f: Listed(y, f), tuple[Values, Flags]),
    ],
    ids=["NamedTuple", "init=False", "frozen, InitVar", "OrderedDict", "defaultdict", "list"],
)
def test_what_is_returned_keeps_its_kind_and_its_other_parts(make, annotation):
    out = returning(make, annotation)(X)
    assert type(out) is type(make(X, err.new(X)))
    f = out["f"] if isinstance(out, dict) else out[1] if isinstance(out, (tuple, list)) else out.f
    assert codes(f) == [[], [err.NAN], [err.INF]]
    if isinstance(out, Counted):
        assert out.made == 1


def test_an_ordered_dict_in_a_graph(compiled):
    out = compiled(returning(lambda y, f: OrderedDict(f=f, y=y), Named))(X)
    assert type(out) is OrderedDict
    assert list(out) == ["f", "y"]
    assert codes(out["f"]) == [[], [err.NAN], [err.INF]]


def test_what_cannot_be_looked_at_is_passed_over():
    @tensorcheck
    def odd(x):
        return (
            x.log().to_sparse(),
            torch.empty(3, device="meta"),
            torch.nested.nested_tensor([x[0], x[1], x[2]]),
            err.new(x),
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert codes(odd(X)[-1]) == [[], [], []]


def test_a_wrong_return_is_told_before_anything_is_recorded():
    @tensorcheck
    def wrong(x) -> tuple[Values, Tensor[error_t, ("batch", 4)]]:
        return x.log(), torch.ones(3, 8)

    with pytest.raises(DimensionMismatchError):
        wrong(X)


def test_flags_in_one_of_two_returns(run):
    @tensorcheck
    def either(x) -> tuple[Values, Values] | tuple[Values, Flags]:
        return x.log(), torch.ones(3, 8)

    assert torch.equal(run(either)(X)[1], torch.ones(3, 8))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_other_ways_to_a_graph_record_as_well():
    from torch.fx.experimental.proxy_tensor import make_fx

    @tensorcheck
    def log(x):
        return x.log(), err.new(x)

    for example in (torch.ones(3, 2), X):
        assert codes(torch.jit.trace(log, (example,), check_trace=False)(X)[1]) == [[], [err.NAN], [err.INF]]
        assert codes(make_fx(log)(example)(X)[1]) == [[], [err.NAN], [err.INF]]


def test_detection_that_was_asked_for_of_a_declared_return_without_flags():
    @tensorcheck(auto_detect={err.NAN})
    def log(x) -> Values:
        return x.log()

    with pytest.warns(ValidationWarning):
        log(X)
