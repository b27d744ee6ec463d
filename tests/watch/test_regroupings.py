"""Random orders and groupings of rows, in front of layers and between them: exact, or declared."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchguard import err
from torchguard._watch import watch
from torchguard.exceptions import MixedRowsWarning

WIDTH = 4
BAD = 1

# Each step takes `(rows, time, width)`, where rows may be any regrouping of the samples, and returns the same form.
KEEPS_SAMPLES_APART = {
    "flatten": lambda z: z.reshape(-1, 1, WIDTH),
    "time first": lambda z: z.transpose(0, 1).reshape(-1, 1, WIDTH),
    "roll the time": lambda z: z.roll(1, 1),
    "windows": lambda z: z.reshape(z.shape[0], -1, 1, WIDTH).transpose(0, 1).reshape(-1, 1, WIDTH),
    "views": lambda z: torch.cat([z, z.flip(-1)]),
    "stacked views": lambda z: torch.stack([z, -z], 1).flatten(0, 1),
    "chunks": lambda z: torch.cat(z.chunk(2, 2)[::-1], 2),
    "permute the width": lambda z: z.permute(2, 0, 1).flip(0).permute(1, 2, 0),
    "reverse the rows twice": lambda z: z.flip(0).contiguous().flip(0),
    "one by one": lambda z: torch.stack([one * 2 for one in z]),
    "interleave": lambda z: z.repeat_interleave(2, 0),
    "tile": lambda z: z.repeat(2, 1, 1),
}
MAY_MIX = {
    "roll the rows": lambda z: z.roll(1, 0),
    "reverse the rows": lambda z: z.flip(0),
    "neighbours": lambda z: z + z.roll(1, 0),
    "a random order": lambda z: z[torch.tensor([*range(1, z.shape[0]), 0])],
    "swap rows and time": lambda z: z.transpose(0, 1),
}
STEPS = KEEPS_SAMPLES_APART | MAY_MIX


class Regrouping(nn.Module):
    """Layers with regroupings around them. What comes out is a value for each row, in whatever order."""

    def __init__(self, steps):
        super().__init__()
        torch.manual_seed(0)
        self.steps = steps
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(len(steps) + 1))

    def forward(self, x):
        z = x
        for step, layer in zip(self.steps, self.layers, strict=False):
            z = layer(STEPS[step](z)).tanh()
        return self.layers[-1](z)


def rows_of_samples(steps, size, time):
    """Which samples each row of the output depends on: found by one-hot samples through the same steps, as numbers."""
    marks = torch.eye(size).reshape(size, 1, 1, size).expand(size, time, WIDTH, size)
    each = []
    for sample in range(size):
        z = marks[..., sample]
        for step in steps:
            z = STEPS[step](z).abs().amax(-1, keepdim=True).expand(-1, -1, WIDTH)  # as a layer mixes a vector
        each.append(z[..., 0] > 0)
    return torch.stack(each, -1)  # (rows, time, samples)


def gradients(model, loss):
    grads = torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)
    return [grad for grad in grads if grad is not None]


@given(st.data())
def test_a_fault_is_its_sample_s_or_all_are_accused(data):
    check_example("plain", data)


@pytest.mark.long
@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@settings(max_examples=20)
@given(st.data())
def test_in_a_graph_a_fault_is_its_sample_s_or_all_are_accused(data):
    check_example("aot_eager", data)


def check_example(mode, data):
    steps = data.draw(st.lists(st.sampled_from([*STEPS]), min_size=1, max_size=3))
    size, time = data.draw(st.sampled_from([(3, 3), (3, 2), (2, 4), (4, 4)]))
    model = Regrouping(steps).double()
    x = torch.randn(size, time, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    want = model(x)
    guarded = watch(model, quarantine=True)
    torch._dynamo.reset()
    call = guarded if mode == "plain" else torch.compile(guarded, backend=mode, dynamic=False)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        out, f = call(x)
        assert torch.equal(out, want)
        assert not err.is_err(f).any()
        bad = x.clone()
        bad[BAD, data.draw(st.integers(0, time - 1)), 0] = data.draw(st.sampled_from([torch.nan, torch.inf]))
        out, f = call(bad)
    named = err.is_err(f).nonzero().flatten().tolist()
    assert out.isfinite().all()
    found = gradients(model, out.square().sum())
    assert all(grad.isfinite().all() for grad in found)
    if named == [BAD]:
        touched = rows_of_samples(steps, size, time)
        keep = ~touched[..., BAD]
        assert not out[~keep].any()
        torch.testing.assert_close(out[keep], want[keep], rtol=1e-9, atol=1e-12)
        clean = gradients(model, guarded(x)[0][keep].square().sum())
        for got, expected in zip(found, clean, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)
    else:
        assert named == [*range(size)]
        assert any(issubclass(one.category, MixedRowsWarning) for one in seen)
