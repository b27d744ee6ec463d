"""Models that return plain objects and dataclasses."""

import dataclasses

import pytest
import torch
from torch import nn

from torchguard import err, watch
from torchguard.exceptions import TorchGuardError

NAN = float("nan")


class Plain:
    def __init__(self, logits, hidden):
        self.logits, self.hidden, self.name = logits, [hidden], "plain"


class Nested:
    def __init__(self, logits, hidden):
        self.inner, self.parent = Plain(logits, hidden), self

    @property
    def logits(self):
        return self.inner.logits


class Slotted:
    __slots__ = ("hidden", "logits")

    def __init__(self, logits, hidden):
        self.logits, self.hidden = logits, {"first": hidden}


@dataclasses.dataclass
class Data:
    logits: torch.Tensor
    hidden: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    logits: torch.Tensor
    hidden: torch.Tensor


class Returns(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.first, self.second = kind, nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        hidden = self.first(x)
        return self.kind(self.second(hidden).log1p(), hidden)  # the fault is in the output alone


def samples():
    model_input = torch.zeros(3, 3)
    model_input[1] = 5.0
    return model_input


def made(kind):
    model = Returns(kind)
    for layer in (model.first, model.second):
        layer.bias.data.zero_()
        layer.weight.data.fill_(1.0)
    model.second.weight.data.fill_(-1.0)
    return model


@pytest.mark.parametrize("kind", [Plain, Nested, Slotted, Data, Frozen])
class TestOutputs:
    def test_they_are_checked(self, run_light, kind):
        model = made(kind)
        out, f = run_light(watch(model))(samples())
        assert err.is_err(f).tolist() == [False, True, False]
        assert type(out) is kind
        torch.testing.assert_close(out.logits, model(samples()).logits, equal_nan=True)

    def test_bad_samples_in_them_are_zero(self, run_light, kind):
        model = made(kind)
        want = model(samples()).logits
        out, f = run_light(watch(model, quarantine=True))(samples())
        assert err.is_err(f).tolist() == [False, True, False]
        assert type(out) is kind
        assert not out.logits[1].any()
        torch.testing.assert_close(out.logits[[0, 2]], want[[0, 2]])


def test_a_distribution():
    class Normal(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return torch.distributions.Normal(self.layer(x), torch.ones(len(x), 2), validate_args=False)

    x = torch.ones(3, 3)
    x[2] = NAN
    out, f = watch(Normal(), quarantine=True)(x)
    assert err.is_err(f).tolist() == [False, False, True]
    assert out.loc.isfinite().all()
    assert out.sample().shape == (3, 2)


def test_an_object_that_cannot_be_copied_is_refused():
    class Counted:
        def __new__(cls, *_):
            return object.__new__(cls)

        def __init__(self, logits, hidden):
            self.logits = logits

    with pytest.raises(TorchGuardError, match="Counted cannot be copied"):
        watch(made(Counted), quarantine=True)(samples())


def test_caches_are_passed_on_as_they_are():
    class Cache:
        def __init__(self, keys):
            self.keys = keys

        def update(self, keys):
            self.keys = keys

    cache = Cache(torch.full((3, 2), NAN))

    class Cached(Returns):
        def forward(self, x):
            return {"out": self.second(self.first(x)), "cache": cache}

    out, f = watch(Cached(None), quarantine=True)(torch.ones(3, 3))
    assert out["cache"] is cache
    assert err.all_ok(f)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # by Dynamo, after a graph break
@pytest.mark.parametrize("mode", ["plain", "eager"])
@pytest.mark.parametrize("quarantine", [False, True])
def test_a_generator_is_refused(mode, quarantine):
    class Yielding(Returns):
        def forward(self, x):
            return (layer(x) for layer in (self.first, self.first))

    guarded = watch(Yielding(None), quarantine=quarantine)
    call = guarded if mode == "plain" else torch.compile(guarded, backend=mode)
    with pytest.raises(TorchGuardError, match="Yielding returned an iterator"):
        call(torch.ones(3, 3))
