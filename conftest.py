"""What every test and every documented example may rely on."""

import gc
import importlib.util
import logging
import os
import sys

import pytest

if os.environ.get("TORCHGUARD_CHECK_SHAPES"):
    # Eager tests only: a checker inside traced code breaks the graph.
    from jaxtyping import install_import_hook

    checked = "checks control err _channel experimental flags locations _operators result"
    install_import_hook([f"torchguard.{name}" for name in checked.split()], "beartype.beartype")

import torch

import torchguard
from torchguard._channel.codes import scoped_names
from torchguard._channel.config import scoped_config

# pytest listens to every logger that does not propagate. This one is torch's structured trace: where somebody listens,
# each compilation is written out in full.
logging.getLogger("torch.__trace").propagate = True

# Machines with a GPU may have pytest and little else; the examples of the docs run where the rest does.
if importlib.util.find_spec("sybil"):
    from sybil import Sybil
    from sybil.parsers.markdown import PythonCodeBlockParser

    pytest_collect_file = Sybil(parsers=[PythonCodeBlockParser()], patterns=["*.md"]).pytest()

# Looking for examples in a module loads it, and this one needs Triton, which comes with torch for a GPU alone.
collect_ignore = [] if importlib.util.find_spec("triton") else ["src/torchguard/_watch/kernels.py"]


if importlib.util.find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    # No property may fail because the machine is busy. Where CI says so, every run draws the same examples.
    calm = {
        "deadline": None,
        "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
        "derandomize": "CI" in os.environ,
    }
    settings.register_profile("quick", max_examples=30, **calm)
    settings.register_profile("thorough", max_examples=500, **calm)  # pytest --hypothesis-profile=thorough
    settings.load_profile("quick")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give each test to the worker that is free, but some files whole.

    The examples of a page build on each other; the tests of an installed wheel share an environment. The mark
    `xdist_group` of pytest-xdist 3.8 would say so, but has no effect with pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByTest(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::")[0]
            return file if file.endswith((".md", "test_installed.py")) else nodeid

    return ByTest(config, log)


def pytest_collection_modifyitems(items):
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        is_inductor = "inductor" in [parameters.get(name) for name in ("backend", "compiled", "run")]
        if (is_inductor and not item.get_closest_marker("inductor")) or item.path.parent.name == "docs":
            item.add_marker(pytest.mark.long)


def pytest_collection_finish():
    leave_out_of_collections()


def forget_what_was_compiled():
    """`torch._dynamo.reset()`, unless nothing was compiled since the last one: most tests compile nothing."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    if frames is not None and (frames.input_codes.seen or frames.FRAME_COUNTER):
        torch._dynamo.reset()
        leave_out_of_collections()


def leave_out_of_collections():
    """Have the garbage collector pass over all that is there by now.

    torch keeps millions of objects of what it compiled. A test that collects garbage, to see what a call leaves behind,
    would take seconds to look through them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)  # what a test leaves behind is collected here


@pytest.fixture(autouse=True)
def fresh_state():
    """The default settings and names of codes, a known seed, and nothing compiled."""
    torch.manual_seed(0)
    forget_what_was_compiled()
    with scoped_config(torchguard.ErrorConfig()), scoped_names():
        yield


@pytest.fixture(autouse=True)
def documented_names(doctest_namespace):
    names = {name: getattr(torchguard, name) for name in torchguard.__all__}
    doctest_namespace.update(names, torch=torch)
