import warnings

import pytest
import torch

from torchguard._torch.guards import children_of
from torchguard.guards import _cost
from torchguard.locations._registry import registry

_NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("cuda", marks=[pytest.mark.gpu, _NEEDS_GPU]),
    ]
)
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def fresh_locations():
    """An empty location registry, even if an earlier test left models alive."""
    registry.clear()


@pytest.fixture(autouse=True)
def code_after_breaks_is_compiled():
    """torch 2.11 may not compile it after tests that call compiled functions from several threads."""
    of_torch = torch._C._dynamo.eval_frame
    if hasattr(of_torch, "set_eval_frame_override"):
        of_torch.set_eval_frame_override(of_torch._EvalFrameOverride.NONE)


# `aot_eager` covers all that `eager` does.
EAGER = pytest.param("eager", marks=pytest.mark.long)


@pytest.fixture(params=[EAGER, "aot_eager", "inductor"])
def compiled(request):
    """`torch.compile(fullgraph=True)`, once for each backend."""
    return lambda fn, **options: torch.compile(fn, backend=request.param, fullgraph=True, **options)


@pytest.fixture(params=["plain", EAGER, "aot_eager", "inductor"])
def run(request):
    """Leave a function as it is, or compile it with `fullgraph=True`, once for each backend."""
    if request.param == "plain":
        return lambda fn: fn
    return lambda fn: torch.compile(fn, backend=request.param, fullgraph=True)


@pytest.fixture(params=["plain", "aot_eager"])
def run_light(request):
    """As `run`, without the slow backends."""
    if request.param == "plain":
        return lambda fn: fn
    return lambda fn: torch.compile(fn, backend=request.param, fullgraph=True)


@pytest.fixture
def fake_guard_clock(monkeypatch):
    """Make `guards.cost` measure one microsecond a guard, however busy the machine is."""

    def count(manager):
        return len(manager.get_leaf_guards()) + sum(map(count, children_of(manager)))

    monkeypatch.setattr(_cost, "_time", lambda guards, f_locals, timing: float(count(guards.root)))


@pytest.fixture
def no_sync():
    """A context in which any synchronization with the device is an error."""

    class NoSync:
        def __enter__(self):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch calls the mode a prototype
                torch.cuda.set_sync_debug_mode("error")

        def __exit__(self, *_):
            torch.cuda.set_sync_debug_mode("default")

    return NoSync()


@pytest.fixture(params=[torch.int64, torch.int32, torch.float32, torch.float64], ids=str)
def carrier(request):
    return request.param


def pytest_collection_modifyitems(items):
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        backends = {parameters.get(name, "plain") for name in ("run", "run_light")}
        if "compiled" in item.fixturenames or backends != {"plain"}:
            item.add_marker(pytest.mark.compiled)
