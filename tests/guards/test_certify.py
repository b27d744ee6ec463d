"""How a filter affects results, and the filter that does no harm."""

import contextlib
import gc
import weakref

import pytest
import torch
from tests.models import bert
from torch import nn

from torchguard.exceptions import GuardError
from torchguard.guards._certify import CORRECT, EAGER_FAILS, HARMFUL, NOT_EXERCISED, STALE, UNGUARDED, certify
from torchguard.guards._compile import compile
from torchguard.guards._filters import keep_all, keep_portable, skip_all, skip_globals, skip_inbuilt_nn_modules
from torchguard.guards._suggest import suggest

# Before torch 2.13, filters on one function share a cache; each test resets it.
pytestmark = pytest.mark.filterwarnings("ignore::torchguard.exceptions.GuardWarning")

LIMIT = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.k, self.unused = 2, 5

    def forward(self, x):
        if self.unused > 100:
            x = x + 1
        return self.drop(self.norm(self.layer(x))) * self.k + LIMIT


def results(certificate):
    return {outcome.change: outcome.result for outcome in certificate.outcomes}


def test_without_dropped_guards_all_is_correct_but_late_hooks():
    found = results(certify(Net(), torch.randn(3, 4), keep_all()))
    assert found.pop("a late forward hook") in (CORRECT, UNGUARDED)
    assert set(found.values()) <= {CORRECT, EAGER_FAILS}


def test_dropout_after_eval_is_harmful():
    certificate = certify(Net(), torch.randn(3, 4), skip_inbuilt_nn_modules())
    assert results(certificate)["eval"] == STALE
    names = [guard.name for guard in certificate.labelled(HARMFUL)]
    assert any("drop" in name and "training" in name for name in names)
    assert not certificate.is_clean
    assert "eval: stale" in str(certificate)


def test_globals():
    certificate = certify(Net(), torch.randn(3, 4), skip_globals())
    assert results(certificate)["G['LIMIT'] = 4"] == STALE
    assert {guard.name for guard in certificate.labelled(HARMFUL)} == {"G['LIMIT']"}
    assert certificate.labelled(NOT_EXERCISED)
    assert LIMIT == 3


def test_a_change_without_effect_is_harmless():
    certificate = certify(Net(), torch.randn(3, 4), keep_portable())
    labels = {guard.name: guard.label for guard in certificate.guards}
    assert labels["self.unused"] == "harmless"
    assert labels["self.k"] == HARMFUL


def test_closures():
    power = 2

    def fn(x):
        return x**power

    certificate = certify(fn, torch.randn(3), keep_portable())
    assert results(certificate)["L['power'] = 3"] == STALE
    assert power == 2


def test_shapes_strides_dtypes_and_state():
    def fn(x):
        return x + 1 if x.shape[0] > 3 else x.contiguous() - 1

    found = results(certify(fn, torch.randn(3, 4), skip_all()))
    assert found["another batch size"] == STALE
    assert {"other strides", "another dtype", "requires_grad", "no_grad", "autocast"} <= set(found)


def test_custom_changes():
    model = Net().eval()

    @contextlib.contextmanager
    def wider():
        model.k = 7
        yield (torch.randn(5, 4),)
        model.k = 2

    found = results(certify(model, (torch.randn(3, 4),), keep_portable(), changes={"wider": wider}))
    assert found["wider"] == STALE


@pytest.mark.long
def test_the_model_is_left_as_it_was():
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = len(model.drop._forward_hooks)
    certify(model, torch.randn(3, 4), skip_all())
    assert model.training
    assert (model.k, model.unused) == (2, 5)
    assert len(model.drop._forward_hooks) == hooks
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_arguments_that_are_numbers():
    found = results(certify(lambda x, k: x * k, (torch.randn(3), 2), skip_all()))
    assert found["k = 3"] == STALE


@pytest.mark.long
def test_results_are_compared_in_every_part():
    def fn(x):
        return x * 2, 3 if torch.is_grad_enabled() else 4

    assert results(certify(fn, torch.randn(3), skip_all()))["no_grad"] == STALE
    assert certify(lambda x: {"a": x, "b": None, "c": x.numpy() * 2}, torch.randn(3), keep_all()).is_clean


def test_arguments_gradients_and_the_random_state_are_left_as_they_were():
    def fn(x):
        x.add_(1)
        return x * 2

    x, state = torch.zeros(3), torch.get_rng_state()
    found = results(certify(fn, x, keep_all()))
    assert UNGUARDED not in found.values()
    assert not x.any()
    assert torch.equal(torch.get_rng_state(), state)
    model = nn.Linear(3, 3)
    model(torch.ones(1, 3)).sum().backward()
    certify(model, torch.ones(1, 3), keep_all())
    assert model.weight.grad.dtype == torch.float32


def test_guards_on_arguments_are_kept():
    def fn(x, mask=None):
        return x * 2 if mask is None else x * mask

    x = torch.randn(3)
    fast = compile(fn, filter=suggest(fn, x).filter, backend="eager")
    fast(x)
    assert torch.equal(fast(x, torch.zeros(3)), torch.zeros(3))


def test_nothing_to_suggest_for_what_is_not_compiled():
    with pytest.raises(GuardError, match="compiled nothing"):
        suggest(lambda x: None, torch.randn(3))


def test_a_model_that_fails_is_refused():
    with pytest.raises(GuardError, match="fails before any change"):
        certify(nn.Linear(3, 3), torch.randn(2, 4), skip_all())


class Named(nn.Module):
    """Its result depends on a string and on a probability."""

    def __init__(self):
        super().__init__()
        self.layer, self.drop, self.act = nn.Linear(4, 4), nn.Dropout(0.5), "relu"

    def forward(self, x):
        x = self.drop(self.layer(x))
        return x.relu() if self.act == "relu" else x.tanh()


def test_values_that_could_not_be_tried_stay_guarded():
    model, x = Named(), torch.randn(64, 4)
    compiled = compile(model, filter=suggest(model, x).filter, backend="eager")
    compiled(x)
    model.drop.p = 0.0
    model.act = "tanh"
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.long
def test_a_trial_keeps_no_model_alive():
    there = []

    def trial():
        model = Net().eval()
        there.append(weakref.ref(model))
        certify(model, torch.randn(2, 4), skip_inbuilt_nn_modules())

    trial()
    gc.collect()
    assert there[0]() is None


def test_the_suggested_filter_saves_and_does_no_harm():
    model, x = Net().eval(), torch.randn(3, 4)
    found = suggest(model, x)
    assert found.certificate.is_clean
    assert found.certificate.guards  # those that it drops
    compiled = eval(found.code, {"guards": __import__("torchguard.guards", fromlist=["x"]), "model": model})
    torch.testing.assert_close(compiled(x), model(x))
    model.train()
    assert (compiled(x) == LIMIT).any()  # the zeros of Dropout: it is active
    assert "less)" in str(found)


@pytest.mark.long
def test_bert():
    model = bert().eval()
    ids = torch.randint(0, 50, (2, 5))
    found = suggest(model, ids)
    assert found.certificate.is_clean
    assert len(found.certificate.guards) > 100  # those that it drops
    torch.testing.assert_close(
        compile(model, filter=found.filter, backend="eager")(ids).last_hidden_state, model(ids).last_hidden_state
    )
