import warnings

import pytest
import torch

from torchguard.locations.registry import registry


@pytest.fixture(autouse=True)
def fresh_places():
    """No place has a name yet, whatever models an earlier test left alive."""
    registry.__init__()


@pytest.fixture(params=["eager", "aot_eager", "inductor"])
def compiled(request):
    """Compile a function without graph breaks, on each backend in turn."""
    return lambda fn, **options: torch.compile(fn, backend=request.param, fullgraph=True, **options)


@pytest.fixture(params=["plain", "eager", "aot_eager", "inductor"])
def run(request):
    """Leave a function as it is, or compile it without graph breaks, on each backend in turn."""
    if request.param == "plain":
        return lambda fn: fn
    return lambda fn: torch.compile(fn, backend=request.param, fullgraph=True)


@pytest.fixture(params=["plain", "aot_eager"])
def run_light(request):
    """As `run`, without the backends that take long."""
    if request.param == "plain":
        return lambda fn: fn
    return lambda fn: torch.compile(fn, backend=request.param, fullgraph=True)


@pytest.fixture
def no_sync():
    """Any wait for the device is an error."""

    class Watch:
        def __enter__(self):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch calls the mode a prototype
                torch.cuda.set_sync_debug_mode("error")

        def __exit__(self, *_):
            torch.cuda.set_sync_debug_mode("default")

    return Watch()


@pytest.fixture(params=[torch.int64, torch.int32, torch.float32, torch.float64], ids=str)
def carrier(request):
    return request.param


def pytest_collection_modifyitems(items):
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if "compiled" in item.fixturenames or parameters.get("run", "plain") != "plain":
            item.add_marker(pytest.mark.compiled)
