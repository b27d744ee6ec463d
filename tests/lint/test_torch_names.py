"""The tables of torch's names, against the installed torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchguard._torch.support import torch_is_at_least
from torchguard.lint import _torch_names as names

# The linter reads code that may be written for a newer torch than the installed one.
SINCE_2_13 = {"linear_cross_entropy", "LinearCrossEntropyLoss"}


@pytest.mark.parametrize(
    ("table", "owner"),
    [
        (names.TENSOR_FUNCTIONS, torch),
        (names.TENSORS_FUNCTIONS, torch),
        (names.FUNCTIONAL, F),
        (names.TENSOR_METHODS, torch.Tensor),
        (names.TENSORS_METHODS, torch.Tensor),
        (names.IN_PLACE_METHODS, torch.Tensor),
        (names.PLAIN_METHODS, torch.Tensor),
        (names.TENSOR_ATTRIBUTES, torch.Tensor),
        (names.TENSOR_ONLY_METHODS, torch.Tensor),
        (names.LAYERS, nn),
        (names.FACTORIES, torch),
    ],
)
def test_every_name_exists(table, owner):
    expected = set() if torch_is_at_least(2, 13) else table & SINCE_2_13
    assert {name for name in table if not hasattr(owner, name)} == expected


@pytest.mark.filterwarnings("ignore")
def test_what_is_said_to_return_a_tensor_does():
    x = torch.rand(4, 4) + 0.5
    for name in sorted(names.TENSOR_METHODS):
        try:
            result = getattr(x.clone(), name)()
        except (TypeError, RuntimeError, ValueError, IndexError, NotImplementedError, AssertionError):
            continue  # needs arguments, another dtype or another device
        assert isinstance(result, torch.Tensor), name


def test_every_method_in_place_is_known():
    public = {name for name in dir(torch.Tensor) if name.endswith("_") and not name.startswith("_")}
    no_values = {"requires_grad_", "rename_", "share_memory_", "resize_as_sparse_", "is_shared_", "module_load_"}
    assert public - names.IN_PLACE_METHODS - no_values == set()
