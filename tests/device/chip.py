"""Compile a function for a device called chip, and return the violations."""

import torch

from torchguard import device
from torchguard.device import Device


def violations_of(fn, *args, dynamic=False, train=False, **fields):
    """The violations that `mock_backend` reports when a function is compiled for a device with these fields."""
    backend = device.mock_backend(Device(name="chip", **fields), mode="warning")
    result = torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    if train:
        result.sum().backward()
    return backend.report().violations


def codes(violations):
    return sorted({violation.code for violation in violations})


def only(violations):
    (violation,) = violations
    return violation
