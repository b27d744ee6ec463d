"""What every test and every documented example may rely on."""

import importlib.util
import os

import pytest

if os.environ.get("TORCHGUARD_CHECK_SHAPES"):
    # Eager tests only: a checker inside traced code breaks the graph.
    from jaxtyping import install_import_hook

    checked = "checks control err errors experimental flags locations operators result"
    install_import_hook([f"torchguard.{name}" for name in checked.split()], "beartype.beartype")

import torch

import torchguard
from torchguard.errors import codes, config

# Machines with a GPU may have pytest and little else; the examples of the docs run where the rest does.
if importlib.util.find_spec("sybil"):
    from sybil import Sybil
    from sybil.parsers.markdown import PythonCodeBlockParser

    pytest_collect_file = Sybil(parsers=[PythonCodeBlockParser()], patterns=["*.md"]).pytest()

# Looking for examples in a module loads it, and this one needs Triton, which comes with torch for a GPU alone.
collect_ignore = [] if importlib.util.find_spec("triton") else ["src/torchguard/watching/kernels.py"]


@pytest.fixture(autouse=True)
def fresh_state():
    """The default settings and names of codes, a known seed, and nothing compiled."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    before, names = config.CONFIG, dict(codes._CODE_NAMES)
    torchguard.set_config(torchguard.ErrorConfig())
    yield
    torchguard.set_config(before)
    codes._CODE_NAMES.clear()
    codes._CODE_NAMES.update(names)


@pytest.fixture(autouse=True)
def documented_names(doctest_namespace):
    names = {name: getattr(torchguard, name) for name in torchguard.__all__}
    doctest_namespace.update(names, torch=torch)
