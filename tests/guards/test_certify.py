"""How a filter affects results, and the filter that does no harm."""

import contextlib
import enum
import functools
import gc
import sys
import types
import weakref

import pytest
import torch
from tests.models import bert
from torch import nn

from torchguard._torch.support import torch_is_at_least
from torchguard.exceptions import GuardError
from torchguard.guards import _certify, _suggest
from torchguard.guards._certify import CORRECT, EAGER_FAILS, HARMFUL, HARMLESS, NOT_EXERCISED, STALE, UNGUARDED
from torchguard.guards._compile import compile
from torchguard.guards._filters import (
    keep_all,
    keep_portable,
    named,
    of_type,
    skip_all,
    skip_globals,
    skip_inbuilt_nn_modules,
)

# Before torch 2.13, filters on one function share a cache; each test resets it.
pytestmark = pytest.mark.filterwarnings("ignore::torchguard.exceptions.GuardWarning")

LIMIT = 3
certify = functools.partial(_certify.certify, backend="eager")
suggest = functools.partial(_suggest.suggest, backend="eager")


class NormAndDropout(nn.Module):
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
    found = results(certify(NormAndDropout(), torch.randn(3, 4), keep_all()))
    assert found.pop("a late forward hook") in (CORRECT, UNGUARDED)
    assert set(found.values()) <= {CORRECT, EAGER_FAILS}


def test_dropout_after_eval_is_harmful():
    certificate = certify(NormAndDropout(), torch.randn(3, 4), skip_inbuilt_nn_modules())
    assert results(certificate)["eval"] == STALE
    names = [guard.name for guard in certificate.labelled(HARMFUL)]
    assert any("drop" in name and "training" in name for name in names)
    assert not certificate.is_clean
    assert "eval: stale" in str(certificate)


def test_globals():
    certificate = certify(NormAndDropout(), torch.randn(3, 4), skip_globals())
    assert results(certificate)["G['LIMIT'] = 4"] == STALE
    assert {guard.name for guard in certificate.labelled(HARMFUL)} == {"G['LIMIT']"}
    assert certificate.labelled(NOT_EXERCISED)
    assert LIMIT == 3


def test_a_change_without_effect_is_harmless():
    certificate = certify(NormAndDropout(), torch.randn(3, 4), keep_portable())
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
    model = NormAndDropout().eval()

    @contextlib.contextmanager
    def wider():
        model.k = 7
        yield (torch.randn(5, 4),)
        model.k = 2

    found = results(certify(model, (torch.randn(3, 4),), keep_portable(), changes={"wider": wider}))
    assert found["wider"] == STALE


@pytest.mark.long
def test_the_model_is_left_as_it_was():
    model = NormAndDropout()
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


@pytest.mark.long
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
        model = NormAndDropout().eval()
        there.append(weakref.ref(model))
        certify(model, torch.randn(2, 4), skip_inbuilt_nn_modules())

    trial()
    gc.collect()
    assert there[0]() is None


def test_what_is_suggested_was_exercised_and_is_clean(monkeypatch):
    monkeypatch.setattr(_suggest, "_microseconds", lambda *checks: [10.0, 9.0])
    model, x = NormAndDropout().eval(), torch.randn(3, 4)
    found = suggest(model, x)
    assert found.saves
    assert found.certificate.is_clean
    assert {guard.label for guard in found.certificate.guards} == {HARMLESS}
    assert "10.0 us before, 9.0 us after (10% less)" in str(found)
    compiled = eval(found.code, {"guards": __import__("torchguard.guards", fromlist=["x"]), "model": model})
    torch.testing.assert_close(compiled(x), model(x))
    model.train()
    assert (compiled(x) == LIMIT).any()  # the zeros of Dropout: it is active


