import pytest
import torch

from torchguard import artifacts


@pytest.fixture
def root(tmp_path):
    """A directory with two whole artifacts."""
    root = tmp_path / "store"
    with artifacts.capture(root):
        compiled = torch.compile(lambda x: torch.sin(x) + 1, backend="eager", dynamic=False)
        compiled(torch.ones(2))
        compiled(torch.ones(3))
    return root
