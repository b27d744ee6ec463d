"""Functions for training loops: freezing, inference, inputs on a device, checks of a tensor."""

from torchguard.exceptions import NonFiniteError
from torchguard.training._model import freeze_model, inference
from torchguard.training._tensors import TensorProperties, check_tensor_properties, safe_to_device

__all__ = [
    "NonFiniteError",
    "TensorProperties",
    "check_tensor_properties",
    "freeze_model",
    "inference",
    "safe_to_device",
]
