"""What does not fit a device called chip."""

import torch

from torchguard import device
from torchguard.device import Device


def found(fn, *args, dynamic=False, train=False, **fields):
    """What does not fit when a function is compiled for a device."""
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
