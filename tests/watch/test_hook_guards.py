"""Dynamo checks few guards for a watched module, and still notices when another module or hook takes its place."""

import copy

import pytest
import torch
from torch import nn

from torchguard import unwatch, watch
from torchguard._torch.dynamo import cache_of, entries_of
from torchguard._torch.guards import children_of, leaves_of

BAD = torch.tensor([[1.0, 1.0], [float("nan"), 1.0]])


class Layers(nn.Module):
    """Layers one after another, which the tests exchange, copy and hook."""

    def __init__(self, count=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(autouse=True)
def _no_compiled_code():
    torch._dynamo.reset()


def compiled():
    """A function that calls the model that it is given: all models share its compiled code."""
    return torch.compile(lambda model, x: model(x), fullgraph=True, backend="eager")


def guards(call):
    def count(manager):
        return len(leaves_of(manager)) + sum(map(count, children_of(manager)))

    cache = cache_of(call)
    assert cache is not None
    return sum(count(entry.root) for _, entry in entries_of(cache))


def guards_of(make, count):
    torch._dynamo.reset()
    model, call = make(Layers(count)), compiled()
    call(model, torch.ones(3, 2))
    return guards(call)


def poisoned(model, number):
    """The path at which a sample goes bad if the weight of a layer is NaN."""
    with torch.no_grad():
        model.layers[number].weight.fill_(float("nan"))
    return model


@pytest.mark.parametrize("quarantine", [False, True])
def test_a_further_watched_module_takes_few_guards(quarantine):
    plain = guards_of(lambda model: model, 12) - guards_of(lambda model: model, 4)
    watched = guards_of(lambda model: watch(model, quarantine=quarantine), 12)
    watched -= guards_of(lambda model: watch(model, quarantine=quarantine), 4)
    assert watched - plain <= 8 * 4


def test_models_that_are_watched_in_other_ways_do_not_share_code():
    call = compiled()
    one, two = (poisoned(Layers(), 1) for _ in range(2))
    one, two = watch(one), watch(two, exclude="layers.1")
    for model in (one, two, one):
        call(model, torch.ones(2, 2))
        expected = "layers.1" if model is one else "layers.2"
        assert {incident.path for incident in model.report()} == {expected}


def test_layers_that_change_places_are_still_named():
    call, model = compiled(), watch(poisoned(Layers(), 2))
    call(model, torch.ones(2, 2))
    assert {incident.path for incident in model.report()} == {"layers.2"}
    layers = model.layers
    layers[0], layers[2] = layers[2], layers[0]
    call(model, torch.ones(2, 2))
    assert model.report() == watch_eager(model)


def watch_eager(model):
    model(torch.ones(2, 2))
    return model.report()


def test_a_copy_uses_the_compiled_code_of_its_original():
    call, model = compiled(), watch(Layers())
    other = copy.deepcopy(model)
    call(model, BAD)
    with torch.compiler.set_stance("fail_on_recompile"):
        call(other, BAD)
    assert [incident.sample for incident in other.report()] == [1]


def test_a_model_that_is_no_longer_watched_runs_without_checks():
    call, guarded = compiled(), watch(Layers())
    call(guarded, BAD)
    plain = unwatch(guarded)
    assert isinstance(call(plain, BAD), torch.Tensor)
    assert not any("_torchguard_identity" in module.__dict__ for module in plain.modules())
    again = watch(plain, include="layers.3")
    call(again, torch.ones(2, 2))
    assert again.report() == []


def test_a_hook_that_is_added_later_is_called():
    call, guarded = compiled(), watch(Layers())
    before, _ = call(guarded, torch.ones(2, 2))
    handle = guarded.layers[3].register_forward_hook(lambda module, args, output: output + 1)
    after, _ = call(guarded, torch.ones(2, 2))
    assert torch.equal(after, before + 1)
    handle.remove()
    again, _ = call(guarded, torch.ones(2, 2))
    assert torch.equal(again, before)
