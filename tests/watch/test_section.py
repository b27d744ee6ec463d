"""The values of a run as a section of a report: above all, each sample's path through the model."""

import dataclasses
import re

import pytest
import torch
from torch import nn

from torchguard import watch
from torchguard._watch import path_bits

BACKENDS = [None, "eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.long)]


class Skips(nn.Module):
    """Runs its modules in another order than it defines them, one of them twice, and one never."""

    def __init__(self):
        super().__init__()
        self.last, self.unused, self.clean, self.first = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        h = self.first(x)
        clean = self.clean(h.nan_to_num())
        return self.last(self.first(h + clean))


def run_of(model, backend=None, quarantine=False, batch=3, bad=1):
    torch._dynamo.reset()
    guarded = watch(model, returns="output", quarantine=quarantine)
    call = guarded if backend is None else torch.compile(guarded, backend=backend)
    x = torch.randn(batch, 4)
    call(x)
    x[bad] = float("nan")
    call(x)
    return guarded


def path_on_page(report):
    (page,) = report.section().sections
    _, _, said, path = page.blocks
    return said.text, [row[1:] for row in path.rows]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_path_of_a_sample_is_recorded_in_the_order_in_which_modules_ran(backend):
    guarded = run_of(Skips(), backend)
    (incident,) = guarded.history
    assert incident.locations == ("input x", "first", "last", "Skips")  # `first` twice in succession
    assert guarded.report()[0].locations == incident.locations
    said, path = path_on_page(guarded.run_report())
    assert said.startswith("Recorded: where the sample was bad")
    assert "nferred" not in said
    assert path[0] == ("input x", "origin, recorded")
    assert {state for _, state in path[1:]} == {"bad, recorded"}


class OnlyFirst(nn.Module):
    """What goes bad in one layer is mended before the next."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return self.third(self.second(self.first(x).nan_to_num()).log())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_location_where_the_sample_was_finite_is_not_on_its_path(backend):
    model = OnlyFirst()
    with torch.no_grad():
        model.second.weight.zero_()
        model.second.bias.fill_(-1.0)
    guarded = watch(model, returns="output")
    torch._dynamo.reset()
    (guarded if backend is None else torch.compile(guarded, backend=backend))(torch.full((1, 4), float("inf")))
    (incident,) = guarded.history
    assert incident.locations == ("input x", "first", "third", "OnlyFirst")


@pytest.mark.parametrize("backend", BACKENDS[:3])
def test_each_sample_has_a_path_of_its_own(backend):
    class TwoWays(nn.Module):
        def __init__(self):
            super().__init__()
            self.low, self.high = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            low, high = self.low(x[:, :4]), self.high(x[:, 4:])
            return low.nan_to_num() + high.nan_to_num()

    torch._dynamo.reset()
    guarded = watch(TwoWays(), returns="output")
    x = torch.randn(4, 8)
    x[1, 0] = x[3, 7] = float("nan")
    (guarded if backend is None else torch.compile(guarded, backend=backend))(x)
    assert [one.locations[1:] for one in guarded.history] == [("low",), ("high",)]


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.long)])
def test_the_path_of_a_model_of_many_modules_takes_several_words(backend):
    guarded = run_of(nn.Sequential(*(nn.Linear(4, 4) for _ in range(70))), backend)
    (incident,) = guarded.history
    assert incident.locations == ("input", *map(str, range(70)), "Sequential")


def test_the_table_of_a_device_holds_paths():
    guarded = watch(Skips(), returns="output")
    guarded._watch.history.allocate(torch.device("cpu"), on_device=True)
    x = torch.randn(3, 4)
    x[2] = float("nan")
    guarded(x)
    (incident,) = guarded.history
    assert (incident.sample, incident.locations) == (2, ("input x", "first", "last", "Skips"))


def test_in_quarantine_the_path_ends_where_values_were_replaced():
    guarded = run_of(Skips(), quarantine=True)
    (incident,) = guarded.history
    assert incident.locations == ("input x",)


def test_a_path_that_was_not_recorded_is_inferred_and_the_page_says_so():
    guarded = run_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    unknown = _without_paths(guarded.run_report())
    said, path = path_on_page(unknown)
    assert "Inferred: these are all 3 locations" in said
    assert path[0] == ("input", "origin, recorded")
    assert {state for _, state in path[1:]} == {"bad, inferred"}
    shown = [block.text for block in unknown.section().blocks if hasattr(block, "text")]
    assert any(re.match("Inferred: ", text) for text in shown)


def test_where_a_module_was_not_reached_an_inferred_path_is_not_known():
    said, path = path_on_page(_without_paths(run_of(Skips()).run_report()))
    assert "bad at 4 checks after it. The model defines 5 locations" in said
    assert {state for _, state in path[1:]} == {"not known"}


def _without_paths(report):
    incidents = tuple(dataclasses.replace(one, locations=()) for one in report.incidents)
    return dataclasses.replace(report, incidents=incidents)


def test_an_order_that_this_process_has_not_met_gives_no_path(monkeypatch):
    guarded = run_of(Skips())
    monkeypatch.setattr(path_bits, "_ORDERS", {})
    assert guarded.report()[0].locations == ()


def test_orders_are_told_apart_by_their_content_and_are_limited():
    first, second = path_bits.order_number((1, 2, 3)), path_bits.order_number((1, 3, 2))
    assert first != second
    assert path_bits.order_number((1, 2, 3)) == first
    assert path_bits.order_number(tuple(range(10_000))) == path_bits.NO_ORDER