def test_progress_on_a_terminal_is_one_line_that_is_erased(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    certify(lambda x: x * LIMIT, torch.randn(3), skip_all(), backend="eager")
    shown = capsys.readouterr().err
    assert "certify: compiling" in shown
    assert "change 8 of 8: " in shown
    assert shown.count("\n") == 1  # the last text, which is erased
    assert shown.endswith("\x1b[2K")


def test_progress_in_a_pipe_has_a_line_for_each_change(capsys):
    certify(lambda x: x * LIMIT, torch.randn(3), skip_all(), backend="eager", progress=True)
    shown = capsys.readouterr().err.splitlines()
    assert shown[:2] == ["certify: compiling", "certify: change 1 of 8: another batch size"]
    assert len(shown) == 9
    certify(lambda x: x * LIMIT, torch.randn(3), skip_all(), backend="eager")
    assert capsys.readouterr().err == ""
    suggest(lambda x: x * LIMIT, torch.randn(3), backend="eager", progress=True)
    assert "suggest, trial 2 of 2: compiling" in capsys.readouterr().err


@pytest.mark.long
def test_what_does_not_save_is_not_suggested(monkeypatch):
    monkeypatch.setattr(_suggest, "_microseconds", lambda *checks: [2.1, 2.9])
    found = suggest(NormAndDropout().eval(), torch.randn(3, 4))
    assert not found.saves
    assert repr(found.filter) == "keep_all()"
    assert "Nothing to suggest" in str(found)
    assert "%" not in str(found)


@pytest.mark.long
def test_the_code_names_the_backend_that_was_tried(monkeypatch):
    found = suggest(NormAndDropout().eval(), torch.randn(3, 4), backend="aot_eager")
    assert "backend='aot_eager'" in found.code
    assert [trial.backend for trial in found.tried] == ["aot_eager"] * 2  # in eval and in train mode


@pytest.mark.inductor
def test_the_default_backend_is_the_one_that_the_code_uses():
    certificate = _certify.certify(nn.Linear(4, 4), torch.randn(3, 4), skip_all())
    assert certificate.backend == "inductor"
    # Its code reads float64 parameters as float32. In eager mode, the same graph gives the right result.
    assert results(certificate)["model.double()"] == STALE
    assert results(certify(nn.Linear(4, 4), torch.randn(3, 4), skip_all()))["model.double()"] == CORRECT


class Mode(enum.Enum):
    SUM, MEAN, MAX = range(3)


class Stateful(nn.Module):
    """Its result depends on attributes of many kinds."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.norm = nn.Linear(4, 4), nn.Dropout(0.0), nn.BatchNorm1d(4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 4)})
        self.mode, self.act, self.scales, self.options = Mode.SUM, torch.relu, [1.0, 2.0], {"shift": 1.0}
        self.config = types.SimpleNamespace(inner=types.SimpleNamespace(k=2))
        self.name, self.threshold, self.code, self.gate, self.gated = "plain", 5, 0, False, False

    def forward(self, x):
        x = self.act(self.drop(self.first(x)))
        for layer in self.layers:
            x = layer(x)
        for head in self.heads.values():
            x = head(x)
        x = x + (2 if self.mode is Mode.MAX else 1 if self.mode is Mode.MEAN else 0)
        x = x * sum(self.scales) * self.config.inner.k + sum(self.options.values())
        if self.name == "other" or self.threshold > 100 or self.code == 7 or (self.gate and self.gated):
            x = x + 1
        return self.norm(x) * LIMIT


class Bent(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


STATE_CHANGES = {
    "enum": lambda model: setattr(model, "mode", Mode.MAX),
    "function": lambda model: setattr(model, "act", torch.tanh),
    "list": lambda model: model.scales.append(3.0),
    "dict": lambda model: model.options.update(more=2.0),
    "nested object": lambda model: setattr(model.config.inner, "k", 3),
    "string": lambda model: setattr(model, "name", "other"),
    "threshold": lambda model: setattr(model, "threshold", 101),
    "one number of many": lambda model: setattr(model, "code", 7),
    "ModuleList append": lambda model: model.layers.append(nn.Linear(4, 4)),
    "ModuleList delete": lambda model: model.layers.__delitem__(1),
    "ModuleDict add": lambda model: model.heads.update({"b": nn.Linear(4, 4)}),
    "submodule": lambda model: setattr(model, "first", nn.Sequential(nn.Linear(4, 4), nn.Tanh())),
    # Dynamo of torch 2.11 does not notice another class, whatever the filter.
    **({"__class__": lambda model: setattr(model.first, "__class__", Bent)} if torch_is_at_least(2, 12) else {}),
    "forward": lambda model: setattr(model.first, "forward", lambda x: x - 1),
    "parametrize": lambda model: nn.utils.parametrizations.orthogonal(model.first),
    "no bias": lambda model: setattr(model.first, "bias", None),
    "a buffer": lambda model: setattr(model.norm, "running_mean", model.norm.running_mean + 1),
    "requires_grad": lambda model: model.first.requires_grad_(False),
    "eps": lambda model: setattr(model.norm, "eps", 1.0),
}


@pytest.fixture(scope="module")
def suggested():
    """The largest filter that is ever suggested for this model, whether it saves time or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_suggest, "_microseconds", lambda *checks: [10.0, 9.0])
        found = suggest(Stateful().eval(), torch.randn(3, 4))
    assert found.certificate.guards
    return found.filter


