"""Bad input raises before anything is written, and the message says what, where, what was got, and what to do."""

import pytest
import torch

import torchguard as tg
from torchguard import err, fix, flag_nan, flag_oob_indices
from torchguard.exceptions import (
    BatchMismatchError,
    NotFlagsError,
    OutOfRangeError,
    TorchGuardError,
)

X = torch.zeros(8, 3)
MASK = torch.ones(8, dtype=torch.bool)


@pytest.mark.parametrize(
    "call",
    [
        lambda f: flag_nan(X, 1, f),
        lambda f: fix(X, f, 1),
        lambda f: err.push(f, err.NAN, 1, where=MASK),
        lambda f: err.push(f, err.NAN, torch.arange(8)),
        lambda f: err.push_many(f, [(err.NAN, 1, MASK)]),
        lambda f: err.take_ok(f, X),
        lambda f: err.take_ok_p(f, X),
        lambda f: err.map_ok(f, X, lambda z: z),
        lambda f: err.and_then(f, X, lambda z: (z, f)),
        lambda f: err.mean_ok(f, X),
        lambda f: err.merge(f, err.new(X)),
    ],
)
def test_a_mismatched_batch_size(call):
    with pytest.raises(BatchMismatchError, match=r"flags hold 4 samples but .* has 8\. Make them from the same batch"):
        call(err.new_t(4))


@pytest.mark.parametrize(
    "f",
    [
        None,
        [1, 2],
        torch.zeros(8),
        torch.zeros(8, 4, dtype=torch.bool),
        torch.zeros(8, 4, dtype=torch.float16),
        X[None],
    ],
    ids=["none", "list", "1d", "bool", "half", "3d"],
)
@pytest.mark.parametrize(
    "call",
    [
        lambda f: err.push(f, err.NAN, 1),
        lambda f: err.is_ok(f),
        lambda f: err.count_errors(f),
        lambda f: err.merge(f),
        lambda f: tg.flags.summary(f),
        lambda f: tg.has_err(f),
        lambda f: err.clear(f, err.NAN),
        lambda f: err.get_first_code(f),
    ],
)
def test_a_value_that_is_not_flags(f, call):
    with pytest.raises(NotFlagsError, match=r"make them with err.new\(x\)|Make them with err.new\(x\)"):
        call(f)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: err.push(f, 16, 1), "code is 16, it must lie in 0 to 15"),
        (lambda f: err.push(f, -1, 1), "code is -1"),
        (lambda f: err.push(f, err.NAN, 1024), "location is 1024, it must lie in 0 to 1023. Use a module"),
        (lambda f: err.push(f, err.NAN, -1), "location is -1"),
        (lambda f: err.push(f, err.NAN, 1, severity=4), "severity is 4"),
        (lambda f: err.push(f, err.NAN, torch.full((8,), 2000)), "location ranges from 2000 to 2000"),
        (lambda f: err.push(f, torch.full((8,), 99), 1), "code ranges from 99 to 99"),
        (lambda f: err.push_many(f, [(err.NAN, 5000, MASK)]), "err.push_many: location is 5000"),
        (lambda f: err.has_code(f, 77), "err.has_code: code is 77"),
        (lambda f: err.has_domain(f, 9), "err.has_domain: domain is 9, it must lie in 0 to 3. Use ErrorDomain"),
        (lambda f: err.from_code(err.NAN, 5000, 3), "location is 5000"),
        (lambda f: flag_nan(torch.full((8, 1), float("nan")), 5000, f), "location is 5000"),
        (lambda f: err.replace(X, targets=[]), "Give a list such as"),
        (lambda f: err.replace(X, targets=["infinity"]), 'Use "nan", "inf", "posinf" or "neginf"'),
    ],
)
def test_values_out_of_range(call, message):
    f = err.new_t(8)
    with pytest.raises(OutOfRangeError, match=message):
        call(f)
    assert not f.any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: err.push(f, err.NAN, 1.5), "location is 1.5, it must be an integer"),
        (lambda f: err.push(f, err.NAN, b"encoder"), "location is b'encoder'"),
        (lambda f: err.push(f, err.NAN, 1, where=torch.ones(8)), "where must be a bool tensor, got torch.float32"),
        (lambda f: err.push(f, err.NAN, 1, where=[True] * 8), "where must be a bool tensor, got list"),
        (lambda f: err.push(f, torch.ones(8), 1), "code is a torch.float32 tensor. Give integers"),
        (lambda f: err.merge(), "no flags were given"),
        (lambda f: err.take_ok(f, [1, 2]), "err.take_ok: z must be a tensor, got list"),
        (lambda f: err.guard(f, X, torch.sin, err.NAN, 1), "ok_mask must be a bool tensor, got torch.float32"),
        (lambda f: err.merge(f, f.to(torch.int32)), "cannot merge torch.int32 flags into torch.int64"),
        (lambda f: flag_nan([1.0], 1, f), "flag_nan: expected a tensor to check, got list"),
        (lambda f: flag_oob_indices(X, 3, 1, f), "ids are torch.float32. Give integers"),
    ],
)
def test_values_of_the_wrong_type(call, message):
    with pytest.raises(NotFlagsError, match=message):
        call(err.new_t(8))


@pytest.mark.parametrize("x", [torch.tensor(1.0), 3, None])
def test_flags_need_a_batch(x):
    with pytest.raises(BatchMismatchError, match=r"has no batch dimension\. Give a tensor of rank 1 or more"):
        err.new(x)


def test_a_scalar_has_no_batch_dimension():
    with pytest.raises(BatchMismatchError, match="z has no batch dimension"):
        flag_nan(torch.tensor(1.0), 1, err.new_t(1))


def test_invalid_location_ids_in_a_graph_become_unknown():
    fn = torch.compile(lambda f, where: err.push(f, err.NAN, where), backend="aot_eager", fullgraph=True)
    assert err.get_first_location(fn(err.new_t(2), torch.tensor([5, 4000]))).tolist() == [5, 0]


@pytest.mark.compiled
def test_bad_input_raises_while_tracing():
    with pytest.raises(Exception, match="flags hold 4 samples but z has 8"):
        torch.compile(lambda x: flag_nan(x, 1, err.new_t(4)), backend="eager", fullgraph=True)(X)


def test_every_error_is_also_a_builtin():
    def subclasses(cls):
        return {cls, *(deeper for sub in cls.__subclasses__() for deeper in subclasses(sub))}

    errors = subclasses(TorchGuardError) - {TorchGuardError}
    assert all(
        issubclass(error, (ValueError, TypeError, RuntimeError, LookupError, AssertionError, ImportError))
        for error in errors
    )
