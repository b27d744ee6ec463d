import warnings

import pytest
import torch

from torchguard._torch.guards import children_of
from torchguard.guards import _cost
from torchguard.locations._registry import registry


@pytest.fixture(autouse=True)
def fresh_locations():
    """No location has a name yet, whatever models an earlier test left alive."""
    registry.clear()


# `aot_eager` does all that `eager` does, and more.
EAGER = pytest.param("eager", marks=pytest.mark.long)


@pytest.fixture(params=[EAGER, "aot_eager", "inductor"])
def compiled(request):
    """Compile a function without graph breaks, on each backend in turn."""
    return lambda fn, **options: torch.compile(fn, backend=request.param, fullgraph=True, **options)


@pytest.fixture(params=["plain", EAGER, "aot_eager", "inductor"])
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
def guards_for_a_clock(monkeypatch):
    """What `guards.cost` measures: a microsecond a guard, however busy the machine is."""

    def count(manager):
        return len(manager.get_leaf_guards()) + sum(map(count, children_of(manager)))

    monkeypatch.setattr(_cost, "_time", lambda guards, f_locals: float(count(guards.root)))


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
