"""Fixtures and hooks for all tests and all documented examples."""

import gc
import importlib.util
import logging
import os
import sys
import tempfile

import pytest

if os.environ.get("TORCHGUARD_CHECK_SHAPES"):
    # For eager tests only: a type checker inside traced code breaks the graph.
    import tests.shape_checker  # noqa: F401 (the hook does not import it)
    from jaxtyping import install_import_hook

    checked = "checks control distributed err _channel experimental flags locations _operators result testing training"
    install_import_hook([f"torchguard.{name}" for name in checked.split()], "tests.shape_checker.check")

import torch

import torchguard
from torchguard._channel.codes import scoped_names
from torchguard._channel.config import scoped_config

# pytest adds a handler to every logger that does not propagate. `torch.__trace` is torch's structured trace: with a
# handler, torch writes out each compilation in full.
logging.getLogger("torch.__trace").propagate = True

# Machines with a GPU may have pytest and little else. The examples of the docs run where sybil is installed.
if importlib.util.find_spec("sybil"):
    from sybil import Sybil
    from sybil.parsers.markdown import PythonCodeBlockParser

    def enter_directory(namespace):
        """Let the examples of a page write their files to a directory of their own, with a fixed seed."""
        torch.manual_seed(0)
        namespace["_directory"], namespace["_before"] = tempfile.TemporaryDirectory(), os.getcwd()
        os.chdir(namespace["_directory"].name)

    def leave_directory(namespace):
        os.chdir(namespace["_before"])
        namespace["_directory"].cleanup()

    pytest_collect_file = Sybil(
        parsers=[PythonCodeBlockParser()], patterns=["*.md"], setup=enter_directory, teardown=leave_directory
    ).pytest()

# Collecting doctests imports a module, and these need Triton, which comes only with the GPU builds of torch.
_KERNELS = ["src/torchguard/_watch/kernels.py", "src/torchguard/_watch/summary_kernels.py"]
collect_ignore = [] if importlib.util.find_spec("triton") else _KERNELS


if importlib.util.find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    # No property may fail because the machine is busy. In CI, every run draws the same examples.
    options = {
        "deadline": None,
        "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
        "derandomize": "CI" in os.environ,
    }
    settings.register_profile("quick", max_examples=30, **options)
    settings.register_profile("thorough", max_examples=500, **options)  # pytest --hypothesis-profile=thorough
    settings.load_profile("quick")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Send each test to a free worker, but keep all tests of some files on one worker.

    The examples of a docs page depend on each other, and the tests of the installed wheel share an environment. The
    mark `xdist_group` of pytest-xdist 3.8 is meant for this, but has no effect with pytest 9.2.
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
    freeze_objects()


def reset_dynamo():
    """Call `torch._dynamo.reset()`, unless nothing was compiled since the last call. Most tests compile nothing."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    if frames is not None and (frames.input_codes.seen or frames.FRAME_COUNTER):
        torch._dynamo.reset()
        freeze_objects()


def freeze_objects():
    """Exclude all current objects from garbage collection.

    torch keeps millions of objects for compiled code. A test that collects garbage, to check what a call leaves behind,
    would take seconds to scan them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)  # rarely during a test; `gc.collect` above does the rest


@pytest.fixture(autouse=True)
def fresh_state():
    """Default configuration and code names, a fixed seed, and nothing compiled."""
    torch.manual_seed(0)
    reset_dynamo()
    with scoped_config(torchguard.ErrorConfig()), scoped_names():
        yield


@pytest.fixture(autouse=True)
def documented_names(doctest_namespace):
    names = {name: getattr(torchguard, name) for name in torchguard.__all__}
    doctest_namespace.update(names, torch=torch)
