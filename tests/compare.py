"""Comparisons that several test files use."""

import torch
from torch import Tensor, nn

from torchguard import flags


def faults(f: Tensor) -> dict[int, list[str]]:
    """The errors of each bad sample: `{1: ["NAN @ input"]}`."""
    found = enumerate(flags.unpack_all(f))
    return {row: [f"{e.code_name} @ {e.location_name}" for e in errors] for row, errors in found if errors}


def assert_same(got, want, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Compare nested tensors up to the rounding of another order of operations."""
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


def take_gradients(model: nn.Module, unused: bool = False) -> dict[str, Tensor]:
    """A copy of the gradient of each parameter, by name. The model's own are reset.

    Every parameter has to have a gradient; with `unused`, at least one.
    """
    parameters = [(name, p) for name, p in model.named_parameters() if p.grad is not None or not unused]
    found = {name: p.grad.clone() for name, p in parameters}
    assert found
    model.zero_grad()
    return found


def assert_same_gradients(got: dict[str, Tensor], want: dict[str, Tensor], why: str = "", tolerance=None) -> None:
    """The same parameters, and for each of them a finite gradient close to the expected one.

    Args:
        why: what is compared, for the message.
        tolerance: returns `rtol` and `atol` for an expected gradient. By default they are torch's for its dtype.
    """
    assert got.keys() == want.keys()
    for name, expected in want.items():
        assert got[name].isfinite().all(), f"{why}: {name}"
        limits = tolerance(expected) if tolerance else {}
        torch.testing.assert_close(got[name], expected, **limits, msg=lambda text, name=name: f"{why}: {name}: {text}")


def assert_same_state(got: nn.Module, want: nn.Module, **limits: float) -> None:
    """Gradients of two models, close within these limits, and buffers."""
    for (name, one), (_, two) in zip(got.named_parameters(), want.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, **limits, msg=lambda text, name=name: f"{name}: {text}")
    for one, two in zip(got.buffers(), want.buffers(), strict=True):
        torch.testing.assert_close(one, two)