@pytest.mark.long
@pytest.mark.parametrize("change", STATE_CHANGES)
def test_no_state_change_is_stale_under_the_suggested_filter(suggested, change):
    model, x = Stateful().eval(), torch.randn(3, 4)
    compiled = compile(model, filter=suggested, backend="eager")
    compiled(x)
    STATE_CHANGES[change](model)
    got, want = compiled(x), model(x)
    torch.testing.assert_close(got, want)
    assert got.requires_grad == want.requires_grad


def test_a_value_that_matters_only_after_another_change_stays_guarded(suggested):
    model, x = Stateful().eval(), torch.randn(3, 4)
    compiled = compile(model, filter=suggested, backend="eager")
    compiled(x)
    model.gate = True
    compiled(x)
    model.gated = True
    torch.testing.assert_close(compiled(x), model(x))


def test_a_certificate_says_how_much_was_tried():
    not_tried = "DICT_NOT_CONTAINS" if torch_is_at_least(2, 12) else "DICT_CONTAINS"  # one type for both in torch 2.11
    certificate = certify(NormAndDropout().eval(), torch.randn(3, 4), ~of_type(not_tried, "DUPLICATE_INPUT"))
    assert certificate.exercised == 0 < len(certificate.guards)
    assert not certificate.is_clean
    assert f"No change made {len(certificate.guards)} of them fail: nothing is known about those." in str(certificate)
    certificate = certify(NormAndDropout().eval(), torch.randn(3, 4), ~named("self.unused"))
    assert certificate.exercised == len(certificate.guards) > 0
    assert certificate.is_clean


def test_what_only_gradients_or_buffers_show_is_harmful():
    embedding, norm = nn.Sequential(nn.Embedding(5, 3)), nn.Sequential(nn.BatchNorm1d(4))
    found = results(certify(embedding, torch.tensor([1, 1, 2]), ~named("*.scale_grad_by_freq")))
    assert found["L['fn']._modules['0'].scale_grad_by_freq = True"] == STALE
    found = results(certify(norm, torch.randn(3, 4), ~named("*.momentum")))
    assert found["L['fn']._modules['0'].momentum = 0.9"] == STALE


def test_a_model_whose_results_cannot_be_repeated_is_refused():
    def fn(x):
        torch.manual_seed(torch.seed())
        return x + torch.rand(3)

    with pytest.raises(GuardError, match="other results than in eager mode before any change"):
        certify(fn, torch.randn(3), skip_all())


@pytest.mark.long
def test_bert():
    model = bert().eval()
    ids = torch.randint(0, 50, (2, 5))
    found = suggest(model, ids)
    assert len(found.tried[0].labelled(HARMFUL)) > 10
    assert not found.certificate.labelled(NOT_EXERCISED)
    torch.testing.assert_close(
        compile(model, filter=found.filter, backend="eager")(ids).last_hidden_state, model(ids).last_hidden_state
    )
