"""The values of a run as a section of a report."""

import torch
from torch import nn

from torchguard import watch


class Skips(nn.Module):
    """Defines a module that no call reaches."""

    def __init__(self):
        super().__init__()
        self.first, self.unused, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.first(x))


def incident_of(model):
    guarded, x = watch(model, returns="output"), torch.randn(3, 4)
    x[1] = float("nan")
    guarded(x)
    (page,) = guarded.run_report().section().sections
    _, _, said, path = page.blocks
    return said.text, [row[1:] for row in path.rows]


def test_the_page_of_an_incident_says_what_of_the_path_is_inferred():
    said, path = incident_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    assert "Inferred: these are all 3 locations" in said
    assert path[0] == ("input", "origin, recorded")
    assert {state for _, state in path[1:]} == {"bad, inferred"}


def test_where_a_module_was_not_reached_the_path_is_not_known():
    said, path = incident_of(Skips())
    assert "bad at 3 checks after it. The model defines 4 locations" in said
    assert {state for _, state in path[1:]} == {"not known"}
